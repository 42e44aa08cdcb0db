"""What to change about an ImageFolderDataModule whose images are not decoded fast enough."""

from lightning_feed.watch.verdict import predict
from lightning_feed.watch.verdict.diagnosis import LoopFacts, Measurements, Remedy
from lightning_feed.watch.verdict.shares import Shares

ON_THE_GPU = {
    "nvjpeg": "nvJPEG decodes on the GPU",
    "dali-gpu": "DALI (pip install 'lightning-feed[dali]') decodes on the GPU",
}
"""Backend -> what it does. ``dali-cpu`` decodes on the CPUs, as torch does: it is for measuring, not for advising."""

_DALI_QUALITIES = (None, "exact")
"""It decodes all pixels, and refuses to be told otherwise."""


def image_remedies(measured: Measurements, shares: Shares) -> list[Remedy]:
    """Decode elsewhere, less, or once; nothing for another data module, or where decoding has left the workers."""
    facts = measured.facts
    if facts.decoder is None or facts.backend not in (None, "torch"):
        return []
    return [
        *_on_the_gpu(measured, shares),
        Remedy(
            code='ImageFolderDataModule("data", quality="fast")',
            why="images are decoded no larger than they are needed",
            changes="quality='fast'",
        ),
        Remedy(
            code='ImageFolderDataModule("data", cache="decoded")',
            why="each image is decoded once, and kept in host memory",
            changes="cache='decoded'",
        ),
    ]


def nvjpeg_remedies(facts: LoopFacts) -> list[Remedy]:
    """Where training waits for nvJPEG: other decoders to compare it with."""
    remedies = [
        Remedy(
            code='ImageFolderDataModule("data", backend="torch")',
            why="to compare: the workers decode, and the GPU has the step alone to do",
            changes="backend='torch'",
        )
    ]
    if facts.quality in _DALI_QUALITIES:
        remedies.append(
            Remedy(
                code='ImageFolderDataModule("data", backend="dali-gpu")',
                why=f"to compare: {ON_THE_GPU['dali-gpu']}, too, some batches ahead",
                changes="backend='dali-gpu'",
            )
        )
    return remedies


def decoder_remedies(facts: LoopFacts) -> list[Remedy]:
    """Where DALI decodes behind workers that have batches ready: it is what training waits for."""
    if facts.backend not in ("dali-cpu", "dali-gpu"):
        return []
    return [
        Remedy(
            code='ImageFolderDataModule("data", backend="torch")',
            why="to compare: the workers wait, and DALI decodes what they read",
            changes="backend='torch'",
        )
    ]


def sends_uint8(facts: LoopFacts) -> bool:
    """Whether the batches are as small as they can be: of an ImageFolderDataModule without transforms of the user's."""
    return facts.decoder is not None and facts.own_transforms is False


def _on_the_gpu(measured: Measurements, shares: Shares) -> list[Remedy]:
    facts, found = measured.facts, measured.experiments
    if facts.device_type != "cuda" or _works_on_pixels(facts):
        return []
    left = predict.read_share(measured)
    workers = "workers only read" if left is None else f"workers only read, {100 * left:.0f} % of what they do now"
    remedies = []
    for backend, what in ON_THE_GPU.items():
        if backend == "dali-gpu" and facts.quality not in _DALI_QUALITIES:
            continue
        alone = found.device_decode_per_s if found is not None and backend == "nvjpeg" else None
        predicted = predict.decoded_on_device(measured, shares, alone)
        if not predict.worth_it(predicted, shares):
            continue
        speed = "how fast was not measured"
        if alone and found is not None and found.batch_size:
            speed = f"{alone * found.batch_size:,.0f} images/s with nothing beside it"
        remedies.append(
            Remedy(
                code=f'ImageFolderDataModule("data", backend="{backend}")',
                why=f"{what} ({speed}); {workers}",
                predicted_step_ms=predicted,
                changes=f"backend='{backend}'",
            )
        )
    return remedies


def _works_on_pixels(facts: LoopFacts) -> bool:
    """Whether the workers do something with decoded images that only they can."""
    return bool(facts.own_transforms) or facts.cache in ("decoded", "device")

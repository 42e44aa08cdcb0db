"""The backends that decode images: what each cannot do, which one "auto" takes, and which decoder, on all ranks."""

import io
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import torch
from PIL import Image

from lightning_feed.archive.folder import SampleSource
from lightning_feed.data.backend_measurements import BackendMeasurement, BackendMeasurements
from lightning_feed.decode.choose import Choice, make_decoder
from lightning_feed.errors import DatasetError, DecodeError, FeedError, LoaderError, MissingExtraError, SettingsError
from lightning_feed.load.dali.binding import require_dali
from lightning_feed.load.dali.options import DaliOptions
from lightning_feed.load.image_dataset import holds_pixels
from lightning_feed.transfer.gpu_decode import nvjpeg

logger = logging.getLogger(__name__)

Chosen = TypeVar("Chosen")
Backend: TypeAlias = Literal["torch", "nvjpeg", "dali-cpu", "dali-gpu", "auto"]
BACKENDS: tuple[str, ...] = get_args(Backend)
DALI_BACKENDS = ("dali-cpu", "dali-gpu")
_SAMPLES_TO_CHOOSE_BY = 64
HEADROOM_PCT = 20.0
"""Share of step time without work that a GPU has to have before decoding is given to it; from there on, too, a step
counts as highly data-bound."""
MOVABLE_PCT = 50.0
"""Share of the workers' time for a sample that has to leave them. Reading stays."""
FASTER = 1.05
"""A backend is taken in place of torch when it is so many times as fast."""
NOT_MEASURED = "nothing is measured yet on this folder, size and device: run lightning-feed diagnose"

# --- what a backend cannot do -----------------------------------------------------------------------------------------


_BESIDE = {
    "transform": (
        "crops and flips by itself, and cannot call a transform of yours for each image. Leave transform and "
        'eval_transform out, or use backend="torch".'
    ),
    "collate": (
        "puts batches together before they are decoded, and cannot call a collate of yours. Change the decoded batch "
        'in device_transform, or use backend="torch".'
    ),
    "drop_keys": "has batches of images, labels: drop_keys has nothing to drop. Leave it out.",
    "cache": 'decodes after the cache, and this one keeps decoded images. Use cache="bytes", or backend="torch".',
}
"""What the backends other than torch do that leaves no place for something else, by the name of that."""


def check_backend(backend: str, quality: str, dali: DaliOptions | None, beside: Mapping[str, bool]) -> DaliOptions:
    """Refuse a backend that is none, and what would have no effect beside it. Returns the options of DALI to use.

    Args:
        backend: as given.
        quality: as given.
        dali: as given.
        beside: which of the keys of the table above there is.

    Raises:
        SettingsError: with what to do instead.
    """
    if backend not in BACKENDS:
        raise SettingsError(f"backend={backend!r} is not a choice. Give one of {', '.join(map(repr, BACKENDS))}.")
    for name, why in _BESIDE.items():
        if beside.get(name) and backend not in ("torch", "auto"):
            raise SettingsError(f"backend={backend!r} {why}")
    if backend in DALI_BACKENDS and quality != "exact":
        raise SettingsError(
            f"quality={quality!r} would have no effect with backend={backend!r}, which decodes all pixels of a box. "
            'Leave it out, or use backend="torch".'
        )
    if dali is not None and backend not in (*DALI_BACKENDS, "auto"):
        raise SettingsError(
            f"dali=DaliOptions(...) would have no effect with backend={backend!r}. Leave it out, or use "
            'backend="dali-cpu" or "dali-gpu".'
        )
    if dali is not None and backend == "dali-cpu":
        dali.refuse_gpu_options('is for decoding on the GPU and has no effect with backend="dali-cpu". Leave it out.')
    return dali or DaliOptions()


def require_cuda(backend: str, device: torch.device) -> None:
    """Refuse a GPU backend without a GPU.

    Raises:
        SettingsError: with what to use instead.
    """
    if backend in ("nvjpeg", "dali-gpu") and device.type != "cuda":
        raise SettingsError(
            f'backend={backend!r} decodes on a CUDA device, and training runs on {device.type}. Use backend="torch", '
            '"dali-cpu", or "auto", which takes what there is.'
        )


def require_nvjpeg(device: torch.device) -> None:
    """Have nvJPEG decode a small JPEG on a CUDA device.

    Raises:
        MissingExtraError: this torchvision has no nvJPEG.
        LoaderError: it fails on the device.
    """
    try:
        _decode_small(device)
    except RuntimeError as error:
        raise LoaderError(
            f'backend="nvjpeg" cannot decode on {device}, which failed on a small JPEG: {_first_line(error)}. Look at '
            'the driver and at the CUDA of torch and torchvision (lightning-feed doctor), or use backend="torch".'
        ) from error


def why_no_nvjpeg(device: torch.device) -> str:
    """Why nvJPEG cannot be used on a CUDA device; "" where it can, as seen by decoding a small JPEG."""
    try:
        _decode_small(device)
    except (MissingExtraError, RuntimeError) as error:
        return _first_line(error)
    return ""


def _decode_small(device: torch.device) -> None:
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG")
    nvjpeg(device)([torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)])


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def why_no_dali(*, gpu: bool) -> str:
    """Why DALI cannot be used; "" where it can."""
    try:
        require_dali(gpu=gpu)
    except (MissingExtraError, SettingsError) as error:
        return str(error)
    return ""


def as_asked(backend: str, device: torch.device) -> "BackendChoice":
    """The backend that was asked for by name, on a device.

    Raises:
        SettingsError: for a GPU backend without a GPU.
    """
    require_cuda(backend, device)
    return BackendChoice(backend, f"backend={backend!r}, as asked for")


# --- backend="auto" ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BackendChoice:
    """A backend and why it is this one."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class BackendFacts:
    """What the choice rests on."""

    device_type: str
    """Where training runs."""
    no_nvjpeg: str = ""
    """Why nvJPEG cannot be used here; "" where it can."""
    no_dali: str = ""
    """The same of DALI."""
    transforms: bool = False
    """Whether the user gave a transform."""
    cache: str | None = None
    quality: str = "exact"
    """That was asked for."""
    pixels: bool = False
    """Whether the images are pixels already."""
    findings: tuple[BackendMeasurement, ...] = ()
    """What was measured on this machine, device and folder."""

    def why_not(self, backend: str) -> str:
        """Why a backend cannot be used; "" where it can."""
        if backend in ("nvjpeg", "dali-gpu") and self.device_type != "cuda":
            return f"training is on {self.device_type}"
        if backend in ("dali-cpu", "dali-gpu") and self.quality != "exact":
            return f"DALI decodes all pixels, so that quality={self.quality!r} would have no effect"
        return {"nvjpeg": self.no_nvjpeg, "torch": ""}.get(backend, self.no_dali)


def choose_backend(facts: BackendFacts) -> BackendChoice:
    """The backend to use, with the figures that say so.

    What was measured on several backends decides first. Else it is torch, unless torch was measured to be decode-bound
    with all CPUs at work, and a GPU has the time to decode: then DALI where it is installed, else nvJPEG.
    """
    for case, why in (
        (facts.transforms, "a transform was given, which is called for each image in the workers"),
        (facts.cache in ("decoded", "device"), f"cache={facts.cache!r} keeps decoded images"),
        (facts.pixels, "the pack holds pixels: there is nothing to decode"),
    ):
        if case:
            return BackendChoice("torch", why)
    torch_found = _found(facts, "torch")
    best = _fastest(facts, torch_found)
    if best is not None:
        return best
    if torch_found is None:
        others = sorted({one.backend for one in facts.findings})
        if others:
            said = f"only {', '.join(map(repr, others))} was measured on this folder: run lightning-feed diagnose with "
            return BackendChoice("torch", said + 'backend="torch", to compare')
        return BackendChoice("torch", NOT_MEASURED)
    return _by_headroom(facts, torch_found)


def _by_headroom(facts: BackendFacts, found: BackendMeasurement) -> BackendChoice:
    """Of what was measured with torch alone."""
    figures = _figures(found)
    why_torch = _why_torch(facts, found)
    if why_torch:
        return BackendChoice("torch", f"{why_torch}: {figures}")
    reasons: list[str] = []
    for backend in ("dali-gpu", "nvjpeg"):
        why = facts.why_not(backend) or _too_slow(facts, backend, found)
        if not why:
            others = "".join(f"; not {reason}" for reason in reasons)
            return BackendChoice(backend, f"decode-bound, and the GPU has time to decode in: {figures}{others}")
        reasons.append(f'"{backend}": {why}')
    said = f"decode-bound, and the GPU has time to decode in: {figures}; but not {'; not '.join(reasons)}"
    return BackendChoice("torch", said)


def _why_torch(facts: BackendFacts, found: BackendMeasurement) -> str:
    """Why decoding is not for the GPU, whatever is installed; "" where it may be."""
    workers, cpus, movable = found.num_workers, found.usable_cpus, found.movable_pct
    if facts.device_type != "cuda":
        return f"training is on {facts.device_type}, and no GPU could decode"
    if not found.cpu_bound:
        return "it is not the CPUs of the workers that training waits for"
    if workers is not None and cpus is not None and workers < cpus:
        return f"decode-bound with {workers} workers on {cpus} CPUs, so more workers come first"
    if movable is not None and movable < MOVABLE_PCT:
        return f"reading takes {100 - movable:.0f} % of the workers' time, and stays with them"
    if found.starved_pct < HEADROOM_PCT:
        return f"decode-bound, but the GPU has only {found.starved_pct:.0f} % of its time to decode in"
    return ""


def _fastest(facts: BackendFacts, torch_found: BackendMeasurement | None) -> BackendChoice | None:
    """The backend that trained fastest, where it is another than torch."""
    now = None if torch_found is None else _rate(torch_found)
    if torch_found is None or now is None:
        return None
    rates = [
        (one.samples_per_s, one.backend)
        for one in facts.findings
        if one.samples_per_s is not None and one.backend != "torch" and one.batch_size == torch_found.batch_size
        if not facts.why_not(one.backend)
    ]
    rate, backend = max(rates, default=(0.0, ""))
    if rate < FASTER * now:
        return None
    said = f"training took {rate:,.0f} images/s with it, and {now:,.0f} with torch (lightning-feed diagnose)"
    return BackendChoice(backend, said)


def _too_slow(facts: BackendFacts, backend: str, found: BackendMeasurement) -> str:
    """Why a backend is not expected to be faster than torch was; "" where it is, or nothing is known of it."""
    now, size = _rate(found), found.batch_size
    measured = [one.samples_per_s for one in facts.findings if (one.backend, one.batch_size) == (backend, size)]
    rate = next((rate for rate in measured if rate is not None), None)
    if rate is not None and now is not None:  # were it faster, it would have been taken before
        return f"training took {rate:,.0f} images/s with it"
    alone = found.device_samples_per_s
    if backend != "nvjpeg" or alone is None or now is None:
        return ""
    # In turns, as where both need all of the GPU. Where a decoder of its own in the GPU does it, it is less.
    together = 1 / (1 / alone + (100 - found.starved_pct) / 100 / now)
    if together >= FASTER * now:
        return ""
    return f"the GPU alone decodes {alone:,.0f} images/s, which with training makes {together:,.0f}"


def _rate(found: BackendMeasurement) -> float | None:
    """Images per second of training; those of the loader, which training does not exceed, where that is not known."""
    return found.samples_per_s if found.samples_per_s is not None else found.loader_samples_per_s


def _found(facts: BackendFacts, backend: str) -> BackendMeasurement | None:
    """That of ``diagnose``, which measures training itself, before that of ``tune``."""
    found = {one.by: one for one in facts.findings if one.backend == backend}
    return found.get("diagnose") or found.get("tune")


def _figures(found: BackendMeasurement) -> str:
    """What was measured, as a phrase."""
    told = []
    if found.samples_per_s is not None:
        told.append(f"training takes {found.samples_per_s:,.0f} images/s")
    if found.loader_samples_per_s is not None:
        told.append(f"the loader alone gives {found.loader_samples_per_s:,.0f} images/s")
    if found.model_samples_per_s is not None:
        told.append(f"the model could take {found.model_samples_per_s:,.0f}")
    told.append(f"it waits {found.starved_pct:.0f} % of its time")
    return f"{', '.join(told)} (lightning-feed {found.by}, {found.day})"


def with_auto(facts: "BackendFacts", device: torch.device, key: dict[str, Any]) -> BackendChoice:
    """The choice for ``backend="auto"``, with what was measured before and what is installed.

    Args:
        facts: what is known besides.
        device: that trains.
        key: of the measurements.
    """
    found = BackendMeasurements().load(key)
    on_gpu = device.type == "cuda"
    no_nvjpeg = no_dali = "it was not looked for"
    if _may_leave_torch(found, on_gpu=on_gpu):  # DALI takes a second to import
        no_nvjpeg = why_no_nvjpeg(device) if on_gpu else f"training is on {device.type}"
        no_dali = why_no_dali(gpu=on_gpu)
    return choose_backend(replace(facts, no_nvjpeg=no_nvjpeg, no_dali=no_dali, findings=found))


def _may_leave_torch(found: tuple[BackendMeasurement, ...], *, on_gpu: bool) -> bool:
    """Whether anything but torch may be chosen."""
    if not on_gpu:
        return any(one.backend == "dali-cpu" for one in found)
    return any(one.backend != "torch" or one.cpu_bound for one in found)


# --- one decision for all ranks ---------------------------------------------------------------------------------------


def once_for_all_ranks(trainer: Any, decide: Callable[[], Chosen]) -> Chosen:
    """What rank 0 decides: what is remembered and installed may differ from node to node, and all must do the same.

    Raises:
        FeedError: on the other ranks, where ``decide`` raises on rank 0: of the same class, if it is one of ours.
    """
    if trainer is None or trainer.world_size == 1:
        return decide()
    chosen, failed = None, None
    if trainer.is_global_zero:
        try:
            chosen = decide()
        except Exception as error:  # noqa: BLE001 - raised below, once the others have heard of it
            failed = error
    said = None
    if failed is not None:
        ours = isinstance(failed, FeedError)
        said = (type(failed), str(failed)) if ours else (LoaderError, f"{type(failed).__name__}: {failed}")
    chosen, said = trainer.strategy.broadcast((chosen, said))
    if failed is not None:
        raise failed
    if said is not None:
        kind, text = said
        raise kind(f"Rank 0, which decides for all ranks how images are decoded, failed: {text}")
    return chosen  # type: ignore[no-any-return]


def device_of(trainer: Any) -> torch.device:
    """Where the batches go: the Trainer's device; without one, the first that a Trainer would take."""
    if trainer is not None:
        return trainer.strategy.root_device  # type: ignore[no-any-return]
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def first_holds_pixels(source: SampleSource) -> bool:
    """Whether the first image is pixels, in a pack, and not encoded."""
    try:
        return len(source) > 0 and holds_pixels(source.read(0))
    except DatasetError:  # met again, and dealt with as on_error says, when it is its turn
        return False


def fastest_decoder(source: SampleSource, crops: bool) -> Choice:  # noqa: FBT001  # as a recipe has it
    """The decoder for ``decoder="auto"``: the fastest on some of the images, the reference where it cannot be told.

    Args:
        source: of the images.
        crops: whether training takes a part of each.
    """
    samples = _some_encoded(source)
    try:
        if not samples:
            raise DecodeError("there are no encoded images to time decoders on: a pack of pixels needs none")
        choice = make_decoder("auto", samples, regions=crops)
    except DecodeError as error:  # images that cannot be read are dealt with as on_error says, in their turn
        choice = replace(make_decoder("pillow"), reason=f'decoder="auto" took the reference: {error}')
    logger.info("decoder=%r: %s", choice.name, choice.reason)
    return choice


def _some_encoded(source: SampleSource) -> list[Any]:
    """Images spread over the source, to measure decoders with; none where it holds pixels."""
    step = max(1, len(source) // _SAMPLES_TO_CHOOSE_BY)
    found, indices = [], range(0, len(source), step)[:_SAMPLES_TO_CHOOSE_BY]
    expect = getattr(source, "expect", None)
    if expect is not None:  # of a remote place, read at the same time
        expect(indices)
    for index in indices:
        try:
            data = source.read(index)
        except DatasetError:  # met again, and dealt with as on_error says, when it is its turn
            continue
        if holds_pixels(data):
            return []
        found.append(data)
    return found

"""The backends that decode images: what each cannot do, which one "auto" takes, and which decoder, on all ranks."""

import io
import logging
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import torch
from PIL import Image

from lightning_feed.archive.folder import SampleSource
from lightning_feed.data.backend_measurements import BackendMeasurement
from lightning_feed.data.base import check_choice
from lightning_feed.decode.choose import Choice, make_decoder
from lightning_feed.errors import DatasetError, DecodeError, FeedError, LoaderError, MissingExtraError, SettingsError
from lightning_feed.load.dali.binding import DaliOptions, require_dali
from lightning_feed.load.image_dataset import holds_pixels
from lightning_feed.transfer.gpu_decode import nvjpeg

logger = logging.getLogger(__name__)

Chosen = TypeVar("Chosen")
Backend: TypeAlias = Literal["torch", "nvjpeg", "dali-cpu", "dali-gpu", "auto"]
BACKENDS: tuple[str, ...] = get_args(Backend)
DALI_BACKENDS = ("dali-cpu", "dali-gpu")
GPU_BACKENDS = ("nvjpeg", "dali-gpu")
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


_ONLY_TORCH = {
    "transform": (
        "a transform was given, which is called for each image in the workers",
        "crops and flips by itself, and cannot call a transform of yours for each image. Leave transform and "
        'eval_transform out, or use backend="torch".',
    ),
    "collate": (
        "collate was overridden, which is written for samples that are decoded",
        "puts batches together before they are decoded, and cannot call a collate of yours. Change the decoded batch "
        'in device_transform, or use backend="torch".',
    ),
    "drop_keys": (
        "drop_keys leaves parts of decoded batches out",
        "has batches of images, labels: drop_keys has nothing to drop. Leave it out.",
    ),
    "cache": (
        "the cache keeps decoded images",
        'decodes after the cache, and this one keeps decoded images. Use cache="bytes", or backend="torch".',
    ),
    "dataset": ("make_dataset was overridden, and what it gives may need decoded images", ""),
    "pixels": ("the pack holds pixels: there is nothing to decode", ""),
}
"""What only torch does: why "auto" takes it then, and what the others say."""


def check_backend(backend: str, quality: str, dali: DaliOptions | None, only_torch: Iterable[str] = ()) -> DaliOptions:
    """Refuse a backend that is none, and what would have no effect beside it. Returns the options of DALI to use.

    Args:
        backend: as given.
        quality: as given.
        dali: as given.
        only_torch: keys of the table above: what was asked for besides.

    Raises:
        SettingsError: with what to do instead.
    """
    check_choice("backend", backend, BACKENDS)
    for name in only_torch:
        if backend not in ("torch", "auto"):
            raise SettingsError(f"backend={backend!r} {_ONLY_TORCH[name][1]}")
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
        for name in ("largest_image", "hw_decoder_load"):
            if getattr(dali, name) is not None:
                raise SettingsError(
                    f"DaliOptions({name}={getattr(dali, name)!r}) is for decoding on the GPU and has no effect with "
                    'backend="dali-cpu". Leave it out.'
                )
    return dali or DaliOptions()


def as_asked(backend: str, device: torch.device) -> "BackendChoice":
    """The backend that was asked for by name, on a device.

    Raises:
        SettingsError: for a GPU backend without a GPU.
    """
    if backend in GPU_BACKENDS and device.type != "cuda":
        raise SettingsError(
            f'backend={backend!r} decodes on a CUDA device, and training runs on {device.type}. Use backend="torch", '
            '"dali-cpu", or "auto", which takes what there is.'
        )
    return BackendChoice(backend, f"backend={backend!r}, as asked for")


def require_nvjpeg(device: torch.device) -> None:
    """Have nvJPEG decode a small JPEG on a CUDA device.

    Raises:
        MissingExtraError: this torchvision has no nvJPEG.
        LoaderError: it fails on the device.
    """
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG")
    try:
        nvjpeg(device)([torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)])
    except RuntimeError as error:
        raise LoaderError(
            f'backend="nvjpeg" cannot decode on {device}, which failed on a small JPEG: {_first_line(error)}. Look at '
            'the driver and at the CUDA of torch and torchvision (lightning-feed doctor), or use backend="torch".'
        ) from error


# --- backend="auto" ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BackendChoice:
    """A backend and why it is this one."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class BackendFacts:
    """What the choice rests on."""

    device: torch.device
    """That trains."""
    only_torch: tuple[str, ...] = ()
    """Keys of the table above: what there is that only torch can do."""
    quality: str = "exact"
    """That was asked for."""
    findings: tuple[BackendMeasurement, ...] = ()
    """What was measured on this machine, device and folder."""

    def of(self, backend: str) -> BackendMeasurement | None:
        """That of ``diagnose``, which measures training itself, before that of ``tune``."""
        found = {one.by: one for one in self.findings if one.backend == backend}
        return found.get("diagnose") or found.get("tune")

    def why_not(self, backend: str) -> str:
        """Why a backend cannot be used; "" where it can."""
        if backend in GPU_BACKENDS and self.device.type != "cuda":
            return f"training is on {self.device.type}"
        if backend in DALI_BACKENDS and self.quality != "exact":
            return f"DALI decodes all pixels, so that quality={self.quality!r} would have no effect"
        return why_missing(backend, self.device)


def why_missing(backend: str, device: torch.device) -> str:
    """Why a backend is not to be had on this machine; "" where it is. DALI takes a second to import."""
    try:
        if backend == "nvjpeg":
            require_nvjpeg(device)
        elif backend in DALI_BACKENDS:
            require_dali(gpu=backend == "dali-gpu")
    except (MissingExtraError, SettingsError, LoaderError) as error:
        return _first_line(error)
    return ""


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def choose_backend(facts: BackendFacts) -> BackendChoice:
    """The backend to use, with the figures that say so.

    What was measured on several backends decides first. Else it is torch, unless torch was measured to be decode-bound
    with all CPUs at work, and a GPU has the time to decode: then DALI where it is installed, else nvJPEG.
    """
    if facts.only_torch:
        return BackendChoice("torch", _ONLY_TORCH[facts.only_torch[0]][0])
    found = facts.of("torch")
    if found is None:
        others = ", ".join(sorted({repr(one.backend) for one in facts.findings}))
        only = (
            f'only {others} was measured on this folder: run lightning-feed diagnose with backend="torch", to compare'
        )
        return BackendChoice("torch", only if others else NOT_MEASURED)
    now, rates = _rate(found), _rates(facts, found.batch_size)
    usable = {backend: rate for backend, rate in rates.items() if rate >= FASTER * now and not facts.why_not(backend)}
    if usable:
        best = max(usable, key=lambda backend: usable[backend])
        said = (
            f"training took {usable[best]:,.0f} images/s with it, and {now:,.0f} with torch (lightning-feed diagnose)"
        )
        return BackendChoice(best, said)
    why_torch, figures = _why_torch(facts, found), _figures(found)
    if why_torch:
        return BackendChoice("torch", f"{why_torch}: {figures}")
    said, reasons = f"decode-bound, and the GPU has time to decode in: {figures}", ""
    for backend in ("dali-gpu", "nvjpeg"):
        why = facts.why_not(backend) or _too_slow(backend, found, rates.get(backend))
        if not why:
            return BackendChoice(backend, said + reasons)
        reasons += f'; not "{backend}": {why}'
    return BackendChoice("torch", said + reasons)


def _why_torch(facts: BackendFacts, found: BackendMeasurement) -> str:
    """Why decoding is not for the GPU, whatever is installed; "" where it may be."""
    workers, cpus, movable = found.num_workers, found.usable_cpus, found.movable_pct
    if facts.device.type != "cuda":
        return f"training is on {facts.device.type}, and no GPU could decode"
    if not found.cpu_bound:
        return "it is not the CPUs of the workers that training waits for"
    if workers is not None and cpus is not None and workers < cpus:
        return f"decode-bound with {workers} workers on {cpus} CPUs, so more workers come first"
    if movable is not None and movable < MOVABLE_PCT:
        return f"reading takes {100 - movable:.0f} % of the workers' time, and stays with them"
    if found.starved_pct < HEADROOM_PCT:
        return f"decode-bound, but the GPU has only {found.starved_pct:.0f} % of its time to decode in"
    return ""


def _too_slow(backend: str, found: BackendMeasurement, rate: float | None) -> str:
    """Why a backend is not expected to be faster than torch was; "" where it is, or nothing is known of it."""
    now, alone = _rate(found), found.device_samples_per_s
    if rate is not None and now < math.inf:  # were it faster, it would have been taken before
        return f"training took {rate:,.0f} images/s with it"
    if backend != "nvjpeg" or alone is None or now == math.inf:
        return ""
    # In turns, as where both need all of the GPU. Where a decoder of its own in the GPU does it, it is less.
    together = 1 / (1 / alone + (100 - found.starved_pct) / 100 / now)
    if together >= FASTER * now:
        return ""
    return f"the GPU alone decodes {alone:,.0f} images/s, which with training makes {together:,.0f}"


def _rates(facts: BackendFacts, batch_size: int) -> dict[str, float]:
    """Images per second of training with other backends, at one batch size."""
    found = [one for one in facts.findings if one.backend != "torch" and one.batch_size == batch_size]
    return {one.backend: one.samples_per_s for one in found if one.samples_per_s is not None}


def _rate(found: BackendMeasurement) -> float:
    """Images per second of training; those of the loader, which training does not exceed, where that is not known."""
    known = (rate for rate in (found.samples_per_s, found.loader_samples_per_s) if rate is not None)
    return next(known, math.inf)


def _figures(found: BackendMeasurement) -> str:
    """What was measured, as a phrase."""
    told = [
        text.format(rate)
        for text, rate in (
            ("training takes {:,.0f} images/s", found.samples_per_s),
            ("the loader alone gives {:,.0f} images/s", found.loader_samples_per_s),
            ("the model could take {:,.0f}", found.model_samples_per_s),
            ("it waits {:.0f} % of its time", found.starved_pct),
        )
        if rate is not None
    ]
    return f"{', '.join(told)} (lightning-feed {found.by}, {found.day})"


# --- one decision for all ranks ---------------------------------------------------------------------------------------


def once_for_all_ranks(trainer: Any, decide: Callable[[], Chosen]) -> Chosen:
    """What rank 0 decides: what is remembered and installed may differ from node to node, and all must do the same.

    Raises:
        FeedError: on the other ranks, where ``decide`` raises on rank 0: of the same class, if it is one of ours.
    """
    if trainer is None or trainer.world_size == 1:
        return decide()
    chosen, failed, told = None, None, None
    if trainer.is_global_zero:
        try:
            chosen = decide()
        except Exception as error:  # noqa: BLE001 - raised below, once the others have heard of it
            kind = type(error) if isinstance(error, FeedError) else LoaderError
            failed, told = error, (kind, f"{type(error).__name__}: {error}")
    chosen, told = trainer.strategy.broadcast((chosen, told))
    if failed is not None:
        raise failed
    if told is not None:
        kind, text = told
        raise kind(f"Rank 0, which decides for all ranks how images are decoded, failed: {text}")
    return chosen  # type: ignore[no-any-return]


def first_holds_pixels(source: SampleSource) -> bool:
    """Whether the first image is pixels, in a pack, and not encoded."""
    try:
        return len(source) > 0 and holds_pixels(source.read(0))
    except DatasetError:  # met again, and dealt with as on_error says, when it is its turn
        return False


def choose_decoder(name: str, source: SampleSource, crops: bool) -> Choice:  # noqa: FBT001  # as a recipe has it
    """A decoder by name; for "auto" the fastest on some of the images, the reference where it cannot be told.

    Args:
        name: as asked for.
        source: of the images.
        crops: whether training takes a part of each.
    """
    if name != "auto":
        return make_decoder(name)
    step = max(1, len(source) // _SAMPLES_TO_CHOOSE_BY)
    samples, indices = [], range(0, len(source), step)[:_SAMPLES_TO_CHOOSE_BY]
    expect = getattr(source, "expect", None)
    _held = None if expect is None else expect(indices)  # of a remote place, read at the same time
    for index in indices:
        with suppress(DatasetError):  # met again, and dealt with as on_error says, when it is its turn
            samples.append(source.read(index))
    try:
        if not samples or any(map(holds_pixels, samples)):
            raise DecodeError("there are no encoded images to time decoders on: a pack of pixels needs none")
        choice = make_decoder("auto", samples, regions=crops)
    except DecodeError as error:  # images that cannot be read are dealt with as on_error says, in their turn
        choice = replace(make_decoder("pillow"), reason=f'decoder="auto" took the reference: {error}')
    logger.info("decoder=%r: %s", choice.name, choice.reason)
    return choice

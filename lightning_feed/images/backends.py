"""Image decoding backends: check that a backend is available, and suits the other settings. Choose a decoder."""

import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from typing import Literal, NamedTuple, TypeAlias, cast, get_args

import torch

from lightning_feed.errors import DatasetError, DecodeError, FeedError, LoaderError, SettingsError
from lightning_feed.images.choose import DecoderChoice, make_decoder
from lightning_feed.images.cpu_share import CpuShare
from lightning_feed.images.dali_binding import DaliOptions, require_dali
from lightning_feed.images.decode_ahead import NvJpegOptions
from lightning_feed.images.device_decode import decode_batch
from lightning_feed.images.image_dataset import EncodedSample, ImageDataset, collate_encoded, holds_pixels
from lightning_feed.images.nvjpeg import has_engine, nvjpeg, small_jpeg
from lightning_feed.load.child import run_in_children
from lightning_feed.load.counts import SharedNumber
from lightning_feed.machine import limits
from lightning_feed.storage.folder import SampleSource

logger = logging.getLogger(__name__)

Backend: TypeAlias = Literal["auto", "torch", "nvjpeg", "dali-cpu", "dali-gpu"]
DALI_BACKENDS: dict[str, Literal["cpu", "gpu"]] = {"dali-cpu": "cpu", "dali-gpu": "gpu"}
"""DALI's backends, and where each decodes."""
GPU_BACKENDS = ("nvjpeg", "dali-gpu")
_SAMPLES_TO_CHOOSE_BY = 64
_TRIED_S = 0.5
"""Seconds for which all CPUs decode: enough for some hundred images, or a few large ones."""
_TIMEOUT_S = 60.0

_ONLY_TORCH = {
    "transform": (
        "crops and flips images itself, and cannot call your transform for each image. Leave transform and "
        'eval_transform out, or use backend="torch".'
    ),
    "collate": (
        "puts batches together before they are decoded, and cannot call a collate of yours. Change the decoded batch "
        'in device_transform, or use backend="torch".'
    ),
    "drop_keys": "has batches of images, labels: drop_keys has nothing to drop. Leave it out.",
    "on_device": 'decodes each batch anew, so no decoded images stay on the device. Use backend="torch".',
}
"""Features that only the torch backend has, with the error messages for other backends."""


@dataclass(frozen=True)
class BackendChoice:
    """A backend, and the reason for it."""

    name: str
    reason: str


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Check that a value is one of the choices.

    Raises:
        SettingsError: the value is none of the choices, which the message lists.
    """
    if value not in choices:
        raise SettingsError(f"{name}={value!r} is not valid. Use one of {', '.join(map(repr, choices))}.")


def resolve(backend: object) -> tuple[Backend, DaliOptions | NvJpegOptions | None]:
    """Return the name of a backend, and its options. The options are None for a backend that has none.

    Args:
        backend: a name, or options, which decide the name.

    Raises:
        SettingsError: there is no such backend.
    """
    if isinstance(backend, DaliOptions):
        return ("dali-gpu" if backend.device == "gpu" else "dali-cpu"), backend
    if isinstance(backend, NvJpegOptions):
        return "nvjpeg", backend
    check_choice("backend", backend, get_args(Backend))
    name = cast("Backend", backend)
    if name == "nvjpeg":
        return name, NvJpegOptions()
    if name not in DALI_BACKENDS:
        return name, None
    return name, DaliOptions(device=DALI_BACKENDS[name])


def check_backend(backend: Backend, quality: str, only_torch: Iterable[str] = ()) -> None:
    """Refuse settings and features that a backend does not support.

    Args:
        backend: name of the backend.
        quality: the user's ``quality``.
        only_torch: requested features, as keys of ``_ONLY_TORCH``.

    Raises:
        SettingsError: a setting or feature is not supported. The message names the alternatives.
    """
    for name in only_torch:
        if backend not in ("auto", "torch"):
            raise SettingsError(f"backend={backend!r} {_ONLY_TORCH[name]}")
    if backend in DALI_BACKENDS and quality != "exact":
        raise SettingsError(
            f"quality={quality!r} would have no effect with backend={backend!r}, which decodes all pixels of a box. "
            'Leave it out, or use backend="torch".'
        )


def check_available(backend: str, device: torch.device) -> None:
    """Refuse a backend that cannot decode on this machine. nvJPEG is tested later, when training begins.

    Raises:
        SettingsError: a GPU backend was chosen without a CUDA device, or DALI is too old, or built for another CUDA
            version than torch.
        MissingExtraError: DALI is not installed.
    """
    if backend in GPU_BACKENDS and device.type not in limits.DECODING_BACKENDS:
        raise SettingsError(
            f'backend={backend!r} decodes on a CUDA device, and training runs on {device.type}. Use backend="torch" '
            'or "dali-cpu".'
        )
    if backend in DALI_BACKENDS:
        require_dali(gpu=backend == "dali-gpu", why=f"backend={backend!r}")


def require_nvjpeg(device: torch.device) -> None:
    """Check that nvJPEG can decode a small JPEG on a CUDA device.

    Raises:
        MissingExtraError: this torchvision has no nvJPEG.
        LoaderError: decoding fails on the device.
    """
    try:
        nvjpeg(device)([small_jpeg()])
    except RuntimeError as error:
        failure = str(error).partition("\n")[0]
        raise LoaderError(
            f'backend="nvjpeg" failed to decode a small JPEG on {device}: {failure}. Check '
            'the driver and the CUDA of torch and torchvision (lightning-feed doctor), or use backend="torch".'
        ) from error


@cache
def tell_if_on_cores(device: torch.device) -> None:
    """Log once that nvJPEG decodes on the cores of a device, if it has no engine for JPEG."""
    if not has_engine(device):
        logger.info(
            "This GPU has no engine for JPEG: nvJPEG decodes on its cores, and takes time from the model. "
            'backend="auto" tries whether the CPUs decode faster.'
        )


def decoding_ms(samples: list[EncodedSample], dataset: ImageDataset, device: torch.device) -> float:
    """Wall time per sample to decode a batch of these samples on the device. A first batch does not count."""
    batch = collate_encoded(samples)
    module = torch.get_device_module(device)
    decode_batch(batch, dataset, device)
    module.synchronize()
    began = time.perf_counter()
    decode_batch(batch, dataset, device)
    module.synchronize()
    return 1e3 * (time.perf_counter() - began) / len(batch)


def choose_backend(dataset: ImageDataset, device: torch.device, cpus: int) -> BackendChoice:
    """Choose between ``"torch"`` and ``"nvjpeg"`` for ``"auto"``, by decoding some images on both sides.

    The device is chosen if it decodes more images a second than all CPUs of this rank together. The workers then decode
    a part of the images nevertheless.

    Args:
        dataset: the training images, encoded, with crops of ours.
        device: the device of the batches.
        cpus: CPUs of this rank, 1 or more.
    """
    if device.type not in limits.DECODING_BACKENDS:
        return BackendChoice("torch", f'backend="auto": training runs on {device.type}, which does not decode images')
    try:
        require_nvjpeg(device)
        samples = _encoded_samples(dataset)
        for_device = [sample for sample in samples if sample.pixels is None]
        if 2 * len(for_device) <= len(samples):
            kinds = ", ".join(cast("CpuShare", dataset.cpu_part).refused.as_dict())
            reason = f"nvJPEG decodes only {len(for_device)} of {len(samples)}: {kinds}"
            return BackendChoice("torch", f'backend="auto": {reason}')
        on_cpus = _images_per_s(for_device, dataset, cpus)
        on_device = 1e3 / decoding_ms(for_device, dataset, device)
    except FeedError as error:
        return BackendChoice("torch", f'backend="auto": {error}')
    name = "nvjpeg" if on_device > on_cpus else "torch"
    where = "" if has_engine(device) else " on its cores, as it has no engine for JPEG"
    rates = f"the device decodes {on_device:.0f} images/s{where}, and {cpus} CPUs {on_cpus:.0f}"
    return BackendChoice(name, f'backend="auto": {rates}, tried with {len(for_device)} images')


def _encoded_samples(dataset: ImageDataset) -> list[EncodedSample]:
    """Some samples, spread over the dataset. Leaves out those that cannot be decoded: on_error handles them later."""
    generator = torch.Generator().manual_seed(0)
    step = max(1, len(dataset) // _SAMPLES_TO_CHOOSE_BY)
    samples = []
    for index in range(0, len(dataset), step)[:_SAMPLES_TO_CHOOSE_BY]:
        with suppress(DatasetError):
            sample = dataset.encoded_sample(index, generator)
            dataset.decoded(sample)
            samples.append(sample)
    if not samples:
        raise DecodeError("there are no images to try")
    return samples


def _images_per_s(samples: list[EncodedSample], dataset: ImageDataset, cpus: int) -> float:
    """Measure how many images all CPUs decode in a second, each in a process of its own, as workers do.

    One CPU alone is no measure of many: two may share a core.
    """
    began = SharedNumber(0.0)

    def note_begin() -> None:
        began.value = time.perf_counter()  # the machine's clock, which all processes read

    all_ready = get_context("fork").Barrier(cpus, note_begin)
    work = partial(_decode_beside_others, samples, dataset, all_ready, began)
    tries = run_in_children([work] * cpus, timeout_s=_TIMEOUT_S)
    return sum(one.images for one in tries) / max(one.seconds for one in tries)


class _Try(NamedTuple):
    """The images that one process has decoded, and the seconds since all processes were ready."""

    images: int
    seconds: float


def _decode_beside_others(
    samples: list[EncodedSample], dataset: ImageDataset, all_ready: Barrier, began: SharedNumber
) -> _Try:
    """Decode until a moment that is the same for all processes, whenever each of them gets a CPU."""
    all_ready.wait(_TIMEOUT_S)
    images = 0
    while time.perf_counter() < began.value + _TRIED_S or not images:
        dataset.decoded(samples[images % len(samples)])
        images += 1
    return _Try(images, time.perf_counter() - began.value)


def choose_decoder(source: SampleSource, crops: bool) -> DecoderChoice:  # noqa: FBT001  # as a recipe has it
    """Choose the decoder for "auto": the fastest on a few images, or Pillow if none can be timed.

    Args:
        source: source of the images.
        crops: True if training crops the images.
    """
    step = max(1, len(source) // _SAMPLES_TO_CHOOSE_BY)
    samples = []
    indices = range(0, len(source), step)[:_SAMPLES_TO_CHOOSE_BY]
    for index in indices:
        with suppress(DatasetError):  # raised again when the sample is loaded; then on_error applies
            samples.append(source.read(index))
    try:
        if not samples or any(map(holds_pixels, samples)):
            raise DecodeError("there are no encoded images to time decoders on: a pack of pixels needs no decoder")
        choice = make_decoder("auto", samples, regions=crops)
    except DecodeError as error:  # on_error handles unreadable images when they are loaded
        choice = replace(make_decoder("pillow"), reason=f'decoder="auto" took the reference: {error}')
    logger.info("decoder=%r: %s", choice.name, choice.reason)
    return choice

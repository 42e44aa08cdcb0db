"""Image decoding backends and their limits; one choice of decoder for all ranks."""

import io
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from PIL import Image

from lightning_feed.decode.choose import Choice, make_decoder
from lightning_feed.errors import DatasetError, DecodeError, FeedError, LoaderError, SettingsError
from lightning_feed.images.dali_binding import DaliOptions, require_dali
from lightning_feed.images.image_dataset import holds_pixels
from lightning_feed.storage.folder import SampleSource
from lightning_feed.transfer.gpu_decode import nvjpeg

logger = logging.getLogger(__name__)

Chosen = TypeVar("Chosen")
Backend: TypeAlias = Literal["torch", "nvjpeg", "dali-cpu", "dali-gpu"]
DALI_BACKENDS = ("dali-cpu", "dali-gpu")
GPU_BACKENDS = ("nvjpeg", "dali-gpu")
_SAMPLES_TO_CHOOSE_BY = 64

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
        SettingsError: lists the choices.
    """
    if value not in choices:
        raise SettingsError(f"{name}={value!r} is not a choice. Use one of {', '.join(map(repr, choices))}.")


def check_backend(backend: str, quality: str, dali: DaliOptions | None, only_torch: Iterable[str] = ()) -> DaliOptions:
    """Check the backend, and refuse options without effect on it. Returns the DALI options to use.

    Args:
        backend: name of the backend.
        quality: the user's ``quality``.
        dali: the user's DALI options.
        only_torch: requested features, as keys of ``_ONLY_TORCH``.

    Raises:
        SettingsError: says what to do instead.
    """
    if backend == "auto":
        raise SettingsError(
            'backend="auto" is gone. Leave it out for "torch"; lightning-feed diagnose says if another would help.'
        )
    check_choice("backend", backend, get_args(Backend))
    for name in only_torch:
        if backend != "torch":
            raise SettingsError(f"backend={backend!r} {_ONLY_TORCH[name]}")
    if backend in DALI_BACKENDS and quality != "exact":
        raise SettingsError(
            f"quality={quality!r} would have no effect with backend={backend!r}, which decodes all pixels of a box. "
            'Leave it out, or use backend="torch".'
        )
    if dali is None:
        return DaliOptions()
    _check_dali(backend, dali)
    return dali


def _check_dali(backend: str, dali: DaliOptions) -> None:
    if backend not in DALI_BACKENDS:
        raise SettingsError(
            f"dali=DaliOptions(...) would have no effect with backend={backend!r}. Leave it out, or use "
            'backend="dali-cpu" or "dali-gpu".'
        )
    for name in ("largest_image", "hw_decoder_load"):
        if backend == "dali-cpu" and vars(dali)[name] is not None:
            raise SettingsError(
                f"DaliOptions({name}={vars(dali)[name]!r}) is for decoding on the GPU and has no effect with "
                'backend="dali-cpu". Leave it out.'
            )


def check_available(backend: str, device: torch.device) -> None:
    """Refuse a backend that cannot decode here. nvJPEG is only tested when training begins.

    Raises:
        SettingsError: a GPU backend without a GPU, or an unsuitable DALI.
        MissingExtraError: DALI is not installed.
    """
    if backend in GPU_BACKENDS and device.type != "cuda":
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
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG")
    try:
        nvjpeg(device)([torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)])
    except RuntimeError as error:
        failure = str(error).partition("\n")[0]
        raise LoaderError(
            f'backend="nvjpeg" failed to decode a small JPEG on {device}: {failure}. Check '
            'the driver and the CUDA of torch and torchvision (lightning-feed doctor), or use backend="torch".'
        ) from error


def device_of(trainer: Trainer | None) -> torch.device:
    """Return the device for the batches: the Trainer's, or the first that a new Trainer would use."""
    if trainer is not None:
        return trainer.strategy.root_device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# --- one decision for all ranks ---------------------------------------------------------------------------------------


def once_for_all_ranks(trainer: Trainer | None, decide: Callable[[], Chosen]) -> Chosen:
    """Use rank 0's decision on all ranks: nodes may have different packages, but all must do the same.

    Raises:
        FeedError: on the other ranks, if ``decide`` raises on rank 0: the class of rank 0's error if that is a
            FeedError, else LoaderError.
    """
    if trainer is None or trainer.world_size == 1:
        return decide()
    chosen: Chosen | None = None
    failed: Exception | None = None
    failure: tuple[type[FeedError], str] | None = None
    if trainer.is_global_zero:
        try:
            chosen = decide()
        except Exception as error:  # noqa: BLE001 - raised below, after the other ranks have received it
            failed = error
            failure = (
                type(error) if isinstance(error, FeedError) else LoaderError,
                f"Rank 0, which decides for all ranks how images are decoded, failed: {type(error).__name__}: {error}",
            )
    chosen, failure = trainer.strategy.broadcast((chosen, failure))
    if failed is not None:
        raise failed
    if failure is not None:
        kind, text = failure
        raise kind(text)
    return cast("Chosen", chosen)


def choose_decoder(source: SampleSource, crops: bool) -> Choice:  # noqa: FBT001  # as a recipe has it
    """Choose the decoder for "auto": the fastest on a few images, or the reference if none can be timed.

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


# --- the ends of passes -----------------------------------------------------------------------------------------------


class PassEnds(Callback):
    """A callback that reports errors and the ends of passes to a data module.

    A loop that ends early, as with ``limit_val_batches``, does not close its loader, and Lightning keeps the iterator.
    """

    def __init__(self, datamodule: Any) -> None:
        self.datamodule = datamodule

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the pass, also after the sanity check and each validation in a fit."""
        self.datamodule._feed_pass_ended("val")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the pass."""
        self.datamodule._feed_pass_ended("test")

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the pass."""
        self.datamodule._feed_pass_ended("predict")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Free all resources."""
        self.datamodule._feed_release()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Free all resources after an error, when Lightning does not call ``teardown``."""
        self.datamodule._feed_release()

"""The backends that decode images: what each cannot do. The decoder of a folder, chosen once for all ranks."""

import io
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, TypeVar, cast, get_args

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from PIL import Image

from lightning_feed._host import AnyDataModule
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
"""Features of torch alone, and the refusals of the other backends."""


@dataclass(frozen=True)
class BackendChoice:
    """A backend and why it is this one."""

    name: str
    reason: str


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse what is none of the choices.

    Raises:
        SettingsError: names them.
    """
    if value not in choices:
        raise SettingsError(f"{name}={value!r} is not a choice. Give one of {', '.join(map(repr, choices))}.")


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
    if backend == "auto":
        raise SettingsError(
            'backend="auto" is gone. Leave it out for "torch"; lightning-feed diagnose says where another would help.'
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
    """Refuse a backend that cannot decode here. nvJPEG itself is tried when the training begins.

    Raises:
        SettingsError: for a GPU backend without a GPU, and for a DALI that does not fit.
        MissingExtraError: without DALI.
    """
    if backend in GPU_BACKENDS and device.type != "cuda":
        raise SettingsError(
            f'backend={backend!r} decodes on a CUDA device, and training runs on {device.type}. Use backend="torch" '
            'or "dali-cpu".'
        )
    if backend in DALI_BACKENDS:
        require_dali(gpu=backend == "dali-gpu", why=f"backend={backend!r}")


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
        failure = str(error).partition("\n")[0]
        raise LoaderError(
            f'backend="nvjpeg" cannot decode on {device}, which failed on a small JPEG: {failure}. Look at '
            'the driver and at the CUDA of torch and torchvision (lightning-feed doctor), or use backend="torch".'
        ) from error


def device_of(trainer: Trainer | None) -> torch.device:
    """The device of the batches: the Trainer's; without one, the first that a Trainer would take."""
    if trainer is not None:
        return trainer.strategy.root_device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# --- one decision for all ranks ---------------------------------------------------------------------------------------


def once_for_all_ranks(trainer: Trainer | None, decide: Callable[[], Chosen]) -> Chosen:
    """The decision of rank 0: what is installed may differ from node to node, and all must do the same.

    Raises:
        FeedError: on the other ranks, where ``decide`` raises on rank 0: of the same class, if it is one of ours.
    """
    if trainer is None or trainer.world_size == 1:
        return decide()
    chosen: Chosen | None = None
    failed: Exception | None = None
    failure: tuple[type[FeedError], str] | None = None
    if trainer.is_global_zero:
        try:
            chosen = decide()
        except Exception as error:  # noqa: BLE001 - raised below, once the others have heard of it
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
    """The decoder for "auto": the fastest on some of the images, the reference where none can be timed.

    Args:
        source: of the images.
        crops: whether training takes a part of each.
    """
    step = max(1, len(source) // _SAMPLES_TO_CHOOSE_BY)
    samples, indices = [], range(0, len(source), step)[:_SAMPLES_TO_CHOOSE_BY]
    expect = getattr(source, "expect", None)
    _held = None if expect is None else expect(indices)  # of a remote place, read at the same time
    for index in indices:
        with suppress(DatasetError):  # raised again in its turn, where on_error applies
            samples.append(source.read(index))
    try:
        if not samples or any(map(holds_pixels, samples)):
            raise DecodeError("there are no encoded images to time decoders on: a pack of pixels needs none")
        choice = make_decoder("auto", samples, regions=crops)
    except DecodeError as error:  # on_error applies to unreadable images in their turn
        choice = replace(make_decoder("pillow"), reason=f'decoder="auto" took the reference: {error}')
    logger.info("decoder=%r: %s", choice.name, choice.reason)
    return choice


# --- the ends of passes -----------------------------------------------------------------------------------------------


class PassEnds(Callback):
    """A callback that reports the ends of passes, and errors, to a data module.

    A loop that ends early, as with ``limit_val_batches``, does not close its loader, and Lightning keeps its iterator.
    """

    def __init__(self, datamodule: AnyDataModule) -> None:
        self.datamodule = datamodule

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Also at the end of the sanity check, and of each validation inside a fit."""
        self.datamodule._feed_pass_ended("val")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the pass."""
        self.datamodule._feed_pass_ended("test")

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the pass."""
        self.datamodule._feed_pass_ended("predict")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Free all."""
        self.datamodule._feed_release()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Free all after an error, too: Lightning does not call ``teardown`` then."""
        self.datamodule._feed_release()

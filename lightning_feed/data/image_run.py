"""ImageFolderDataModule in a Trainer: its device, its choices, the same on all ranks, and the ends of passes."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_feed.errors import FeedError, LoaderError
from lightning_feed.images.backends import BackendChoice
from lightning_feed.images.choose import DecoderChoice
from lightning_feed.images.crop import Recipe, UserTransform
from lightning_feed.images.dali_binding import DaliOptions
from lightning_feed.images.dali_decoder import DaliImageDecoder
from lightning_feed.images.decode_ahead import NvJpegOptions
from lightning_feed.load.order import mix_seed

Chosen = TypeVar("Chosen")


def device_of(trainer: Trainer | None) -> torch.device:
    """Return the device for the batches: the Trainer's; without a Trainer, CUDA if it is available, else the CPU."""
    if trainer is not None:
        return trainer.strategy.root_device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def local_ranks_of(trainer: Trainer | None) -> int:
    """Return the number of ranks on this machine."""
    return 1 if trainer is None else trainer.num_devices


@dataclass(frozen=True, kw_only=True)
class Recipes:
    """The transforms of the images."""

    train: Recipe
    evaluation: Recipe
    """The recipe of all other splits."""
    on_device: Recipe
    """The recipe of training images that stay on the device, where they are cropped."""

    def of(self, split: str) -> tuple[Recipe, Recipe | None]:
        """Return the recipe of a split, and that of its images that stay on the device, if it is another."""
        if split == "train":
            return self.train, self.on_device
        return self.evaluation, None

    @property
    def has_transform(self) -> bool:
        """True if one of them is a transform of the user's."""
        return isinstance(self.train, UserTransform) or isinstance(self.evaluation, UserTransform)


@dataclass
class ImageRun:
    """The choices that a data module makes once, and what it keeps on the device."""

    options: DaliOptions | NvJpegOptions | None
    """Options of the backend; None if it has none."""
    decoder: DecoderChoice | None = None
    """The decoder in use; None until the first dataset is made."""
    backend: BackendChoice | None = None
    """The backend in use; None until the first dataset is made."""
    pipelines: dict[str, DaliImageDecoder] = field(default_factory=dict)
    """The DALI decoder of each split."""
    generators: dict[torch.device, tuple[int, torch.Generator]] = field(default_factory=dict)
    """The epoch in which a device's random numbers began, and their generator."""

    @property
    def backend_name(self) -> str | None:
        """Name of the backend in use; None until the first dataset is made."""
        if self.backend is None:
            return None
        return self.backend.name

    def copy(self) -> "ImageRun":
        """Return the same choices, without device data: a worker that receives these would open the device."""
        return replace(self, pipelines={}, generators={})

    def generator(self, device: torch.device, epoch: int, *, run_seed: int, rank: int) -> torch.Generator:
        """Return a generator of our own for random numbers on the device, seeded by run, epoch and rank."""
        held = self.generators.get(device)
        if held is None or held[0] != epoch:
            seed = mix_seed(run_seed, epoch, rank, "device augmentation")
            held = (epoch, torch.Generator(device).manual_seed(seed))
            self.generators[device] = held
        return held[1]


def once_for_all_ranks(trainer: Trainer | None, decide: Callable[[], Chosen]) -> Chosen:
    """Call ``decide`` on rank 0, and return its result on all ranks, which may have different packages installed.

    Raises:
        FeedError: on the other ranks, if ``decide`` raises on rank 0. Its class is that of rank 0's error if that is a
            FeedError, else LoaderError. Rank 0 raises the original error.
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
        """Free all resources after an error, because Lightning does not call ``teardown`` then."""
        self.datamodule._feed_release()

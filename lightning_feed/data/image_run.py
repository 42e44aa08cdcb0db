"""ImageFolderDataModule in a Trainer: its device, one decision for all ranks, and the ends of passes."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_feed.errors import FeedError, LoaderError

Chosen = TypeVar("Chosen")


def device_of(trainer: Trainer | None) -> torch.device:
    """Return the device for the batches: the Trainer's; without a Trainer, CUDA if it is available, else the CPU."""
    if trainer is not None:
        return trainer.strategy.root_device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


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

"""Splits, stages and checks of arguments for the data modules, and a callback that tells them when a pass ends."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_feed.errors import SettingsError
from lightning_feed.load.settings import LoaderSettings

SPLITS = ("train", "val", "test", "predict")
SPLITS_OF_STAGE = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}


def check_whole(name: str, value: object, unit: str) -> None:
    """Refuse what is not a whole number of 1 or more.

    Raises:
        SettingsError: says which, and what to give.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingsError(f"{name}={value!r} is not possible. Give {unit}, 1 or more.")


def check_misplaced(owner: str, given: Mapping[str, object]) -> None:
    """Refuse arguments that a data module does not have; of a loader's settings say where they belong.

    Raises:
        SettingsError: names the first.
    """
    for name, value in given.items():
        if name in LoaderSettings.__dataclass_fields__:
            where = f"Write {owner}(..., loader=LoaderSettings({name}={value!r}))."
            raise SettingsError(f"{name} is a setting of the loaders. {where}")
        raise SettingsError(f"{owner} has no argument {name}.")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse what is none of the choices.

    Raises:
        SettingsError: names them.
    """
    if value not in choices:
        raise SettingsError(f"{name}={value!r} is not a choice. Give one of {', '.join(map(repr, choices))}.")


def ignore_warning(message: str) -> None:
    """Keep one warning of Lightning's back: what it advises was considered, and decided otherwise with a reason."""
    warnings.filterwarnings("ignore", message=message, category=UserWarning)


def device_of(trainer: Any) -> torch.device:
    """Where the batches go: the Trainer's device; without one, the first that a Trainer would take."""
    if trainer is not None:
        return trainer.strategy.root_device  # type: ignore[no-any-return]
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class PassEnds(Callback):
    """A callback that tells a data module of the ends of passes, and of errors.

    A loop that ends early, as with ``limit_val_batches``, does not close its loader, and Lightning keeps its iterator.
    """

    def __init__(self, datamodule: Any) -> None:
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

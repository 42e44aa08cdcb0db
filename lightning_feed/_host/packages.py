"""The two packages that a Trainer may come from."""

from importlib import import_module
from types import ModuleType
from typing import Any

from lightning_feed.errors import SettingsError

PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def package_of(first: Any, *others: Any) -> ModuleType:
    """The package that a Trainer, a module or a data module comes from: ``lightning.pytorch`` or ``pytorch_lightning``.

    Raises:
        SettingsError: when it comes from neither, or ``others`` come from another: each takes nothing of the other.
    """
    found = [PACKAGES[top] for base in type(first).__mro__ if (top := base.__module__.partition(".")[0]) in PACKAGES]
    if not found:
        raise SettingsError(
            f"{type(first).__module__}.{type(first).__qualname__} comes from neither lightning.pytorch nor "
            "pytorch_lightning. Give a Trainer, a LightningModule and a LightningDataModule of one of them."
        )
    for other in others:
        if package_of(other).__name__ != found[0]:
            raise SettingsError(
                f"{type(first).__name__} comes from {found[0]} and {type(other).__name__} from "
                f"{package_of(other).__name__}, and neither package takes what is of the other. Import both from one."
            )
    return import_module(found[0])

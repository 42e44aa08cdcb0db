"""Attributes of a Trainer that its connectors set, and its class does not declare.

Checked against Lightning 2.4.0 and 2.6.6 (``trainer/connectors``, ``trainer/trainer.py: __init__``).
"""

from typing import TYPE_CHECKING, Any

from lightning_feed._host.types import AnyTrainer

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningDataModule
    from lightning.pytorch.profilers import Profiler


def callbacks_of(trainer: AnyTrainer) -> "list[Callback]":
    """The Trainer's own list of its callbacks."""
    callbacks: list[Callback] = _attribute(trainer, "callbacks")
    return callbacks


def profiler_of(trainer: AnyTrainer) -> "Profiler":
    """The profiler, to which the loops announce their actions."""
    profiler: Profiler = _attribute(trainer, "profiler")
    return profiler


def datamodule_of(trainer: AnyTrainer) -> "LightningDataModule | None":
    """The data module of the last run; None without one."""
    datamodule: LightningDataModule | None = _attribute(trainer, "datamodule")
    return datamodule


def log_interval(trainer: AnyTrainer) -> int:
    """``Trainer(log_every_n_steps=...)``."""
    return int(_attribute(trainer, "log_every_n_steps"))


def reload_interval(trainer: AnyTrainer) -> int:
    """``Trainer(reload_dataloaders_every_n_epochs=...)``; 0 if the loaders are made once."""
    return int(_attribute(trainer, "reload_dataloaders_every_n_epochs"))


def is_fast_dev_run(trainer: AnyTrainer) -> bool:
    """Check for ``Trainer(fast_dev_run=...)``."""
    return bool(_attribute(trainer, "fast_dev_run"))


def overfits(trainer: AnyTrainer) -> bool:
    """Check for ``Trainer(overfit_batches=...)``."""
    return bool(_attribute(trainer, "overfit_batches") > 0)


def _attribute(trainer: Any, name: str) -> Any:
    return getattr(trainer, name)

"""Types of Lightning's objects, for annotations."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer

    # pytorch_lightning's classes have the same interface, so mypy checks our use of both packages against these.
    AnyTrainer: TypeAlias = Trainer
    AnyModule: TypeAlias = LightningModule
    AnyDataModule: TypeAlias = LightningDataModule
else:
    # Importing Lightning takes seconds, and pytorch_lightning may be the only one of the two packages in use.
    AnyTrainer = AnyModule = AnyDataModule = Any

Original: TypeAlias = Callable[..., Any]
"""The method of Lightning or the user that a :class:`Wrap` replaces, and calls."""
RunStage = Literal["fit", "validate", "test", "predict"]
Checkpoint: TypeAlias = dict[str, Any]
"""A checkpoint, as Lightning passes it to the hooks that save and load it."""
LoaderStates: TypeAlias = list[dict[str, Any]]
"""The states of the stateful training loaders, as in a checkpoint."""

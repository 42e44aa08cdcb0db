"""Hooks that nobody overrides are never named as slow."""

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_feed import _host


class Overrides(Callback):
    def on_train_batch_end(self, *args: object) -> None: ...


class Empty(Callback): ...


class OfTheInstance(Callback):
    def __init__(self) -> None:
        self.on_train_batch_end = lambda *_: None  # type: ignore[method-assign]


class Module(LightningModule):
    def on_train_batch_end(self, *args: object) -> None: ...


@pytest.mark.parametrize(
    ("action", "empty"),
    [
        ("[Callback]Overrides.on_train_batch_end", False),
        ("[Callback]Overrides.on_train_batch_start", True),
        ("[Callback]Empty.on_train_batch_end", True),
        ("[LightningModule]Module.on_train_batch_end", False),
        ("[LightningModule]Module.on_train_batch_start", True),
        ("[Strategy]SingleDeviceStrategy.on_train_batch_start", True),
        ("run_training_batch", False),
        ("logger Slow.log_metrics", False),
        ("[Callback]OfTheInstance.on_train_batch_end", False),
        ("[Callback]Unknown.on_train_batch_end", False),
    ],
)
def test_hooks_without_an_override_are_recognised_as_empty(action: str, *, empty: bool) -> None:
    callbacks = [Overrides(), Empty(), OfTheInstance(), ModelCheckpoint()]
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, callbacks=callbacks)
    trainer.strategy.connect(Module())
    assert _host.is_empty_hook(trainer, action) == empty
    saver = next(one for one in trainer.callbacks if isinstance(one, ModelCheckpoint))
    assert not _host.is_empty_hook(trainer, f"[Callback]{saver.state_key}.on_train_batch_end")

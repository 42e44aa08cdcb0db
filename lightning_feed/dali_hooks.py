"""Where Lightning's loops begin and end, for the pipelines of a DaliDataModule: resumed, and freed in time."""

from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_feed import _host
from lightning_feed.dali_loaders import DaliLoaders


def attach(trainer: Trainer) -> None:
    """Add :class:`DaliHooks` to ``trainer`` unless it has one. To be called while the trainer sets up."""
    callbacks = cast(list[Any], cast(Any, trainer).callbacks)
    if not any(isinstance(callback, DaliHooks) for callback in callbacks):
        callbacks.append(DaliHooks())


class DaliHooks(Callback):
    """What a data module is not told of by Lightning. It stands behind ``ExactResume``, which corrects checkpoints."""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the state of the training loader: Lightning gives it to no loader where an epoch had come to its end."""
        loaders = _loaders(trainer)
        states = _host.checkpoint_loader_states(checkpoint) or []
        if loaders is None or trainer.state.fn != "fit" or not states:
            return
        if loaders.choices.resumable:
            loaders.resume = states[0]
            return
        # Lightning refuses a state that no loader takes; without one it warns that the epoch is taken up anew.
        _host.write_loader_states(checkpoint, [])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the pass, or that of the sanity check. Lightning keeps the iterator of a loop that was broken off."""
        self._end(trainer, "val")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the pass."""
        self._end(trainer, "test")

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the pass."""
        self._end(trainer, "predict")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Free all, since Lightning does not call ``teardown`` then."""
        loaders = _loaders(trainer)
        if loaders is not None:
            loaders.close()

    @staticmethod
    def _end(trainer: Trainer, split: str) -> None:
        loaders = _loaders(trainer)
        if loaders is not None:
            loaders.end_pass(split)


def _loaders(trainer: Any) -> DaliLoaders | None:
    found = getattr(trainer.datamodule, "_dali", None)
    return found if isinstance(found, DaliLoaders) else None

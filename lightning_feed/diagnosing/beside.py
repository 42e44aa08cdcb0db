"""What of the user's fit is not training steps: validation, checkpoints, loggers, callbacks. What of it is not run."""

from typing import Any

from lightning_feed import _host

HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
)
"""Of callbacks, and called in training."""
_CALLED_OFTEN = 6


def own_callbacks(trainer: Any) -> list[Any]:
    """The callbacks of the user's own classes that take part in training."""
    return [
        one
        for one in trainer.callbacks
        if not _host.defined_by_lightning(type(one)) and any(_host.is_overridden(one, hook) for hook in HOOKS)
    ]


def left_out(trainer: Any, model: Any, datamodule: Any, run: list[Any]) -> str:
    """What a diagnosis does not run of a fit, by name; empty where there is nothing.

    Args:
        trainer: the user's.
        model: the module.
        datamodule: None: not known whether there is something to validate on.
        run: callbacks that are run all the same.
    """
    names = [*_validation(trainer, model, datamodule), *(_checkpoint(one) for one in trainer.checkpoint_callbacks)]
    names += [type(one).__name__ for one in trainer.loggers]
    callbacks = [_hooks_of(one) for one in own_callbacks(trainer) if not any(one is each for each in run)]
    names += callbacks
    if not names:
        return ""
    more = "; --callbacks, or callbacks=True, runs the callbacks here" if callbacks else ""
    return (
        f"{', '.join(names)}: not run, since they may write files or upload. What they take, the report of "
        f"GPUStarvationCallback() in the fit itself tells{more}"
    )


def _validation(trainer: Any, model: Any, datamodule: Any) -> list[str]:
    if not _host.is_overridden(model, "validation_step") or not trainer.limit_val_batches:
        return []
    if datamodule is not None and not any(_host.is_overridden(one, "val_dataloader") for one in (model, datamodule)):
        return []
    every, epochs = trainer.val_check_interval, trainer.check_val_every_n_epoch
    if isinstance(every, int):
        when = f"every {every} steps"
    elif every != 1.0:
        when = f"every {every:g} of an epoch"
    else:
        when = f"every {epochs} epochs" if epochs and epochs > 1 else "every epoch"
    return [f"validation ({when})"]


def _checkpoint(callback: Any) -> str:
    steps = _host.steps_between_checkpoints(callback)
    return f"{type(callback).__name__} ({f'every {steps} steps' if steps else 'checkpoints'})"


def _hooks_of(callback: Any) -> str:
    hooks = [hook for hook in HOOKS if _host.is_overridden(callback, hook)]
    often = [hook for hook in hooks if HOOKS.index(hook) < _CALLED_OFTEN]
    return f"{type(callback).__name__}.{(often or hooks)[-1]}"

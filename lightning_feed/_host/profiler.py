"""The names that Lightning's profiler gives to the parts of a loop, and to hooks."""

from lightning_feed._host.arguments import callbacks_of, profiler_of
from lightning_feed._host.origin import defined_by_lightning
from lightning_feed._host.types import AnyTrainer, RunStage

_EVALUATIONS: dict[RunStage, tuple[str, str]] = {
    "validate": ("[_EvaluationLoop].val_next", "validation"),
    "test": ("[_EvaluationLoop].test_next", "test"),
    "predict": ("[_PredictionLoop].predict_next", "predict"),
}
"""For each stage, the profiler action that fetches a batch, and the word in the names of the stage's hooks."""
_BASES = ("Callback", "ModelHooks", "DataHooks", "LightningModule", "Strategy")
"""Lightning's classes whose hooks do nothing."""


def actions(trainer: AnyTrainer, stage: RunStage) -> dict[str, str]:
    """Map the parts of a stage's loop (``fetch``, ``to_device``, ``step``) to the profiler's names for them.

    Validations, tests and predictions also have ``epoch_end``, which starts after their last step. A fit also has:

    - ``forward``, ``backward`` and ``optimizer``, but not with manual optimisation, which does not announce the
      backward pass to the profiler, and whose CUDA graphs must not contain our events.
    - ``validation``, which starts before the validation loaders are iterated. Lightning does not announce it in the
      middle of a gradient accumulation.
    - ``validation_end``, which stops when nothing of the validation remains but printing its results.
    - ``epoch``.

    Checked against Lightning 2.4.0 and 2.6.6 (``loops/training_epoch_loop.py``, ``loops/evaluation_loop.py``,
    ``loops/fit_loop.py``, ``loops/prediction_loop.py``, ``loops/optimization``, ``trainer/call.py``).
    """
    if stage == "fit":
        return _actions_of_fit(trainer)
    fetch, hooks = _EVALUATIONS[stage]
    strategy = f"[Strategy]{type(trainer.strategy).__name__}"
    return {
        "to_device": f"{strategy}.batch_to_device",
        "fetch": fetch,
        "step": f"{strategy}.{hooks}_step",
        "epoch_end": f"[LightningModule]{type(trainer.lightning_module).__name__}.on_{hooks}_epoch_end",
    }


def _actions_of_fit(trainer: AnyTrainer) -> dict[str, str]:
    strategy = f"[Strategy]{type(trainer.strategy).__name__}"
    module = f"[LightningModule]{type(trainer.lightning_module).__name__}"
    names = {
        "to_device": f"{strategy}.batch_to_device",
        "fetch": f"[{type(trainer.fit_loop.epoch_loop).__name__}].train_dataloader_next",
        "step": "run_training_batch",
        "validation": f"{module}.on_validation_model_zero_grad",
        "validation_end": f"{strategy}.on_validation_end",
        "epoch": "run_training_epoch",
    }
    if trainer.lightning_module.automatic_optimization:
        names["forward"] = f"{strategy}.training_step"
        names["backward"] = f"{strategy}.backward"
        names["optimizer"] = f"{module}.optimizer_step"
    return names


def profiler_does_nothing(trainer: AnyTrainer) -> bool:
    """Check if the profiler is Lightning's PassThroughProfiler, which does nothing.

    Checked against Lightning 2.4.0 and 2.6.6 (``profilers/base.py``).
    """
    kind = type(profiler_of(trainer))
    return kind.__name__ == "PassThroughProfiler" and defined_by_lightning(kind)


def is_empty_hook(trainer: AnyTrainer, action: str) -> bool:
    """Return True if an action of Lightning's profiler is a hook that does nothing, because nobody overrides it.

    Checked against Lightning 2.4.0 and 2.6.6 (``trainer/call.py``).
    """
    owners: dict[str, object] = {f"[Callback]{callback.state_key}": callback for callback in callbacks_of(trainer)}
    owners[f"[LightningModule]{type(trainer.lightning_module).__name__}"] = trainer.lightning_module
    owners[f"[Strategy]{type(trainer.strategy).__name__}"] = trainer.strategy
    owner, _, hook = action.rpartition(".")
    method = getattr(owners.get(owner), hook, None)
    return defined_by_lightning(method) and getattr(method, "__qualname__", "").partition(".")[0] in _BASES

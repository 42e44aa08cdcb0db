"""What measuring, logging and printing beside a loop need to know of it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from lightning_feed._host.wraps import defined_by_lightning


class StepActions(NamedTuple):
    """What the profiler calls the parts of a step in one of the loops."""

    fetch: str
    to_device: str
    step: str
    parts: tuple[str, ...]
    """Forward, backward and optimizer. Empty outside of training, and with manual optimisation: that announces no
    backward pass, and what is captured there as a CUDA graph is not to have an event of ours in it."""


def step_actions(trainer: Any, stage: str = "fit") -> StepActions:
    """The names for a stage, as ``stage_now`` names it.

    Read in 2.4.0 and 2.6.6 (``loops/training_epoch_loop.py``, ``loops/evaluation_loop.py``,
    ``loops/prediction_loop.py``, ``loops/optimization``, ``trainer/call.py``).
    """
    strategy = f"[Strategy]{type(trainer.strategy).__name__}"
    to_device = f"{strategy}.batch_to_device"
    if stage == "fit":
        fetch = f"[{type(trainer.fit_loop.epoch_loop).__name__}].train_dataloader_next"
        module = f"[LightningModule]{type(trainer.lightning_module).__name__}"
        parts = (f"{strategy}.training_step", f"{strategy}.backward", f"{module}.optimizer_step")
        automatic = trainer.lightning_module.automatic_optimization
        return StepActions(fetch, to_device, "run_training_batch", parts if automatic else ())
    loop = "_PredictionLoop" if stage == "predict" else "_EvaluationLoop"
    prefix, step = ("val", "validation_step") if stage == "validate" else (stage, f"{stage}_step")
    return StepActions(f"[{loop}].{prefix}_next", to_device, f"{strategy}.{step}", ())


class RunActions(NamedTuple):
    """What the profiler calls what lies around the steps of a fit."""

    validation_begins: str
    """Starts before the loaders of a validation are iterated, unless gradients are being accumulated."""
    validation_ends: str
    """Stops when nothing but printing follows."""
    epoch: str


def run_actions(trainer: Any) -> RunActions:
    """The names of this Trainer. Read in 2.4.0 and 2.6.6 (``loops/training_epoch_loop.py``, ``loops/fit_loop.py``)."""
    return RunActions(
        validation_begins=f"[LightningModule]{type(trainer.lightning_module).__name__}.on_validation_model_zero_grad",
        validation_ends=f"[Strategy]{type(trainer.strategy).__name__}.on_validation_end",
        epoch="run_training_epoch",
    )


class RunBegins:
    """In the place of a callback's ``log``, which Lightning gives it before anything else of a run: notes that.

    Then calls the method of the callback that ``tell`` names, before ``prepare_data`` and ``setup``. Read in 2.4.0 and
    2.6.6 (``connectors/callback_connector.py: _attach_model_logging_functions``); a hook at the beginning of
    ``Trainer.fit`` would replace it.
    """

    def __init__(self, tell: str) -> None:
        self._tell = tell

    def __get__(self, callback: Any, owner: Any = None) -> Any:
        try:
            return vars(callback)["log"] if callback is not None else self
        except KeyError:
            raise AttributeError("log is set when a Trainer runs") from None

    def __set__(self, callback: Any, log: Any) -> None:
        vars(callback)["log"] = log
        getattr(callback, self._tell)()


def profiler_does_nothing(trainer: Any) -> bool:
    """Whether the profiler is Lightning's empty one. Read in 2.4.0 and 2.6.6 (``profilers/base.py``)."""
    kind = type(trainer.profiler)
    return kind.__name__ == "PassThroughProfiler" and defined_by_lightning(kind)


def step_to_log(trainer: Any, every: int) -> int | None:
    """The loggers' number of the step that just ended, if one in ``every`` falls on it; None while accumulating.

    Read in 2.4.0 and 2.6.6 (``connectors/logger_connector: should_update_logs, update_train_step_metrics``).
    """
    loop = trainer.fit_loop.epoch_loop
    step: int = loop._batches_that_stepped
    return None if (step + 1) % every or loop._should_accumulate() else step


def steps_logged(trainer: Any) -> int:
    """The loggers' number of the step that comes next.

    Read in 2.4.0 and 2.6.6 (``connectors/logger_connector: update_train_step_metrics``).
    """
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def bar_printer(trainer: Any) -> Callable[[str], object] | None:
    """What prints a line above a live progress bar; None where a plain ``print`` does.

    Lightning's TQDM bar prints nothing at all when it is closed or disabled; other bars let a ``print`` through. Read
    in 2.4.0 and 2.6.6 (``callbacks/progress/tqdm_progress.py: print``).
    """
    bar = trainer.progress_bar_callback
    live = getattr(bar, "_train_progress_bar", None)
    return bar.print if live is not None and not live.disable else None

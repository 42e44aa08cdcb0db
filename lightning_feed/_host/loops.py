"""Lightning's loops: the running stage, its progress, and its next batches and epochs."""

import math
from typing import Any

from lightning_feed._host.arguments import callbacks_of, reload_interval
from lightning_feed._host.types import AnyTrainer, RunStage


def stage_now(trainer: AnyTrainer) -> RunStage:
    """Return the stage of the running loop: ``"fit"``, ``"validate"`` (also within a fit), ``"test"`` or
    ``"predict"``."""
    if trainer.training:
        return "fit"
    if trainer.sanity_checking or trainer.validating:
        return "validate"
    if trainer.testing:
        return "test"
    return "predict"


def loop_of(trainer: AnyTrainer, stage: RunStage) -> Any:
    """Return the loop of a stage, named as by :func:`stage_now`.

    Checked against Lightning 2.4.0, 2.5.6 and 2.6.6 (``trainer/trainer.py``).
    """
    if stage == "validate" and trainer.state.fn == "fit":
        return trainer.fit_loop.epoch_loop.val_loop
    return getattr(trainer, f"{stage}_loop")


def live_fetcher(trainer: AnyTrainer) -> Any:
    """Return the running loop's data fetcher; None if no loop runs, or before the fetcher exists.

    Checked against Lightning 2.4.0, 2.5.6 and 2.6.6.
    """
    if trainer.training:  # checked first, as this runs in each step
        return trainer.fit_loop._data_fetcher
    if trainer.sanity_checking or trainer.validating or trainer.testing or trainer.predicting:
        return loop_of(trainer, stage_now(trainer))._data_fetcher
    return None


def train_fetcher(trainer: AnyTrainer) -> Any:
    """Return the training loop's data fetcher; None outside a fit. Checked against Lightning 2.4.0, 2.5.6 and 2.6.6."""
    return trainer.fit_loop._data_fetcher


def is_running(trainer: AnyTrainer) -> bool:
    """Check if one of the Trainer's loops runs now.

    Checked against Lightning 2.4.0 and 2.6.6 (``trainer/states.py``).
    """
    return trainer.state.status == "running"


# --- progress -----------------------------------------------------------------------------------------------------


def epochs_processed(trainer: AnyTrainer) -> int:
    """Return the number of training epochs processed so far, which is also the index of the current epoch.

    Lightning passes this number to ``sampler.set_epoch``. In a resumed run, ``trainer.current_epoch`` lags behind it
    until the fit loop starts. Checked against Lightning 2.4.0 and 2.6.6 (``loops/fit_loop.py: on_advance_start``).
    """
    epochs: Any = trainer.fit_loop.epoch_progress.current
    return int(epochs.processed)


def next_epoch(trainer: AnyTrainer, epoch: int) -> int | None:
    """Return the index of the epoch after ``epoch``; None outside a fit, after its last epoch, and if loaders are
    reloaded."""
    if trainer.state.fn != "fit" or trainer.sanity_checking or reload_interval(trainer):
        return None
    last = trainer.max_epochs
    if last is not None and 0 <= last <= epoch + 1:
        return None
    return epoch + 1


def batches_of(trainer: AnyTrainer, stage: RunStage) -> int | None:
    """Return the number of batches in an epoch of a stage, in evaluation summed over all loaders; None if there is no
    length.

    Checked against Lightning 2.4.0 and 2.6.6 (``loops/evaluation_loop.py: max_batches``).
    """
    batches = trainer.num_training_batches
    if stage != "fit":
        batches = sum(loop_of(trainer, stage).max_batches)
    return None if batches == float("inf") else int(batches)


def train_progress(trainer: AnyTrainer) -> Any:
    """Return the training loop's counters of batches (``batch_progress``).

    Checked against Lightning 2.4.0 and 2.6.6 (``loops/progress.py: _BatchProgress``).
    """
    return trainer.fit_loop.epoch_loop.batch_progress


def read_already(trainer: AnyTrainer) -> bool:
    """Return True if Lightning has drawn a batch that no step has received yet, as it does for loaders without a
    length."""
    return bool(train_fetcher(trainer).batches)


def train_batches_to_follow(trainer: AnyTrainer, *, at_most: int, step_pending: bool) -> int:
    """Return the number of batches that the training loop will certainly take directly after this one, up to
    ``at_most``.

    Returns 0 if the run ends here, or if validation comes first, because validation must draw from the global random
    generators before the next training batch is loaded.

    Args:
        at_most: upper limit of the result.
        step_pending: True if this batch's optimizer step has not run yet, so that ``global_step`` does not count it.

    Checked against Lightning 2.4.0 and 2.6.6 (``loops/training_epoch_loop.py``).
    """
    loop = trainer.fit_loop.epoch_loop
    if trainer.should_stop or loop.batch_progress.is_last_batch:
        return 0
    if trainer.max_steps != -1:
        at_most = min(at_most, trainer.max_steps - trainer.global_step - step_pending)
    if at_most <= 0 or loop._should_check_val_fx(train_fetcher(trainer)):
        return 0
    return min(at_most, _batches_to_validation(trainer, at_most))


def _batches_to_validation(trainer: AnyTrainer, otherwise: int) -> int:
    """Training batches before the next validation within the epoch; ``otherwise`` if there is none."""
    loop = trainer.fit_loop.epoch_loop
    interval = trainer.val_check_batch
    if interval is None or interval == float("inf") or not loop._should_check_val_epoch():
        return otherwise
    done = loop.total_batch_idx if trainer.check_val_every_n_epoch is None else loop.batch_idx
    return int(interval - (done + 1) % interval)


def steps_left(trainer: AnyTrainer) -> tuple[float, float]:
    """Return the number of training batches and of epochs that are still to begin; infinite where the fit has no end.

    Neither early stopping nor a time limit is taken into account.
    """
    loop = trainer.fit_loop
    in_epoch = trainer.num_training_batches
    in_this = max(0.0, in_epoch - loop.epoch_loop.batch_progress.current.ready)
    epochs = math.inf
    if loop.max_epochs not in (None, -1):
        epochs = max(0, loop.max_epochs - trainer.current_epoch - 1)
    steps = in_this + (epochs * in_epoch if epochs else 0)
    if trainer.max_steps != -1:
        by_steps = max(0, trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
        if by_steps < steps:
            steps = by_steps
            epochs = math.ceil(max(0.0, steps - in_this) / in_epoch)
    return steps, epochs


def seconds_left(trainer: AnyTrainer) -> float:
    """Return the seconds until a Timer callback, such as that of ``Trainer(max_time=...)``, ends the fit; else
    infinite."""
    timers: list[Any] = [callback for callback in callbacks_of(trainer) if type(callback).__name__ == "Timer"]
    left_s = [timer.time_remaining() for timer in timers]
    return min((seconds for seconds in left_s if seconds is not None), default=math.inf)


def epoch_cut_short(trainer: AnyTrainer) -> tuple[int, int] | None:
    """Return (batches received, batches expected) if the training loader ended before its length, else None.

    Lightning skips the validation of such an epoch, without a message. Checked against Lightning 2.4.0 and 2.6.6
    (``loops/training_epoch_loop.py``).
    """
    promised = trainer.num_training_batches
    loop = trainer.fit_loop.epoch_loop
    came = loop.batch_progress.current.ready
    if promised == float("inf") or trainer.should_stop or trainer.global_step == loop.max_steps or came >= promised:
        return None
    return came, int(promised)


def go_on_past_the_end(trainer: AnyTrainer) -> None:
    """Let the training loop ignore ``max_epochs`` and ``max_steps`` from here on.

    Values that optimizers and schedulers have already read are unchanged. Checked against Lightning 2.4.0 and 2.6.6
    (``loops/fit_loop.py: done``, ``loops/training_epoch_loop.py: _is_training_done``).
    """
    trainer.fit_loop.max_epochs = -1
    trainer.fit_loop.epoch_loop.max_steps = -1


# --- logging and the progress bar ---------------------------------------------------------------------------------


def step_to_log(trainer: AnyTrainer, every: int) -> int | None:
    """Return the number under which to log the current step, once in ``every`` steps; else None.

    Also None in the middle of a gradient accumulation.

    Checked against Lightning 2.4.0 and 2.6.6
    (``connectors/logger_connector: should_update_logs, update_train_step_metrics``).
    """
    loop = trainer.fit_loop.epoch_loop
    step = loop._batches_that_stepped
    if (step + 1) % every or loop._should_accumulate():
        return None
    return step


def steps_logged(trainer: AnyTrainer) -> int:
    """Return the number under which loggers log the next step. Checked against Lightning 2.4.0 and 2.6.6."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped

"""What measuring, logging and printing beside a loop need to know of it."""

from collections.abc import Callable
from typing import Any

from lightning_feed._host.hooks import defined_by_lightning


def step_actions(trainer: Any) -> tuple[str, str, str]:
    """What the profiler calls fetching a training batch, taking it to the device, and running the step on it.

    Read in 2.4.0 and 2.6.6 (``loops/training_epoch_loop.py``, ``trainer/call.py: _call_strategy_hook``).
    """
    fetch = f"[{type(trainer.fit_loop.epoch_loop).__name__}].train_dataloader_next"
    return fetch, f"[Strategy]{type(trainer.strategy).__name__}.batch_to_device", "run_training_batch"


def profiler_does_nothing(trainer: Any) -> bool:
    """Whether the profiler is Lightning's empty one. Read in 2.4.0 and 2.6.6 (``profilers/base.py``)."""
    kind = type(trainer.profiler)
    return kind.__name__ == "PassThroughProfiler" and defined_by_lightning(kind)


def train_iterators(trainer: Any) -> list[Any]:
    """The iterators that training batches come from now, one for each loader of the mode; empty outside of a fit.

    A mode may make others within an epoch: ``max_size_cycle`` makes a new one when a loader is at its end. The class of
    the fetcher does not matter, so it may be one that PrefetchCallback has adopted. Read in 2.4.0 and 2.6.6
    (``loops/fetchers.py: _DataFetcher``, ``utilities/combined_loader.py: _ModeIterator``).
    """
    combined = getattr(trainer.fit_loop._data_fetcher, "_combined_loader", None)
    return list(getattr(getattr(combined, "_iterator", None), "iterators", None) or ())


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

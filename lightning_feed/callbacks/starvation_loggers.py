"""The output to the loggers of a Trainer: figures, reports, and the settings of the training loader."""

import io
import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lightning.pytorch.loggers import Logger

from lightning_feed import _host
from lightning_feed._host import AnyTrainer
from lightning_feed.load.recommend import Recommendation
from lightning_feed.measure import loop
from lightning_feed.measure.guard import Guard
from lightning_feed.measure.stats import Which, choose_tags, custom_scalar_layout, to_tags
from lightning_feed.report.document import as_json
from lightning_feed.report.files import as_html, short_markdown
from lightning_feed.report.report import Report, headline
from lightning_feed.verdict.diagnosis import Diagnosis

TEXT_TAG = "feed/report"
SLOW_S = 1e-3
"""Seconds above which a logger's call is slow."""
_laid_out: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""TensorBoard's SummaryWriters that have already received the layout of the tags' charts."""


class LoggerOutput:
    """Passes figures and reports of one run to the Trainer's loggers. A failing logger does not affect the others.

    Args:
        trainer: the Trainer that runs.
        guard: the callback's guard, around each call of a logger.
        which: the tags to log, ``"core"`` or ``"all"``.
        any_logger: True to pass figures and reports to loggers from other packages than Lightning, too.
    """

    def __init__(self, trainer: AnyTrainer, guard: Guard, *, which: Which = "core", any_logger: bool = True) -> None:
        self._trainer = trainer
        self._guard = guard
        self._which = which
        self._any_logger = any_logger
        self._paces: dict[int, Pace] = {}

    def for_each(self, task: str, call: Callable[[Logger], object]) -> None:
        """Call a function with each logger in turn.

        Args:
            task: the task in words that can follow "could not", and precede a logger's name: ``"log figures to"``.
            call: does the task for one logger.
        """
        for number, logger in enumerate(self._trainer.loggers):
            if self._any_logger or _is_of_lightning(logger):
                name = f"{type(logger).__name__} (trainer.loggers[{number}])"
                self._guard.attempt(f"{task} {name}", call, logger)

    def lay_out(self) -> None:
        """Give each of TensorBoard's SummaryWriters the layout of the tags' charts, once."""
        self.for_each("lay its figures out in", self._lay_out)

    def _lay_out(self, logger: Logger) -> None:
        experiment = _experiment_of(logger)
        if callable(getattr(experiment, "add_custom_scalars", None)) and experiment not in _laid_out:
            _laid_out.add(experiment)
            experiment.add_custom_scalars(custom_scalar_layout(self._which))

    def log(self, figures: dict[str, float], step: int) -> None:
        """Log the figures whose tags ``which`` includes."""
        chosen = choose_tags(figures, self._which)
        self.for_each("log its figures to", lambda logger: self._pace_of(logger).log(logger, chosen, step))

    def _pace_of(self, logger: Logger) -> "Pace":
        return self._paces.setdefault(id(logger), Pace())

    def give(self, report: Report, *, ended: bool) -> None:
        """Pass a report to the loggers, and at the end of a run the loader's settings with the results."""
        settings = self._guard.attempt("read the loader's settings", tuned_hparams, _host.datamodule_of(self._trainer))
        if settings and ended:
            log = partial(log_hparams, params=settings, metrics=achieved(report.diagnosis))
            self.for_each("pass the loader's settings to", log)
        step = self._trainer.global_step
        self.for_each("give its report to", lambda logger: give_report(logger, report, step))


class Pace:
    """Passes figures to one logger. Skips windows of a slow logger, so that its calls take 1 % of the time."""

    def __init__(self) -> None:
        self._took_s: deque[float] = deque(maxlen=3)
        self._next_s = -math.inf

    def log(self, logger: Logger, figures: dict[str, float], step: int) -> None:
        """Log the figures, or skip this window."""
        began = loop.clock()
        if not figures or began < self._next_s:
            return
        logger.log_metrics(figures, step=step)
        self._took_s.append(loop.clock() - began)
        shortest_s = min(self._took_s)  # one slow call may have other reasons
        if len(self._took_s) == self._took_s.maxlen and shortest_s >= SLOW_S:
            self._next_s = loop.clock() + 100 * shortest_s


def _is_of_lightning(logger: Logger) -> bool:
    """Return True for Lightning's own loggers and their subclasses. Other packages' loggers share only the base
    class."""
    kinds = [kind for kind in type(logger).__mro__ if kind.__module__.partition(".")[0] in _host.PACKAGES]
    return any(kind.__name__ != "Logger" for kind in kinds)


def _experiment_of(logger: Logger) -> Any:
    """Return the logger's ``experiment`` (the W&B run, the SummaryWriter, ...); None if it has none."""
    return getattr(logger, "experiment", None)


def give_report(logger: Logger, report: Report, step: int) -> None:
    """Pass a report to a logger in the best form for it. Loggers that accept neither pages nor text get nothing.

    Weights & Biases gets the HTML page, and in the run's summary the verdict and the figures of the whole run.
    TensorBoard and Comet get Markdown. MLflow gets ``feed_report.md`` and ``feed_report.json`` as artifacts.
    """
    experiment = _experiment_of(logger)
    if _host.has_class(logger, "WandbLogger"):
        _give_to_wandb(experiment, report, step)
    elif callable(getattr(experiment, "add_text", None)):
        experiment.add_text(TEXT_TAG, short_markdown(report), step)
    elif callable(getattr(experiment, "log_text", None)):
        run_id = getattr(logger, "run_id", None)
        if run_id is None:
            experiment.log_text(short_markdown(report), step=step)
        else:
            experiment.log_text(run_id, short_markdown(report), "feed_report.md")
            experiment.log_text(run_id, as_json(report), "feed_report.json")


def _give_to_wandb(experiment: Any, report: Report, step: int) -> None:
    import wandb

    experiment.log({TEXT_TAG: wandb.Html(io.StringIO(as_html(report))), "trainer/global_step": step})
    # Without these, W&B would show the figures of the last window there.
    figures = choose_tags(to_tags(report.diagnosis.stats), "core")
    experiment.summary.update({**figures, "feed/verdict": headline(report.diagnosis)})


# --- the loader's settings, to compare runs by them -------------------------------------------------------------------


def tuned_hparams(datamodule: object) -> dict[str, Any]:
    """Return the training loader's settings as hyperparameters, to compare runs by them.

    Args:
        datamodule: a FastDataModule or a wrapped data module whose training loader was made.

    Returns:
        ``feed/num_workers`` and so on; with several training loaders, ``feed/<loader>/num_workers``. Empty for other
        data modules, and before the loader is made.
    """
    recommendations = getattr(datamodule, "recommendations", None)
    if not isinstance(recommendations, Mapping):
        return {}
    training = {
        name: recommendation.setting
        for name, recommendation in recommendations.items()
        if isinstance(recommendation, Recommendation) and (name == "train" or name.startswith("train["))
    }
    params: dict[str, Any] = {}
    for name, setting in training.items():
        prefix = "feed/"
        if len(training) > 1:
            prefix += f"{name}/"
        params |= {
            f"{prefix}num_workers": setting.num_workers,
            f"{prefix}workers": setting.workers,
            f"{prefix}prefetch_factor": setting.prefetch_factor or 0,
            f"{prefix}pin_memory": setting.pin_memory,
            f"{prefix}persistent_workers": setting.persistent_workers,
        }
    return params


def achieved(diagnosis: Diagnosis) -> dict[str, float]:
    """Return measured results of a run, by which to compare settings in a table of runs."""
    results = {}
    stats = diagnosis.stats
    if stats.starved_pct is not None:
        results["feed_final/starved_pct"] = stats.starved_pct
    batch_size = diagnosis.measurements.facts.loader.batch_size
    if stats.step_ms and batch_size:
        results["feed_final/samples_per_s"] = 1e3 * batch_size / stats.step_ms
    return results


def log_hparams(logger: Any, params: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
    """Pass the loader's settings to a logger as hyperparameters, with the results. Call on rank 0, once, after a fit.

    Skips TensorBoard, which accepts hyperparameters only once per run: that one time is left to the user. There, the
    settings are in the report.
    """
    if not hasattr(logger.experiment, "add_hparams"):
        logger.log_hyperparams(dict(params))
        logger.log_metrics(dict(metrics))

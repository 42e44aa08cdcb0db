"""When a report of a fit comes, and where it goes besides the screen: the loggers, and the folder of the run."""

import io
import math
import time
from collections import deque
from pathlib import Path, PurePath
from typing import Any

from lightning_feed.watch.reports.document import as_json
from lightning_feed.watch.reports.headline import headline
from lightning_feed.watch.reports.html import as_html
from lightning_feed.watch.reports.report import Report
from lightning_feed.watch.reports.text import diagnosis_markdown
from lightning_feed.watch.stats import SOME_STEPS
from lightning_feed.watch.tags import choose_tags, to_tags
from lightning_feed.watch.verdict.diagnosis import Diagnosis

TEXT_TAG = "feed/report"
FIRST_STEPS, FIRST_S = 200, 60.0
"""The first report of a fit comes after so many steps or seconds, whichever is sooner."""
EVERY_S = 600.0
"""Seconds from one report to the next."""
SLOW_S = 1e-3
"""A call of a logger that takes longer is slow."""
clock = time.monotonic


class Pace:
    """Gives figures to one logger: where each of its calls takes long, only so often that they cost 1 % of the time."""

    def __init__(self) -> None:
        self._took: deque[float] = deque(maxlen=3)
        self._next_s = -math.inf

    def give(self, to: Any, tags: dict[str, float], step: int) -> None:
        """Log the figures, or leave this window out."""
        began = clock()
        if not tags or began < self._next_s:
            return
        to.log_metrics(tags, step=step)
        self._took.append(clock() - began)
        least = min(self._took)  # one slow call may have other reasons
        if len(self._took) == self._took.maxlen and least >= SLOW_S:
            self._next_s = clock() + 100 * least


class Schedule:
    """When the next report of a fit is due."""

    def __init__(self) -> None:
        self._next_step: float = FIRST_STEPS
        self._next_s = clock() + FIRST_S
        self.first = True
        """Whether none has come yet."""

    def due(self, steps: int) -> bool:
        """Whether one is due after so many steps."""
        return steps >= self._next_step or clock() >= self._next_s

    def came(self, *, early: bool = False) -> None:
        """A report came; ``early``: there was nothing to tell yet, so the next is due soon."""
        self._next_step = math.inf
        self._next_s = clock() + (FIRST_S if early else EVERY_S)
        self.first &= early


def tells_nothing(found: Diagnosis, steps: int) -> bool:
    """Whether a fit was so short, with ``steps`` steps, that nobody expects a verdict."""
    return found.bottleneck == "unknown" and steps < SOME_STEPS


def run_folder(trainer: Any) -> Path | None:
    """The folder of this run: of the first logger that has one on this machine, else that of the checkpoints.

    Not ``trainer.log_dir``: that is a broadcast, which all ranks have to take part in. Loggers may give anything.
    """
    if not trainer.loggers or trainer.fast_dev_run:
        return None
    for one in trainer.loggers:
        found = _path(getattr(one, "log_dir", None))
        if found is None and (saved := _path(getattr(one, "save_dir", None))) is not None:
            version = one.version if isinstance(one.version, str) else f"version_{one.version}"
            found = saved / str(one.name) / version  # where ModelCheckpoint puts its checkpoints
        if found is not None:
            return found
    return _path(getattr(trainer.checkpoint_callback, "dirpath", None))


def _path(folder: Any) -> Path | None:
    """None too for an address (``s3://bucket/runs``), of which a path would make a folder here."""
    if not isinstance(folder, (str, PurePath)) or "://" in str(folder):
        return None
    return Path(folder)


def achieved(found: Diagnosis) -> dict[str, float]:
    """What a run's settings gave, to stand beside them in a table of runs. What was not measured is absent."""
    stats, size = found.stats, found.measurements.facts.batch_size
    figures: dict[str, float] = {}
    if stats.starved_pct is not None:
        figures["feed_final/starved_pct"] = stats.starved_pct
    if stats.step_ms and size:
        figures["feed_final/samples_per_s"] = 1e3 * size / stats.step_ms
    return figures


def give_report(to: Any, report: Report, step: int) -> None:
    """Give a report to a logger in the form that it shows best; nothing to one that takes neither pages nor text.

    Weights & Biases gets the page, and in the run's summary the verdict with the figures of the whole run; TensorBoard
    and Comet get Markdown; MLflow the files ``feed_report.md`` and ``feed_report.json`` as artifacts.
    """
    found = report.diagnosis
    experiment: Any = getattr(to, "experiment", None)
    if any(kind.__name__ == "WandbLogger" for kind in type(to).__mro__):
        import wandb

        experiment.log({TEXT_TAG: wandb.Html(io.StringIO(as_html(report))), "trainer/global_step": step})
        whole = choose_tags(to_tags(found.stats), "core", tensorboard=False)
        experiment.summary.update({**whole, "feed/verdict": headline(found)})  # else W&B shows the last window there
    elif callable(getattr(experiment, "add_text", None)):
        experiment.add_text(TEXT_TAG, diagnosis_markdown(found), step)
    elif callable(getattr(experiment, "log_text", None)):
        run_id = getattr(to, "run_id", None)
        if run_id is None:
            experiment.log_text(diagnosis_markdown(found), step=step)
        else:
            experiment.log_text(run_id, diagnosis_markdown(found), "feed_report.md")
            experiment.log_text(run_id, as_json(report), "feed_report.json")

"""What the loggers of a run are given: figures, its report, and the settings of its loader as hyperparameters."""

import inspect
import io
import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from lightning_feed.measure import loop
from lightning_feed.measure.stats import SOME_STEPS, choose_tags, to_tags
from lightning_feed.report.document import as_json
from lightning_feed.report.files import as_html, diagnosis_markdown
from lightning_feed.report.report import Report, headline
from lightning_feed.verdict.diagnosis import Diagnosis

TEXT_TAG = "feed/report"
SLOW_S = 1e-3
"""A call of a logger that takes longer is slow."""


class Pace:
    """Gives figures to one logger: where each of its calls takes long, only so often that they cost 1 % of the time."""

    def __init__(self) -> None:
        self._took: deque[float] = deque(maxlen=3)
        self._next_s = -math.inf

    def give(self, to: Any, tags: dict[str, float], step: int) -> None:
        """Log the figures, or leave this window out."""
        began = loop.clock()
        if not tags or began < self._next_s:
            return
        to.log_metrics(tags, step=step)
        self._took.append(loop.clock() - began)
        least = min(self._took)  # one slow call may have other reasons
        if len(self._took) == self._took.maxlen and least >= SLOW_S:
            self._next_s = loop.clock() + 100 * least


def tells_nothing(found: Diagnosis, steps: int) -> bool:
    """Whether a fit was so short, with ``steps`` steps, that nobody expects a verdict."""
    return found.bottleneck == "unknown" and steps < SOME_STEPS


def run_folder(trainer: Any) -> Path | None:
    """The folder of this run: of the first logger that has one on this machine, else that of the checkpoints.

    Not ``trainer.log_dir``: that is a broadcast, which all ranks have to take part in. Loggers may give anything; an
    empty ``log_dir`` is none, and not the current folder.
    """
    if not trainer.loggers or trainer.fast_dev_run:
        return None
    for one in trainer.loggers:
        found = _path(getattr(one, "log_dir", None) or None)
        if found is None and (saved := _path(getattr(one, "save_dir", None))) is not None:
            version = one.version if isinstance(one.version, str) else f"version_{one.version}"
            found = saved / str(one.name) / version  # where ModelCheckpoint puts its checkpoints
        if found is not None:
            return found
    return _path(getattr(trainer.checkpoint_callback, "dirpath", None) or None)


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
        whole = choose_tags(to_tags(found.stats), "core")
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


_HPARAMS_RUN = "feed"
"""The folder in a TensorBoard run's folder, where TensorBoard finds them."""


def tuned_hparams(datamodule: Any) -> dict[str, Any]:
    """The settings of the training loader as hyperparameters, so that runs can be compared by them.

    Args:
        datamodule: a FastDataModule or a wrapped data module whose training loader was made.

    Returns:
        ``feed/num_workers`` and so on; of several training loaders with their names. Empty for other data modules, and
        before the loader is made.
    """
    found = getattr(datamodule, "recommendations", None)
    found = found if isinstance(found, Mapping) else {}
    chosen = {name: one for name, one in found.items() if name == "train" or str(name).startswith("train[")}
    settings = ("num_workers", "workers", "prefetch_factor", "pin_memory", "persistent_workers")
    return {
        f"feed/{setting}" if len(chosen) == 1 else f"feed/{name}/{setting}": 0 if value is None else value
        for name, one in chosen.items()
        for setting, value in ((setting, getattr(one, setting)) for setting in settings)
    }


def log_hparams(logger: Any, params: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
    """Give a logger of Lightning's hyperparameters with what they led to. Once, at the end of a fit, on rank 0.

    TensorBoard takes the first hyperparameters of a run and no others, and those are the user's: so these go, with the
    user's, into a run of their own in the folder ``feed`` of that run. Other loggers get them as further
    hyperparameters, and the metrics as metrics.
    """
    add = getattr(logger.experiment, "add_hparams", None)
    if add is None:
        logger.log_hyperparams(dict(params))
        logger.log_metrics(dict(metrics))
        return
    users = _flat(getattr(logger, "hparams", None) or {})
    # torch's SummaryWriter and tensorboardX's differ in the name of that argument.
    name = "run_name" if "run_name" in inspect.signature(add).parameters else "name"
    add({**users, **params}, dict(metrics), **{name: _HPARAMS_RUN})


def _flat(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested hyperparameters with their places as names, and as text what TensorBoard does not take as it is."""
    flat: dict[str, Any] = {}
    for key, value in params.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}/")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return flat

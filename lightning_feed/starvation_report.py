"""Where a report goes besides the console: the loggers, as text, and the folder of the run."""

from pathlib import Path
from typing import Any

from lightning_feed.watch.verdict.diagnosis import Diagnosis

TEXT_TAG = "feed/report"


def run_folder(trainer: Any) -> Path | None:
    """The folder that the first logger keeps this run in; None where no logger keeps anything on this machine.

    Not ``trainer.log_dir``: that is a broadcast, which all ranks have to take part in.
    """
    if not trainer.loggers or trainer.fast_dev_run:
        return None
    first = trainer.loggers[0]
    if getattr(first, "log_dir", None) is not None:
        return None if _elsewhere(first.log_dir) else Path(first.log_dir)
    if first.save_dir is None or _elsewhere(first.save_dir):
        return None
    version = first.version if isinstance(first.version, str) else f"version_{first.version}"
    return Path(first.save_dir, str(first.name), version)  # where ModelCheckpoint puts its checkpoints


def achieved(found: Diagnosis) -> dict[str, float]:
    """What a run's settings gave, to stand beside them in a table of runs. What was not measured is absent."""
    stats, size = found.stats, found.measurements.facts.batch_size
    figures: dict[str, float] = {}
    if stats.starved_pct is not None:
        figures["feed_final/starved_pct"] = stats.starved_pct
    if stats.step_ms and size:
        figures["feed_final/samples_per_s"] = 1e3 * size / stats.step_ms
    return figures


def _elsewhere(folder: Any) -> bool:
    """Whether it is an address (``s3://bucket/runs``), of which a path would make a folder here."""
    return "://" in str(folder)


def log_text(to: Any, markdown: str, step: int) -> None:
    """Give the report to a logger, if it takes text: those of TensorBoard, Weights & Biases, MLflow and Comet do."""
    experiment: Any = getattr(to, "experiment", None)
    if callable(getattr(experiment, "add_text", None)):
        experiment.add_text(TEXT_TAG, markdown, step)
    elif callable(getattr(to, "log_text", None)):
        to.log_text(key=TEXT_TAG, columns=["report"], data=[[markdown]], step=step)
    elif callable(getattr(experiment, "log_text", None)):
        run_id = getattr(to, "run_id", None)
        if run_id is None:
            experiment.log_text(markdown, step=step)
        else:
            experiment.log_text(run_id, markdown, "feed_report.md")

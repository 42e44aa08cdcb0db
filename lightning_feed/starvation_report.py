"""Where a report goes besides the console: the loggers, as text, and the folder of the run."""

from pathlib import Path
from typing import Any

TEXT_TAG = "feed/report"


def run_folder(trainer: Any) -> Path | None:
    """The folder that the first logger keeps this run in; None where no logger keeps anything on this machine.

    Not ``trainer.log_dir``: that is a broadcast, which all ranks have to take part in.
    """
    if not trainer.loggers or trainer.fast_dev_run:
        return None
    first = trainer.loggers[0]
    if getattr(first, "log_dir", None) is not None:
        return Path(first.log_dir)
    if first.save_dir is None:
        return None
    version = first.version if isinstance(first.version, str) else f"version_{first.version}"
    return Path(first.save_dir, str(first.name), version)  # where ModelCheckpoint puts its checkpoints


def log_text(loggers: list[Any], markdown: str, step: int) -> None:
    """Give the report to every logger that takes text: those of TensorBoard, Weights & Biases, MLflow and Comet."""
    for logger in loggers:
        experiment: Any = getattr(logger, "experiment", None)
        if callable(getattr(experiment, "add_text", None)):
            experiment.add_text(TEXT_TAG, markdown, step)
        elif callable(getattr(logger, "log_text", None)):
            logger.log_text(key=TEXT_TAG, columns=["report"], data=[[markdown]], step=step)
        elif callable(getattr(experiment, "log_text", None)):
            run_id = getattr(logger, "run_id", None)
            if run_id is None:
                experiment.log_text(markdown, step=step)
            else:
                experiment.log_text(run_id, markdown, "feed_report.md")

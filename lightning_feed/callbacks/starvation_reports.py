"""The reports of a run: the time, the form and the folder of each."""

import math
import os
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from lightning_feed import _host
from lightning_feed._host import AnyTrainer
from lightning_feed.callbacks.starvation_loggers import LoggerOutput
from lightning_feed.callbacks.starvation_run import RunFigures, StarvationRun
from lightning_feed.errors import SettingsError
from lightning_feed.measure.guard import Guard
from lightning_feed.measure.loop import Schedule
from lightning_feed.measure.stats import SOME_STEPS
from lightning_feed.report.document import make_report
from lightning_feed.report.files import Form, show_report, write_report
from lightning_feed.report.next_step import ENOUGH_STEPS, next_step
from lightning_feed.report.report import Report, RunIdentity, read_identity
from lightning_feed.verdict.decide import decide
from lightning_feed.verdict.diagnosis import Diagnosis

_shown_fits: set[str] = set()
"""Fits whose reports this process has printed. The reports of later fits take one line."""


class RunReports:
    """Makes the reports of one run.

    Args:
        trainer: the Trainer that runs.
        guard: the callback's guard, around each part of making a report.
        folder: the folder that the user chose for the files.
        loggers: the output to loggers, which gets the reports, too.

    Attributes:
        reported_steps: number of finished steps at the last report.
    """

    def __init__(self, trainer: AnyTrainer, guard: Guard, *, folder: Path | None, loggers: LoggerOutput) -> None:
        self._trainer = trainer
        self._guard = guard
        self._folder = folder
        self._loggers = loggers
        self._schedule = Schedule()
        self._identity = read_identity()
        self._shown: Diagnosis | None = None
        self.reported_steps = 0

    def is_due(self, steps: int) -> bool:
        """Return True if a report is due after this many steps."""
        return self._schedule.due(steps)

    def make(self, figures: RunFigures, *, ended: bool = False, to_loggers: bool = True) -> None:
        """Write the report into the run's folder, print it if due, and pass it to the loggers."""
        run = figures.run
        if run.finished == self.reported_steps and not ended:  # the end adds the run's validation and its wall time
            return
        self.reported_steps = run.finished
        is_first = self._schedule.first
        diagnosis = self._guard.attempt("make its report", lambda: decide(figures.measurements()))
        # Nobody expects a verdict from a fit with so few steps.
        if diagnosis is None or (diagnosis.grade == "not measured" and run.finished < SOME_STEPS):
            self._schedule.came(early=True)
            return
        self._schedule.came()
        report = make_report(diagnosis, run=self._identity_with_folder())
        files = self._guard.attempt("write its report", self._write, report, run.stage) or []
        form = self._form(run, diagnosis, ended=ended, is_first=is_first)
        if form is not None:
            self._guard.attempt("print its report", self._show, report, form, files)
            self._shown = diagnosis
        if to_loggers:
            self._loggers.give(report, ended=ended)

    def _identity_with_folder(self) -> RunIdentity:
        folder = run_folder(self._trainer, self._folder)
        if folder is None or folder == folder_in_root(self._trainer):
            return replace(self._identity, folder="")
        return replace(self._identity, folder=folder.name)

    def _write(self, report: Report, stage: _host.RunStage) -> list[Path]:
        folder = run_folder(self._trainer, self._folder)
        if folder is None:
            return []
        return write_report(report, folder if stage == "fit" else folder / stage)

    def _show(self, report: Report, form: Form, files: list[Path]) -> None:
        show_report(report, _host.bar_printer(self._trainer), files, form=form, before=self._shown)

    def _form(self, run: StarvationRun, diagnosis: Diagnosis, *, ended: bool, is_first: bool) -> Form | None:
        """Return the form in which to print a report; None if the report goes only to files and loggers."""
        is_endless = self._trainer.num_training_batches == math.inf
        if self._is_worth_a_line(run, ended=ended):
            return "line" if ended or is_endless else None
        if not (ended or is_first or is_endless):
            return None
        if run.stage == "fit":
            _shown_fits.add(self._identity.id)
        is_new = self._shown is None or _conclusion(self._shown) != _conclusion(diagnosis)
        return "full" if is_new else "short"

    def _is_worth_a_line(self, run: StarvationRun, *, ended: bool) -> bool:
        """Return True if at most one line is to be printed: for a fit of few steps, and all but this process's first
        fit."""
        if run.stage != "fit":
            return False
        follows_others = bool(_shown_fits - {self._identity.id})
        return follows_others or (ended and run.finished < ENOUGH_STEPS)


def _conclusion(diagnosis: Diagnosis) -> tuple[str, ...]:
    """Return the verdict and the next step. A report with the same as the report before is printed in short form."""
    return diagnosis.bottleneck, diagnosis.cause, diagnosis.grade, next_step(diagnosis)


FOLDER_VARIABLE = "LIGHTNING_FEED_DIR"
IN_ROOT = "feed_reports"
"""Name of the folder for reports in the Trainer's ``default_root_dir``."""


def chosen_folder(folder: str | Path | None) -> Path | None:
    """Return the folder that the user chose: the argument, else the environment variable; None if there is neither.

    Raises:
        SettingsError: the folder is on another machine.
    """
    chosen = folder or os.environ.get(FOLDER_VARIABLE)
    if not chosen:
        return None
    path = _local_path(chosen)
    if path is None:
        source = f"folder={folder!r}" if folder else f"{FOLDER_VARIABLE}={chosen}"
        raise SettingsError(f"GPUStarvationCallback: {source} is not on this machine. Give a local folder.")
    return path


def run_folder(trainer: AnyTrainer, chosen: Path | None = None) -> Path | None:
    """Return the folder for this run's reports; None in a ``fast_dev_run``, and if no folder is on this machine.

    This is the chosen folder, else the first logger's folder on this machine, else the folder of the checkpoints if
    there are loggers, else ``feed_reports`` in ``default_root_dir``. If a logger's ``log_dir`` is empty, which does not
    mean the current folder, the folder is in its ``save_dir``. ``trainer.log_dir`` is not used, because it broadcasts,
    so that all ranks would have to call it.
    """
    if _host.is_fast_dev_run(trainer):
        return None
    if chosen is not None:
        return chosen
    for logger in trainer.loggers:
        folder = _folder_of(logger)
        if folder is not None:
            return folder
    if trainer.loggers:
        beside = _local_path(getattr(trainer.checkpoint_callback, "dirpath", None))
        if beside is not None:
            return beside
    return folder_in_root(trainer)


def folder_in_root(trainer: AnyTrainer) -> Path | None:
    """Return the folder for reports of runs without a folder of their own; None if the root is on another machine."""
    root = _local_path(trainer.default_root_dir)
    return None if root is None else root / IN_ROOT


def _folder_of(logger: Any) -> Path | None:
    folder = _local_path(getattr(logger, "log_dir", None))
    if folder is not None:
        return folder
    saved = getattr(logger, "save_dir", None)
    root = Path() if saved == "" else _local_path(saved)
    if root is None:
        return None
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return root / str(logger.name) / version  # where ModelCheckpoint puts its checkpoints


def _local_path(folder: object) -> Path | None:
    """Return a folder as a path; None for an empty one, and for a URL (``s3://``), which would become a local
    folder."""
    if not isinstance(folder, (str, PurePath)) or not str(folder) or "://" in str(folder):
        return None
    return Path(folder)

"""The folder for the reports of a run of a Trainer."""

import os
from pathlib import Path, PurePath
from typing import Any

from lightning_feed import _host
from lightning_feed._host import AnyTrainer
from lightning_feed.errors import SettingsError

FOLDER_VARIABLE = "LIGHTNING_FEED_DIR"
IN_ROOT = "feed_reports"
"""Name of the folder for reports in the Trainer's ``default_root_dir``."""


def chosen_folder(folder: str | Path | None) -> Path | None:
    """The folder that the user chose: the argument, else the environment variable; None if there is neither.

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
    """Folder for this run's reports; None in a ``fast_dev_run``, and if no folder is on this machine.

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
    """The folder for reports of runs without a folder of their own; None if the root is on another machine."""
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
    """A folder as a path; None for an empty one, and for a URL (``s3://``), which would become a local folder."""
    if not isinstance(folder, (str, PurePath)) or not str(folder) or "://" in str(folder):
        return None
    return Path(folder)

"""Indexes of folders, remembered between runs: a network folder of a million files takes minutes to list."""

import hashlib
import json
import logging
import os
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lightning_feed.archive.folder_index import FolderIndex, scan_classes
from lightning_feed.archive.whole_file import whole_file

logger = logging.getLogger(__name__)

_VERSION = 1
_SETTLED_NS = 2_000_000_000
"""A folder changed within the last two seconds may change again within one tick of its clock, unseen (FAT has ticks of
2 s, the coarsest in use)."""


def cache_folder() -> Path:
    """Where this package keeps what it remembers between runs: ``$XDG_CACHE_HOME/lightning_feed``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_feed"


def index_of(
    root: Path, classes: tuple[str, ...] | None = None, *, now_ns: Callable[[], int] = time.time_ns
) -> FolderIndex:
    """The index of ``root``: the remembered one if no folder in it has changed, or a new one, remembered if possible.

    Args:
        root: a folder of class folders.
        classes: the classes there must be; None takes the names of the folders.
        now_ns: the time, for tests.

    Raises:
        DatasetError: as :func:`scan_classes`.
    """
    kept = cache_folder() / "index" / f"{_key(root, classes)}.npz"
    remembered = _load(kept)
    if remembered is not None and remembered.is_current(root):
        return remembered
    index = scan_classes(root, classes)
    if max(stamp for _, stamp in index.folders) < now_ns() - _SETTLED_NS:
        _save(index, kept)
    return index


def _key(root: Path, classes: tuple[str, ...] | None) -> str:
    text = json.dumps([_VERSION, os.fsencode(root.resolve()).hex(), classes])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _load(kept: Path) -> FolderIndex | None:
    try:
        with kept.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            about = json.loads(stored["about"].tobytes())
            return FolderIndex(
                classes=tuple(about["classes"]),
                labels=stored["labels"],
                names=stored["names"],
                ends=stored["ends"],
                folders=tuple((name, stamp) for name, stamp in about["folders"]),
            )
    except FileNotFoundError:
        return None
    except (
        OSError,
        ValueError,
        KeyError,
        EOFError,
        zipfile.BadZipFile,
    ) as error:  # cut short, or of something else: scanned anew
        logger.debug("The remembered index %s cannot be read (%s), so the folder is listed anew.", kept, error)
        return None


def _save(index: FolderIndex, kept: Path) -> None:
    about = json.dumps({"classes": index.classes, "folders": index.folders}).encode()
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(kept) as file:
            np.savez(
                file,
                about=np.frombuffer(about, dtype=np.uint8),
                labels=index.labels,
                names=index.names,
                ends=index.ends,
            )
    except OSError as error:
        logger.info(
            "The index of the folder could not be remembered in %s: %s. The next run lists it anew.", kept, error
        )

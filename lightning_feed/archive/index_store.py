"""Indexes of folders, remembered between runs: a network folder of a million files takes minutes to list."""

import hashlib
import io
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lightning_feed.archive.folder_index import FolderIndex, FolderStamp, scan_classes
from lightning_feed.archive.remembered import cache_folder, read_remembered, write_remembered
from lightning_feed.archive.stage_room import find_mount

logger = logging.getLogger(__name__)

_VERSION = 2
_DIGEST_BYTES = 16
_SETTLED_NS = 2_000_000_000
"""A folder changed within the last two seconds may change again within one tick of its clock, unseen (FAT has ticks of
2 s, the coarsest in use)."""


def index_of(
    root: Path, classes: tuple[str, ...] | None = None, *, now_ns: Callable[[], int] = time.time_ns
) -> FolderIndex:
    """The index of ``root``: the remembered one if no folder in it has changed, or a new one, remembered if possible.

    On FUSE every run lists the folder: mounts of object stores give their folders times that do not change with them.

    Args:
        root: a folder of class folders.
        classes: the classes there must be; None takes the names of the folders.
        now_ns: the time, for tests.

    Raises:
        DatasetError: as :func:`scan_classes`.
    """
    mount = find_mount(str(root))
    if mount is not None and mount.kind.startswith("fuse"):
        return scan_classes(root, classes)
    kept = cache_folder() / "index" / f"{_key(root, classes)}.npz"
    remembered = _load(kept)
    if remembered is not None and remembered.is_current(root):
        return remembered
    index = scan_classes(root, classes)
    if max(stamp.ctime_ns for _, stamp in index.folders) < now_ns() - _SETTLED_NS:
        _save(index, kept)
    return index


def _key(root: Path, classes: tuple[str, ...] | None) -> str:
    text = json.dumps([_VERSION, os.fsencode(root.resolve()).hex(), classes])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _load(kept: Path) -> FolderIndex | None:
    try:
        content = read_remembered(kept)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.info("The remembered index %s is not used: %s. The folder is listed anew.", kept, error)
        return None
    digest, stored = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if digest != _digest(stored):
        logger.warning("The remembered index %s is damaged. The folder is listed anew, and remembered again.", kept)
        return None
    with np.load(io.BytesIO(stored), allow_pickle=False) as arrays:
        about = json.loads(arrays["about"].tobytes())
        return FolderIndex(
            classes=tuple(about["classes"]),
            labels=arrays["labels"],
            names=arrays["names"],
            ends=arrays["ends"],
            folders=tuple((name, FolderStamp(*stamp)) for name, stamp in about["folders"]),
        )


def _save(index: FolderIndex, kept: Path) -> None:
    about = json.dumps({"classes": index.classes, "folders": index.folders}).encode()
    stored = io.BytesIO()
    np.savez(
        stored, about=np.frombuffer(about, dtype=np.uint8), labels=index.labels, names=index.names, ends=index.ends
    )
    try:
        write_remembered(kept, _digest(stored.getvalue()) + stored.getvalue())
    except OSError as error:
        logger.info(
            "The index of the folder could not be remembered in %s: %s. The next run lists it anew.", kept, error
        )


def _digest(stored: bytes) -> bytes:
    return hashlib.blake2b(stored, digest_size=_DIGEST_BYTES).digest()

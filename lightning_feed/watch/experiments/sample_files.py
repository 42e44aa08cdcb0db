"""Which files a sample is made of."""

import os
import site
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from lightning_feed.load.image_dataset import ImageDataset

_NOT_DATA = (".py", ".pyc", ".so", ".pth", ".pyd", ".pyi")
_SYSTEM = ("/proc/", "/sys/", "/dev/")


def innermost(dataset: Any, index: Any) -> tuple[Any, Any]:
    """The data set under subsets and concatenations, and the sample's index there."""
    while True:
        if isinstance(dataset, Subset):
            dataset, index = dataset.dataset, dataset.indices[index]
        elif isinstance(dataset, ConcatDataset):
            index = index + len(dataset) if index < 0 else index
            part = bisect_right(dataset.cumulative_sizes, index)
            index -= dataset.cumulative_sizes[part - 1] if part else 0
            dataset = dataset.datasets[part]
        else:
            return dataset, index


def listed_file(dataset: Any, index: Any) -> str | None:
    """The file of a sample, where the data set has a list of them (``samples``, ``imgs``; ours); None where not."""
    base, inner = innermost(dataset, index)
    if isinstance(base, ImageDataset):
        name = str(base.source.name(inner))
        return name if Path(name).is_file() else None
    for attribute in ("samples", "imgs"):
        listed = getattr(base, attribute, None)
        if not isinstance(listed, (list, tuple)) or not -len(listed) <= inner < len(listed):
            continue
        item = listed[inner]
        first = item[0] if isinstance(item, (list, tuple)) and item else item
        if isinstance(first, (str, os.PathLike)) and Path(first).is_file():
            return os.fspath(first)
    return None


def opened_by(work: Callable[[], object]) -> list[str]:
    """The files of data that ``work`` opens for reading, in this thread, each once.

    Python reports every ``open`` of its own to audit hooks (https://docs.python.org/3/library/audit_events.html).
    Libraries that open files in C, as OpenCV and HDF5 do, are not seen. A hook cannot be removed again, so one is
    installed when this is called first, and does nothing but look at a flag afterwards.
    """
    _listener.install()
    heard: list[str] = []
    _listener.heard[threading.get_ident()] = heard
    try:
        work()
    finally:
        del _listener.heard[threading.get_ident()]
    return [path for path in dict.fromkeys(heard) if _is_data(path)]


def sizes_of(paths: Iterable[str]) -> dict[str, int]:
    """Bytes of each file that is there."""
    found = {}
    for path in paths:
        try:
            found[path] = Path(path).stat().st_size
        except OSError:
            continue
    return found


class _Listener:
    """Hears of files that are opened, in the threads that are listened to."""

    def __init__(self) -> None:
        self.heard: dict[int, list[str]] = {}
        self._installed = False

    def install(self) -> None:
        if not self._installed:
            self._installed = True
            sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.heard or event != "open":
            return
        paths = self.heard.get(threading.get_ident())
        if paths is None or not isinstance(arguments[0], (str, bytes, os.PathLike)):
            return
        mode, flags = (*arguments[1:], None, None)[:2]
        if isinstance(mode, str) and any(letter in mode for letter in "wax+"):
            return
        if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
            return
        paths.append(os.fsdecode(arguments[0]))


_listener = _Listener()


def _is_data(path: str) -> bool:
    absolute = os.path.abspath(path)  # noqa: PTH100  # links stay as they are
    packages = (sys.prefix, sys.base_prefix, *site.getsitepackages())
    code = absolute.endswith(_NOT_DATA) or absolute.startswith(_SYSTEM)
    libraries = any(absolute.startswith(f"{folder}{os.sep}") for folder in packages if folder not in ("/usr", "/"))
    return not code and not libraries and Path(absolute).is_file()

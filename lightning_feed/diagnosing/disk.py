"""Storage: the files of the samples, their file system, and the loader's rate with and without the page cache."""

import functools
import math
import os
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from lightning_feed.diagnosing.session import LoaderPart, NotMeasurable, Session, naming
from lightning_feed.images.image_dataset import ImageDataset
from lightning_feed.load.kinds import AnyDataset, Index
from lightning_feed.load.random_state import preserve_state
from lightning_feed.measure.experiment_results import DiskFacts
from lightning_feed.measure.user_code import is_users
from lightning_feed.storage.file_system import file_system
from lightning_feed.trials.cloning import Changes, burst_of

ROUNDS = 8
"""Rounds of the workers for which there are first batches: two that do not count, and six that do."""
_FILES_SHARE = 0.25
"""Share of free memory for the files of the first batches."""
_SAMPLES_OPENED = 16
_NO_FILE = "the samples were not seen to open a file: they are in memory, or a library opens files in C"
_NOT_DATA = (".py", ".pyc", ".so", ".pth", ".pyd", ".pyi")
_SYSTEM = ("/proc/", "/sys/", "/dev/")


# --- the first batches, read warm and read cold -----------------------------------------------------------------------


@dataclass(frozen=True)
class FirstBatches:
    """The first batches of each loader."""

    batches: dict[LoaderPart, list[Index]]
    files: dict[str, int]
    """The files of their samples, with sizes in bytes; empty if none was found."""


def measure_cached(session: Session) -> None:
    """The rate over the first batches, repeated. The first pass does not count: it reads the files from storage."""
    first = choose(session)
    burst = max(burst_of(part.loader) for part in session.parts)
    once = math.ceil(min(map(len, first.batches.values())) / burst)
    rate = session.rate(
        lambda part: Changes(batches=first.batches[part], endless=True), share=0.5, warm_rounds=max(2, once)
    )
    session.note(cached_bytes_per_s=rate)


def measure_cold(session: Session) -> None:
    """The rate over the first batches, with their files removed from the page cache before each pass."""
    first = choose(session)
    if not hasattr(os, "posix_fadvise"):
        raise NotMeasurable("this system has no posix_fadvise to remove files from the page cache")
    if not first.files:
        raise NotMeasurable(_NO_FILE)
    system, kind = file_system(next(iter(first.files)))
    if kind == "memory":
        raise NotMeasurable(f"the files lie in memory ({system})")
    rate = session.rate(lambda part: Changes(batches=first.batches[part]), prepare=lambda: forget_files(first.files))
    session.note(cold_per_s=rate)


def forget_files(files: Iterable[str]) -> None:
    """Remove files from the page cache, unless a process maps them.

    Only needs the right to read them (posix_fadvise(2), POSIX_FADV_DONTNEED).
    """
    for path in files:
        with suppress(OSError), Path(path).open("rb", buffering=0) as file:  # the loader raises for missing ones
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def choose(session: Session) -> FirstBatches:
    """The first batches of the samplers, as many as there are time and memory for.

    Raises:
        NotMeasurable: there are none, for the reason in the message.
        DatasetError: a sample cannot be made.
    """
    if session.subset is None:
        session.check_memory()
        if any(part.stream for part in session.parts):
            raise NotMeasurable("an iterable data set decides itself which samples come")
        memory = session.machine.available_memory_bytes
        session.subset = _choose(session, session.share_s / 3, math.inf if memory is None else _FILES_SHARE * memory)
    found: FirstBatches = session.subset
    return found


def _choose(session: Session, max_s: float, max_bytes: float) -> FirstBatches:
    assert session.alone is not None, "it is measured first"
    burst = max(burst_of(part.loader) for part in session.parts)
    count = min(1 + ROUNDS * burst, int(session.alone.batches_per_s * max_s))
    batches = {part: part.first_batches(count) for part in session.parts}
    files: dict[str, int] = {}
    taken = 0
    deadline = session.clock() + max_s
    for together in zip(*batches.values(), strict=False):
        found = dict(files)
        for part, batch in zip(batches, together, strict=True):
            found |= sizes_of(files_of_samples(part, part.indices(batch)))
        if sum(found.values()) > max_bytes or session.clock() > deadline:
            break
        files = found
        taken = taken + 1
    if taken < 1 + burst:
        raise NotMeasurable(
            f"too little time or memory: {taken} batches fit, but a round of the workers has {1 + burst}"
        )
    return FirstBatches({part: given[:taken] for part, given in batches.items()}, files)


# --- the files of samples ---------------------------------------------------------------------------------------------


def innermost(dataset: AnyDataset, index: Index) -> tuple[AnyDataset, Index]:
    """The data set inside subsets and concatenations, and the sample's index in it."""
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


def files_of_samples(part: LoaderPart, indices: list[Index]) -> list[str]:
    """The files of these samples: from the data set's list, or those opened while making the samples in this process.

    Raises:
        DatasetError: when a sample cannot be made.
    """
    dataset: AnyDataset = part.loader.dataset
    found: list[str] = []
    with preserve_state(part.loader):
        for index in indices:
            path = _listed_file(*innermost(dataset, index))
            with naming(dataset, index):
                found += opened_by(functools.partial(dataset.__getitem__, index)) if path is None else [path]
    return found


def _listed_file(dataset: object, index: Index) -> str | None:
    """The file of a sample, if the data set lists its files (``samples``, ``imgs``; ours); else None."""
    listed = [getattr(dataset, name, None) for name in ("samples", "imgs")]
    items = [one[index] for one in listed if isinstance(one, (list, tuple)) and -len(one) <= index < len(one)]
    if isinstance(dataset, ImageDataset):
        items.append(str(dataset.source.name(index)))
    path = items[0] if items else None
    path = path[0] if isinstance(path, (list, tuple)) and path else path
    return os.fspath(path) if isinstance(path, (str, os.PathLike)) and Path(path).is_file() else None


def opened_by(work: Callable[[], object]) -> list[str]:
    """The data files that ``work`` opens for reading in this thread, each once.

    Python reports each of its ``open`` calls to audit hooks (https://docs.python.org/3/library/audit_events.html).
    Libraries that open files in C, such as OpenCV and HDF5, are not seen. A hook cannot be removed, so the first call
    installs one that stays. While no thread is observed, it only checks that a dict is empty.
    """
    _install_hook()
    found: list[str] = []
    _opened[threading.get_ident()] = found
    try:
        work()
    finally:
        del _opened[threading.get_ident()]
    return [path for path in dict.fromkeys(found) if _is_data(path)]


_opened: dict[int, list[str]] = {}
"""Files opened so far, by observed thread."""


@functools.cache
def _install_hook() -> None:
    sys.addaudithook(_note_open)


def _note_open(event: str, arguments: tuple[Any, ...]) -> None:
    if not _opened or event != "open":
        return
    path, mode, flags = (*arguments, None, None)[:3]
    writes = isinstance(mode, str) and bool(set(mode) & set("wax+"))
    writes = writes or (isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR)))
    if not writes and isinstance(path, (str, bytes, os.PathLike)):
        _opened.get(threading.get_ident(), []).append(os.fsdecode(path))


def _is_data(path: str) -> bool:
    absolute = os.path.abspath(path)  # noqa: PTH100  # links stay as they are
    named_so = not absolute.endswith(_NOT_DATA) and not absolute.startswith(_SYSTEM)
    return named_so and is_users(absolute) and Path(absolute).is_file()


def sizes_of(paths: Iterable[str]) -> dict[str, int]:
    """Bytes of each file that exists."""
    return {path: Path(path).stat().st_size for path in paths if Path(path).is_file()}


# --- where the files lie ----------------------------------------------------------------------------------------------


def measure_disk(session: Session) -> None:
    """The file system of some samples' files, and the rate at which the loader alone reads files."""
    assert session.alone is not None, "it is measured first"
    if any(part.stream for part in session.parts):
        raise NotMeasurable("the files of an iterable data set's samples are unknown")
    opened = {part: part.first_samples(_SAMPLES_OPENED) for part in session.parts}
    files = [path for part, indices in opened.items() for path in dict.fromkeys(files_of_samples(part, indices))]
    sizes = sizes_of(files)
    if not sizes:
        raise NotMeasurable(_NO_FILE)
    mean = sum(sizes.values()) / len(sizes)
    per_sample = len(files) / sum(map(len, opened.values()))
    files_per_s = None
    if per_sample >= 0.9:  # else many samples share a file, and the rate of files is not that of samples
        files_per_s = session.alone.batches_per_s * (session.results.batch_size or 1) * per_sample
    system, kind = file_system(files[0])
    session.note(
        disk=DiskFacts(
            file_system=system,
            kind=kind,
            read_mb_per_s=None if files_per_s is None else mean * files_per_s / 1e6,
            files_per_s=files_per_s,
            mean_file_bytes=mean,
        )
    )

"""Storage: which files samples are made of, where they lie, and the loader with them in and out of the page cache."""

import functools
import math
import os
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from lightning_feed.diagnosing.session import LeftOut, LoaderPart, Session, naming
from lightning_feed.images.image_dataset import ImageDataset
from lightning_feed.load.random_state import preserve_state
from lightning_feed.measure.experiment_results import DiskFacts
from lightning_feed.measure.user_code import is_users
from lightning_feed.storage.file_system import file_system
from lightning_feed.storage.remote_folder import RemoteSamples, RemoteSource
from lightning_feed.storage.remote_speed import TOGETHER, Wanted, measure_speed
from lightning_feed.trials.cloning import Changes, burst_of

ROUNDS = 8
"""Of the first batches: two that do not count, and six that do."""
_FILES_SHARE = 0.25
"""Of free memory, for the files of the first batches."""
_SAMPLES_OPENED = 16
_NO_FILE = "no file was seen to be opened by the samples: they lie in memory, or a library opens them in C"
_NOT_DATA = (".py", ".pyc", ".so", ".pth", ".pyd", ".pyi")
_SYSTEM = ("/proc/", "/sys/", "/dev/")


# --- the first batches, read warm and read cold -----------------------------------------------------------------------


@dataclass(frozen=True)
class FirstBatches:
    """The first batches of each loader."""

    batches: dict[LoaderPart, list[Any]]
    files: dict[str, int]
    """That their samples are made of, with their sizes in bytes; empty where none was found."""


def measure_cached(session: Session) -> None:
    """The rate over the first batches, again and again. The first time through is not counted: it fetches the files."""
    if _remote_samples(session):
        raise LeftOut("the samples are read from a URL, of which the page cache holds nothing")
    first = choose(session)
    burst = max(burst_of(part.loader) for part in session.parts)
    once = math.ceil(min(map(len, first.batches.values())) / burst)
    rate = session.rate(
        lambda part: Changes(batches=first.batches[part], endless=True), share=0.5, warm_rounds=max(2, once)
    )
    session.note(cached_bytes_per_s=rate)


def measure_cold(session: Session) -> None:
    """The rate over the first batches, whose files leave the page cache before each time through."""
    first = choose(session)
    if not hasattr(os, "posix_fadvise"):
        raise LeftOut("this system has no posix_fadvise, by which files are taken out of the page cache")
    if not first.files:
        raise LeftOut(_NO_FILE)
    system, kind = file_system(next(iter(first.files)))
    if kind == "memory":
        raise LeftOut(f"the files lie in memory ({system})")
    rate = session.rate(lambda part: Changes(batches=first.batches[part]), prepare=lambda: forget_files(first.files))
    session.note(cold_per_s=rate)


def forget_files(files: Iterable[str]) -> None:
    """Take files out of the page cache, as far as no process maps them.

    Needs no rights but to read them (posix_fadvise(2), POSIX_FADV_DONTNEED).
    """
    for path in files:
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError:
            continue  # gone since: it cannot be read at all, and the loader will say so
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def choose(session: Session) -> FirstBatches:
    """The first batches that the samplers give, as many as can be gone through in time and fit in memory.

    Raises:
        LeftOut: why there are none.
        DatasetError: a sample cannot be made.
    """
    if session.subset is None:
        session.check_memory()
        if any(part.stream for part in session.parts):
            raise LeftOut("an iterable data set decides itself which samples come")
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
    taken, deadline = 0, session.clock() + max_s
    for together in zip(*batches.values(), strict=False):
        found = dict(files)
        for part, batch in zip(batches, together, strict=True):
            found |= sizes_of(files_of_samples(part, [batch] if part.loader.batch_sampler is None else list(batch)))
        if sum(found.values()) > max_bytes or session.clock() > deadline:
            break
        files, taken = found, taken + 1
    if taken < 1 + burst:
        raise LeftOut(f"too little time or memory: {taken} batches fit, and a round of the workers has {1 + burst}")
    return FirstBatches({part: given[:taken] for part, given in batches.items()}, files)


# --- the files of samples ---------------------------------------------------------------------------------------------


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


def files_of_samples(part: LoaderPart, indices: list[Any]) -> list[str]:
    """The files that these samples are made of: by the data set's list of them, or by making the samples in this
    process and listening to what is opened.

    Raises:
        DatasetError: when a sample cannot be made.
    """
    dataset: Any = part.loader.dataset
    found: list[str] = []
    with preserve_state(part.loader):
        for index in indices:
            path = _listed_file(*innermost(dataset, index))
            with naming(dataset, index):
                found += opened_by(functools.partial(dataset.__getitem__, index)) if path is None else [path]
    return found


def _listed_file(dataset: Any, index: Any) -> str | None:
    """The file of a sample, where the data set has a list of them (``samples``, ``imgs``; ours); None where not."""
    listed = [getattr(dataset, name, None) for name in ("samples", "imgs")]
    items = [one[index] for one in listed if isinstance(one, (list, tuple)) and -len(one) <= index < len(one)]
    if isinstance(dataset, ImageDataset):
        items.append(str(dataset.source.name(index)))
    first = items[0] if items else None
    first = first[0] if isinstance(first, (list, tuple)) and first else first
    return os.fspath(first) if isinstance(first, (str, os.PathLike)) and Path(first).is_file() else None


def opened_by(work: Callable[[], object]) -> list[str]:
    """The files of data that ``work`` opens for reading, in this thread, each once.

    Python reports every ``open`` of its own to audit hooks (https://docs.python.org/3/library/audit_events.html).
    Libraries that open files in C, as OpenCV and HDF5 do, are not seen. A hook cannot be removed again, so one is
    installed when this is called first, and does nothing but look into an empty dict afterwards.
    """
    _install_hook()
    heard: list[str] = []
    _heard[threading.get_ident()] = heard
    try:
        work()
    finally:
        del _heard[threading.get_ident()]
    return [path for path in dict.fromkeys(heard) if _is_data(path)]


_heard: dict[int, list[str]] = {}
"""Files opened so far, by the thread that is listened to."""


@functools.cache
def _install_hook() -> None:
    sys.addaudithook(_hear)


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if not _heard or event != "open":
        return
    paths = _heard.get(threading.get_ident())
    path, mode, flags = (*arguments, None, None)[:3]
    writes = isinstance(mode, str) and set(mode) & set("wax+")
    if paths is None or writes or not isinstance(path, (str, bytes, os.PathLike)):
        return
    if not (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)):
        paths.append(os.fsdecode(path))


def _is_data(path: str) -> bool:
    absolute = os.path.abspath(path)  # noqa: PTH100  # links stay as they are
    named_so = not absolute.endswith(_NOT_DATA) and not absolute.startswith(_SYSTEM)
    return named_so and is_users(absolute) and Path(absolute).is_file()


def sizes_of(paths: Iterable[str]) -> dict[str, int]:
    """Bytes of each file that is there."""
    return {path: Path(path).stat().st_size for path in paths if Path(path).is_file()}


# --- where they lie ---------------------------------------------------------------------------------------------------


def measure_disk(session: Session) -> None:
    """The file system of some samples' files, and the rate at which the loader alone reads them."""
    assert session.alone is not None, "it is measured first"
    if any(part.stream for part in session.parts):
        raise LeftOut("an iterable data set does not tell which files a sample is made of")
    if (remote := _remote_samples(session)) is not None:
        session.note(disk=_measure_url(*remote))
        return
    opened = {part: part.first_samples(_SAMPLES_OPENED) for part in session.parts}
    files = [path for part, indices in opened.items() for path in dict.fromkeys(files_of_samples(part, indices))]
    if not files:
        raise LeftOut(_NO_FILE)
    sizes = sizes_of(files)
    mean = sum(sizes.values()) / len(sizes) if sizes else None
    per_sample = len(files) / max(1, sum(map(len, opened.values())))
    files_per_s = None
    if per_sample >= 0.9:  # else many samples are of one file, and files are not opened at the rate of samples
        files_per_s = session.alone.batches_per_s * (session.results.batch_size or 1) * per_sample
    system, kind = file_system(files[0])
    session.note(
        disk=DiskFacts(
            file_system=system,
            kind=kind,
            read_mb_per_s=None if mean is None or files_per_s is None else mean * files_per_s / 1e6,
            files_per_s=files_per_s,
            mean_file_bytes=mean,
        )
    )


def _remote_samples(session: Session) -> tuple[RemoteSource, list[int]] | None:
    """The samples that we read from a URL, and the numbers there of the first; None where there are none."""
    for part in session.parts:
        samples = [] if part.stream else part.first_samples(TOGETHER)
        found = [innermost(part.loader.dataset, sample) for sample in samples]
        find = getattr(found[0][0], "remote_reads", None) if found else None
        remote = find() if find is not None else None
        if isinstance(remote, RemoteSamples):
            numbers = [int(number) for _, number in found]
            picked = numbers if remote.numbers is None else [int(remote.numbers[number]) for number in numbers]
            return remote.reads, picked
    return None


def _measure_url(reads: RemoteSource, numbers: list[int]) -> DiskFacts:
    """The speed of a URL, by requests for some of its samples."""
    wanted = [
        Wanted(reads.index.path(number), int(reads.sizes[number])) for number in numbers if reads.sizes[number] > 0
    ]
    if not wanted:
        raise LeftOut("the server does not tell how long its files are")
    speed = measure_speed(reads.place, wanted)
    return DiskFacts(
        file_system=reads.place.url.partition("://")[0],
        kind="network",
        mean_file_bytes=sum(one.size for one in wanted) / len(wanted),
        latency_ms=speed.latency_ms,
        line_mb_per_s=speed.mb_per_s,
    )

"""One contender in a process of its own, measured there: what `loader.py` starts for each row of its table.

A crash, an import or a thread of one contender cannot touch another. The process leads a session, so that all it
starts (workers, helpers) is found by its number, for the CPU time and for the memory.
"""

import gc
import logging
import multiprocessing
import os
import resource
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

_TICKS = os.sysconf("SC_CLK_TCK")


class Skip(Exception):
    """A contender that cannot run here, in a word."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What is to be loaded, the same for all."""

    folder: Path
    """Holds ``train/<class>/<file>``."""
    scratch: Path
    """For what a contender makes of the files: archives, chunks, logs."""
    batch_size: int = 64
    size: int = 224
    workers: int = 2

    @property
    def files(self) -> list[Path]:
        return sorted((self.folder / "train").glob("*/*"))

    @property
    def batches(self) -> list[list[Path]]:
        files = self.files
        return [files[at : at + self.batch_size] for at in range(0, len(files), self.batch_size)]


class Feed(NamedTuple):
    """A contender that is ready: its epochs."""

    epoch: Callable[[], Iterable[Any]]
    """Called before the clock starts; gives the image batches of one epoch, (B, 3, H, W)."""


class Pass(NamedTuple):
    """One epoch."""

    images: int
    wall_s: float
    """From the start of the first ``iter`` to the last batch."""
    first_s: float
    cpu_s: float
    memory_mb: float


def serve(connection: Connection, make: Callable[[RunFacts], Feed], job: RunFacts, log: Path) -> None:
    """Make the contender, then run one epoch for each message, until it is killed."""
    os.setsid()
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    # This process was spawned, and would hand that on to the contenders' workers, which then import all libraries
    # again: seconds at the start, and hundreds of MB for each. Linux's default up to Python 3.13 is fork.
    multiprocessing.set_start_method("fork", force=True)
    try:
        feed = make(job)
        while True:
            asked = connection.recv()
            connection.send(_run(feed, job, with_memory=asked == "memory"))
    except Exception as error:  # noqa: BLE001 - whatever a library raises is said in the table
        traceback.print_exc()
        connection.send(error if isinstance(error, Skip) else Skip(f"{type(error).__name__}: {error}"))
        connection.close()


def _run(feed: Feed, job: RunFacts, *, with_memory: bool) -> Pass:
    source = feed.epoch()
    total = len(job.files)
    images = 0
    first_s = 0.0
    memory_mb = 0.0
    gc.collect()
    cpu_s = _cpu_seconds()
    began_s = time.perf_counter()
    last_s = began_s
    for batch in source:
        last_s = time.perf_counter()
        if not images:
            first_s = last_s - began_s
            _check(batch, job)
        images += len(batch)
        if with_memory and not memory_mb and images >= total // 2:
            memory_mb = memory_of(os.getsid(0))
    cpu_s = _cpu_seconds() - cpu_s
    if images != total:
        raise Skip(f"gave {images} of {total} images")
    return Pass(images, last_s - began_s, first_s, cpu_s, memory_mb)


def _check(batch: Any, job: RunFacts) -> None:
    wanted = (job.batch_size, 3, job.size, job.size)
    if tuple(batch.shape) != wanted:
        raise Skip(f"gave batches of {tuple(batch.shape)}, not {wanted}")


def _session(leader: int) -> Iterator[tuple[int, list[str]]]:
    """(pid, fields of /proc/<pid>/stat from the state on) of what belongs to a session."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields[3] == str(leader):
                yield int(entry.name), fields


def _cpu_seconds() -> float:
    """User and system time of this process, of its children that ended, and of all that live (those to 10 ms)."""
    own, ended = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    seconds = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    for pid, fields in _session(os.getsid(0)):
        if pid != os.getpid():
            seconds += sum(map(int, fields[11:15])) / _TICKS
    return seconds


def memory_of(session: int) -> float:
    """Anonymous and shared memory of a session in MB, each page once. Files are left out: the libraries' code is mapped
    by the processes of all contenders, and each one's share of it would depend on how many there are."""
    kilobytes = 0
    for pid, _ in _session(session):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        kilobytes += sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    return kilobytes * 1024 / 1e6

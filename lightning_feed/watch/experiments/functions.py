"""X5: what making a batch takes, samples and collating told apart, and the user's functions in which that time goes by.

A thread looks at the stack of the one that makes batches, about every millisecond. Time belongs to the innermost
function of the user's; what that calls in a library is named beside it.
"""

import os
import sys
import sysconfig
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

import torch

from lightning_feed.errors import FeedError, LoaderError
from lightning_feed.load.untouched import untouched
from lightning_feed.load.watched import Beat, watched
from lightning_feed.watch.experiments.results import FunctionCost
from lightning_feed.watch.experiments.subject import Part
from lightning_feed.watch.experiments.transform_cost import threads_of_a_worker

_LOOK_S = 0.001
_SWITCH_S = 0.0001
"""So long pure Python keeps the one who looks waiting: what runs after it would be seen in its place."""
_SILENT_S = 60.0
"""A sample that takes longer is taken to hang."""
_MOST_BATCHES = 1000
MOST_FUNCTIONS = 6
_LEAST_SHARE = 0.05
"""Functions that take less of a batch's time are not told."""

Stage = Literal["samples", "collate"]

_CALLS = {"__call__", "__init__", "forward", "_call_impl", "_wrapped_call_impl"}
"""Methods by which a class itself is meant."""


@dataclass(frozen=True, kw_only=True)
class Making:
    """What one batch takes in one process."""

    samples_ms: float
    collate_ms: float
    functions: tuple[FunctionCost, ...]


@dataclass
class StackTally:
    """Time by the user's functions, as stacks show it.

    Attributes:
        stage: what is going on.
        looked: when the last look was, or the stage began.
    """

    stage: Stage = "samples"
    looked: float = 0.0
    seen: dict[Stage, float] = field(default_factory=lambda: defaultdict(float))
    """All time, by stage."""
    spent: dict[tuple[Stage, CodeType, str | None], dict[int, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )
    """Of functions and what they call, by line."""
    names: dict[CodeType, str] = field(default_factory=dict)

    def enter(self, stage: Stage, now: float) -> None:
        """The stage begins: what went by before is not its own."""
        self.stage, self.looked = stage, now

    def clear(self) -> None:
        """Forget all."""
        self.seen.clear()
        self.spent.clear()

    def add(self, frame: FrameType | None, now: float) -> None:
        """Book the time since the last look by the innermost ``frame`` of the stack."""
        elapsed, self.looked = max(0.0, now - self.looked), now
        self.seen[self.stage] += elapsed
        called: FrameType | None = None
        while frame is not None:
            if is_users(frame.f_code.co_filename):
                calls = None if called is None else _name_of_call(called)
                self.spent[self.stage, frame.f_code, calls][frame.f_lineno] += elapsed
                self.names.setdefault(frame.f_code, _name_of(frame))
                return
            called, frame = frame, frame.f_back

    def result(self, stage_ms: dict[Stage, float]) -> tuple[FunctionCost, ...]:
        """The dearest functions, of stages that take so long for a batch."""
        costs = [
            FunctionCost(
                name=self.names[code],
                file=code.co_filename,
                line=max(lines, key=lambda line: lines[line]),
                calls=calls,
                stage=stage,
                ms_per_batch=stage_ms[stage] * sum(lines.values()) / self.seen[stage],
            )
            for (stage, code, calls), lines in self.spent.items()
            if self.seen[stage] > 0
        ]
        least = _LEAST_SHARE * sum(stage_ms.values())
        dear = [one for one in costs if one.ms_per_batch >= least]
        return tuple(sorted(dear, key=lambda one: -one.ms_per_batch)[:MOST_FUNCTIONS])


def measure_making(part: Part, max_s: float, *, clock: Callable[[], float] = time.perf_counter) -> Making:
    """Make batches in this process, with one thread where workers would have one. The first does not count, unless it
    takes all the time.

    Args:
        part: a loader with a map-style or an iterable data set.
        max_s: how long; at least one batch is made.
        clock: seconds.

    Raises:
        LoaderError: when no batch can be made in this process, or a sample takes very long.
    """
    tally = StackTally()

    def work(beat: Beat) -> list[tuple[float, float]]:
        began, took = clock(), list[tuple[float, float]]()
        batches = _samples(part, beat)
        with sampled(tally, clock):
            while True:
                start = clock()
                samples = next(batches, None)
                if samples is None:
                    break
                drawn = clock()
                tally.enter("collate", drawn)
                part.loader.collate_fn(samples)
                end = clock()
                tally.enter("samples", end)
                took.append((drawn - start, end - drawn))
                beat.beat()
                if end - began > max_s or beat.stopped:
                    break
                if len(took) == 1:
                    tally.clear()
        return took

    with untouched(part.loader), threads_of_a_worker(part):
        try:
            took = watched(
                work,
                silent_s=max(max_s, _SILENT_S),
                unblock=lambda: False,
                what=lambda seconds: f"A sample of the data set took longer than {seconds:g} s in this process.",
            )
        except FeedError:
            raise
        except Exception as error:
            raise LoaderError(f"no batch can be made in this process: {type(error).__name__}: {error}") from error
    counted = took[1:] or took
    if not counted:
        raise LoaderError("the loader gives no batch")
    stage_ms: dict[Stage, float] = {
        "samples": 1e3 * sum(one for one, _ in counted) / len(counted),
        "collate": 1e3 * sum(one for _, one in counted) / len(counted),
    }
    return Making(samples_ms=stage_ms["samples"], collate_ms=stage_ms["collate"], functions=tally.result(stage_ms))


def _samples(part: Part, beat: Beat) -> Iterator[Any]:
    """What ``collate_fn`` is given, batch for batch, as torch's fetchers make it."""
    loader = part.loader
    dataset: Any = loader.dataset
    batched = loader.batch_size is not None or loader.batch_sampler is not None
    if part.stream:
        stream = iter(dataset)
        size = loader.batch_size or 1
        while samples := _beating(islice(stream, size), beat):
            yield samples if batched else samples[0]
        return
    for index in part.first_batches(_MOST_BATCHES):
        if not batched:
            yield dataset[index]
        elif getattr(dataset, "__getitems__", None):
            yield dataset.__getitems__(index)
        else:
            yield _beating((dataset[one] for one in index), beat)


def _beating(samples: Iterator[Any], beat: Beat) -> list[Any]:
    made = []
    for sample in samples:
        made.append(sample)
        beat.beat()
    return made


@contextmanager
def sampled(tally: StackTally, clock: Callable[[], float]) -> Iterator[None]:
    """Within it, the stack of this thread is looked at again and again."""
    ident, done = threading.get_ident(), threading.Event()

    def look() -> None:
        while not done.wait(_LOOK_S):
            tally.add(sys._current_frames().get(ident), clock())

    before = sys.getswitchinterval()
    looking = threading.Thread(target=look, name="lightning-feed-sampling", daemon=True)
    tally.enter("samples", clock())
    sys.setswitchinterval(min(before, _SWITCH_S))
    looking.start()
    try:
        yield
    finally:
        done.set()
        looking.join()
        sys.setswitchinterval(before)


def is_users(file: str) -> bool:
    """Whether code of this file is neither Python's, nor of an installed package, nor ours. Cells of notebooks are."""
    if file.startswith("<"):
        return file.startswith(("<ipython", "<stdin"))
    return not file.startswith(_LIBRARIES) and "site-packages" not in file and "dist-packages" not in file


_LIBRARIES = tuple(
    {
        *(str(Path(folder)) + os.sep for folder in sysconfig.get_paths().values()),
        str(Path(torch.__file__).parent) + os.sep,
        str(Path(__file__).parents[2]) + os.sep,
    }
)


def _name_of(frame: FrameType) -> str:
    """``Birds.__getitem__``."""
    code = frame.f_code
    whole: str | None = getattr(code, "co_qualname", None)  # from Python 3.11 on
    if whole is not None:
        return whole.rpartition("<locals>.")[2]
    return f"{type(frame.f_locals['self']).__name__}.{code.co_name}" if "self" in frame.f_locals else code.co_name


def _name_of_call(frame: FrameType) -> str:
    """What is called: a class where its objects are, else ``Image.convert``, or the function."""
    name = frame.f_code.co_name
    if "self" not in frame.f_locals:
        return name
    kind = type(frame.f_locals["self"]).__name__
    return kind if name in _CALLS else f"{kind}.{name}"

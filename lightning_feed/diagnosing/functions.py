"""The time to make a batch, samples and collating told apart, and the user's functions in which that time goes by.

A thread looks at the stack of the one that makes batches, about every millisecond. Time belongs to the innermost
function of the user's; what that calls in a library is named beside it.
"""

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from types import CodeType, FrameType
from typing import Any, Literal

from torch.utils.data import DataLoader

from lightning_feed.diagnosing.session import LoaderPart, Session, not_hanging
from lightning_feed.diagnosing.transforms import threads_of_a_worker
from lightning_feed.errors import FeedError, LoaderError
from lightning_feed.load.random_state import preserve_state
from lightning_feed.measure.experiment_results import FunctionCost
from lightning_feed.measure.user_code import is_users
from lightning_feed.trials.cloning import Heartbeat

_LOOK_S = 0.001
_SWITCH_S = 0.0001
"""Longest wait of the sampling thread for pure Python: code that runs after it would be seen in its place."""
_SILENT_S = 60.0
"""A batch that takes longer is taken to hang."""
_MOST_FUNCTIONS = 6
_LEAST_SHARE = 0.05
"""Functions that take less of a batch's time are not reported."""
_CLASS_CALLS = {"__call__", "__init__", "forward", "_call_impl", "_wrapped_call_impl"}
"""Methods by which a class itself is meant."""

Stage = Literal["samples", "collate"]


class StackTally:
    """Time of the stages that make batches, and of the user's functions in them, as stacks show it."""

    def __init__(self) -> None:
        self._stage: Stage = "samples"
        self._entered = self._looked = 0.0
        self.clear()

    def clear(self) -> None:
        """Forget all times."""
        self._total: dict[Stage, float] = {"samples": 0.0, "collate": 0.0}
        self._seen: dict[Stage, float] = {"samples": 0.0, "collate": 0.0}
        """Time up to the last look in each stage."""
        self._spent: dict[tuple[Stage, CodeType, str, str | None], dict[int, float]] = {}
        """Of functions, their names and what they call, by line."""

    def enter(self, stage: Stage, now: float) -> None:
        """The stage begins, and the one before it ends."""
        self._total[self._stage] += now - self._entered
        self._stage, self._entered, self._looked = stage, now, now

    def add(self, frame: FrameType | None, now: float) -> None:
        """Book the time since the last look by the innermost ``frame`` of the stack."""
        elapsed, self._looked = max(0.0, now - self._looked), now
        self._seen[self._stage] += elapsed
        called: FrameType | None = None
        while frame is not None and not is_users(frame.f_code.co_filename):
            called, frame = frame, frame.f_back
        if frame is not None:
            calls = None if called is None else _name_of_call(called)
            lines = self._spent.setdefault((self._stage, frame.f_code, _name_of(frame), calls), defaultdict(float))
            lines[frame.f_lineno] += elapsed

    def result(self, batches: int) -> tuple[dict[Stage, float], list[FunctionCost]]:
        """Milliseconds per batch by stage, and the functions that take a part of it worth mentioning."""
        stage_ms = {stage: 1e3 * total / batches for stage, total in self._total.items()}
        costs = [
            FunctionCost(
                name=name,
                file=code.co_filename,
                line=max(lines, key=lambda line: lines[line]),
                calls=calls,
                stage=stage,
                ms_per_batch=stage_ms[stage] * sum(lines.values()) / (self._seen[stage] or 1.0),
            )
            for (stage, code, name, calls), lines in self._spent.items()
        ]
        least = _LEAST_SHARE * sum(stage_ms.values())
        return stage_ms, [one for one in costs if one.ms_per_batch >= least]


def measure_functions(session: Session) -> None:
    """The time for making samples and collating them, of all loaders, and the user's functions in them."""
    made = [time_batches(part, session.share_s / len(session.parts)) for part in session.parts]
    functions = sorted((one for _, found in made for one in found), key=lambda one: -one.ms_per_batch)
    session.note(
        samples_ms=sum(stage_ms["samples"] for stage_ms, _ in made),
        collate_ms=sum(stage_ms["collate"] for stage_ms, _ in made),
        functions=tuple(functions[:_MOST_FUNCTIONS]),
    )


def time_batches(part: LoaderPart, max_s: float) -> tuple[dict[Stage, float], list[FunctionCost]]:
    """Make batches in this process, with one thread where workers would have one. The first does not count.

    Args:
        part: a loader with a map-style or an iterable data set.
        max_s: how long; at least two batches are made.

    Returns:
        Milliseconds per batch by stage, and the user's functions.

    Raises:
        LoaderError: when no batch can be made in this process, or one takes very long.
    """
    tally = StackTally()

    def collate(beat: Heartbeat, samples: Any) -> None:
        tally.enter("collate", time.perf_counter())
        part.loader.collate_fn(samples)
        tally.enter("samples", time.perf_counter())
        beat.beat()

    def work(beat: Heartbeat) -> int:
        loader, number = _in_this_process(part, partial(collate, beat)), -1
        with sampled(tally):
            began = time.perf_counter()
            for number, _ in enumerate(chain(loader, loader)):  # twice: there may be one batch only
                tally.enter("samples", time.perf_counter())
                if number == 0:
                    tally.clear()
                elif time.perf_counter() - began > max_s or beat.stopped:
                    break
        return number

    with preserve_state(part.loader), threads_of_a_worker(part):
        try:
            counted = not_hanging(work, max(max_s, _SILENT_S), "A batch that is made in this process")
        except FeedError:
            raise
        except Exception as error:
            raise LoaderError(f"no batch can be made in this process: {type(error).__name__}: {error}") from error
    if counted < 1:
        raise LoaderError("the loader gives no batch")
    return tally.result(counted)


def _in_this_process(part: LoaderPart, collate: Callable[[Any], object]) -> DataLoader[Any]:
    """A plain loader of the same samples without workers."""
    loader = part.loader
    order: dict[str, Any] = {"batch_sampler": loader.batch_sampler}
    if part.stream:
        order = {"batch_size": loader.batch_size}
    elif loader.batch_sampler is None:
        order = {"batch_size": None, "sampler": loader.sampler}
    return DataLoader(loader.dataset, collate_fn=collate, generator=loader.generator, **order)


@contextmanager
def sampled(tally: StackTally) -> Iterator[None]:
    """Within it, the stack of this thread is looked at again and again."""
    ident, done = threading.get_ident(), threading.Event()

    def look() -> None:
        while not done.wait(_LOOK_S):
            tally.add(sys._current_frames().get(ident), time.perf_counter())

    before = sys.getswitchinterval()
    looking = threading.Thread(target=look, name="lightning-feed-sampling", daemon=True)
    tally.enter("samples", time.perf_counter())
    sys.setswitchinterval(min(before, _SWITCH_S))
    looking.start()
    try:
        yield
    finally:
        done.set()
        looking.join()
        sys.setswitchinterval(before)


def _name_of(frame: FrameType) -> str:
    """``Birds.__getitem__``."""
    code = frame.f_code
    whole: str | None = getattr(code, "co_qualname", None)  # from Python 3.11 on
    if whole is not None:
        return whole.rpartition("<locals>.")[2]
    return f"{type(frame.f_locals['self']).__name__}.{code.co_name}" if "self" in frame.f_locals else code.co_name


def _name_of_call(frame: FrameType) -> str:
    """The name of a call: a class where its objects are called, else ``Image.convert``, or the function."""
    name = frame.f_code.co_name
    if "self" not in frame.f_locals:
        return name
    kind = type(frame.f_locals["self"]).__name__
    return kind if name in _CLASS_CALLS else f"{kind}.{name}"

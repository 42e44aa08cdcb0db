"""The user's functions that take most time to make a batch, found by sampling the stack."""

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

from lightning_feed.diagnosing.parts import SILENT_S, LoaderPart, not_hanging, threads_of_a_worker
from lightning_feed.diagnosing.session import Session
from lightning_feed.errors import FeedError, LoaderError
from lightning_feed.load.kinds import Batch, Sample
from lightning_feed.load.random_state import preserve_state
from lightning_feed.measure.experiment_results import FunctionCost
from lightning_feed.measure.loader_code import is_users
from lightning_feed.trials.loader_rate import Heartbeat

_SAMPLING_S = 0.001
"""Time between two samples of the stack."""
_SWITCH_S = 0.0001
"""Longest wait of the sampling thread for the GIL. After a longer wait, the thread would sample code that ran later."""
_MOST_FUNCTIONS = 6
_LEAST_SHARE = 0.05
"""Smallest share of a batch's time for a function to be reported."""
_CLASS_CALLS = {"__call__", "__init__", "forward", "_call_impl", "_wrapped_call_impl"}
"""Methods that are reported under the name of their class."""

Stage = Literal["samples", "collate"]


class StackTally:
    """Times of the stages that make batches, and of the user's functions in these stages, from samples of the stack.

    The time of a stack counts for the user's innermost function, together with the name of the library call in it.
    """

    def __init__(self) -> None:
        self._stage: Stage = "samples"
        self._entered_s = 0.0
        self._sampled_s = 0.0
        self.clear()

    def clear(self) -> None:
        """Forget all times."""
        self._total: dict[Stage, float] = {"samples": 0.0, "collate": 0.0}
        self._seen: dict[Stage, float] = {"samples": 0.0, "collate": 0.0}
        """Time up to the last sample of the stack in each stage."""
        self._spent: dict[tuple[Stage, CodeType, str, str | None], dict[int, float]] = {}
        """Time by line, for each (stage, function, name of the function, name of the call in it)."""

    def enter(self, stage: Stage, now_s: float) -> None:
        """Begin a stage, and end the previous one."""
        self._total[self._stage] += now_s - self._entered_s
        self._stage = stage
        self._entered_s = now_s
        self._sampled_s = now_s

    def add(self, frame: FrameType | None, now_s: float) -> None:
        """Add the time since the last sample to the innermost ``frame`` of the stack."""
        elapsed = max(0.0, now_s - self._sampled_s)
        self._sampled_s = now_s
        self._seen[self._stage] += elapsed
        called: FrameType | None = None
        while frame is not None and not is_users(frame.f_code.co_filename):
            called = frame
            frame = frame.f_back
        if frame is not None:
            calls = None if called is None else _name_of_call(called)
            lines = self._spent.setdefault((self._stage, frame.f_code, _name_of(frame), calls), defaultdict(float))
            lines[frame.f_lineno] += elapsed

    def result(self, batches: int) -> tuple[dict[Stage, float], list[FunctionCost]]:
        """Return the milliseconds per batch by stage, and the functions that take at least 5 % of the time of a
        batch."""
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
        return stage_ms, [cost for cost in costs if cost.ms_per_batch >= least]


def measure_functions(session: Session) -> None:
    """Measure the time for making and for collating samples, over all loaders, and the user's slowest functions."""
    samples_ms = 0.0
    collate_ms = 0.0
    functions: list[FunctionCost] = []
    for part in session.parts:
        stage_ms, functions_of_part = time_batches(part, session.share_s / len(session.parts))
        samples_ms += stage_ms["samples"]
        collate_ms += stage_ms["collate"]
        functions += functions_of_part
    functions.sort(key=lambda function: -function.ms_per_batch)
    session.note(samples_ms=samples_ms, collate_ms=collate_ms, functions=tuple(functions[:_MOST_FUNCTIONS]))


def time_batches(part: LoaderPart, max_s: float) -> tuple[dict[Stage, float], list[FunctionCost]]:
    """Time batches made in this process, with as many threads as a worker would have. The first batch does
    not count.

    Args:
        part: a loader with a map-style or an iterable dataset.
        max_s: time to take; at least two batches are made.

    Returns:
        Milliseconds per batch by stage, and the user's functions.

    Raises:
        LoaderError: no batch can be made in this process, or a batch takes very long.
    """
    tally = StackTally()

    def collate(beat: Heartbeat, samples: list[Sample]) -> None:
        tally.enter("collate", time.perf_counter())
        part.loader.collate_fn(samples)
        tally.enter("samples", time.perf_counter())
        beat.beat()

    def work(beat: Heartbeat) -> int:
        plain = _in_this_process(part, partial(collate, beat))
        number = -1
        with sampled(tally):
            began = time.perf_counter()
            for number, _ in enumerate(chain(plain, plain)):  # twice: the loader may have only one batch
                tally.enter("samples", time.perf_counter())
                if number == 0:
                    tally.clear()
                elif time.perf_counter() - began > max_s or beat.stopped:
                    break
        return number

    with preserve_state(part.loader), threads_of_a_worker(part):
        try:
            counted = not_hanging(work, max(max_s, SILENT_S), "A batch that is made in this process")
        except FeedError:
            raise
        except Exception as error:
            raise LoaderError(f"no batch can be made in this process: {type(error).__name__}: {error}") from error
    if counted < 1:
        raise LoaderError("the loader gives no batch")
    return tally.result(counted)


def _in_this_process(part: LoaderPart, collate: Callable[[Any], object]) -> DataLoader[Batch]:
    """Return a plain DataLoader of the same samples without workers."""
    loader = part.loader
    order: dict[str, Any] = {"batch_sampler": loader.batch_sampler}
    if part.stream:
        order = {"batch_size": loader.batch_size}
    elif loader.batch_sampler is None:
        order = {"batch_size": None, "sampler": loader.sampler}
    return DataLoader(loader.dataset, collate_fn=collate, generator=loader.generator, **order)


@contextmanager
def sampled(tally: StackTally) -> Iterator[None]:
    """Sample the stack of this thread about every millisecond, as a context manager."""
    ident = threading.get_ident()
    done = threading.Event()

    def sample() -> None:
        while not done.wait(_SAMPLING_S):
            tally.add(sys._current_frames().get(ident), time.perf_counter())

    before = sys.getswitchinterval()
    sampling = threading.Thread(target=sample, name="lightning-feed-sampling", daemon=True)
    tally.enter("samples", time.perf_counter())
    sys.setswitchinterval(min(before, _SWITCH_S))
    sampling.start()
    try:
        yield
    finally:
        done.set()
        sampling.join()
        sys.setswitchinterval(before)


def _name_of(frame: FrameType) -> str:
    """Return the name of a frame's function, such as ``Birds.__getitem__``."""
    code = frame.f_code
    whole: str | None = getattr(code, "co_qualname", None)  # from Python 3.11 on
    if whole is not None:
        return whole.rpartition("<locals>.")[2]
    if "self" in frame.f_locals:
        return f"{type(frame.f_locals['self']).__name__}.{code.co_name}"
    return code.co_name


def _name_of_call(frame: FrameType) -> str:
    """Return the name of a call: of the class if an object is called, else of the method (``Image.convert``) or
    function."""
    name = frame.f_code.co_name
    if "self" not in frame.f_locals:
        return name
    kind = type(frame.f_locals["self"]).__name__
    if name in _CLASS_CALLS:
        return kind
    return f"{kind}.{name}"

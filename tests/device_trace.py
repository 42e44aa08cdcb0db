"""What a trace of ``torch.profiler`` says of the device: what it did when, and how much of that lay beside what."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Interval = tuple[float, float]
"""(start, end) in microseconds."""

LOADER_NEXT = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
"""torch's own name for the time that a loader without workers takes for a batch."""
SPIN = "spin_kernel"
"""Part of the name of the kernel of ``torch.cuda._sleep``."""
COPY = "Memcpy HtoD"
"""Beginning of the names of copies from the host to the device."""


@contextmanager
def trace() -> Iterator[list[Any]]:
    """A list that holds the events of what was done inside once it is left."""
    kinds = torch.profiler.ProfilerActivity
    found: list[Any] = []
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        yield found
        torch.cuda.synchronize()
    found += profile.events()


def device_work(events: Iterable[Any]) -> list[Any]:
    """Kernels, copies and fills.

    A named range of the host (``record_function``; an optimizer's step is one) is in the trace a second time as an
    event of the device, from its first kernel to its last with all gaps between them. That is no work.
    """
    kinds = torch.autograd.DeviceType
    named = {event.name for event in events if event.device_type == kinds.CPU}
    return [event for event in events if event.device_type == kinds.CUDA and event.name not in named]


def host_ranges(events: Iterable[Any], name: str) -> list[Interval]:
    """When the host was in the range ``name``, in order."""
    kind = torch.autograd.DeviceType.CPU
    return sorted(_interval(event) for event in events if event.device_type == kind and event.name == name)


def intervals(events: Iterable[Any], part: str = "") -> list[Interval]:
    """When the events ran whose names contain ``part``, in order."""
    return sorted(_interval(event) for event in events if part in event.name)


def overlap(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """Time that lies in some interval of either, in microseconds."""
    others = _merged(second)
    return sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in _merged(first) for begin, stop in others)


def covered_pct(inner: Sequence[Interval], outer: Sequence[Interval]) -> float:
    """Share of the time of ``inner`` that lies within ``outer``."""
    return 100 * overlap(inner, outer) / overlap(inner, inner)


def starved_pct(fetches: Iterable[Interval], work: Iterable[Interval], window: Interval) -> float:
    """Share of ``window`` in which the host was fetching while the device had nothing to do."""
    fetches = [(max(start, window[0]), min(end, window[1])) for start, end in fetches]
    return 100 * (overlap(fetches, fetches) - overlap(fetches, work)) / (window[1] - window[0])


def _interval(event: Any) -> Interval:
    return event.time_range.start, event.time_range.end


def _merged(given: Iterable[Interval]) -> list[Interval]:
    """The same time without overlaps, in order; what is empty or runs backwards is left out."""
    found: list[Interval] = []
    for start, end in sorted(given):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found

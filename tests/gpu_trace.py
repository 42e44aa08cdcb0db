"""Traces of torch.profiler: when kernels and copies ran on the device, and when the host was in the loader."""

import json
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

Span = tuple[float, float]
"""From and to, microseconds."""


class Trace(NamedTuple):
    """What a profiler saw. All spans are in order."""

    kernels: list[Span]
    other: list[Span]
    """Copies and fills."""
    to_device: list[Span]
    """Of these, copies from the host."""
    spins: list[Span]
    """Of the kernels, those of ``torch.cuda._sleep``."""
    fetches: list[Span]
    """When the host was in the loader."""


FETCH = "enumerate(DataLoader)"
"""Beginning of torch's own names for the time that a DataLoader takes for a batch; other loaders use it as a name."""


@contextmanager
def profiled(into: list[Trace]) -> Iterator[None]:
    """Profile a block."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with warnings.catch_warnings():
        # Torch 2.11 warns from the second profile of a process on.
        warnings.filterwarnings("ignore", ".*Profiler clears events")
        with torch.profiler.profile(activities=activities) as profile:
            yield
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "trace.json"
        profile.export_chrome_trace(str(file))
        into.append(read_trace(file))


def read_trace(file: Path) -> Trace:
    """Read a trace in Chrome's format, whose categories are those of Kineto."""
    events = json.loads(file.read_text())["traceEvents"]

    def spans(*categories: str, name: str = "") -> list[Span]:
        found = (one for one in events if one.get("cat") in categories and name in one["name"])
        return sorted((one["ts"], one["ts"] + one["dur"]) for one in found)

    return Trace(
        kernels=spans("kernel"),
        other=spans("gpu_memcpy", "gpu_memset"),
        to_device=spans("gpu_memcpy", name="HtoD"),
        spins=spans("kernel", name="spin_kernel"),
        fetches=spans("user_annotation", name=FETCH),
    )


def covered_pct(spans: list[Span], by: list[Span]) -> float:
    """Share of the time of ``spans`` that lies in the union of others, which are sorted."""
    return 100 * sum(covered(span, by) for span in spans) / sum(end - start for start, end in spans)


def covered(span: Span, by: list[Span]) -> float:
    """How much of ``span`` lies in the union of others, which are sorted."""
    inside, reached = 0.0, span[0]
    for start, end in by:
        start, end = max(start, reached), min(end, span[1])
        if end > start:
            inside, reached = inside + end - start, end
    return inside


def starved_pct(trace: Trace, steps: int) -> float:
    """Share of the last ``steps`` steps, each of which ends with a spin, in which the device waited for the loader."""
    busy = sorted(trace.kernels + trace.other)
    idle = sum(end - start - covered((start, end), busy) for start, end in trace.fetches[-steps:])
    return 100 * idle / (trace.spins[-1][1] - trace.spins[-steps - 1][1])

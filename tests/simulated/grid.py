"""Training steps in simulated time: what theory says of a step, and what the callbacks do and report."""

from typing import Any, NamedTuple

from simulated.device import MS, SimulatedDevice, outside
from simulated.training import Model, SimulatedLoader, fit, idle_ns

from lightning_feed import GPUStarvationCallback, PrefetchCallback

STEPS = 45
BYTES = 4 * 8 * 4
"""Of a batch."""


class Case(NamedTuple):
    """A training step: durations in milliseconds, and how its parts depend on each other."""

    compute: float
    copy: float
    load: float
    pinned: bool = True
    synchronises: bool = False
    """The step makes the host wait for the device, as ``.item()`` does; else the host runs ahead."""
    in_main_process: bool = False
    """``num_workers=0``: the host makes the batches itself."""

    def plain_ms(self) -> float:
        """Lightning alone: the copy is queued in the stream that computes."""
        on_device = self.compute + self.copy
        if not self.in_main_process:
            return max(self.load, on_device)
        if self.synchronises:
            return self.load + on_device
        # A pageable copy first waits for the step before it: the host cannot load beside copying.
        return max(self.load, on_device) if self.pinned else self.copy + max(self.compute, self.load)

    def prefetched_ms(self, depth: int) -> float:
        """With PrefetchCallback: the copy is beside the computing unless the host waits between them."""
        # What the host itself does for a batch, one thing after the other.
        host = (self.load if self.in_main_process else 0) + (0 if self.pinned else self.copy)
        if not self.synchronises:
            return max(self.compute, self.copy, self.load, host)
        # The host begins the next batch when the device is done: what it does then, the device cannot hide.
        exposed = host + self.compute + (self.copy if self.pinned and depth == 1 else 0)
        return max(exposed, self.copy, self.load)


class Outcome(NamedTuple):
    """What came of a run."""

    step_ms: float
    starved_pct: float
    """As reported."""
    truly_starved_pct: float
    copied_under_compute_pct: float
    """Of the time of copying that in which a kernel ran beside it."""
    races: list[str]


def run(case: Case, depth: int | None, steps: int = STEPS) -> Outcome:
    """Train; without PrefetchCallback where ``depth`` is None."""
    device = SimulatedDevice(copy_bytes_per_ms=BYTES / case.copy)
    model = Model(device, case.compute, synchronise=case.synchronises)
    loader = SimulatedLoader(
        device, steps, period_ms=case.load, pinned=case.pinned, in_main_process=case.in_main_process
    )
    starvation = GPUStarvationCallback(report=False)
    callbacks: list[Any] = [starvation] if depth is None else [PrefetchCallback(depth=depth), starvation]
    fit(device, model, loader, *callbacks)
    stats = starvation.report().stats
    assert stats.step_ms is not None
    assert stats.starved_pct is not None
    began = model.ended_at[-stats.steps - 1]
    ended = model.ended_at[-1]
    last = -1 - (depth or 0)  # the steps at the end have nothing left to fetch ahead
    return Outcome(
        step_ms=(model.ended_at[last] - began) / (stats.steps + last + 1) / MS,
        starved_pct=stats.starved_pct,
        truly_starved_pct=100 * idle_ns(device, loader, began) / (ended - began),
        copied_under_compute_pct=under_compute_pct(device, began, ended),
        races=device.races,
    )


def under_compute_pct(device: SimulatedDevice, began: int, ended: int) -> float:
    """Share of copying during which a kernel of the compute stream ran, between two moments."""
    copies = [(stream, span) for stream, span in device.copied if began <= span[0] and span[1] <= ended]
    of_its_own = {span for stream, span in copies if stream is device.compute}
    kernels = [span for span in device.compute.busy if span not in {*of_its_own, *device.compute.held_up}]
    beside = sum(span[1] - span[0] - outside(span, kernels) for _, span in copies)
    copying = sum(until - since for _, (since, until) in copies)
    return 100 * beside / copying if copying else 0.0

"""The device's busy share of the step itself, and the possible cost of the host's waits for it."""

from lightning_feed.measure.measurements import DeviceWait, LoopFacts, Measurements
from lightning_feed.verdict.diagnosis import Note
from lightning_feed.verdict.thresholds import BUSY_DEVICE_SHARE
from lightning_feed.wording import source_line


def idle_share(measured: Measurements) -> float | None:
    """Return the smallest possible share of ``compute_ms`` in which the device runs no kernel; None if unknown.

    NVML measures the device's busy time in whole steps. Here all of it counts as part of ``compute_ms``, as far as it
    fits, so the device may be idle for longer.
    """
    stats = measured.stats
    busy_pct = measured.device_busy_pct
    if busy_pct is None or not stats.compute_ms or not stats.step_ms:
        return None
    busy_ms = stats.step_ms * busy_pct / 100
    return max(0.0, 1 - busy_ms / stats.compute_ms)


def has_idle_device(measured: Measurements) -> bool:
    """Return True if the device was seen idle within the step itself."""
    share = idle_share(measured)
    return share is not None and share > 1 - BUSY_DEVICE_SHARE


def waits_in_each_step(facts: LoopFacts) -> list[DeviceWait]:
    """Return the lines at which the host waits for the device in most steps, those of the user first."""
    waits = [wait for wait in facts.waits or () if wait.in_most_steps]
    return sorted(waits, key=lambda wait: not wait.is_users)


def wait_cost_pct(measured: Measurements) -> float | None:
    """Return the largest possible cost of the host's waits for the device, in percent of a step; None if unknown.

    While the device is idle, the host does not wait for it. So without any wait, the step itself would still take as
    long as the device is busy, and as long as it is idle now: whichever is longer.
    """
    share = idle_share(measured)
    stats = measured.stats
    if share is None or not stats.compute_ms or not stats.step_ms:
        return None
    return 100 * min(share, 1 - share) * stats.compute_ms / stats.step_ms


def wait_note(wait: DeviceWait, measured: Measurements) -> Note:
    """Return the note on a wait in each step, with its cost, which is 0 if the device is busy meanwhile."""
    share = idle_share(measured)
    cost_pct = wait_cost_pct(measured) if has_idle_device(measured) else 0.0
    if share is None or cost_pct is None:
        return Note.of("device wait", at=source_line(wait.file, wait.line), code=wait.code)
    busy_pct = 100 * (1 - share)
    at = source_line(wait.file, wait.line)
    return Note.of("device wait", at=at, code=wait.code, cost_pct=cost_pct, busy_pct=busy_pct)

"""How scarce CPUs, disks and memory were between two readings, for this container where the kernel tells, else here."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from lightning_feed.archive.memory import cgroup_folders, read_text

T = TypeVar("T")

RESOURCES = ("cpu", "io", "memory")


@dataclass
class PressureTime:
    """Sums over intervals."""

    waited_us: dict[str, int] = field(default_factory=dict)
    """Microseconds in which some task waited for the resource (PSI "some"), by resource."""
    span_us: dict[str, float] = field(default_factory=dict)
    """Microseconds in which that was measured."""
    periods: dict[str, int] = field(default_factory=dict)
    """Scheduler periods of each cgroup that may have a quota."""
    throttled: dict[str, int] = field(default_factory=dict)
    """Those in which it had used up its quota."""

    def add(self, other: "PressureTime") -> None:
        """Add what another interval gave."""
        for name in self.__dataclass_fields__:
            mine, others = getattr(self, name), getattr(other, name)
            for key, value in others.items():
                mine[key] = mine.get(key, 0) + value

    def pressure_pct(self, resource: str) -> float | None:
        """Share of time in which some task waited for ``"cpu"``, ``"io"`` or ``"memory"``, 0 to 100."""
        span = self.span_us.get(resource)
        return min(100.0, 100 * self.waited_us[resource] / span) if span else None

    @property
    def throttled_pct(self) -> float | None:
        """Share of periods without quota left, 0 to 100, of the cgroup worst off; None where none has a quota."""
        shares = [100 * self.throttled[key] / periods for key, periods in self.periods.items() if periods]
        return max(shares, default=None)


class PressureClock:
    """Reads the kernel's totals, and gives the differences.

    Sources: Documentation/accounting/psi.rst and admin-guide/cgroup-v2.rst of Linux. The files are looked for once,
    when this is made.

    Args:
        root: the file system to read ``proc`` and ``sys`` from.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        own = list(cgroup_folders(root, ""))
        self._pressure = {}
        for resource in RESOURCES:
            # A process outside of any container is in the root cgroup, or in its session's: the nearest is meant.
            files = [*(folder / f"{resource}.pressure" for folder in own), root / "proc/pressure" / resource]
            found = next((path for path in files if _some_total(path) is not None), None)
            if found is not None:
                self._pressure[resource] = found
        # The quota that binds may be that of a cgroup further out.
        folders = [*own, *cgroup_folders(root, "cpu")]
        self._quotas = [path for path in (folder / "cpu.stat" for folder in folders) if _periods(path) is not None]
        self._last: dict[str, int] = {}
        self._last_periods: dict[str, tuple[int, int]] = {}
        self._at_ns: int | None = None

    def take(self, now_ns: int) -> PressureTime:
        """What happened since the last time; nothing at the first. ``now_ns``: the time now."""
        time = PressureTime()
        span = None if self._at_ns is None else (now_ns - self._at_ns) * 1e-3
        self._at_ns = now_ns
        totals = _read_all(self._pressure.items(), _some_total)
        for resource, total in totals.items():
            then = self._last.get(resource)
            if span and then is not None and total >= then:
                time.waited_us[resource], time.span_us[resource] = total - then, span
        self._last = totals
        counts = _read_all(((str(path), path) for path in self._quotas), _periods)
        for folder, now in counts.items():
            before = self._last_periods.get(folder)
            if before is not None and now[0] >= before[0] and now[1] >= before[1]:
                time.periods[folder], time.throttled[folder] = now[0] - before[0], now[1] - before[1]
        self._last_periods = counts
        return time


def _read_all(paths: Iterable[tuple[str, Path]], read: Callable[[Path], T | None]) -> dict[str, T]:
    found = ((name, read(path)) for name, path in paths)
    return {name: value for name, value in found if value is not None}


def _some_total(path: Path) -> int | None:
    """Microseconds of ``some avg10=0.00 avg60=0.00 avg300=0.00 total=123``."""
    for line in read_text(path).splitlines():
        kind, *values = line.split()
        if kind == "some":
            for value in values:
                name, _, number = value.partition("=")
                if name == "total" and number.isdigit():
                    return int(number)
    return None


def _periods(path: Path) -> tuple[int, int] | None:
    """``nr_periods`` and ``nr_throttled`` of a ``cpu.stat``, which v1 and v2 call the same."""
    values = {}
    for line in read_text(path).splitlines():
        name, _, number = line.partition(" ")
        if number.isdigit():
            values[name] = int(number)
    if "nr_periods" in values and "nr_throttled" in values:
        return values["nr_periods"], values["nr_throttled"]
    return None

"""Watches the loaders of a running fit: two cheap looks per step, and a reading of the kernel's counters per log."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_feed.measure.kernel import (
    PressureClock,
    PressureTime,
    WorkerClock,
    Workers,
    WorkerTime,
    count_connections,
)
from lightning_feed.measure.loader_state import Probe, QueueState, probe_loader
from lightning_feed.measure.stats import Additive, LoaderStats
from lightning_feed.measure.step_meter import Clock, host_clock

COUNT_EVERY_NS = 5_000_000_000
"""The connections of the workers are counted this often at most: a busy machine has many thousands."""
TRIES = 3
"""Fetches at whose start an iterator of no known kind is looked into: a generator shows what it draws from late."""


@dataclass
class LoaderSums(Additive):
    """Sums over fetches and intervals. Shares are sums divided by sums, never means of ratios."""

    workers: WorkerTime = field(default_factory=WorkerTime)
    pressure: PressureTime = field(default_factory=PressureTime)
    connections: int = 0
    """Of the workers over the network, whenever they were counted, added up."""
    counts: int = 0
    """How often."""
    fetches: int = 0
    """Those that counted: they drew from loaders all of which are known, and were not the first of an epoch."""
    ready: int = 0
    """Batches ready at the start of each, added up."""
    capacity: int = 0
    """Batches that could have been ready, added up."""
    sized_fetches: int = 0
    """Those with a known capacity."""
    ordered_wait_ns: int = 0
    """Waiting of which it is known whether a later batch was ready."""
    head_of_line_ns: float = 0.0
    handover_ns: float = 0.0
    """Waiting that began with batches ready in each loader, but for what was lost to their order."""
    wait_ns: int = 0
    """All waiting."""
    pinned_fetches: int = 0
    """Those of a loader with a pin thread."""
    pin_wait_ns: int = 0
    """Waiting that began with batches made, and none of them pinned."""
    drawn: int = 0
    """Batches drawn in ``span_ns``, of all loaders."""
    draws: int = 0
    """Fetches that drew them."""
    stocked: int = 0
    """By how many the stock of ready batches grew."""
    span_ns: int = 0
    """Time between fetches of one epoch, over which production is told."""

    @property
    def produced_per_s(self) -> float | None:
        """Batches per second that the loaders made, as the loop takes them: one of each loader together count once.

        What was handed out, and what the stock of ready ones grew by.
        """
        if not self.draws or not self.span_ns or not self.drawn:
            return None
        made = max(0, self.drawn + self.stocked)
        return made * self.draws / self.drawn / (self.span_ns * 1e-9)

    def to_stats(self) -> LoaderStats:
        """The figures; None for what nothing was seen of."""
        seen, pressure = self.workers, self.pressure
        return LoaderStats(
            workers_on_cpu_pct=seen.share_pct(seen.on_cpu_ns),
            workers_run_queue_pct=seen.share_pct(seen.run_queue_ns),
            workers_blocked_pct=seen.share_pct(seen.blocked_ns),
            read_mb_per_s=seen.read_mb_per_s,
            disk_mb_per_s=seen.disk_mb_per_s,
            page_cache_pct=seen.page_cache_pct,
            connections=_ratio(self.connections, self.counts),
            queue_ready=_ratio(self.ready, self.fetches),
            queue_capacity=_ratio(self.capacity, self.sized_fetches),
            head_of_line_pct=_ratio(100 * self.head_of_line_ns, self.ordered_wait_ns),
            handover_pct=_ratio(100 * self.handover_ns, self.wait_ns),
            pin_lag_ms=_ratio(self.pin_wait_ns * 1e-6, self.pinned_fetches),
            produced_per_s=self.produced_per_s,
            cpu_pressure_pct=pressure.pressure_pct("cpu"),
            io_pressure_pct=pressure.pressure_pct("io"),
            memory_pressure_pct=pressure.pressure_pct("memory"),
            throttled_pct=pressure.throttled_pct,
        )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


@dataclass
class _Look:
    """The loaders at the start of a fetch."""

    at: int
    counts: bool
    """Whether this fetch counts: it is not the first of an epoch."""
    known: bool = False
    """Whether something is known of one of them, and of all."""
    all_known: bool = True
    ready: int = 0
    unpinned: int = 0
    pinning: bool = False
    drawn: int = 0
    """Batches drawn since the last look."""
    scarce: tuple[int, int] | None = None
    """Batches ready, and capacity, of the loader with the smallest share ready: the one that is waited for."""
    wait_ns: int = 0
    """How long the fetch took."""
    late_ns: float | None = None
    """And how long of that a later batch was ready; until it ends, what was waited so before."""

    def see(self, probe: Probe, state: QueueState) -> None:
        """One of the loaders."""
        self.known = True
        self.ready += state.ready
        held = probe.held
        if held is not None and (self.scarce is None or state.ready * self.scarce[1] < self.scarce[0] * held):
            self.scarce = state.ready, held
        if state.unpinned is not None:
            self.pinning = True
            self.unpinned += state.unpinned
        self.drawn += state.taken - probe.taken if state.taken >= probe.taken else state.taken
        probe.taken = state.taken


class LoaderWatch:
    """What can be known of the training loaders while they are drawn from.

    Call :meth:`fetch_began` and :meth:`fetch_ended` around each fetch of the loop, wherever it takes place, and around
    those that only hand out what was fetched before, which are told apart: they take nothing from a loader. The first
    fetch of each epoch does not count: it waits for workers to start.

    Several loaders are taken together: what is ready and what could be are those of the loader that has the smallest
    share ready, which is the one that is waited for. A later batch being ready is told of each loader by itself: the
    loop waits for one after the other. With one among them of a kind that is not known, nobody can say for which the
    loop waits: of waiting and workers nothing is told then, only what the others make.

    ``head_of_line_pct`` is the time waited with a later batch at hand, from the moment on at which that one came, times
    the share of workers idle for it, over all time in fetches. With ``background=``, worker processes and the thread
    that reads ahead are watched as one: as far as the thread waits so while the loop waits, it counts. What the other
    figures mean is said in ``stats``, and how they are made in ``kernel``.

    Args:
        find: gives the live iterators of the training loaders. Asked at each fetch.
        clock: the host's clock, nanoseconds.
        root: the file system to read ``proc`` and ``sys`` from.
        read_every_ns: the kernel's counters are not read more often than this by :meth:`take`; a window that ends
            sooner is without them, and what they counted goes to a later one. Reading takes about 0.4 ms.
    """

    def __init__(
        self,
        find: Callable[[], list[Any]],
        *,
        clock: Clock = host_clock,
        root: Path = Path("/"),
        read_every_ns: int = 0,
    ) -> None:
        self._find, self._clock, self._read_every_ns = find, clock, read_every_ns
        self._root = root
        self._next_read = self._next_count = clock()
        self._probes: list[Probe | None] = []
        self._ids: list[int] = []
        self._tries = TRIES
        self._workers, self._pressure = WorkerClock(root), PressureClock(root)
        self._pressure.take(clock())
        self._sums, self._settled, self._before = LoaderSums(), LoaderSums(), LoaderSums()
        """Of the whole run; when its warm-up ended; when the present window began."""
        self._first = True
        """No fetch of this epoch has ended."""
        self._last: _Look | None = None

    def epoch_began(self) -> None:
        """The next fetch is the first of an epoch."""
        self._first = True
        self._last = None
        self._tries = TRIES

    def fetch_began(self) -> None:
        """The loop asks for a batch."""
        now, last = self._clock(), self._last
        if self._follow():
            last = None  # of other iterators
        look = self._last = _Look(now, counts=not self._first)
        for probe in self._probes:
            state = probe.read() if probe is not None else None
            if probe is None or state is None:
                look.all_known = False
            else:
                look.see(probe, state)
        look.late_ns = self._late_ns()
        if last is not None and last.counts and last.known and look.known:
            self._count(last, look)

    def fetch_ended(self) -> None:
        """It has it."""
        look = self._last
        if look is None:
            return  # began before the watch did
        now = self._clock()
        look.wait_ns = now - look.at
        if look.late_ns is not None:
            look.late_ns = max(0.0, (self._late_ns() or 0.0) - look.late_ns)
        if self._first:
            self._first = False
            self._follow()  # loaders without a length are read before the loop asks for them
            self._workers.meet(self._all_workers(), now)

    def _late_ns(self) -> float | None:
        """Time waited so far with a later batch ready, of the loaders that tell it."""
        told = [probe.head_of_line_ns() for probe in self._probes if probe is not None]
        known = [ns for ns in told if ns is not None]
        return sum(known) if known else None

    def take(self) -> LoaderStats:
        """What was seen since the last time."""
        if self._clock() >= self._next_read:
            self._read()
        window, self._before = self._sums - self._before, replace(self._sums)
        return window.to_stats()

    def settle(self) -> None:
        """What came before is warm-up, and not in the total."""
        self._read()
        self._settled, self._next_count = replace(self._sums), self._clock()

    def settled(self) -> LoaderSums:
        """What was seen since the start, or since it settled."""
        self._read()
        return self._sums - self._settled

    def total(self) -> LoaderStats:
        """The same as figures."""
        return self.settled().to_stats()

    def close(self) -> None:
        """Leave the iterators as they were. Figures can still be asked for."""
        for probe in self._probes:
            if probe is not None:
                probe.close()
        self._probes, self._last = [], None

    def _count(self, last: _Look, look: _Look) -> None:
        """Book the last fetch, and the time from its start to that of the present one."""
        sums = self._sums
        sums.span_ns += look.at - last.at
        sums.stocked += look.ready + look.unpinned - last.ready - last.unpinned
        if not look.drawn:
            return  # it only handed out what had been fetched before
        sums.drawn += look.drawn
        sums.draws += 1
        if not last.all_known:
            return  # it may have been the other one that was waited for
        sums.fetches += 1
        scarce, capacity = last.scarce or (last.ready, 0)
        sums.ready += scarce
        sums.wait_ns += last.wait_ns
        if scarce:
            sums.handover_ns += max(0.0, last.wait_ns - (last.late_ns or 0.0))
        if all(probe is not None and probe.held is not None for probe in self._probes):
            sums.capacity += capacity
            sums.sized_fetches += 1
        if last.late_ns is not None:
            sums.ordered_wait_ns += last.wait_ns
            sums.head_of_line_ns += min(last.late_ns, last.wait_ns)
        if last.pinning:
            sums.pinned_fetches += 1
            if last.unpinned and not last.ready:
                sums.pin_wait_ns += last.wait_ns

    def _follow(self) -> bool:
        """Look at the iterators that are live now. Returns whether they are others than the last time."""
        found, probes = self._find(), self._probes
        if len(found) == len(probes):
            for it, probe in zip(found, probes, strict=True):
                if probe is not None and probe.iterator() is not it:
                    self._tries = TRIES
                    break
            else:
                ids = [id(it) for it, probe in zip(found, probes, strict=True) if probe is None]
                self._tries = self._tries - 1 if ids == self._ids else TRIES
                self._ids = ids
                if not ids or self._tries <= 0:
                    return False
        old = {id(probe.iterator()): probe for probe in probes if probe is not None and probe.iterator() is not None}
        self._probes = [old.pop(id(each), None) or probe_loader(each, self._clock) for each in found]
        for probe in old.values():
            probe.close()
        return self._probes != probes  # else all of them are of no known kind

    def _all_workers(self) -> Workers:
        if None in self._probes:
            # What these do meanwhile would be taken for the reason of a wait that may not be theirs.
            return Workers()
        every = [probe.workers() for probe in self._probes if probe is not None]
        return Workers(
            tuple(dict.fromkeys(pid for each in every for pid in each.pids)),
            tuple(dict.fromkeys(tid for each in every for tid in each.thread_ids)),
        )

    def _read(self) -> None:
        now = self._clock()
        self._next_read = now + self._read_every_ns
        workers = self._all_workers()
        self._sums.workers += self._workers.take(workers, now)
        self._sums.pressure += self._pressure.take(now)
        if workers.pids and now >= self._next_count:
            found = count_connections(workers.pids, self._root)
            self._next_count = now + COUNT_EVERY_NS
            if found is not None:
                self._sums.connections += found
                self._sums.counts += 1

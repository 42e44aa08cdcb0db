"""Watches the loaders of a running fit: two cheap looks per step, and a reading of the kernel's counters per log."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_feed.watch.clocks import Clock, host_clock
from lightning_feed.watch.cpu import PressureClock, PressureTime
from lightning_feed.watch.loader_state import Probe, probe_loader
from lightning_feed.watch.stats import LoaderStats
from lightning_feed.watch.worker_time import WorkerClock, Workers, WorkerTime


@dataclass
class LoaderSums:
    """Sums over fetches and intervals. Shares are sums divided by sums, never means of ratios."""

    workers: WorkerTime = field(default_factory=WorkerTime)
    pressure: PressureTime = field(default_factory=PressureTime)
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

    def add(self, other: "LoaderSums") -> None:
        """Add what other steps gave."""
        self.workers.add(other.workers)
        self.pressure.add(other.pressure)
        for name in self.__dataclass_fields__:
            if name not in ("workers", "pressure"):
                setattr(self, name, getattr(self, name) + getattr(other, name))

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
            queue_ready=self.ready / self.fetches if self.fetches else None,
            queue_capacity=self.capacity / self.sized_fetches if self.sized_fetches else None,
            head_of_line_pct=100 * self.head_of_line_ns / self.ordered_wait_ns if self.ordered_wait_ns else None,
            handover_pct=100 * self.handover_ns / self.wait_ns if self.wait_ns else None,
            pin_lag_ms=self.pin_wait_ns * 1e-6 / self.pinned_fetches if self.pinned_fetches else None,
            produced_per_s=self.produced_per_s,
            cpu_pressure_pct=pressure.pressure_pct("cpu"),
            io_pressure_pct=pressure.pressure_pct("io"),
            memory_pressure_pct=pressure.pressure_pct("memory"),
            throttled_pct=pressure.throttled_pct,
        )


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
    figures mean is said in ``stats``, and how they are made in ``worker_time``, ``pressure`` and ``loader_sums``.

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
        self._next_read = clock()
        self._probes: list[Probe | None] = []
        self._taken: list[int] = []
        self._late: list[float | None] = []
        self._workers, self._pressure = WorkerClock(root), PressureClock(root)
        self._pressure.take(clock())
        self._total, self._head, self._open = LoaderSums(), LoaderSums(), LoaderSums()
        self._first = True
        """No fetch of this epoch has ended."""
        self._held: list[int | None] = []
        self._sized = False
        # The last look at the loaders, at the start of a fetch.
        self._at: int | None = None
        self._counted = self._known = self._all_known = self._pinning = False
        self._ready = self._unpinned = 0
        self._scarce = (0, 0)
        """Batches ready, and capacity, of the loader with the smallest share ready: the one that is waited for."""
        self._wait = 0
        self._late_ns: float | None = None

    def epoch_began(self) -> None:
        """The next fetch is the first of an epoch."""
        self._first = True
        self._at = None

    def fetch_began(self) -> None:
        """The loop asks for a batch."""
        now = self._clock()
        if self._follow():
            self._at = None  # of other iterators
        ready = unpinned = drawn = 0
        scarce: tuple[int, int] | None = None
        known = pinning = False
        all_known = True
        for place, probe in enumerate(self._probes):
            state = probe.read() if probe is not None else None
            if probe is None or state is None:
                self._late[place] = None
                all_known = False
                continue
            known = True
            ready += state.ready
            held = self._held[place]
            if held is not None and (scarce is None or state.ready * scarce[1] < scarce[0] * held):
                scarce = state.ready, held
            if state.unpinned is not None:
                pinning = True
                unpinned += state.unpinned
            last = self._taken[place]
            drawn += state.taken - last if state.taken >= last else state.taken
            self._taken[place] = state.taken
            self._late[place] = probe.head_of_line_ns()
        if self._at is not None and self._counted and self._known and known:
            self._count(now - self._at, drawn, ready + unpinned - self._ready - self._unpinned)
        self._at, self._counted, self._known, self._all_known = now, not self._first, known, all_known
        self._ready, self._unpinned, self._pinning = ready, unpinned, pinning
        self._scarce = scarce or (ready, 0)
        self._wait, self._late_ns = 0, None

    def fetch_ended(self) -> None:
        """It has it."""
        if self._at is None:
            return  # began before the watch did
        now = self._clock()
        self._wait = now - self._at
        late: float | None = None
        for probe, before in zip(self._probes, self._late, strict=True):
            if probe is not None and before is not None:
                late = (late or 0) + (probe.head_of_line_ns() or before) - before
        self._late_ns = late
        if self._first:
            self._first = False
            self._follow()  # loaders without a length are read before the loop asks for them
            self._workers.meet(self._all_workers(), now)

    def take(self) -> LoaderStats:
        """What was seen since the last time."""
        if self._clock() >= self._next_read:
            self._read()
        self._head.add(self._open)
        stats = self._head.to_stats()
        self._total.add(self._open)
        self._head, self._open = LoaderSums(), LoaderSums()
        return stats

    def settle(self) -> None:
        """What came before is warm-up, and not in the total."""
        self._read()
        self._head.add(self._open)
        self._total, self._open = LoaderSums(), LoaderSums()

    def total(self) -> LoaderStats:
        """What was seen since the start, or since it settled."""
        self._read()
        everything = LoaderSums()
        everything.add(self._total)
        everything.add(self._open)
        return everything.to_stats()

    def close(self) -> None:
        """Leave the iterators as they were. Figures can still be asked for."""
        for probe in self._probes:
            if probe is not None:
                probe.close()
        self._probes, self._taken, self._late, self._at = [], [], [], None

    def _count(self, span_ns: int, drawn: int, stocked: int) -> None:
        """Book the last fetch, and the time from its start to that of the present one."""
        sums = self._open
        sums.span_ns += span_ns
        sums.stocked += stocked
        if not drawn:
            return  # it only handed out what had been fetched before
        sums.drawn += drawn
        sums.draws += 1
        if not self._all_known:
            return  # it may have been the other one that was waited for
        sums.fetches += 1
        scarce, capacity = self._scarce
        sums.ready += scarce
        sums.wait_ns += self._wait
        if scarce:
            sums.handover_ns += max(0.0, self._wait - (self._late_ns or 0.0))
        if self._sized:
            sums.capacity += capacity
            sums.sized_fetches += 1
        if self._late_ns is not None:
            sums.ordered_wait_ns += self._wait
            sums.head_of_line_ns += min(self._late_ns, self._wait)
        if self._pinning:
            sums.pinned_fetches += 1
            if self._unpinned and not self._ready:
                sums.pin_wait_ns += self._wait

    def _follow(self) -> bool:
        """Look at the iterators that are live now. Returns whether they are others than the last time."""
        found = self._find()
        probes = self._probes
        if len(found) == len(probes):
            for iterator, probe in zip(found, probes, strict=True):
                if probe is None or probe.iterator() is not iterator:
                    break
            else:
                return False
        old = {id(probe.iterator()): probe for probe in probes if probe is not None and probe.iterator() is not None}
        self._probes = [old.pop(id(each), None) or probe_loader(each, self._clock) for each in found]
        for probe in old.values():
            probe.close()
        if self._probes == probes:  # all of them of no known kind
            return False
        kept = {id(probe): taken for probe, taken in zip(probes, self._taken, strict=True)}
        self._taken = [kept.get(id(probe), 0) for probe in self._probes]
        self._late = [None] * len(self._probes)
        self._held = [probe.capacity() if probe is not None else None for probe in self._probes]
        self._sized = bool(self._held) and None not in self._held
        return True

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
        self._open.workers.add(self._workers.take(self._all_workers(), now))
        self._open.pressure.add(self._pressure.take(now))

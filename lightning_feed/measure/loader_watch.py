"""Watches a running fit's loaders: two cheap readings per step, and the kernel's counters once per log."""

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
)
from lightning_feed.measure.loader_state import Probe, probe_loader
from lightning_feed.measure.stats import Additive, LoaderStats, ratio
from lightning_feed.measure.step_meter import Clock, host_clock


@dataclass
class LoaderSums(Additive):
    """Sums over fetches and intervals. Shares are sums divided by sums, never means of ratios."""

    workers: WorkerTime = field(default_factory=WorkerTime)
    pressure: PressureTime = field(default_factory=PressureTime)
    fetches: int = 0
    """Fetches that count: all their loaders are known, and they were not the first of an epoch."""
    ready: int = 0
    """Sum of the batches ready at the start of each fetch."""
    capacity: int = 0
    """Sum of the batches that could have been ready at the start of each fetch."""
    sized_fetches: int = 0
    """Fetches with a known capacity."""
    ordered_wait_ns: int = 0
    """Waiting time for which it is known whether a later batch was ready."""
    head_of_line_ns: float = 0.0
    handover_ns: float = 0.0
    """Waiting that began with batches ready in each loader, without head-of-line time."""
    wait_ns: int = 0
    """All waiting time."""
    pinned_fetches: int = 0
    """Fetches from a loader with a pin thread."""
    pin_wait_ns: int = 0
    """Waiting that began with batches made but none pinned."""
    drawn: int = 0
    """Batches drawn from all loaders in ``span_ns``."""
    draws: int = 0
    """Fetches that drew these batches."""
    stocked: int = 0
    """Growth of the number of batches that are made but not yet drawn."""
    span_ns: int = 0
    """Time from fetch to fetch within epochs, in which the loaders made batches."""

    @property
    def produced_per_s(self) -> float | None:
        """Batches per second made by the loaders: the batches drawn, plus the growth of the stock of ready batches.

        Batches that the loop takes together from several loaders count as one batch.
        """
        if not self.draws or not self.span_ns or not self.drawn:
            return None
        made = max(0, self.drawn + self.stocked)
        return made * self.draws / self.drawn / (self.span_ns * 1e-9)

    def to_stats(self) -> LoaderStats:
        """Return the figures; None for figures without data."""
        seen = self.workers
        pressure = self.pressure
        return LoaderStats(
            workers_on_cpu_pct=seen.share_pct(seen.on_cpu_ns),
            workers_run_queue_pct=seen.share_pct(seen.run_queue_ns),
            workers_blocked_pct=seen.share_pct(seen.blocked_ns),
            read_mb_per_s=seen.read_mb_per_s,
            disk_mb_per_s=seen.disk_mb_per_s,
            page_cache_pct=seen.page_cache_pct,
            queue_ready=ratio(self.ready, self.fetches),
            queue_capacity=ratio(self.capacity, self.sized_fetches),
            head_of_line_pct=ratio(100 * self.head_of_line_ns, self.ordered_wait_ns),
            handover_pct=ratio(100 * self.handover_ns, self.wait_ns),
            pin_lag_ms=ratio(self.pin_wait_ns * 1e-6, self.pinned_fetches),
            produced_per_s=self.produced_per_s,
            cpu_pressure_pct=pressure.pressure_pct("cpu"),
            io_pressure_pct=pressure.pressure_pct("io"),
            memory_pressure_pct=pressure.pressure_pct("memory"),
            throttled_pct=pressure.throttled_pct,
        )


@dataclass
class _Fetch:
    """State of the loaders at the start of a fetch."""

    at: int
    counts: bool
    """True unless it is the first fetch of an epoch."""
    known: bool = False
    """True if the state of at least one loader is known."""
    all_known: bool = True
    ready: int = 0
    unpinned: int = 0
    pinning: bool = False
    drawn: int = 0
    """Batches drawn since the last fetch."""
    scarce: tuple[int, int] | None = None
    """Batches ready, and the capacity, of the loader with the smallest share ready: the loop waits for this loader."""
    wait_ns: int = 0
    """Duration of the fetch."""
    late_ns: float | None = None
    """Time in the fetch while a later batch was ready. Until the fetch ends: the loaders' total when it began."""

    def see(self, probe: Probe) -> None:
        """Add the state of one loader."""
        state = probe.read()
        held = probe.held
        if state is None:
            self.all_known = False
            return
        self.known = True
        self.ready += state.ready
        if held is not None and (self.scarce is None or state.ready * self.scarce[1] < self.scarce[0] * held):
            self.scarce = (state.ready, held)
        if state.unpinned is not None:
            self.pinning = True
            self.unpinned += state.unpinned
        self.drawn += state.taken - probe.taken if state.taken >= probe.taken else state.taken
        probe.taken = state.taken


class LoaderWatch:
    """Measures the training loaders while the loop draws from them.

    Call :meth:`fetch_began` and :meth:`fetch_ended` around each fetch of the loop, even if the fetch only returns a
    batch that was drawn before. The first fetch of each epoch does not count: it waits for workers to start.

    With several loaders, as in a CombinedLoader, the number of ready batches and the capacity are taken from the loader
    with the smallest share of batches ready, because the loop waits for this loader. Head-of-line time is added up over
    the loaders, because the loop waits for one after the other. If one loader is of an unknown kind, the loop may be
    waiting for it: waiting and workers are then unknown, and only the batches made by the other loaders are counted.

    ``head_of_line_pct`` is the time waited while a later batch was ready, times the share of workers idle meanwhile,
    divided by all time in fetches. With ``background=``, the workers and the thread that reads ahead are watched as one
    loader: the thread's waits count while the loop waits, too. For the other figures see ``stats`` and ``kernel``.

    Args:
        find: returns the live iterators of the training loaders. Called at each fetch.
        clock: the host's clock, nanoseconds.
        root: the file system to read ``proc`` and ``sys`` from.
        read_every_ns: shortest time between two readings of the kernel's counters, which take about 0.4 ms. A window
            that ends sooner has no such counts; the next reading includes them.
    """

    def __init__(
        self,
        find: Callable[[], list[Any]],
        *,
        clock: Clock = host_clock,
        root: Path = Path("/"),
        read_every_ns: int = 0,
    ) -> None:
        self._find = find
        self._clock = clock
        self._read_every_ns = read_every_ns
        self._next_read = clock()
        self._probes: list[Probe | None] = []
        self._live: list[Probe] = []
        """Probes of the iterators of known kinds."""
        self._identities: list[int] = []
        self._workers = WorkerClock(root)
        self._pressure = PressureClock(root)
        self._pressure.take(clock())
        self._sums = LoaderSums()
        self._settled = LoaderSums()
        self._at_epoch = LoaderSums()
        self._before = LoaderSums()
        """The sums until now, until the end of the warm-up, until the start of the epoch, and until the start of the
        window."""
        self._first = True
        """True until a fetch of this epoch has ended."""
        self._last: _Fetch | None = None

    def epoch_began(self) -> None:
        """Note that the next fetch is the first of an epoch."""
        self._first = True
        self._last = None
        self._read()
        self._at_epoch = replace(self._sums)

    def leave_out_earlier_epochs(self) -> None:
        """Start the total at the start of the present epoch."""
        self._settled = self._at_epoch

    def fetch_began(self) -> None:
        """Note that the loop requests a batch."""
        now = self._clock()
        last = self._last
        if self._follow():
            last = None  # the last fetch was from other iterators
        fetch = self._last = _Fetch(now, counts=not self._first, all_known=None not in self._probes)
        for probe in self._live:
            fetch.see(probe)
        fetch.late_ns = self._late_ns()
        if last is not None and last.counts and last.known and fetch.known:
            self._count(last, fetch)

    def fetch_ended(self) -> None:
        """Note that the batch has arrived."""
        fetch = self._last
        if fetch is None:
            return  # the fetch began before this object was made
        now = self._clock()
        fetch.wait_ns = now - fetch.at
        for probe in self._live:
            probe.waited(fetch.wait_ns)
        if fetch.late_ns is not None:
            fetch.late_ns = max(0.0, (self._late_ns() or 0.0) - fetch.late_ns)
        if self._first:
            self._first = False
            self._follow()  # loaders without a length are read before the loop asks for a batch
            self._workers.meet(self._all_workers(), now)

    def _late_ns(self) -> float | None:
        """Return the nanoseconds waited so far while a later batch was ready, over the loaders that measure this; else
        None."""
        known = [ns for probe in self._live if (ns := probe.head_of_line_ns()) is not None]
        if known:
            return sum(known)
        return None

    def take(self) -> LoaderStats:
        """Return the figures since the last call."""
        if self._clock() >= self._next_read:
            self._read()
        window = self._sums - self._before
        self._before = replace(self._sums)
        return window.to_stats()

    def settle(self) -> None:
        """End the warm-up: the total starts here."""
        self._read()
        self._settled = replace(self._sums)

    def settled(self) -> LoaderSums:
        """Return the sums since the start, or since the warm-up ended."""
        self._read()
        return self._sums - self._settled

    def total(self) -> LoaderStats:
        """Return the figures since the start, or since the warm-up ended."""
        return self.settled().to_stats()

    def pause(self) -> None:
        """Stop counting, because training stops for a while."""
        self._read()

    def go_on(self) -> None:
        """Count again from the next fetch, because training continues. Leaves out all that happened in the pause."""
        now = self._clock()
        self._workers.take(self._all_workers(), now)
        self._pressure.take(now)
        self._last = None

    def close(self) -> None:
        """Forget the iterators. Figures remain available."""
        self._probes = []
        self._live = []
        self._last = None

    def _count(self, last: _Fetch, fetch: _Fetch) -> None:
        """Count the last fetch, and the time from its start to the start of the current fetch, ``fetch``."""
        sums = self._sums
        sums.span_ns += fetch.at - last.at
        sums.stocked += fetch.ready + fetch.unpinned - last.ready - last.unpinned
        if fetch.drawn:  # else the last fetch only returned a batch that was drawn before
            sums.drawn += fetch.drawn
            sums.draws += 1
            if last.all_known:  # else the loop may have waited for the unknown loader
                self._count_wait(last)

    def _count_wait(self, last: _Fetch) -> None:
        sums = self._sums
        sums.fetches += 1
        scarce, capacity = last.scarce or (last.ready, 0)
        sums.ready += scarce
        sums.wait_ns += last.wait_ns
        if scarce:
            sums.handover_ns += max(0.0, last.wait_ns - (last.late_ns or 0.0))
        if all(probe.held is not None for probe in self._live):
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
        """Find the live iterators. Returns True if they are not those of the last call."""
        iterators = self._find()
        probes = self._probes
        if self._unchanged(iterators):
            return False
        self._identities = [id(iterator) for iterator in iterators]
        known = {id(probe.iterator()): probe for probe in self._live}
        self._probes = [known.pop(id(iterator), None) or probe_loader(iterator) for iterator in iterators]
        self._live = [probe for probe in self._probes if probe is not None]
        return self._probes != probes  # equal if all iterators are unknown

    def _unchanged(self, iterators: list[Any]) -> bool:
        """Return True if the iterators are the same as at the last call."""
        if self._identities != [id(iterator) for iterator in iterators]:
            return False
        pairs = zip(iterators, self._probes, strict=True)
        return all(probe is None or probe.iterator() is iterator for iterator, probe in pairs)

    def _all_workers(self) -> Workers:
        if None in self._probes:
            # The known workers' times would seem to explain a wait that may be for the unknown loader.
            return Workers()
        pids: dict[int, None] = {}
        thread_ids: dict[int, None] = {}
        for probe in self._live:
            workers = probe.workers()
            pids.update(dict.fromkeys(workers.pids))
            thread_ids.update(dict.fromkeys(workers.thread_ids))
        return Workers(tuple(pids), tuple(thread_ids))

    def _read(self) -> None:
        now = self._clock()
        self._next_read = now + self._read_every_ns
        self._sums.workers += self._workers.take(self._all_workers(), now)
        self._sums.pressure += self._pressure.take(now)

"""Watches the loaders of a running fit: two cheap looks per step, and a reading of the kernel's counters per log."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_feed.watch.clocks import Clock, host_clock
from lightning_feed.watch.loader_state import Probe, probe_loader
from lightning_feed.watch.loader_sums import LoaderSums
from lightning_feed.watch.pressure import PressureClock
from lightning_feed.watch.stats import LoaderStats
from lightning_feed.watch.worker_time import WorkerClock, Workers


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
        """E0."""
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
        """E1."""
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

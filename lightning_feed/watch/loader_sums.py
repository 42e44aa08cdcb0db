"""What watching the loaders gave over some steps: sums, and the figures that are made of them."""

from dataclasses import dataclass, field

from lightning_feed.watch.pressure import PressureTime
from lightning_feed.watch.stats import LoaderStats
from lightning_feed.watch.worker_time import WorkerTime


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

"""LoaderWatch on real loaders with planted faults. Linux: the shares come from /proc.

Bounds are wide, since other programs may use the CPUs meanwhile: what is told apart differs by a factor of ten.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cells import covering, in_gate
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_feed.load.loader import FeedLoader
from lightning_feed.measure.loader_watch import LoaderWatch
from lightning_feed.measure.stats import LoaderStats

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,  # what workers do with their time is read off a machine that does nothing else
    pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel counts no scheduling"),
    pytest.mark.filterwarnings(
        # Torch compares num_workers with the CPUs of this machine, whatever the test is about.
        "ignore:This DataLoader will create:UserWarning",
        # Forking a process that has threads, which Python 3.12 warns of; torch forks its workers.
        "ignore:.*multi-threaded, use of fork:DeprecationWarning",
    ),
]


def spin(seconds: float) -> None:
    """Use that much time of a CPU, however long it takes to get it."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class Samples(Dataset[int]):
    def __init__(self, *, spin_s: float = 0.0, block_s: float = 0.0, slow_s: float = 0.0, every: int = 0) -> None:
        self.spin_s, self.block_s, self.slow_s, self.every = spin_s, block_s, slow_s, every

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> int:
        if self.every and index % self.every == 7:
            time.sleep(self.slow_s)
        if self.spin_s:
            spin(self.spin_s)
        if self.block_s:
            time.sleep(self.block_s)
        return index


class Streamed(IterableDataset[int]):
    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        return (self.samples[index] for index in range(10_000))


def watch(loader: Any, fetches: int, step_s: float = 0.0, warm_up: int = 5) -> LoaderStats:
    """Draw from the loader as a training loop does, and take what the steps after the warm-up gave."""
    batches = iter(loader)
    seen = LoaderWatch(lambda: [batches])
    seen.epoch_began()
    try:
        for number in range(warm_up + fetches):
            if number == warm_up:
                seen.take()
            seen.fetch_began()
            next(batches)
            seen.fetch_ended()
            time.sleep(step_s)
        return seen.take()
    finally:
        seen.close()
        if isinstance(loader, FeedLoader):
            loader.close()


def check_adds_up(stats: LoaderStats) -> None:
    parts = stats.workers_on_cpu_pct, stats.workers_run_queue_pct, stats.workers_blocked_pct
    assert None not in parts
    assert sum(part for part in parts if part is not None) == pytest.approx(100)
    assert all(part is not None and -1e-6 <= part <= 100 for part in parts)


LOADERS: dict[str, Callable[[Samples], Any]] = {
    "workers": lambda data: DataLoader(data, batch_size=None, num_workers=1),
    "persistent": lambda data: DataLoader(data, batch_size=None, num_workers=1, persistent_workers=True),
    "iterable": lambda data: DataLoader(Streamed(data), batch_size=None, num_workers=1),
    "background over workers": lambda data: FeedLoader(data, batch_size=None, num_workers=1, background=2),
    "background alone": lambda data: FeedLoader(data, batch_size=None, background=2),
    "threads": lambda data: FeedLoader(data, batch_size=None, num_workers=1, workers="thread"),
}


@covering(workers=["process", "thread"], background=[0, 2])
def test_one_slow_sample_in_twenty_shows_as_head_of_line_waiting(workers: Any, background: int) -> None:
    samples = Samples(block_s=0.002, slow_s=0.12, every=20)
    loader = FeedLoader(
        samples, batch_size=None, num_workers=3, prefetch_factor=2, workers=workers, background=background
    )
    stats = watch(loader, 80, warm_up=10)
    assert stats.head_of_line_pct is not None
    assert 35 < stats.head_of_line_pct < 75  # two of three workers idle, most of the time


@pytest.mark.parametrize("workers", in_gate(["process", "thread"], ["process"]))
def test_equally_fast_workers_show_little_head_of_line_waiting(workers: Any) -> None:
    # Later batches are there at the end of most waits, and with some luck half of the time; but all go on working.
    loader = FeedLoader(Samples(block_s=0.04), batch_size=None, num_workers=4, prefetch_factor=2, workers=workers)
    stats = watch(loader, 40, warm_up=8)
    assert stats.head_of_line_pct is not None
    assert stats.head_of_line_pct < 25


def test_bytes_read_by_the_workers_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.write_bytes(b"x" * 2_000_000)

    class Files(Samples):
        def __getitem__(self, index: int) -> int:
            time.sleep(0.01)
            return len(file.read_bytes())

    stats = watch(DataLoader(Files(), batch_size=None, num_workers=1), 30)
    assert stats.read_mb_per_s is not None
    assert stats.produced_per_s is not None
    assert stats.read_mb_per_s == pytest.approx(2 * stats.produced_per_s, rel=0.4)
    assert stats.page_cache_pct == pytest.approx(100, abs=2)  # just written


def test_figures_stay_consistent_when_workers_are_replaced() -> None:
    loader = DataLoader(Samples(block_s=0.01), batch_size=None, num_workers=2, sampler=range(20))
    live: list[Any] = []
    seen = LoaderWatch(lambda: live)
    for _ in range(3):
        seen.epoch_began()
        live[:] = [iter(loader)]
        for _ in range(20):
            seen.fetch_began()
            next(live[0])
            seen.fetch_ended()
    stats = seen.take()
    check_adds_up(stats)
    assert stats.workers_blocked_pct is not None
    assert stats.workers_blocked_pct > 60
    assert stats.produced_per_s is not None
    assert 20 < stats.produced_per_s < 280  # 200 where nothing else runs; a start counted in, or twice, is outside
    seen.close()


def test_dropping_a_watched_iterator_ends_its_workers_at_once() -> None:
    """An iterator that is dropped ends its workers at once, watched or not."""
    batches = iter(DataLoader(Samples(), batch_size=None, num_workers=1))
    live = [batches]
    seen = LoaderWatch(lambda: live)
    seen.epoch_began()
    seen.fetch_began()
    next(batches)
    seen.fetch_ended()
    worker = batches._workers[0]  # type: ignore[attr-defined]
    assert worker.is_alive()
    live.clear()
    del batches
    assert not worker.is_alive()
    seen.fetch_began()
    seen.fetch_ended()
    assert seen.take().workers_on_cpu_pct is None

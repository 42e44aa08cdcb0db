"""The rate of a loader: whole rounds on a fake clock, and what hangs or raises."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_feed.errors import LoaderError
from lightning_feed.load.processes import worker_processes
from lightning_feed.trials import loader_rate
from lightning_feed.trials.loader_rate import RoundLimits, time_loader


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def bursts(
    clock: Clock, workers: int, *, start_s: float, round_s: float, batches: int = 10**6, first_rounds_s: float = 0.0
) -> Callable[[], Iterator[int]]:
    """Workers that finish together: a round comes at once, then nothing for ``round_s``. Each pass is for itself."""

    def begin() -> Iterator[int]:
        clock.now += start_s
        for number in range(batches):
            if number and number % workers == 0:
                clock.now += first_rounds_s if number <= 2 * workers and first_rounds_s else round_s
            yield number
        clock.now += 7.0  # shutting down

    return begin


@pytest.mark.parametrize("workers", [1, 2, 4, 7])
def test_rate_is_measured_over_whole_rounds_of_the_workers(workers: int) -> None:
    clock = Clock()
    begin = bursts(clock, workers, start_s=3.0, round_s=0.5)
    rate = time_loader(begin, burst=workers, limits=RoundLimits(min_s=2.0, max_s=100), clock=clock)
    assert rate.batches_per_s == pytest.approx(workers / 0.5)
    assert rate.start_s == 3.0
    assert clock.now == pytest.approx(103.0 + 6 * 0.5)  # two rounds of warm-up and four that are measured


def test_rate_excludes_the_first_batch_and_two_warm_up_rounds() -> None:
    clock = Clock()
    slow_at_first = bursts(clock, 2, start_s=1, round_s=0.25, first_rounds_s=4.0)
    rate = time_loader(slow_at_first, burst=2, limits=RoundLimits(min_s=1.0), clock=clock)
    assert rate.batches_per_s == pytest.approx(2 / 0.25)
    slow_at_first = bursts(clock, 2, start_s=1, round_s=0.25, first_rounds_s=4.0)
    with_them = time_loader(slow_at_first, burst=2, limits=RoundLimits(min_s=1.0, warm_rounds=0), clock=clock)
    assert with_them.batches_per_s == pytest.approx(0.5)


def test_rate_excludes_the_time_between_consecutive_passes() -> None:
    clock = Clock()
    begun = []
    begin = bursts(clock, 2, start_s=50.0, round_s=0.5, batches=1 + 2 * 5)

    def counted() -> Iterator[int]:
        begun.append(clock())
        return begin()

    # One batch and two rounds off each pass of eleven batches leave three rounds: three passes for nine.
    rate = time_loader(counted, burst=2, limits=RoundLimits(min_s=4.5, max_s=1000), clock=clock)
    assert len(begun) == 3
    assert rate.batches_per_s == pytest.approx(4.0)
    assert rate.start_s == 50.0


def test_measuring_stops_at_max_s_and_gives_the_rate_so_far() -> None:
    clock = Clock()
    rate = time_loader(
        bursts(clock, 2, start_s=1, round_s=4), burst=2, limits=RoundLimits(min_s=5, max_s=18), clock=clock
    )
    assert rate.batches_per_s == pytest.approx(0.5)
    assert clock.now <= 100 + 18 + 4
    assert time_loader(
        bursts(clock, 8, start_s=1, round_s=4), burst=8, limits=RoundLimits(max_s=3), clock=clock
    ).batches_per_s == pytest.approx(8 / 4)


def test_empty_loader_or_single_slow_batch_raises_a_loader_error() -> None:
    with pytest.raises(LoaderError, match="no batch at all"):
        time_loader(lambda: iter(()), burst=1)
    clock = Clock()
    with pytest.raises(LoaderError, match=r"yielded 1 batch in 5 s"):
        time_loader(bursts(clock, 1, start_s=9, round_s=1), burst=1, limits=RoundLimits(max_s=5), clock=clock)


def test_measured_batches_are_released_immediately() -> None:
    alive = 0
    most = 0

    class Batch:
        def __init__(self) -> None:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    clock = Clock()

    def begin() -> Iterator[Batch]:
        for _ in range(20):
            clock.now += 0.5
            yield Batch()

    time_loader(begin, burst=1, limits=RoundLimits(min_s=1), clock=clock)
    assert most == 1


class Hanging(Dataset[int]):
    """Sample 9 never comes."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if index == 9:
            threading.Event().wait(60)
        return index


@pytest.mark.parametrize("workers", [0, 2])
def test_hanging_loader_raises_an_error_and_its_workers_end(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_rate, "_SOON_S", 0.1)
    passes = []
    before = threading.enumerate()

    def begin() -> Iterator[torch.Tensor]:
        passes.append(iter(DataLoader(Hanging(), batch_size=2, num_workers=workers)))
        return passes[-1]

    with pytest.raises(LoaderError, match=r"gave no batch for 1 s \(after 4 batches\): it hangs"):
        time_loader(begin, burst=1, limits=RoundLimits(min_s=0.5, min_rounds=100, max_s=1.0))
    processes = worker_processes(passes[0])
    assert len(processes) == workers
    assert not any(process.is_alive() for process in processes)
    left = [one for one in threading.enumerate() if one not in before and one.name == "lightning-feed-measuring"]
    assert len(left) == (0 if workers else 1)  # what hangs in this process can only be left behind


@pytest.mark.parametrize("call", ["start", "join"])
def test_interrupt_waits_until_the_current_sample_is_loaded(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go on to draw random numbers, whose state is put back by then. Ctrl-C may come at any moment."""
    monkeypatch.setattr(loader_rate, "_SOON_S", 0.1)
    making = threading.Event()
    made = threading.Event()
    came: list[int] = []

    def begin() -> Iterator[int]:
        yield 0
        making.set()
        made.wait(10)
        came.append(1)
        yield 1

    usual = getattr(threading.Thread, call)
    later = threading.Timer(0.5, made.set)

    def interrupted(self: threading.Thread, *arguments: float | None) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(loader_rate, "_SOON_S", 0.1)
        usual(self, *arguments)
        making.wait(10)
        later.start()
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        time_loader(begin, burst=1, limits=RoundLimits(min_s=20))
    assert came == [1]
    later.join()

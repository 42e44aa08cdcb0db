"""The cheaper way stays, by the host's clock and the device's, and nothing waits for the device."""

from collections.abc import Callable
from typing import Any

import pytest

from lightning_feed.transfer.transfer_filter import ROUNDS, WARM_UP, PackTrial

BATCHES = 2 * (WARM_UP + ROUNDS)


class Bench:
    """A host clock and a device that copies behind it."""

    def __init__(self, host_us: dict[bool, int], device_us: dict[bool, int] | None = None) -> None:
        self.host_us, self.device_us = host_us, device_us
        self.now_us = self.device_now_us = 0
        self.taken: list[bool] = []
        self.arrived = True

    def clock(self) -> int:
        return self.now_us * 1000

    def stamp(self) -> Any:
        return None if self.device_us is None else Stamp(self, self.device_now_us)

    def way(self, packed: bool) -> Callable[[], str]:
        def send() -> str:
            self.taken.append(packed)
            slow = 1000 if len(self.taken) <= 2 * WARM_UP else 0  # the first ones allocate
            self.now_us += self.host_us[packed] + (slow if packed else 0)
            self.device_now_us += (self.device_us or {packed: 0})[packed]
            return f"batch {len(self.taken)}"

        return send

    def run(self, trial: PackTrial, batches: int) -> None:
        for _ in range(batches):
            assert trial.run({way: self.way(way) for way in (True, False)}) == f"batch {len(self.taken)}"


class Stamp:
    def __init__(self, bench: Bench, at_us: int) -> None:
        self.bench, self.at_us = bench, at_us

    def query(self) -> bool:
        return self.bench.arrived

    def elapsed_time(self, end: "Stamp") -> float:
        assert self.bench.arrived, "not to be asked before the event has passed"
        return (end.at_us - self.at_us) / 1000


@pytest.mark.parametrize("packed_us", [50, 150])
def test_the_way_that_costs_the_host_less_stays(packed_us: int) -> None:
    bench = Bench({True: packed_us, False: 100})
    trial = PackTrial(bench.clock, bench.stamp)
    bench.run(trial, BATCHES)
    assert sorted(bench.taken) == [False] * (BATCHES // 2) + [True] * (BATCHES // 2)
    assert trial.packs is None
    bench.run(trial, 3)
    assert trial.packs is (packed_us < 100)
    assert bench.taken[-3:] == [trial.packs] * 3
    assert f"packed {packed_us} us of the host, one by one 100 us of the host" in trial.figures
    assert "copying" not in trial.figures


def test_the_copying_counts_too() -> None:
    bench = Bench({True: 90, False: 100}, {True: 40, False: 10})
    trial = PackTrial(bench.clock, bench.stamp)
    bench.run(trial, BATCHES + 1)
    assert trial.packs is False
    assert "packed 90 us of the host + 40 us of copying" in trial.figures


def test_a_device_far_behind_is_not_waited_for() -> None:
    bench = Bench({True: 10, False: 100}, {True: 1, False: 1})
    bench.arrived = False
    trial = PackTrial(bench.clock, bench.stamp)
    bench.run(trial, BATCHES + 5)
    assert trial.packs is None
    assert bench.taken[-5:] == [False] * 5
    bench.arrived = True
    bench.run(trial, 1)
    assert trial.packs is True


def test_an_error_in_a_way_reaches_the_caller_and_is_not_counted() -> None:
    bench = Bench({True: 10, False: 100})
    trial = PackTrial(bench.clock, bench.stamp)

    def fails() -> Any:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        trial.run({True: fails, False: fails})
    bench.run(trial, BATCHES + 1)
    assert trial.packs is True

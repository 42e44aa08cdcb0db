"""The wall time of a run, divided, on a scripted clock."""

import pytest

from lightning_feed.measure.wall import PARTS, WallClock, WallStats


class Clock:
    """Goes on only when it is told to."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


def told(stats: WallStats) -> dict[str, tuple[float, int]]:
    return {part.name: (pytest.approx(part.seconds), part.times) for part in stats.parts}


def test_wall_clock_counts_each_moment_in_one_part() -> None:
    clock = Clock()
    wall = WallClock(clock)
    clock.sleep(2)
    wall.enter("sanity check")
    clock.sleep(1)
    wall.leave()
    clock.sleep(3)
    wall.go_on("epoch starts")
    clock.sleep(0.5)
    wall.go_on("train")
    clock.sleep(4)
    wall.enter("validation")
    clock.sleep(5)
    wall.enter("checkpoints")
    clock.sleep(6)
    wall.leave()
    clock.sleep(7)
    wall.leave()
    clock.sleep(8)
    stats = wall.stats()
    assert told(stats) == {
        "set-up": (5, 1),
        "sanity check": (1, 1),
        "epoch starts": (0.5, 1),
        "train": (12, 1),
        "validation": (12, 1),
        "checkpoints": (6, 1),
    }
    assert stats.wall_s == pytest.approx(36.5)
    assert stats.seconds(*PARTS) == pytest.approx(stats.wall_s)
    assert (stats.seconds("train", "validation"), stats.times("checkpoints"), stats.times("test")) == (24, 1, 0)


def test_a_new_epoch_drops_parts_left_open() -> None:
    clock = Clock()
    wall = WallClock(clock)
    wall.go_on("train")
    wall.enter("validation")
    wall.go_on("epoch starts")
    wall.leave()
    assert wall.part == "epoch starts"


def test_wall_stats_can_be_read_while_a_part_is_running() -> None:
    clock = Clock()
    wall = WallClock(clock)
    wall.go_on("train")
    clock.sleep(1)
    assert wall.stats().seconds("train") == 1
    clock.sleep(1)
    assert wall.stats().seconds("train") == 2
    assert wall.stats().times("train") == 1

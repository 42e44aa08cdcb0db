"""Pressure and throttling, on trees that look like /proc and /sys."""

from pathlib import Path

import pytest

from lightning_feed.measure.kernel import PressureClock

SECOND = 1_000_000_000


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def some(total: int) -> str:
    return (
        f"some avg10=0.00 avg60=0.00 avg300=0.00 total={total}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=999999999"
    )


def test_machine_pressure_is_the_stalled_share_of_the_interval(tmp_path: Path) -> None:
    for resource in ("cpu", "io", "memory"):
        write(tmp_path, f"proc/pressure/{resource}", some(1000))
    clock = PressureClock(tmp_path)
    assert clock.take(0).pressure_pct("cpu") is None  # no interval yet
    write(tmp_path, "proc/pressure/cpu", some(1000 + 500_000))
    write(tmp_path, "proc/pressure/io", some(1000 + 20_000))
    time = clock.take(2 * SECOND)
    assert [time.pressure_pct(each) for each in ("cpu", "io", "memory")] == pytest.approx([25, 1, 0])


def test_pressure_of_the_container_overrides_that_of_the_machine(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/job/step\n")
    write(tmp_path, "proc/pressure/cpu", some(0))
    write(tmp_path, "sys/fs/cgroup/job/cpu.pressure", some(0))
    clock = PressureClock(tmp_path)
    clock.take(0)
    write(tmp_path, "sys/fs/cgroup/job/cpu.pressure", some(700_000))
    assert clock.take(SECOND).pressure_pct("cpu") == pytest.approx(70)


@pytest.mark.parametrize("text", ["", "full avg10=0 total=5", "some avg10=0.00", "some total=x"])
def test_pressure_files_of_another_format_give_none(tmp_path: Path, text: str) -> None:
    write(tmp_path, "proc/pressure/cpu", text)
    clock = PressureClock(tmp_path)
    clock.take(0)
    assert clock.take(SECOND).pressure_pct("cpu") is None


def test_missing_pressure_files_give_none(tmp_path: Path) -> None:
    clock = PressureClock(tmp_path)
    clock.take(0)
    time = clock.take(SECOND)
    assert [time.pressure_pct(each) for each in ("cpu", "io", "memory")] == [None, None, None]
    assert time.throttled_pct is None


def test_a_pressure_file_that_vanishes_or_runs_backwards_gives_none(tmp_path: Path) -> None:
    write(tmp_path, "proc/pressure/cpu", some(500))
    write(tmp_path, "proc/pressure/io", some(500))
    clock = PressureClock(tmp_path)
    clock.take(0)
    write(tmp_path, "proc/pressure/cpu", some(400))
    (tmp_path / "proc/pressure/io").unlink()
    time = clock.take(SECOND)
    assert time.pressure_pct("cpu") is None
    assert time.pressure_pct("io") is None


def test_pressure_never_exceeds_100_percent(tmp_path: Path) -> None:
    write(tmp_path, "proc/pressure/cpu", some(0))
    clock = PressureClock(tmp_path)
    clock.take(0)
    write(tmp_path, "proc/pressure/cpu", some(1_000_900))  # the kernel's clock and ours are read apart
    assert clock.take(SECOND).pressure_pct("cpu") == 100


@pytest.mark.parametrize(
    ("membership", "folder"),
    [("0::/job\n", "sys/fs/cgroup/job"), ("3:cpu,cpuacct:/job\n0::/\n", "sys/fs/cgroup/cpu,cpuacct/job")],
)
def test_throttling_is_read_from_both_versions_of_cgroups(tmp_path: Path, membership: str, folder: str) -> None:
    write(tmp_path, "proc/self/cgroup", membership)
    write(tmp_path, f"{folder}/cpu.stat", "usage_usec 5\nnr_periods 100\nnr_throttled 10\n")
    clock = PressureClock(tmp_path)
    clock.take(0)
    write(tmp_path, f"{folder}/cpu.stat", "usage_usec 9\nnr_periods 120\nnr_throttled 15\n")
    assert clock.take(SECOND).throttled_pct == pytest.approx(25)


def test_throttling_is_read_from_the_most_throttled_cgroup(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/outer/inner\n")
    for folder in ("outer", "outer/inner"):
        write(tmp_path, f"sys/fs/cgroup/{folder}/cpu.stat", "nr_periods 0\nnr_throttled 0\n")
    clock = PressureClock(tmp_path)
    clock.take(0)
    write(tmp_path, "sys/fs/cgroup/outer/cpu.stat", "nr_periods 10\nnr_throttled 8\n")
    write(tmp_path, "sys/fs/cgroup/outer/inner/cpu.stat", "nr_periods 10\nnr_throttled 1\n")
    assert clock.take(SECOND).throttled_pct == pytest.approx(80)


def test_throttling_is_none_without_a_cpu_quota(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/job\n")
    write(tmp_path, "sys/fs/cgroup/job/cpu.stat", "nr_periods 0\nnr_throttled 0\n")
    clock = PressureClock(tmp_path)
    clock.take(0)
    assert clock.take(SECOND).throttled_pct is None


def test_pressure_adds_up_over_intervals(tmp_path: Path) -> None:
    write(tmp_path, "proc/pressure/cpu", some(0))
    clock = PressureClock(tmp_path)
    total = clock.take(0)
    write(tmp_path, "proc/pressure/cpu", some(1_000_000))
    total += clock.take(SECOND)
    total += clock.take(4 * SECOND)
    assert total.pressure_pct("cpu") == pytest.approx(25)

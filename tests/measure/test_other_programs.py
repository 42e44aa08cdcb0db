"""What other programs took of the CPUs, read from a ``proc`` of the test's own."""

import os
from pathlib import Path

import pytest

from lightning_feed.measure import cpu_time as cpu_share
from lightning_feed.measure.cpu_time import OtherPrograms

CHILD, GRANDCHILD, OTHER = os.getpid() + 1, os.getpid() + 2, os.getpid() + 3


class Machine:
    """A machine of four CPUs. Figures are ticks since it started."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.busy, self.idle, self.irq = [0] * 4, [0] * 4, 0
        self.taken = {os.getpid(): (1, 0), CHILD: (os.getpid(), 0), GRANDCHILD: (CHILD, 0), OTHER: (1, 0)}

    def write(self) -> None:
        proc = self.root / "proc"
        proc.mkdir(exist_ok=True)
        cpus = zip(self.busy, self.idle, strict=True)
        lines = [f"cpu{at} {busy} 0 0 {idle} 0 {self.irq} 0 0 0 0" for at, (busy, idle) in enumerate(cpus)]
        (proc / "stat").write_text("\n".join(["cpu 1 1 1 1 1 1 1 1 0 0", *lines, "intr 5 6"]))
        for pid, (parent, ticks) in self.taken.items():
            (proc / str(pid)).mkdir(exist_ok=True)
            before = "0 " * 9
            (proc / str(pid) / "stat").write_text(f"{pid} (a ) name) S {parent} {before}{ticks} 0 0 0 20 0")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(cpu_share.os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    machine = Machine(tmp_path)
    machine.write()
    return machine


def test_cpu_time_not_used_by_this_run_counts_as_other_programs(machine: Machine) -> None:
    share = OtherPrograms(machine.root)
    machine.busy, machine.idle = [80, 60, 60, 60], [20, 40, 40, 40]  # 260 of 400 ticks
    machine.taken |= {os.getpid(): (1, 50), CHILD: (os.getpid(), 40), GRANDCHILD: (CHILD, 10), OTHER: (1, 160)}
    machine.write()
    assert share.others_pct(4) == pytest.approx(40.0)


def test_load_on_cpus_this_run_does_not_need_is_not_counted(machine: Machine) -> None:
    share = OtherPrograms(machine.root)
    machine.busy, machine.idle = [100, 100, 50, 0], [0, 0, 50, 100]
    machine.write()
    assert share.others_pct(2) == pytest.approx(25.0)  # 2.5 CPUs are taken, and 2 are left for others
    assert share.others_pct(1) == 0.0


def test_interrupt_time_is_not_counted_as_other_programs(machine: Machine) -> None:
    share = OtherPrograms(machine.root)
    machine.idle, machine.irq = [50] * 4, 50
    machine.write()
    assert share.others_pct(4) == 0.0


def test_cpu_share_is_none_without_kernel_counters(tmp_path: Path, machine: Machine) -> None:
    assert OtherPrograms(machine.root).others_pct(4) is None  # no time has passed
    assert OtherPrograms(machine.root).others_pct(None) is None
    (tmp_path / "proc/stat").write_text("cpu 1 2 3")
    assert OtherPrograms(tmp_path).others_pct(4) is None

"""The limits of a process, read from made-up file systems."""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_feed.machine.limits import Machine, read_machine

GIB = 2**30
Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Puts files below the made-up root, on a machine of 16 CPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.setattr(os, "process_cpu_count", lambda: 16, raising=False)

    def write(**files: str) -> None:
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    return write


def put(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_machine_without_proc_and_cgroup_files_has_no_limits(tmp_path: Path, write: Write) -> None:
    found = read_machine(tmp_path)
    assert found == Machine(
        usable_cpus=16,
        cpu_reason="CPUs that this process may run on (affinity)",
        available_memory_bytes=None,
        free_shm_bytes=None,
        start_method=multiprocessing.get_all_start_methods()[0],
    )


def test_read_machine_gives_plausible_values_on_the_real_machine() -> None:
    found = read_machine()
    assert 1 <= found.usable_cpus <= (os.cpu_count() or 1)
    assert found.available_memory_bytes is None or found.available_memory_bytes > 0
    assert found.start_method in multiprocessing.get_all_start_methods()


def test_cpu_affinity_limits_usable_cpus(tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    found = read_machine(tmp_path)
    assert (found.usable_cpus, "affinity" in found.cpu_reason) == (2, True)


def test_process_cpu_count_limits_usable_cpus(tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "process_cpu_count", lambda: 3, raising=False)
    assert (read_machine(tmp_path).usable_cpus, read_machine(tmp_path).cpu_reason) == (3, "os.process_cpu_count()")


@pytest.mark.parametrize(
    ("cpu_max", "cpus"),
    [("50000 100000", 1), ("250000 100000", 2), ("400000 100000", 4), ("max 100000", 16), ("nonsense", 16), ("", 16)],
)
def test_cgroup_v2_cpu_quota_limits_usable_cpus(tmp_path: Path, write: Write, cpu_max: str, cpus: int) -> None:
    write(proc__self__cgroup="0::/job")
    put(tmp_path, "sys/fs/cgroup/job/cpu.max", cpu_max)
    found = read_machine(tmp_path)
    assert found.usable_cpus == cpus
    assert ("/sys/fs/cgroup/job/cpu.max" in found.cpu_reason) is (cpus < 16)


@pytest.mark.parametrize("path", ["/docker/abc", "/../../docker/abc"])
def test_container_reads_its_cgroup_limits_at_the_mount_root(tmp_path: Path, write: Write, path: str) -> None:
    write(proc__self__cgroup=f"0::{path}")
    put(tmp_path, "sys/fs/cgroup/cpu.max", "200000 100000")
    assert read_machine(tmp_path).usable_cpus == 2


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(("quota", "cpus"), [("150000", 1), ("600000", 6), ("-1", 16)])
def test_cgroup_v1_cpu_quota_limits_usable_cpus(
    tmp_path: Path, write: Write, mount: str, quota: str, cpus: int
) -> None:
    write(proc__self__cgroup="5:memory:/m\n4:cpu,cpuacct:/job\n0::/")
    put(tmp_path, f"sys/fs/cgroup/{mount}/job/cpu.cfs_quota_us", quota)
    put(tmp_path, f"sys/fs/cgroup/{mount}/job/cpu.cfs_period_us", "100000")
    assert read_machine(tmp_path).usable_cpus == cpus


def test_cgroup_v2_memory_counts_the_page_cache_as_free(tmp_path: Path, write: Write) -> None:
    write(proc__meminfo="MemAvailable: 16777216 kB", proc__self__cgroup="0::/job")
    put(tmp_path, "sys/fs/cgroup/job/memory.max", str(4 * GIB))
    put(tmp_path, "sys/fs/cgroup/job/memory.current", str(4 * GIB))
    put(tmp_path, "sys/fs/cgroup/job/memory.stat", f"anon {GIB}\nactive_file {GIB}\ninactive_file {2 * GIB}")
    assert read_machine(tmp_path).available_memory_bytes == 3 * GIB


def test_cgroup_v1_memory_limit_bounds_available_memory(tmp_path: Path, write: Write) -> None:
    write(proc__meminfo="MemAvailable: 16777216 kB", proc__self__cgroup="4:memory:/job")
    put(tmp_path, "sys/fs/cgroup/memory/job/memory.limit_in_bytes", str(8 * GIB))
    put(tmp_path, "sys/fs/cgroup/memory/job/memory.usage_in_bytes", str(3 * GIB))
    put(tmp_path, "sys/fs/cgroup/memory/job/memory.stat", f"inactive_file 5\ntotal_inactive_file {GIB}")
    put(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")  # none
    put(tmp_path, "sys/fs/cgroup/memory/memory.usage_in_bytes", str(15 * GIB))
    assert read_machine(tmp_path).available_memory_bytes == 6 * GIB

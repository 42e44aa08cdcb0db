"""Planted faults of machine and environment: each is named, and nothing else is."""

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doctor.made_machine import MEMINFO, FakeNvml, fake_torch, made_machine, unpinnable, write

from lightning_feed.doctor import Finding
from lightning_feed.doctor.checks import CHECKS, examine
from lightning_feed.errors import SettingsError

MIB = 1 << 20
NO_DALI = {"nvidia-dali-cuda120": None}
FOR_13 = {"nvidia-dali-cuda120": None, "nvidia-dali-cuda130": "2.4.0"}


@pytest.fixture(autouse=True)
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(os, "process_cpu_count", lambda: 4, raising=False)


def _bad(found: list[Finding]) -> dict[str, Finding]:
    return {one.topic: one for one in found if one.level != "ok"}


def test_a_machine_in_good_order_has_nothing_to_mend(tmp_path: Path) -> None:
    nvml = FakeNvml()
    found = examine(None, made_machine(tmp_path, modules={"pynvml": nvml}))
    assert _bad(found) == {}
    assert {one.value for one in found if one.topic == "CPUs"} == {"4 usable"}
    assert nvml.open == 0
    assert all(one.do == "" for one in found)


@pytest.mark.parametrize(
    ("changes", "topic", "level", "words"),
    [
        ({"space": lambda folder: (64 * MIB, 0, 64 * MIB)}, "/dev/shm", "problem", "room for 1 batches"),
        ({"space": lambda folder: (256 * MIB, 0, 256 * MIB)}, "/dev/shm", "warning", "--shm-size"),
        ({"limit": lambda _: (256, 4096)}, "open files", "warning", "ulimit -n 4096"),
        ({"limit": lambda _: (256, -1)}, "open files", "warning", "ulimit -n 65536"),
        ({"modules": {"pynvml": FakeNvml(width=4)}}, "PCIe link 0", "warning", "25 %"),
        ({"modules": {"pynvml": FakeNvml(gen=1, util=90)}}, "PCIe link 0", "warning", "generation"),
        ({"modules": {"pynvml": FakeNvml(cuda=11080)}}, "driver", "problem", "too old for torch"),
        ({"modules": {"pynvml": FakeNvml(cuda=12040)}}, "driver", "note", "12.6"),
        ({"environ": {"OMP_NUM_THREADS": "1"}}, "thread variables", "note", "one thread"),
        ({"environ": {"OMP_NUM_THREADS": "64"}}, "thread variables", "warning", "the 4 usable CPUs"),
        ({"environ": {"OMP_NUM_THREADS": "8,2"}}, "thread variables", "warning", "the 4 usable CPUs"),
        ({"environ": {"OMP_NUM_THREADS": "1,8"}}, "thread variables", "note", "one thread"),
        ({"environ": {"OMP_NUM_THREADS": "abc"}}, "thread variables", "warning", "OMP_NUM_THREADS=abc: not a number"),
        ({"environ": {"OMP_NUM_THREADS": "-3"}}, "thread variables", "warning", "OMP_NUM_THREADS=-3: not a number"),
        ({"environ": {"OMP_NUM_THREADS": "0"}}, "thread variables", "warning", "OMP_NUM_THREADS=0: not a number"),
        ({"environ": {"OMP_NUM_THREADS": "4,x"}}, "thread variables", "warning", "OMP_NUM_THREADS=4,x: not a number"),
        ({"environ": {"MKL_NUM_THREADS": "4,2"}}, "thread variables", "warning", "MKL_NUM_THREADS=4,2: not a number"),
        (
            {"environ": {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "²"}},
            "thread variables",
            "warning",
            "²: not a number",
        ),
        ({"modules": {"torch": fake_torch(threads=64)}}, "torch threads", "warning", "OMP_NUM_THREADS=4"),
        ({"modules": {"torch": fake_torch(empty=unpinnable)}}, "pinned memory", "problem", "out of memory"),
        (
            {"modules": {"PIL.features": SimpleNamespace(check_feature=lambda name: False)}},
            "Pillow",
            "warning",
            "without",
        ),
        ({"modules": {"cv2": SimpleNamespace(getNumThreads=lambda: 8)}}, "OpenCV threads", "note", "setNumThreads(0)"),
        ({"versions": {"simplejpeg": None}}, "decoders", "note", "simplejpeg"),
        ({"versions": {"lightning": "2.3.9"}}, "lightning", "problem", "older than 2.4"),
    ],
)
def test_a_planted_fault_is_named_alone(
    changes: dict[str, Any], topic: str, level: str, words: str, tmp_path: Path
) -> None:
    (one,) = _bad(examine(None, made_machine(tmp_path, **changes))).values()
    assert (one.topic, one.level) == (topic, level)
    assert words in f"{one.value} {one.meaning} {one.do}"


@pytest.mark.parametrize(
    ("idle", "threads", "level", "do"),
    [
        (900, 4, "ok", ""),
        (100, 4, "warning", "To train on the CPU beside them: OMP_NUM_THREADS=1. Measure again"),
        (100, 1, "warning", "Measure again"),
    ],
)
def test_other_programs_on_the_cpus(idle: int, threads: int, level: str, do: str, tmp_path: Path) -> None:
    def used(user: int, idle: int) -> None:
        cpus = "".join(f"cpu{one} {user} 0 0 {idle} 0 0 0 0\n" for one in os.sched_getaffinity(0))
        write(tmp_path, {"proc/stat": cpus})

    used(0, 0)
    modules = {"torch": fake_torch(threads=threads)}
    sources = made_machine(tmp_path, modules=modules, wait=lambda seconds: used(1000 - idle, idle))
    (one,) = (one for one in examine(None, sources) if one.topic == "other programs")
    assert (one.value, one.level) == (f"{(1000 - idle) / 10:.0f} % of the CPUs", level)
    assert one.do.startswith(do)


def test_one_thread_is_right_beside_other_programs(tmp_path: Path) -> None:
    def busy(_: float) -> None:
        write(tmp_path, {"proc/stat": "".join(f"cpu{one} 900 0 0 1000 0 0 0 0\n" for one in os.sched_getaffinity(0))})

    write(tmp_path, {"proc/stat": "".join(f"cpu{one} 0 0 0 900 0 0 0 0\n" for one in os.sched_getaffinity(0))})
    found = _bad(examine(None, made_machine(tmp_path, environ={"OMP_NUM_THREADS": "1"}, wait=busy)))
    assert set(found) == {"other programs"}


def test_a_limit_that_cannot_be_raised_is_shown_alone(tmp_path: Path) -> None:
    limits = {"NOFILE": (65536, 65536), "MEMLOCK": (-1, -1)}
    assert _look(tmp_path, "open files", limit=limits.__getitem__).value == "65536"


def test_dali_is_proposed_only_beside_a_gpu(tmp_path: Path) -> None:
    torch = fake_torch(cuda="12.6", available=False)
    found = _look(tmp_path, "DALI", versions=NO_DALI, modules={"torch": torch})
    assert (found.level, found.do) == ("ok", "")


def test_swap_in_use_and_a_slow_governor_and_a_far_gpu(tmp_path: Path) -> None:
    sources = made_machine(tmp_path)
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO.replace("SwapFree: 8388608", "SwapFree: 4194304"),
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
            "sys/bus/pci/devices/0000:65:00.0/local_cpulist": "8-15\n",
            "sys/bus/pci/devices/0000:65:00.0/numa_node": "1\n",
        },
    )
    bad = _bad(examine(None, sources))
    assert set(bad) == {"swap", "CPU clock", "GPU 0 node"}
    assert bad["swap"].value == "4.0 GiB of 8.0 GiB used"
    assert "--cpunodebind=1" in bad["GPU 0 node"].do
    write(tmp_path, {"sys/devices/system/cpu/cpu0/cpufreq/scaling_driver": "intel_pstate\n"})
    assert "CPU clock" not in _bad(examine(None, sources))


@pytest.mark.parametrize(
    ("system", "rotational", "level", "words"),
    [
        ("nfs4", "0", "warning", "over a network"),
        ("ext4", "1", "warning", "rotating"),
        ("ext4", "0", "ok", "local disk"),
        ("overlay", "0", "note", "volume"),
        ("tmpfs", "0", "ok", "in memory"),
    ],
)
def test_where_the_data_lies(system: str, rotational: str, level: str, words: str, tmp_path: Path) -> None:
    sources = made_machine(tmp_path)
    write(
        tmp_path,
        {
            "proc/self/mountinfo": f"1 0 8:1 / / rw - {system} /dev/sda1 rw\n",
            "sys/dev/block/8:1/queue/rotational": rotational,
        },
    )
    data = examine(tmp_path, sources)[-1]
    assert (data.topic, data.level) == ("data", level)
    assert words in f"{data.value} {data.do}"


def test_data_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no such file or folder"):
        examine(tmp_path / "nowhere", made_machine(tmp_path))


def test_no_proc_at_all(tmp_path: Path) -> None:
    found = examine(tmp_path, dataclasses.replace(made_machine(tmp_path / "full"), root=tmp_path / "empty"))
    unknown = {one.topic for one in found if one.value == "not known"}
    assert unknown == {"CPU clock", "memory", "swap", "GPU 0 node", "data"}
    assert all(one.meaning for one in found if one.value == "not known")


def test_a_look_that_breaks_is_told_and_hides_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sources = made_machine(tmp_path)
    whole = {one.topic for one in examine(None, sources)}

    def broken(sources: object) -> Any:
        raise ZeroDivisionError("planted")

    for topic in CHECKS:
        with monkeypatch.context() as patch:
            patch.setitem(CHECKS, topic, broken)
            found = examine(None, sources)
        (told,) = (one for one in found if "planted" in one.meaning)
        assert (told.topic, told.value, told.level) == (topic, "not known", "note")
        assert {one.topic for one in found} - {topic} < whole | {topic}


# --- DALI, nvJPEG ------------------------------------------------------------------------------------------------


def _look(root: Path, topic: str, **changes: Any) -> Finding:
    (found,) = [one for one in examine(None, made_machine(root, **changes)) if one.topic == topic]
    return found


@pytest.mark.parametrize(
    ("versions", "cuda", "level", "value", "words", "do"),
    [
        ({}, "12.6", "ok", "2.4.0 for CUDA 12", "", ""),
        (FOR_13, "13.2", "ok", "2.4.0 for CUDA 13", "", ""),
        (NO_DALI, "12.6", "note", "not installed", "need it", "pip install nvidia-dali-cuda120"),
        (NO_DALI, "13.2", "note", "not installed", "need it", "pip install nvidia-dali-cuda130"),
        (NO_DALI, None, "ok", "not installed", "need it", ""),
        ({}, None, "ok", "2.4.0 for CUDA 12", "", ""),
        (
            FOR_13, "12.6", "warning", "2.4.0 for CUDA 13", "exactly one DALI build",
            "pip uninstall --yes nvidia-dali-cuda130 && pip install nvidia-dali-cuda120",
        ),
        ({}, "11.8", "warning", "2.4.0 for CUDA 12", "exactly one DALI build", ""),
        (
            {"nvidia-dali-cuda120": "1.50.0"}, "12.6", "warning", "1.50.0 for CUDA 12", "older than 2.0",
            "pip install --upgrade nvidia-dali-cuda120",
        ),
        (
            {"nvidia-dali-cuda130": "2.4.0"}, "13.2", "warning", "2.4.0 for CUDA 12, 2.4.0 for CUDA 13",
            "exactly one DALI build",
            "pip uninstall --yes nvidia-dali-cuda120 nvidia-dali-cuda130 && pip install nvidia-dali-cuda130",
        ),
    ],
)  # fmt: skip
def test_dali(
    versions: dict[str, Any], cuda: str | None, level: str, value: str, words: str, do: str, tmp_path: Path
) -> None:
    torch = fake_torch(cuda=cuda, available=cuda is not None)
    found = _look(tmp_path, "DALI", versions=versions, modules={"torch": torch})
    assert (found.level, found.value, found.do) == (level, value, do)
    assert words in found.meaning

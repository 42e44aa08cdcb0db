"""``lightning-feed doctor``: this machine, made-up ones, the screen and JSON."""

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_feed import doctor
from lightning_feed.doctor import Finding, as_text, examine
from lightning_feed.machine.limits import Machine

GIB = 1 << 30


def test_doctor_examines_this_machine_without_importing_lightning() -> None:
    code = (
        "import sys\nfrom lightning_feed import cli\n"
        "assert cli.main(['doctor', '--json']) == 0\n"
        "assert not {'lightning', 'pytorch_lightning'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["schema"] == "lightning_feed.doctor/1"
    assert {"Python", "torch", "CPUs", "memory", "/dev/shm", "open files"} <= {
        finding["topic"] for finding in printed["findings"]
    }
    assert all(set(finding) == {"topic", "value", "advice"} for finding in printed["findings"])


def test_doctor_text_lists_findings_and_marks_advice() -> None:
    findings = [Finding("CPUs", "2 usable"), Finding("/dev/shm", "64 MB free", "Workers die. " * 12)]
    lines = as_text(findings).splitlines()
    assert lines[0] == "CPUs      2 usable"
    assert lines[1] == "/dev/shm  64 MB free"
    assert lines[2].startswith("          -> Workers die.")
    assert lines[3].startswith("             Workers die.")
    assert max(map(len, lines)) <= 110


@pytest.fixture
def advice(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """Topic -> advice, on a machine in good order but for the changes."""
    monkeypatch.setattr(doctor, "others_pct_now", lambda *_: 3.0)
    monkeypatch.setattr(doctor, "installed_version", lambda _: "1.0")

    def examined(**changes: Any) -> dict[str, str]:
        known = {"usable_cpus": 8, "available_memory_bytes": 32 * GIB, "free_shm_bytes": 16 * GIB} | changes
        machine = Machine(cpu_reason="affinity", start_method="fork", **known)
        monkeypatch.setattr(doctor, "read_machine", lambda _: machine)
        return {finding.topic: finding.advice for finding in examine()}

    return examined


def test_doctor_gives_no_advice_for_a_healthy_machine(
    advice: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    assert {topic: said for topic, said in advice().items() if said} == {}


@pytest.mark.parametrize(
    ("changes", "topic", "said"),
    [
        ({"usable_cpus": 1}, "CPUs", "share one CPU"),
        ({"available_memory_bytes": GIB}, "memory", "may be killed"),
        ({"free_shm_bytes": 64 << 20}, "/dev/shm", "--shm-size=8g"),
    ],
)
def test_doctor_advises_on_scarce_cpus_and_memory(
    changes: dict[str, int], topic: str, said: str, advice: Callable[..., dict[str, str]]
) -> None:
    assert said in advice(**changes)[topic]


def test_doctor_advises_on_process_limits_and_busy_cpus(
    advice: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    monkeypatch.setattr("torch.get_num_threads", lambda: 64)
    monkeypatch.setattr(doctor, "others_pct_now", lambda *_: 57.0)
    found = advice()
    assert "Too many open files" in found["open files"]
    assert "OMP_NUM_THREADS=8" in found["torch threads"]
    assert "Measure again" in found["other programs"]


@pytest.mark.parametrize(("driver", "said"), [(12080, ""), (11040, "Too old for torch")])
def test_doctor_advises_on_a_driver_too_old_for_torch(driver: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = SimpleNamespace(
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlSystemGetCudaDriverVersion=lambda: driver,
        nvmlSystemGetDriverVersion=lambda: "570.1",
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda _: "A Board",
    )
    monkeypatch.setattr(doctor, "pynvml", nvml)
    monkeypatch.setattr("torch.version.cuda", "12.6")
    shown = {finding.topic: finding for finding in examine()}
    assert shown["GPU 0"].value == "A Board"
    assert shown["driver"].value.startswith("570.1, for CUDA ")
    assert said in shown["driver"].advice
    assert bool(said) == bool(shown["driver"].advice)


def test_a_failing_check_is_a_finding_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RuntimeError("GPU is lost")

    monkeypatch.setattr(doctor, "pynvml", SimpleNamespace(NVMLError=OSError, nvmlInit=lost))
    found = examine()
    assert Finding("gpus", "not known: RuntimeError: GPU is lost") in found
    assert {"Python", "CPUs", "memory"} <= {finding.topic for finding in found}


def test_doctor_names_no_gpu_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise OSError

    monkeypatch.setattr(doctor, "pynvml", SimpleNamespace(NVMLError=OSError, nvmlInit=no_driver))
    assert Finding("GPU", "none with an NVIDIA driver") in examine()

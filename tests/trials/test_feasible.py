"""Settings that would break the machine are known before they run, each with its reason."""

import math
from dataclasses import replace

import pytest
import torch

from lightning_feed.load.machine import Machine
from lightning_feed.trials.trial import Feasible, Setting, Trial

MIB = 2**20
MACHINE = Machine(
    usable_cpus=8,
    cpu_reason="CPUs by decree",
    available_memory_bytes=64 * 1024 * MIB,
    free_shm_bytes=64 * MIB,
    start_method="fork",
)
LIMITS = Feasible(machine=MACHINE, open_files=1196)
PROBE = Trial(
    setting=Setting(num_workers=0, prefetch_factor=None), batches_per_s=1.0, batch_bytes=10 * MIB, batch_tensors=2
)


def setting(workers: int, prefetch: int = 2, kind: str = "process") -> Setting:
    return Setting(num_workers=workers, prefetch_factor=prefetch, workers=kind)  # type: ignore[arg-type]


def test_shared_memory_of_a_container() -> None:
    # 0.8 x 64 MiB hold 5 batches of 10 MiB: (workers x prefetch + 1).
    assert LIMITS.broken(setting(2), [PROBE]) == ""
    assert LIMITS.broken(setting(4, 1), [PROBE]) == ""
    why = LIMITS.broken(setting(5, 1), [PROBE])
    assert "6 batches of 10.5 MB" in why
    assert "80% of the 64 MiB free in /dev/shm" in why
    assert "--shm-size" in why
    assert LIMITS.broken(setting(5, 8, "thread"), [PROBE]) == ""
    assert "for each of 2 loaders" in replace(LIMITS, local_ranks=2).broken(setting(2), [PROBE])
    assert replace(LIMITS, background=1).broken(setting(2), [PROBE])


def test_memory_of_workers_as_measured_or_else_as_reckoned() -> None:
    tight = replace(LIMITS, machine=replace(MACHINE, available_memory_bytes=1024 * MIB))
    small = replace(PROBE, batch_bytes=0)
    assert tight.broken(setting(2), [small]) == ""  # 256 MiB each, in half of 1 GiB
    assert "50% of the 1,024 MiB of free memory" in tight.broken(setting(3), [small])
    light = Trial(setting=setting(2), batches_per_s=1.0, memory_bytes=20 * MIB)
    assert tight.broken(setting(16), [small, light]) == ""
    heavy = Trial(setting=setting(2), batches_per_s=1.0, memory_bytes=800 * MIB)
    assert "2 workers at 400 MiB" in tight.broken(setting(2), [small, heavy])
    assert replace(tight, start_method="spawn").broken(setting(2), [small])


def test_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(PROBE, batch_bytes=1, batch_tensors=100)
    assert LIMITS.broken(setting(4), [small]) == ""  # 4 x 4 + 9 x 100 = 916
    why = LIMITS.broken(setting(5), [small])
    assert "5 workers and 11 batches of 100 tensors would keep 1120 files open, and this process may have 1196" in why
    assert replace(LIMITS, open_files=math.inf).broken(setting(5), [small]) == ""
    assert LIMITS.broken(setting(5, 2, "thread"), [small]) == ""
    monkeypatch.setattr(torch.multiprocessing, "get_sharing_strategy", lambda: "file_system")
    assert LIMITS.broken(setting(5), [small]) == ""


@pytest.mark.parametrize("known", [None, 0])
def test_limits_that_are_not_known_bind_nobody(known: int | None) -> None:
    machine = replace(MACHINE, available_memory_bytes=None, free_shm_bytes=None)
    trials = [replace(PROBE, batch_bytes=known, batch_tensors=known)]
    assert Feasible(machine=machine).broken(setting(512, 64), trials) == ""

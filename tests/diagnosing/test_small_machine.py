"""Tuning where the machine is small in truth: a /dev/shm of 64 MB, mounted for a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.alone]

SCRIPT = """
import json, os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset
from lightning_feed import tune

class Large(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        until = time.thread_time() + 0.005  # so that workers would pay
        while time.thread_time() < until:
            pass
        return torch.full((MEBI * 256,), float(index))  # MEBI MiB

if __name__ == "__main__":
    found = tune(DataLoader(Large(), batch_size=8), budget_s=4, fresh=True)
    free = os.statvfs("/dev/shm")
    print(json.dumps({
        "shm": free.f_blocks * free.f_frsize,
        "workers": found.setting.num_workers,
        "tried": [[trial.setting.num_workers, trial.infeasible] for trial in found.trials],
    }))
""".replace("MEBI * 256", "MEBI * 1024 * 256")


def _in_small_shm(script: Path, cache: Path) -> dict[str, object]:
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    outside = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    try:
        able = subprocess.run([*outside, mount], capture_output=True, timeout=20).returncode == 0
    except FileNotFoundError:
        able = False
    if not able:
        pytest.skip("this user may not mount")
    run = f'{mount} && exec "$0" "$1"'
    made = subprocess.run(
        [*outside, run, sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
    )
    assert made.returncode == 0, made.stderr[-2000:]
    return dict(json.loads(made.stdout.splitlines()[-1]))


def test_settings_that_would_fill_dev_shm_are_rejected_before_they_run(tmp_path: Path) -> None:
    script = tmp_path / "large.py"
    script.write_text(SCRIPT.replace("MEBI", "4"))
    found = _in_small_shm(script, tmp_path / "cache")  # batches of 32 MiB
    assert found["shm"] == 64 << 20
    assert found["workers"] == 0
    rejected = [reason for workers, reason in found["tried"] if workers]  # type: ignore[attr-defined]
    assert rejected
    assert all("/dev/shm" in reason for reason in rejected)

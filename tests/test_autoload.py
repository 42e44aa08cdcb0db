"""Switching on by environment: real Trainers of both packages, built in a program that never names this one."""

import subprocess
import sys

import pytest

from lightning_feed import GPUStarvationCallback, PrefetchCallback, autoload, pl
from lightning_feed.errors import SettingsError

PROGRAM = """
import os, sys
import lightning.pytorch, pytorch_lightning
for value in ("", "1"):
    os.environ["LIGHTNING_FEED"] = value
    for package in (lightning.pytorch, pytorch_lightning):
        off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
        trainer = package.Trainer(**off, accelerator="cpu")
        print([type(c).__name__ for c in trainer.callbacks if type(c).__module__.startswith("lightning_feed")])
    if not value:
        print(sorted(name for name in sys.modules if name.startswith("lightning_feed.")))
"""


def test_real_trainers_of_both_packages() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[]",
        "[]",
        "['lightning_feed.autoload', 'lightning_feed.errors']",  # unset: nothing heavy is imported
        "['PrefetchCallback', 'GPUStarvationCallback']",
        "['PrefetchCallback', 'GPUStarvationCallback']",
    ]


@pytest.mark.parametrize(("value", "count"), [("1", 2), ("0", 0), ("", 0), (None, 0)])
def test_values(value: str | None, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is not None:
        monkeypatch.setenv("LIGHTNING_FEED", value)
    made = autoload.callbacks()
    assert [type(callback) for callback in made] == [PrefetchCallback, GPUStarvationCallback][:count]
    made = autoload.pl_callbacks()
    assert [type(callback) for callback in made] == [pl.PrefetchCallback, pl.GPUStarvationCallback][:count]


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_FEED", "true")
    with pytest.raises(SettingsError, match=r"LIGHTNING_FEED='true' is neither on nor off\. Set it to 1"):
        autoload.callbacks()
    with pytest.raises(SettingsError):
        autoload.pl_callbacks()

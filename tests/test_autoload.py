"""Switching on by environment: real Trainers of both packages, built in a program that never names this one."""

import subprocess
import sys

import pytest

import lightning_feed
from lightning_feed import autoload, pl
from lightning_feed.errors import SettingsError

PROGRAM = """
import os, sys
import lightning.pytorch, pytorch_lightning
for value in ("", "1", "tune"):
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
        "['AutotuneCallback', 'PrefetchCallback', 'GPUStarvationCallback']",
        "['AutotuneCallback', 'PrefetchCallback', 'GPUStarvationCallback']",
    ]


BOTH = ["PrefetchCallback", "GPUStarvationCallback"]


@pytest.mark.parametrize(
    ("value", "names"), [("1", BOTH), ("tune", ["AutotuneCallback", *BOTH]), ("0", []), ("", []), (None, [])]
)
def test_values(value: str | None, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if value is not None:
        monkeypatch.setenv("LIGHTNING_FEED", value)
    for made, home in ((autoload.callbacks(), lightning_feed), (autoload.pl_callbacks(), pl)):
        assert [type(callback) for callback in made] == [getattr(home, name) for name in names]


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_FEED", "true")
    with pytest.raises(SettingsError, match=r"LIGHTNING_FEED='true' is not known\. Set it to 1"):
        autoload.callbacks()
    with pytest.raises(SettingsError):
        autoload.pl_callbacks()

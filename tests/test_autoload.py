"""Switching on by environment: real Trainers of both packages, built in a program that never names this one."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import warm
from lightning.pytorch.demos.boring_classes import BoringModel
from recording import quiet_trainer

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


def test_trainers_get_callbacks_as_the_environment_variable_says() -> None:
    done = warm.run(["-c", PROGRAM])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[]",
        "[]",
        "['lightning_feed.autoload', 'lightning_feed.errors', 'lightning_feed.wording']",  # unset: nothing heavy
        "['PrefetchCallback', 'GPUStarvationCallback']",
        "['PrefetchCallback', 'GPUStarvationCallback']",
        "['AutotuneCallback', 'PrefetchCallback', 'GPUStarvationCallback']",
        "['AutotuneCallback', 'PrefetchCallback', 'GPUStarvationCallback']",
    ]


BOTH = ["PrefetchCallback", "GPUStarvationCallback"]


@pytest.mark.parametrize(
    ("value", "names"), [("1", BOTH), ("tune", ["AutotuneCallback", *BOTH]), ("0", []), ("", []), (None, [])]
)
def test_each_value_of_the_environment_variable_gives_its_callbacks(
    value: str | None, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is not None:
        monkeypatch.setenv("LIGHTNING_FEED", value)
    for made, home in ((autoload.callbacks(), lightning_feed), (autoload.pl_callbacks(), pl)):
        assert [type(callback) for callback in made] == [getattr(home, name) for name in names]


def test_an_unknown_value_of_the_environment_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_FEED", "true")
    with pytest.raises(SettingsError, match=r"LIGHTNING_FEED='true' is not valid\. Set it to 1"):
        autoload.callbacks()
    with pytest.raises(SettingsError):
        autoload.pl_callbacks()


def test_a_callback_that_nobody_asked_for_does_not_say_that_it_does_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LIGHTNING_FEED", "1")
    callbacks = autoload.callbacks()
    monkeypatch.delenv("LIGHTNING_FEED")  # the Trainer would add them again
    with caplog.at_level("INFO", "lightning_feed"):
        quiet_trainer(callbacks, max_steps=2, default_root_dir=tmp_path).fit(BoringModel())
    assert "does nothing" not in caplog.text


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_autoloaded_callbacks_log_only_to_lightning_loggers(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some packages keep the history that their users read in a logger of their own."""
    monkeypatch.setenv("LIGHTNING_FEED", "1")
    loggers = importlib.import_module(f"{package}.loggers")
    boring = importlib.import_module(f"{package}.demos.boring_classes")

    class Kept(loggers.logger.Logger):  # type: ignore[misc, name-defined]
        name = "kept"
        version = 0

        def __init__(self) -> None:
            self.rows: list[dict[str, float]] = []

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.rows.append(metrics)

        def log_hyperparams(self, *args: object) -> None:
            pass

    class Mine(loggers.CSVLogger):  # type: ignore[misc, name-defined]
        pass

    def logged(*callbacks: Any) -> tuple[set[str], set[str]]:
        kept = Kept()
        mine = Mine(tmp_path)
        trainer = importlib.import_module(package).Trainer(
            max_epochs=1, limit_train_batches=60, limit_val_batches=0, log_every_n_steps=5, accelerator="cpu",
            logger=[kept, mine], callbacks=list(callbacks), enable_checkpointing=False, enable_progress_bar=False,
        )  # fmt: skip
        trainer.fit(boring.BoringModel())
        rows = mine.experiment.metrics
        return {name for row in kept.rows for name in row}, {name for row in rows for name in row}

    monkeypatch.setattr(loggers.csv_logs.ExperimentWriter, "save", lambda self: None)
    theirs, own = logged()
    assert not [name for name in theirs if name.startswith("feed")]
    assert "feed/starved_pct" in own
    monkeypatch.delenv("LIGHTNING_FEED")
    home = lightning_feed if package == "lightning.pytorch" else pl
    theirs, own = logged(home.GPUStarvationCallback())
    assert "feed/starved_pct" in theirs & own

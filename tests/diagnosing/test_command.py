"""``lightning-feed diagnose``: exit codes, what is printed where, what is written."""

import importlib
import inspect
import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from diagnosing.small_runs import PACKAGES

from lightning_feed import cli
from lightning_feed.diagnosing import program, run
from lightning_feed.errors import ReportError

TRAINING = """
import signal
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from {package} import LightningDataModule, LightningModule

class Numbers(Dataset):
    def __init__(self, stop_at=None, number=signal.SIGINT):
        self.stop_at, self.served, self.number = stop_at, 0, number
    def __len__(self):
        return 64
    def __getitem__(self, index):
        self.served += 1
        if self.served == self.stop_at:
            signal.raise_signal(self.number)
        return {{"x": torch.ones(4), "y": torch.tensor(1), "mask": torch.ones(9)}}

class Data(LightningDataModule):
    def __init__(self, *stop):
        super().__init__()
        self.stop = stop
    def train_dataloader(self):
        return DataLoader(Numbers(*self.stop), batch_size=4)

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.layer(batch["x"]), batch["y"])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def pair(): return Model(), Data()
def stopped(): return Model(), Data(64)
class Fails(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index == 60:
            raise ValueError("bad photo")
        return Numbers()[index]
class FailingData(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Fails(), batch_size=4)
def failing(): return Model(), FailingData()
"""


@pytest.fixture
def package() -> str:
    return "lightning.pytorch"


@pytest.fixture
def file(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"training_{package[:2]}.py"
    path.write_text(TRAINING.format(package=package))
    return path


@pytest.fixture
def run_command(package: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a command with the fit of a program, which the function of this name in ``file`` makes."""
    trainer = importlib.import_module(package).Trainer

    def run(name: str, *arguments: str) -> int:
        def take_over(named: program.Program, take: Callable[[program.Fit], int]) -> None:
            made: dict[str, Any] = {}
            exec(compile(Path(named.name).read_text(), named.name, "exec"), made)
            model, data = made[name]()
            options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
            raise SystemExit(take(program.Fit(trainer=trainer(**options), model=model, datamodule=data)))

        monkeypatch.setattr(program, "run_until_fit", take_over)
        with pytest.raises(SystemExit) as end:
            cli.main(["diagnose", f"training_{package[:2]}.py", "--quick", "--only", "model", *arguments])
        return int(str(end.value.code))

    return run


@pytest.mark.parametrize("package", PACKAGES)
def test_diagnose_command_prints_the_verdict_and_writes_reports(
    file: Path, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("pair") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("FEED  ")
    assert printed.err.splitlines()[-1] == "Written to feed_diagnosis/feed_report.html, .json and .md."
    assert {one.name for one in Path("feed_diagnosis").iterdir()} == {
        f"feed_report.{end}" for end in ("json", "md", "html")
    }


def test_json_option_prints_the_verdict_that_is_written(
    file: Path, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("pair", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["verdict"]["bottleneck"]
    assert json.loads(Path("feed_diagnosis/feed_report.json").read_text())["verdict"] == printed["verdict"]


@pytest.fixture
def as_in_a_shell() -> Iterator[None]:
    """Shells have background jobs ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("as_in_a_shell")
def test_ctrl_c_prints_and_writes_the_measurements_so_far(
    file: Path, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("stopped") == 130
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-2:] == [
        "lightning-feed: what was measured until then is in feed_diagnosis",
        "lightning-feed: stopped",
    ]
    assert "Traceback" not in printed.err
    assert printed.out.startswith("FEED  ")
    assert json.loads(Path("feed_diagnosis/feed_report.json").read_text())


def test_failure_after_some_steps_keeps_the_measurements_so_far(
    file: Path, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("failing", "--json") == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["step"]["steps"] >= 10
    said = printed.err.splitlines()[-2:]
    assert said[0] == "lightning-feed: what was measured until then is in feed_diagnosis"
    assert "training as it is failed: ValueError: bad photo (training_li.py:" in said[1]


# --- where it is written ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["afile", "afile/below"])
def test_unusable_output_folder_is_reported_before_anything_runs(
    out: str, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("afile").touch()
    monkeypatch.setattr(run, "_run", lambda *_: pytest.fail("an experiment ran"))
    assert cli.main(["diagnose", str(file), "--quick", "--out", out]) == 1
    printed = capsys.readouterr()
    assert f"reports cannot be written into {out}: " in printed.err
    assert printed.out == ""
    assert sorted(one.name for one in Path().iterdir() if one.name != "__pycache__") == ["afile", file.name]


def test_verdict_is_printed_even_if_the_report_cannot_be_written(
    file: Path, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "write_report", _disk_is_full)
    assert run_command("pair") == 1
    printed = capsys.readouterr()
    assert printed.out.startswith("FEED  ")
    assert printed.err.splitlines()[-1] == "lightning-feed: x could not be written: No space left on device."


def _disk_is_full(*_: Any, **__: Any) -> Any:
    raise ReportError("x could not be written: No space left on device.")


# --- what is wrong ----------------------------------------------------------------------------------------------


def test_unknown_experiment_is_reported_without_a_traceback(
    file: Path, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("pair", "--only", "speed") == 2
    printed = capsys.readouterr()
    assert "give a list of any of model, loader" in printed.err
    assert "Traceback" not in printed.err
    assert not Path("feed_diagnosis").exists()


def test_docstring_names_every_argument_of_diagnose() -> None:
    arguments = inspect.getdoc(run.diagnose).partition("Args:")[2].partition("Raises:")[0].partition("Returns:")[0]
    assert re.findall(r"^ {4}(\w+): ", arguments, re.MULTILINE) == list(inspect.signature(run.diagnose).parameters)

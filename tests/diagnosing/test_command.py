"""``lightning-feed diagnose``: exit codes, what is printed where, what is written."""

import inspect
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_feed import cli
from lightning_feed.diagnosing import run

pytestmark = [
    # Two CPU steps say little; the figures do not matter here.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]

TRAINING = """
import signal
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from {package} import LightningDataModule, LightningModule

class Numbers(Dataset):
    def __init__(self, stop_at=None):
        self.stop_at, self.served = stop_at, 0
    def __len__(self):
        return 64
    def __getitem__(self, index):
        self.served += 1
        if self.served == self.stop_at:
            signal.raise_signal(signal.SIGINT)
        return {{"x": torch.ones(4), "y": torch.tensor(1), "mask": torch.ones(9)}}

class Data(LightningDataModule):
    def __init__(self, stop_at=None):
        super().__init__()
        self.stop_at = stop_at
    def train_dataloader(self):
        return DataLoader(Numbers(self.stop_at), batch_size=4)

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.layer(batch["x"]), batch["y"])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def pair(): return Model(), Data()
def stopped(): return Model(), Data(stop_at=40)
def broken(): return Model(), 1 / 0
"""


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"training_{request.param.replace('.', '_')}.py"
    path.write_text(TRAINING.format(package=request.param))
    return path


def test_a_training(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diagnose", f"{file}:pair", "--quick", "--only", "X1,X7", "--accelerator", "cpu"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("FEED  ")
    assert "ROAD" in printed.out
    assert "never used by the model: mask" in printed.out
    assert printed.err.splitlines()[-1] == "Written to feed_diagnosis."
    assert {one.name for one in Path("feed_diagnosis").iterdir()} == {
        f"feed_report.{end}" for end in ("json", "md", "html")
    }


def test_a_data_module_has_a_road(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "QUICK_BUDGET_S", 3.0)
    assert cli.main(["diagnose", f"{file}:Data", "--quick", "--only", "x3", "--out", "here"]) == 0
    printed = capsys.readouterr().out
    assert "no verdict" in printed
    assert "ROAD" in printed
    assert "loader" in printed
    assert Path("here/feed_report.json").exists()


def test_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diagnose", f"{file}:pair", "--quick", "--only", "X1", "--json", "--accelerator", "cpu"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["verdict"]["bottleneck"]
    assert json.loads(Path("feed_diagnosis/feed_report.json").read_text())["verdict"] == printed["verdict"]


@pytest.fixture
def ctrl_c_is_heard() -> Iterator[None]:
    """Shells have background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_is_heard")
def test_ctrl_c_in_the_middle(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["diagnose", f"{file}:stopped", "--quick", "--only", "X1", "--accelerator", "cpu"]
    assert cli.main(argv) == 130
    printed = capsys.readouterr()
    said = printed.err.splitlines()[-2:]
    assert said == [
        "lightning-feed: what was measured before Ctrl-C is in feed_diagnosis",
        "lightning-feed: stopped",
    ]
    assert "Traceback" not in printed.err
    assert printed.out.startswith("FEED  ")
    assert json.loads(Path("feed_diagnosis/feed_report.json").read_text())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["{file}:nope"], "there is no 'nope'"),
        (["{file}:broken"], "ZeroDivisionError"),
        (["{file}:pair", "--only", "X0"], "X0 is no experiment"),
        (["{file}:pair", "--accelerator", "abacus"], "abacus"),
        (["nowhere.py:pair"], "There is no file nowhere.py"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(
    file: Path, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["diagnose", *(word.format(file=file) for word in argv)]) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert not Path("feed_diagnosis").exists()


def test_the_reference_names_every_argument() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/diagnose.md").read_text().split("| raises |")[0]
    named = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert named == list(inspect.signature(run.diagnose).parameters)


def test_the_page_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["diagnose", "--help"])
    options = set(re.findall(r"^  (--\w+)", capsys.readouterr().out, re.MULTILINE))
    text = (Path(__file__).parents[2] / "docs/reference/command-line.md").read_text()
    section = text.split("## `lightning-feed diagnose TARGET`")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(--\w+)", section, re.MULTILINE)) == options

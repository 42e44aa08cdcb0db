"""``lightning-feed diagnose`` and ``tune`` on programs as users write them, most in a process of its own."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import warm
from cells import in_gate

PARTS = """
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import CSVLogger

class Numbers(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.ones(4) * index, torch.tensor(index % 2)

def make_loader(batch_size=4, **options):
    return DataLoader(Numbers(), batch_size=batch_size, **options)

class Data(LightningDataModule):
    def __init__(self, batch_size: int = 4, num_workers: int = 0):
        super().__init__()
        self.batch_size, self.num_workers = batch_size, num_workers
    def train_dataloader(self):
        return make_loader(self.batch_size, num_workers=self.num_workers)
    val_dataloader = test_dataloader = train_dataloader
    def teardown(self, stage):
        print("data torn down after", stage)

class Model(LightningModule):
    def __init__(self, lr: float = 0.1):
        super().__init__()
        self.lr, self.layer = lr, nn.Linear(4, 2)
    def training_step(self, batch, batch_idx):
        if isinstance(batch, dict):
            batch = batch["cls"]
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
    def validation_step(self, batch, batch_idx):
        Path("validated").touch()
    test_step = validation_step
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)
    def on_train_end(self):
        Path("uploaded").touch()
    on_fit_end = on_train_end
    def teardown(self, stage):
        Path("uploaded").touch()

class Uploads(Callback):
    def on_train_batch_end(self, *args):
        Path("uploaded").touch()
    on_fit_end = on_train_end = on_train_batch_end
"""
PLAIN = """
import argparse
from lightning.pytorch import Trainer
from birds.parts import CSVLogger, Model, Uploads, make_loader

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    options = parser.parse_args()
    trainer = Trainer(max_epochs=options.epochs, accelerator="cpu", callbacks=[Uploads()], logger=CSVLogger("logs"))
    model = Model()
    trainer.fit(model, make_loader(), make_loader())
    trainer.test(model, make_loader())

if __name__ == "__main__":
    main()
"""
LIGHTNING_CLI = """
from lightning.pytorch.cli import LightningCLI
from birds.parts import Data, Model

if __name__ == "__main__":
    LightningCLI(Model, Data)
"""
HYDRA = """
import hydra
from birds.parts import Data, Model

@hydra.main(version_base=None, config_path="conf", config_name="c")
def main(config):
    trainer, data = hydra.utils.instantiate(config.trainer), hydra.utils.instantiate(config.data)
    trainer.fit(Model(config.lr), datamodule=data)
    trainer.test(Model(config.lr), datamodule=data)

if __name__ == "__main__":
    main()
"""
CONFIG = """
lr: 0.1
data: {_target_: birds.parts.Data, batch_size: 4, num_workers: 0}
trainer: {_target_: lightning.pytorch.Trainer, max_epochs: 3, accelerator: cpu}
hydra: {job: {chdir: true}}
"""
STARTS = """
import subprocess, sys
print(subprocess.run([sys.executable, "plain.py", "--epochs", "1"]).returncode)
"""
TWO = """
from lightning.pytorch import Trainer
from birds.parts import Model, make_loader
loaders = {"cls": make_loader(), "lm": make_loader(8)}
Trainer(accelerator="cpu", logger=False, enable_checkpointing=False).fit(Model(), loaders)
"""
BEGIN = """
import atexit, contextlib, os, signal, sys, threading, time, weakref
from multiprocessing import Manager, Process
from lightning.pytorch import Trainer
from birds.parts import *
class Samples(Numbers):
    def __getitem__(self, index):
        if index == 50:
            AT_50()
        return super().__getitem__(index)
def fit():
    trainer = Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(Model(), DataLoader(Samples(), batch_size=4))
def AT_50():
    pass
def ran(what):
    with open("ran", "a") as file:
        print(what, file=file)
    Path("final.pt").write_text("hardly trained")
Path("final.pt").write_text("trained for a week")
from lightning_feed.diagnosing import run
run.QUICK_RUN_STEPS, run.QUICK_REPLAY_STEPS = 20, 40
"""
DOES_NOTHING = "    pass\ndef ran"
CARELESS = (
    BEGIN
    + """
csv, binary = open("log.csv", "w"), open("log.bin", "wb")
print("begun", file=csv)
binary.write(b"begun")
class Kept:
    def __del__(self):
        ran("__del__")
class Closes:
    def __enter__(self):
        pass
    def __exit__(self, *error):
        ran("__exit__")
kept = Kept()
weakref.finalize(kept, ran, "finalizer of a weak reference")
atexit.register(ran, "atexit")
manager, daemon = Manager(), Process(target=time.sleep, args=(600,), daemon=True)
daemon.start()
batches = iter(make_loader(num_workers=1))
next(batches)
Path("children").write_text(f"{manager._process.pid} {daemon.pid} {batches._workers[0].pid}")
sys.stdout.close()
sys.stderr = open(os.devnull, "w")
at_50, signals = AT_50, (signal.SIGCHLD, signal.SIGUSR1)
def AT_50():
    for number in signals:
        signal.raise_signal(number)
    at_50()
for number in signals:
    signal.signal(number, lambda *_: ran("handler"))
for _ in range(3):
    try:
        with Closes(), contextlib.suppress(BaseException):
            fit()
            ran("what follows")
        ran("what follows a suppressed error")
    except BaseException:
        ran("except")
    finally:
        ran("finally")
        print("ended", file=csv)
        os._exit(0)
ran("the rest")
"""
)
ENDS = {
    "with": "@contextlib.contextmanager\ndef closes():\n    yield\n    ran('with')\nwith closes(): fit()",
    "stdout's file closed": "os.close(1)\nfile = open('log', 'w')\nassert file.fileno() == 1\nfit()",
    "another thread": "threading.Thread(target=threading.Event().wait).start()\nfit()\nran('what follows')",
}
"""What surrounds a fit, other than all that does in the careless program."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "birds").mkdir()
    (tmp_path / "conf").mkdir()
    files = {
        "birds/__init__.py": "",
        "birds/parts.py": PARTS,
        "plain.py": PLAIN,
        "lcli.py": LIGHTNING_CLI,
        "with_hydra.py": HYDRA,
        "conf/c.yaml": CONFIG,
        "c.yaml": "trainer: {max_epochs: 4, accelerator: cpu}\ndata: {batch_size: 8}\n",
        "starts.py": STARTS,
        "two.py": TWO,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As ``python -m lightning_feed`` does, in a process that has imported Lightning already."""
    return warm.run(["-m", "lightning_feed", *arguments], cwd=folder)


QUICK = ("diagnose", "--quick", "--only", "model")
END = "This training, and what follows it, was not run."


def test_no_code_of_a_program_runs_after_its_fit(project: Path) -> None:
    (project / "careless.py").write_text(CARELESS)
    done = run(project, *QUICK, "--json", "careless.py")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"]["bottleneck"]
    assert done.stderr.splitlines()[-2:] == [
        "Written to feed_diagnosis/feed_report.html, .json and .md.",
        "lightning-feed: careless.py was ended where it calls fit at careless.py:13. It would now train for 2 epochs. "
        f"{END}",
    ]
    assert (project / "feed_diagnosis" / "feed_report.json").exists()
    assert not (project / "ran").exists(), (project / "ran").read_text()
    assert (project / "final.pt").read_text() == "trained for a week"
    assert (project / "log.csv").read_text() == "begun\n"
    assert (project / "log.bin").read_bytes() == b"begun"
    for number in map(int, (project / "children").read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


@pytest.mark.slow
def test_failed_diagnosis_runs_no_code_after_the_fit(project: Path) -> None:
    (project / "careless.py").write_text(CARELESS.replace(DOES_NOTHING, "    raise ValueError('bad photo')\ndef ran"))
    done = run(project, *QUICK, "careless.py")
    assert done.returncode == 1
    *_, measured, ended, failed = done.stderr.splitlines()
    assert measured == "lightning-feed: what was measured until then is in feed_diagnosis"
    assert ended.startswith("lightning-feed: careless.py was ended where it calls fit at careless.py:13.")
    assert "bad photo" in failed
    assert not (project / "ran").exists(), (project / "ran").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", in_gate(list(ENDS), ["another thread"]))
def test_program_ends_at_its_fit_whatever_code_surrounds_it(name: str, project: Path) -> None:
    (project / "careless.py").write_text(BEGIN + ENDS[name])
    done = run(project, *QUICK, "careless.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("FEED  "), done.stdout
    assert done.stderr.endswith(f"{END}\n")
    assert not (project / "ran").exists(), (project / "ran").read_text()
    assert (project / "final.pt").read_text() == "trained for a week"


@pytest.mark.slow
def test_tune_runs_no_code_of_a_program_after_its_fit(project: Path) -> None:
    (project / "careless.py").write_text(CARELESS)
    done = run(project, "tune", "careless.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("workers"), done.stdout
    assert done.stderr.endswith(f"{END}\n")
    assert not (project / "ran").exists(), (project / "ran").read_text()
    assert (project / "final.pt").read_text() == "trained for a week"


@pytest.mark.slow
def test_ctrl_c_does_not_reach_the_program(project: Path) -> None:
    handled = f"signal.signal({signal.SIGINT.value}, lambda *_: ran('handler'))\n"
    stops = f"    os.kill(os.getpid(), {signal.SIGINT.value})\ndef ran"
    text = CARELESS.replace(DOES_NOTHING, stops).replace("for _", f"{handled}for _")
    (project / "careless.py").write_text(text)
    done = run(project, *QUICK, "careless.py")
    assert done.returncode == 130, done.stderr
    assert done.stdout.startswith("FEED  ")
    assert done.stderr.splitlines()[-3:] == [
        "lightning-feed: what was measured until then is in feed_diagnosis",
        "lightning-feed: careless.py was ended where it calls fit at careless.py:13. It would now train for 2 epochs. "
        f"{END}",
        "lightning-feed: stopped",
    ]
    assert not (project / "ran").exists(), (project / "ran").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "end", "batch_size"),
    [
        (
            ("plain.py", "--", "--epochs", "10"),
            "plain.py was ended where it calls fit at plain.py:12. It would now train for 10 epochs.",
            4,
        ),
        pytest.param(
            ("lcli.py", "--", "fit", "--config", "c.yaml"),
            "lcli.py was ended where it calls fit at lcli.py:6. It would now train for 4 epochs.",
            8,
            marks=pytest.mark.nightly,  # as with `tune` below
        ),
        (
            ("with_hydra.py", "--", "data.batch_size=2", "hydra.run.dir=out"),
            "with_hydra.py was ended where it calls fit at with_hydra.py:8. It would now train for 3 epochs.",
            2,
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_programs_are_diagnosed_without_running_their_training(
    arguments: tuple[str, ...], end: str, batch_size: int, project: Path
) -> None:
    before = {str(path) for path in project.rglob("*")}
    done = run(project, *QUICK, *arguments)
    assert done.returncode == 0, done.stderr
    assert "FEED  " in done.stdout
    assert done.stderr.splitlines()[-2:] == [
        "Written to feed_diagnosis/feed_report.html, .json and .md.",
        f"lightning-feed: {end} {END}",
    ]
    report = json.loads((project / "feed_diagnosis" / "feed_report.json").read_text())
    assert report["run"]["loader"]["batch_size"] == batch_size
    new = {str(path.relative_to(project)) for path in project.rglob("*") if str(path) not in before}
    of_hydra = {"out", "out/.hydra", "out/with_hydra.log"}
    assert {name for name in new if "__pycache__" not in name and not name.startswith("out/.hydra/")} - of_hydra == {
        "feed_diagnosis",
        *(f"feed_diagnosis/feed_report.{end}" for end in ("json", "md", "html")),
    }
    if arguments[0] != "plain.py":
        assert done.stdout.count("data torn down after fit") == 1
        return
    assert "validation, ModelCheckpoint, CSVLogger, Uploads: not run" in " ".join(done.stdout.split())


@pytest.mark.slow
def test_tune_requires_the_name_of_one_of_several_loaders(project: Path) -> None:
    done = run(project, "tune", "two.py")
    assert done.returncode == 2
    assert (
        "There are 2 training loaders: cls, lm. Tune them one by one: --loader cls on the command line, loader='cls' "
        "in a call of tune()."
    ) in done.stderr
    done = run(project, "tune", "--loader", "lm", "--json", "two.py")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["batch_size"] == 8
    assert result["work"]["step_s"] > 0
    assert done.stderr.splitlines()[-1].endswith(END)


@pytest.mark.slow
def test_tune_gives_command_line_and_yaml_keys_for_lightning_cli(project: Path) -> None:
    done = run(project, "tune", "--fresh", "--json", "lcli.py", "--", "fit", "--config", "c.yaml")
    assert done.returncode == 0, done.stderr
    pasted = json.loads(done.stdout[done.stdout.index("{") :])["paste"]
    assert (pasted[0]["where"], pasted[0]["form"]) == ("on the command line", "override")
    assert pasted[0]["code"].startswith("--data.num_workers=")
    assert pasted[1]["where"] == "or in YAML, under data"
    assert pasted[2]["where"].startswith("and in your training DataLoader (Data.train_dataloader, parts.py:")

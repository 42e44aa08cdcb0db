"""A user's own program, run until its first fit: what it sees, what it gives, how it ends."""

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from diagnosing.small_runs import PACKAGES

from lightning_feed.autoload import PROGRAM, callbacks
from lightning_feed.diagnosing import program
from lightning_feed.diagnosing.failures import ProgramEnded
from lightning_feed.diagnosing.program import Fit, Program, run_until_fit
from lightning_feed.errors import SettingsError

PARTS = """
from torch import nn
from torch.utils.data import DataLoader, Dataset
from {package} import LightningDataModule, LightningModule, Trainer

class Model(LightningModule):
    def train_dataloader(self):
        return LOADER

class Data(LightningDataModule):
    pass

LOADER = DataLoader(range(8), batch_size=2)
def make(**options):
    return Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **options)
"""


@pytest.fixture
def package() -> str:
    return PACKAGES[0]


@pytest.fixture
def script(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a program beside a file of parts, and gives its path."""
    (tmp_path / f"parts_{package[:2]}.py").write_text(PARTS.format(package=package))
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "train.py") -> str:
        (tmp_path / name).write_text(f"from parts_{package[:2]} import *\n{text}")
        return name

    yield write
    sys.modules.pop(f"parts_{package[:2]}", None)


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders of targets stay importable: in these tests to their end."""
    monkeypatch.setattr(sys, "path", sys.path[:])


both_packages = pytest.mark.parametrize("package", PACKAGES)


class Left(BaseException):
    """In the place of the end of the process."""


def fit_of(name: str, *arguments: str, **options: Any) -> Fit:
    """What the program gives to its first fit."""
    taken: list[Fit] = []

    def take(fit: Fit) -> int:
        taken.append(fit)
        return 7

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", sys.stdout)
        patch.setattr(sys, "stderr", sys.stderr)
        for part in ("end_children", "_drop_signal_handlers"):
            patch.setattr(program, part, lambda: None)
        patch.setattr(os, "_exit", Mock(side_effect=Left))
        with pytest.raises(Left):
            run_until_fit(Program(name, arguments, **options), take)
        os._exit.assert_called_once_with(7)
    return taken[0]


# --- what it gives ------------------------------------------------------------------------------------------------


@both_packages
@pytest.mark.parametrize(
    ("call", "given"),
    [
        ("LOADER, LOADER", "train_dataloaders"),
        ("train_dataloaders={'a': LOADER, 'b': LOADER}", "train_dataloaders"),
        ("Data()", "datamodule"),
        ("datamodule=Data()", "datamodule"),
        ("", ""),
    ],
)
def test_arguments_of_fit_are_captured(call: str, given: str, script: Any) -> None:
    fit = fit_of(script(f"make(max_epochs=3).fit(Model(), {call})\n"))
    assert type(fit.model).__name__ == "Model"
    assert fit.trainer.max_epochs == 3
    assert [name for name in ("train_dataloaders", "datamodule") if getattr(fit, name) is not None] == [given] * bool(
        given
    )


def test_fit_of_a_trainer_subclass_is_captured(script: Any) -> None:
    text = "class Own(Trainer):\n def fit(self, *args):\n  super().fit(*args)\n"
    fit = fit_of(script(text + "Own(accelerator='cpu', logger=False, enable_checkpointing=False).fit(Model(), LOADER)"))
    assert type(fit.trainer).__name__ == "Own"


def lightning_cli(script: Any, package: str, call: str, rest: str = "") -> str:
    start = f"from {package}.cli import LightningCLI\n"
    return str(script(f"{start}cli = LightningCLI({call}, seed_everything_default=False)\n{rest}"))


of_jsonargparse = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning calls what it has deprecated


@of_jsonargparse
@both_packages
def test_fit_after_lightning_cli_with_run_false_is_captured(script: Any, package: str) -> None:
    rest = "cli.trainer.fit(cli.model, LOADER)\ncli.trainer.test(cli.model, LOADER)\n"
    name = lightning_cli(script, package, "Model, run=False", rest)
    fit = fit_of(name, "--trainer.max_epochs=5", "--trainer.accelerator=cpu", "--trainer.logger=false")
    assert "train.py:4. It would now train for 5 epochs." in fit.ended


@of_jsonargparse
@pytest.mark.parametrize("checkpoint", [(), ("--ckpt_path=last.ckpt",)])
def test_fit_subcommand_of_lightning_cli_is_captured(checkpoint: tuple[str, ...], script: Any, package: str) -> None:
    options = ("--trainer.max_epochs=5", "--trainer.accelerator=cpu", "--trainer.logger=false")
    fit = fit_of(lightning_cli(script, package, "Model, Data"), "fit", *checkpoint, *options)
    assert type(fit.datamodule).__name__ == "Data"
    assert "train.py:3. It would now train for 5 epochs" in fit.ended
    assert ("from the checkpoint last.ckpt" in fit.ended) == bool(checkpoint)


# --- what it sees -------------------------------------------------------------------------------------------------

SEES = """
import json, os, sys
seen = dict(argv=sys.argv, name=__name__, path=sys.path[0], file=__file__, main=sys.modules["__main__"].__file__)
with open("seen.json", "w") as file:
    file.write(json.dumps(seen))
os.chdir("/")
"""


def test_program_sees_argv_and_path_as_when_run_by_python(script: Any, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    name = script("import sys; sys.path.append('..')\n", "below/train.py")
    (tmp_path / "below" / "train.py").write_text(
        SEES + f"sys.path.append({str(tmp_path)!r})\n" + (tmp_path / name).read_text() + "make().fit(Model(), LOADER)"
    )
    before = sys.argv, sys.path[:], sys.modules["__main__"], dict(os.environ)
    fit = fit_of("below/train.py", "--lr", "1")
    assert (sys.argv, sys.path, sys.modules["__main__"], dict(os.environ)) == before
    assert Path.cwd() == tmp_path
    assert "_around" not in type(fit.trainer).fit.__qualname__
    assert not hasattr(type(fit.trainer).fit, "__wrapped__")
    path = str(tmp_path / "below" / "train.py")
    assert json.loads((tmp_path / "seen.json").read_text()) == {
        "argv": [path, "--lr", "1"],
        "name": "__main__",
        "path": str(tmp_path / "below"),
        "file": path,
        "main": path,
    }


def test_module_of_a_package_runs_as_with_python_m(script: Any, tmp_path: Path) -> None:
    (tmp_path / "birds").mkdir()
    (tmp_path / "birds" / "__init__.py").touch()
    (tmp_path / "birds" / "size.py").write_text("import sys\nSIZE = int(sys.argv[1])\n")
    script("from .size import SIZE\nmake(max_epochs=SIZE).fit(Model(), LOADER)\n", "birds/train.py")
    assert fit_of("birds.train", "7", is_module=True).trainer.max_epochs == 7
    for name in ("birds", "birds.size"):
        sys.modules.pop(name)


# --- how it ends --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code", "said", "printed"),
    [
        ("sys.exit()", 1, "ended by an exit with 0 before it called Trainer.fit", ""),
        ("sys.exit(3)", 3, "ended by an exit with 3 before", ""),
        ("sys.exit('no data')", 1, "ended by an exit with 1 before", "no data\n"),
        ("make()", 1, "ended without calling Trainer.fit in this process.*Its arguments were: --lr 1", ""),
        ("make().fit()", 1, "failed before it called", "missing a required argument: 'model'\n"),
        ("1 / 0", 1, "failed before it called Trainer.fit", "ZeroDivisionError: division by zero\n"),
    ],
)
def test_program_without_a_fit_ends_with_an_error_and_exit_code(
    text: str, code: int, said: str, printed: str, script: Any, capsys: Any
) -> None:
    name = script(f"import sys\n{text}\n")
    with pytest.raises(ProgramEnded, match=said) as ended:
        run_until_fit(Program(name, ("--lr", "1")), lambda _: 0)
    assert ended.value.exit_code == code
    err = capsys.readouterr().err
    assert err.endswith(printed)
    if "failed" in said:  # the traceback begins with the program's own line
        assert err.splitlines()[1].strip().startswith(f'File "{Path(name).absolute()}", line 3')


def test_missing_program_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"There is no file nowhere\.py"):
        run_until_fit(Program("nowhere.py"), lambda _: 0)
    for module in ("no.such.module", "json"):
        with pytest.raises(SettingsError, match=f"-m {module} cannot be run: .*Give SCRIPT.py, or -m package.module"):
            run_until_fit(Program(module, is_module=True), lambda _: 0)


# --- other processes ----------------------------------------------------------------------------------------------


def test_processes_started_by_torchrun_are_refused(monkeypatch: pytest.MonkeyPatch, script: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    name = script("raise AssertionError")
    with pytest.raises(SettingsError, match=r"one of 4 processes started by torchrun.*Run .* without the launcher"):
        run_until_fit(Program(name), lambda _: 0)
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(SystemExit) as end:
        run_until_fit(Program(name), lambda _: 0)
    assert end.value.code == 1


def test_fit_in_a_forked_process_is_stopped_and_reported(script: Any, capfd: pytest.CaptureFixture[str]) -> None:
    text = (
        "import multiprocessing\n"
        "trainer = make()\n"
        "def child():\n"
        "    try: trainer.fit(Model(), LOADER)\n"
        "    finally: print('went on')\n"
        "process = multiprocessing.get_context('fork').Process(target=child)\n"
        "process.start(); process.join()\n"
        "print('ended with', process.exitcode)\n"
    )
    with pytest.raises(ProgramEnded, match="If it trains in another process, name the program that runs there"):
        run_until_fit(Program(script(text)), lambda _: 0)
    printed = capfd.readouterr()
    assert "ended with 1" in printed.out
    assert "went on" not in printed.out
    assert "train.py called Trainer.fit in a process that it had forked, where it cannot be replaced." in printed.err


def test_trainers_in_a_child_process_are_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "_exit", Mock(side_effect=Left))
    monkeypatch.setenv(PROGRAM, f"{os.getpid()} train.py")
    assert callbacks() == []
    monkeypatch.setenv(PROGRAM, f"{os.getppid()} train.py")
    with pytest.raises(Left):
        callbacks()
    os._exit.assert_called_once_with(1)
    assert "train.py makes a Trainer in another process, which cannot be examined" in capfd.readouterr().err

"""What ``lightning-feed diagnose TARGET`` takes, and what it says of the rest."""

import sys
from pathlib import Path

import pytest
from diagnosing.small_runs import make_parts, make_trainer

from lightning_feed.diagnosing import diagnose
from lightning_feed.diagnosing.target import open_target, trainer_for
from lightning_feed.errors import SettingsError

GOOD = """
import torch
from {package} import LightningDataModule, LightningModule
import beside_{stem}

class Data(LightningDataModule):
    def __init__(self, size=4):
        super().__init__()

class Model(LightningModule):
    pass

class NeedsPath(LightningDataModule):
    def __init__(self, path, *, size, other=1):
        super().__init__()

def data(): return Data()
def pair(): return Model(), Data()
def reverse(): return [Data(), Model()]
def alone(): return Model()
def nothing(): return None
def three(): return Model(), Data(), 3
def broken(): return 1 / 0
def leaves(): raise SystemExit(3)
instance = Data()
both = (Model(), instance)
class inner:
    made = instance
number = 7
"""


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    stem = "target_" + request.param.replace(".", "_")
    (tmp_path / f"beside_{stem}.py").write_text("")
    path = tmp_path / f"{stem}.py"
    path.write_text(GOOD.format(package=request.param, stem=stem))
    return path


@pytest.mark.parametrize("name", ["data", "Data", "instance", "inner.made"])
def test_a_data_module(file: Path, name: str) -> None:
    with open_target(f"{file}:{name}") as target:
        assert target.model is None
        assert type(target.datamodule).__name__ == "Data"
        assert sys.path[0] == str(file.parent)
        package = "pytorch_lightning" if "pytorch_lightning" in file.stem else "lightning"
        assert type(trainer_for(target, "cpu")).__module__.partition(".")[0] == package
    assert str(file.parent) not in sys.path


@pytest.mark.parametrize("name", ["pair", "reverse", "both"])
def test_a_module_and_a_data_module(file: Path, name: str) -> None:
    with open_target(f"{file}:{name}") as target:
        assert (type(target.model).__name__, type(target.datamodule).__name__) == ("Model", "Data")


def test_a_module_by_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    with open_target(f"{file.stem}:pair") as target:
        assert target.model is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{file}", "names no object"),
        ("{file}:", "names no object"),
        (":data", "names no object"),
        ("{file}:Dat", "there is no 'Dat' in it. Did you mean 'Data'?"),
        ("{file}:inner.mode", "there is no 'mode' in it. Did you mean 'made'?"),
        ("{folder}/targt.py:data", "There is no file"),
        ("no_such_package.module:data", "There is no module 'no_such_package' to import"),
        ("json.no_such_module:data", "There is no module 'json.no_such_module' to import"),
        ("{file}:NeedsPath", "needs arguments that it is not given: path, size"),
        ("{file}:alone", "gives a Model. A module alone does not say what to load"),
        ("{file}:nothing", "gives a NoneType"),
        ("{file}:number", "gives a int"),
        ("{file}:three", "gives a tuple of Model, Data, int"),
        ("{file}:broken", "failed when it was called: ZeroDivisionError: division by zero (target_"),
        ("{file}:leaves", "failed when it was called: SystemExit: 3"),
    ],
)
def test_bad_targets(file: Path, text: str, message: str) -> None:
    path = sys.path[:]
    with pytest.raises(SettingsError) as raised, open_target(text.format(file=file, folder=file.parent)):
        pass
    assert message in str(raised.value)
    assert sys.path == path


@pytest.mark.parametrize("body", ["import no_such_thing", "1 / 0", "raise SystemExit", "def ("])
def test_files_that_do_not_import(tmp_path: Path, body: str) -> None:
    file = tmp_path / "bad_target.py"
    file.write_text(body)
    with pytest.raises(SettingsError, match="could not be imported"), open_target(f"{file}:data"):
        pass
    assert "bad_target" not in sys.modules


def test_a_module_that_does_not_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad_module.py").write_text("import no_such_thing")
    monkeypatch.chdir(tmp_path)
    wanted = pytest.raises(SettingsError, match="bad_module could not be imported: ModuleNotFoundError")
    with wanted, open_target("bad_module:data"):
        pass


@pytest.mark.parametrize("order", ["Model(), Data()", "Data(), Model()"])
def test_a_pair_of_two_packages(order: str, tmp_path: Path) -> None:
    file = tmp_path / "two_packages.py"
    file.write_text(
        "from lightning.pytorch import LightningDataModule\nfrom pytorch_lightning import LightningModule\n"
        f"class Data(LightningDataModule): pass\nclass Model(LightningModule): pass\ndef make(): return {order}\n"
    )
    said = "Model comes from pytorch_lightning and Data from lightning.pytorch, and neither package takes"
    with pytest.raises(SettingsError, match=said), open_target(f"{file}:make"):
        pass


def test_a_trainer_of_the_other_package() -> None:
    Module, Data = make_parts("pytorch_lightning")
    with pytest.raises(SettingsError, match=r"Trainer comes from lightning.pytorch and Module from pytorch_lightning"):
        diagnose(make_trainer("lightning.pytorch"), Module(), Data(), budget_s=1.0)


def test_an_accelerator_that_is_not_there(file: Path) -> None:
    with open_target(f"{file}:pair") as target, pytest.raises(SettingsError, match="accelerator 'abacus'"):
        trainer_for(target, "abacus")

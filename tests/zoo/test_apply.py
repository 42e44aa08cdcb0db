"""What is pasted lands where it belongs."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from zoo.apply import CannotApply, apply

SCRIPT = '''"""A script."""
import lightning as L
from torch.utils.data import DataLoader


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return {
            "a": DataLoader(self.ds, 32, shuffle=True),
            "b": DataLoader(
                self.ds,
                num_workers=2,
            ),
        }

    def val_dataloader(self):
        return DataLoader(self.ds)


trainer = L.Trainer(max_epochs=1, callbacks=[TQDMProgressBar(refresh_rate=1), Mine()])
trainer.fit(Model(), datamodule=Data(batch_size=8))
'''


@dataclass
class Printed:
    form: str | None
    code: str
    where: str = ""


def _applied(folder: Path, form: str | None, code: str, where: str = "") -> str:
    (folder / "train.py").write_text(SCRIPT)
    assert apply(Printed(form, code, where), folder, "train.py") == []
    return (folder / "train.py").read_text()


@pytest.mark.parametrize(
    ("where", "code", "expected"),
    [
        ('in your training DataLoader (Data.train_dataloader, train.py:7, loader "a")', "num_workers=1",
         '"a": DataLoader(self.ds, 32, shuffle=True, num_workers=1),'),
        ("in your training DataLoader (train.py:10)", "num_workers=1, pin_memory=True",
         '"b": DataLoader(\n                self.ds,\n                num_workers=1, pin_memory=True,\n            )'),
        ("in your validation DataLoader (Data.val_dataloader, train.py:17)", "num_workers=1",
         "return DataLoader(self.ds, num_workers=1)"),
        ("in each of your 2 training DataLoaders (Data.train_dataloader, train.py:9 and train.py:10)", "num_workers=1",
         'DataLoader(self.ds, 32, shuffle=True, num_workers=1),\n            "b": DataLoader(\n'
         "                self.ds,\n                num_workers=1,"),
    ],
)  # fmt: skip
def test_apply_adds_arguments_to_the_call_that_is_named(tmp_path: Path, where: str, code: str, expected: str) -> None:
    assert expected in _applied(tmp_path, "arguments", code, where)


def test_apply_refuses_an_ambiguous_loader_call(tmp_path: Path) -> None:
    with pytest.raises(CannotApply, match="2 calls"):
        _applied(tmp_path, "arguments", "num_workers=1", "in your training DataLoader (train.py:7)")


@pytest.mark.parametrize(
    ("form", "code", "where", "expected"),
    [
        ("trainer", "log_every_n_steps=50", "in your Trainer", "Mine()], log_every_n_steps=50)"),
        ("callback", "TQDMProgressBar(refresh_rate=20)", "", "callbacks=[Mine(), TQDMProgressBar(refresh_rate=20)]"),
        ("callback", "PrefetchCallback()", "", "from lightning_feed import PrefetchCallback\n"),
        ("datamodule", 'stage_to="/dev/shm"', "stage_to: None -> /dev/shm in the call that makes your Data",
         "Data(batch_size=8, stage_to='/dev/shm')"),
        ("settings", "num_workers=4", "num_workers: 2 -> 4 in loader=LoaderSettings(...) of your Data",
         "Data(batch_size=8, loader=LoaderSettings(num_workers=4))"),
        ("replacement", "from lightning_feed import FastDataModule\nFastDataModule.wrap(Data(...))",
         "as the datamodule of trainer.fit, in place of Data(...)", "FastDataModule.wrap(Data(batch_size=8))"),
    ],
)  # fmt: skip
def test_apply_puts_each_form_of_remedy_where_it_belongs(
    tmp_path: Path, form: str, code: str, where: str, expected: str
) -> None:
    assert expected in _applied(tmp_path, form, code, where)


@pytest.mark.parametrize(
    ("form", "code", "where"),
    [
        (None, "num_workers=1", ""),
        ("arguments", "DataLoader(dataset, num_workers=1)", "in train.py:9"),
        ("arguments", "num_workers=", "in train.py:9"),
    ],
)
def test_apply_refuses_malformed_remedies(tmp_path: Path, form: str | None, code: str, where: str) -> None:
    with pytest.raises(CannotApply):
        _applied(tmp_path, form, code, where)


def test_apply_returns_overrides_for_the_command_line(tmp_path: Path) -> None:
    overrides = apply(Printed("override", "data.num_workers=2 data.pin=true"), tmp_path, "train.py")
    assert overrides == ["data.num_workers=2", "data.pin=true"]

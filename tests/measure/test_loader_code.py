"""Where the user's program makes the training loader, in the shapes in which programs make it."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from lightning_feed import FastDataModule, LoaderSettings
from lightning_feed.callbacks.starvation_facts import facts_of
from lightning_feed.load.streams import divides_among_workers
from lightning_feed.measure.facts import training_loader_facts
from lightning_feed.measure.guard import Guard
from lightning_feed.measure.loader_code import code_of
from lightning_feed.measure.measurements import HookCode, LoaderCode, LoopFacts

PROGRAM = """
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

ROWS = [torch.zeros(8) for _ in range(8)]


class Plain(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(
            ROWS, batch_size=2)

    def test_dataloader(self):
        return DataLoader(ROWS)


class Heir(Plain):
    pass
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    file = tmp_path_factory.mktemp("program") / "mydata.py"
    file.write_text(PROGRAM)
    yield _imported(file)
    del sys.modules["mydata"]


def _imported(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


class Tiny(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Look(Callback):
    """Takes the facts of the running fit."""

    facts: LoopFacts | None = None

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.facts = facts_of(trainer, Guard("a test", lambda: None))


def _looking() -> tuple[Look, Trainer]:
    look = Look()
    trainer = Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[look], limit_val_batches=0,
    )  # fmt: skip
    return look, trainer


def _fit(**given: Any) -> LoopFacts:
    look, trainer = _looking()
    trainer.fit(Tiny(), **given)
    assert look.facts is not None
    return look.facts


def _place(**given: Any) -> LoaderCode:
    place = _fit(**given).loader_code
    assert place is not None
    return place


@pytest.mark.parametrize("name", ["Plain", "Heir"])
def test_loader_code_names_the_train_dataloader_method_and_its_line(program: ModuleType, name: str) -> None:
    place = _place(datamodule=getattr(program, name)())
    words = f"your training DataLoader ({name}.train_dataloader, mydata.py:10)"
    assert (place.words, place.form, place.datamodule) == (words, "arguments", name)


def test_loaders_from_one_train_dataloader_share_one_description() -> None:
    class Pair(LightningDataModule):
        def train_dataloader(self) -> Any:
            return [DataLoader(Squares(), batch_size=2), DataLoader(Squares(), batch_size=2)]

    line = Pair.train_dataloader.__code__.co_firstlineno
    words = f"each of your 2 training DataLoaders (Pair.train_dataloader, {Path(__file__).name}:{line})"
    data = Pair()
    assert code_of(data, data, data.train_dataloader(), config={}).words == words


def test_a_loader_made_by_a_package_is_named_after_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site-packages" / "forecasts"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(folder.parent)
    package = importlib.import_module("forecasts")
    place = _place(datamodule=package.Plain())
    assert (place.words, place.form) == ("your training DataLoader (made by forecasts)", "callback")
    of_datasets = LightningDataModule.from_datasets(Squares(), batch_size=2)
    place = code_of(of_datasets, of_datasets, [DataLoader(Squares())], config={})
    assert (place.words, place.form) == ("your training DataLoader (made by lightning)", "callback")


MAIN = """
import torch
from torch.utils import data
from torch.utils.data import DataLoader

rows = [torch.zeros(8)]
{lines}
"""


@pytest.mark.parametrize(
    ("lines", "place"),
    [
        ("loader = DataLoader(rows)", "train.py:7"),
        ("loader = data.DataLoader(rows)", "train.py:7"),
        ("loader = DataLoader(rows)\nother = DataLoader(rows)", "passed to trainer.fit"),
        ("loader = wds.WebLoader(rows)", "train.py:7"),  # its inner loader is the DataLoader
        ("loader = wds.WebLoader(rows)\nother = DataLoader(rows)", "train.py:8"),
        ("loader = make(rows)", "passed to trainer.fit"),
        ("loader = make(rows, FileSystemLoader(folder))", "passed to trainer.fit"),  # of templates, by jinja2
        ("loader = (", "passed to trainer.fit"),
    ],
)
def test_a_loader_passed_to_fit_is_named_by_its_line_if_that_is_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, place: str
) -> None:
    main = tmp_path / "train.py"
    main.write_text(MAIN.format(lines=lines))
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(main), raising=False)
    assert _place(train_dataloaders=DataLoader(Squares())).words == f"your training DataLoader ({place})"


def test_a_loader_passed_to_fit_without_a_main_file_has_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    words = "your training DataLoader (passed to trainer.fit)"
    assert code_of(None, None, [DataLoader(Squares())], config={}).words == words


class Squares(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index**2))


class Ours(FastDataModule):
    def make_dataset(self, split: str) -> Any:
        return Squares() if split == "train" else None


def test_a_fast_data_module_is_changed_through_its_loader_settings() -> None:
    place = _place(datamodule=Ours(batch_size=2, loader=LoaderSettings(num_workers=0)))
    assert (place.words, place.form) == ("loader=LoaderSettings(...) of your Ours", "settings")


def test_a_wrapped_data_module_is_changed_where_it_is_wrapped(program: ModuleType) -> None:
    place = _place(datamodule=FastDataModule.wrap(program.Plain(), LoaderSettings(num_workers=0)))
    assert place.form == "settings"
    assert place.words == "the LoaderSettings(...) of FastDataModule.wrap(Plain(...), LoaderSettings(...))"
    assert place.inner == "your training DataLoader (Plain.train_dataloader, mydata.py:10)"


ZERO = LoaderSettings(num_workers=0)


class Text(LightningDataModule):
    def __init__(self, num_workers: int = 0, batch_size: int = 2) -> None:
        super().__init__()
        self.num_workers, self.batch_size = num_workers, batch_size

    def train_dataloader(self) -> Any:
        rows = [torch.zeros(8) for _ in range(8)]
        return DataLoader(rows, batch_size=self.batch_size, num_workers=self.num_workers)  # type: ignore[arg-type]


class Fed(Ours):
    def __init__(self, batch_size: int = 2, loader: LoaderSettings = ZERO) -> None:
        super().__init__(batch_size, loader=loader)


@pytest.mark.filterwarnings(
    "ignore:The 'train_dataloader' does not have many workers",
    # Lightning's CLI calls jsonargparse by names that it has retired.
    r"ignore:[\s\S]*JSONARGPARSE_DEPRECATION_WARNINGS:DeprecationWarning",
    r"ignore:[\s\S]*was deprecated in v4\.\d+\.0 and will be removed in v5:DeprecationWarning",
)
@pytest.mark.parametrize(
    ("kind", "arguments", "key"),
    [
        (Text, [], "--data.num_workers"),
        (Fed, ["--data.loader.num_workers=0"], "--data.loader.num_workers"),
    ],
)
def test_loader_code_names_the_lightning_cli_key_of_num_workers(
    kind: Any, arguments: list[str], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "fit", *arguments])
    look = Look()
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    LightningCLI(
        Tiny,
        kind,
        trainer_defaults={
            **quiet, "max_steps": 1, "callbacks": [look], "enable_model_summary": False,
            "default_root_dir": str(tmp_path),
        },
        seed_everything_default=False,
    )  # fmt: skip
    assert look.facts is not None
    assert look.facts.loader_code is not None
    assert look.facts.loader_code.overrides[0] == ("num_workers", key)
    assert look.facts.loader_code.trainer_key == "--trainer."


# --- what workers may do ------------------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Pipeline(Stream):
    def __init__(self, *names: str) -> None:
        self.pipeline = [type("Stage", (), {"__name__": name})() for name in names]


class Shards(Stream):
    def __init__(self, number: int) -> None:
        self.num_shards = number


Shards.__module__ = "datasets.iterable_dataset"
Mosaic = type("Mosaic", (Stream,), {"__module__": "streaming.base"})


@pytest.mark.parametrize(
    ("dataset", "divides"),
    [
        ([1, 2], None),
        (Stream(), False),
        (Shards(1), False),
        (Shards(2), True),
        (Mosaic(), True),
        (Pipeline("split_by_node"), False),
        (Pipeline("split_by_node", "split_by_worker"), True),
    ],
)
def test_divides_among_workers_is_true_for_known_sharding_datasets(dataset: Any, divides: bool | None) -> None:
    assert divides_among_workers(DataLoader(dataset)) is divides
    assert training_loader_facts([DataLoader(dataset)], reloaded=False).shards_by_worker is divides


class Slow(Callback):
    """Its settings are a part of the name that Lightning gives it."""

    def __init__(self, every_n_steps: int = 1, log_every_n_steps: int = 7) -> None:
        self.every_n_steps, self.log_every_n_steps = every_n_steps, log_every_n_steps

    def on_train_batch_end(self, *args: Any) -> None:
        """Nothing."""


@pytest.mark.parametrize(("steps", "interval"), [(1, "every_n_steps"), (2, ""), (True, "")])
def test_hook_code_lists_only_user_hooks_with_line_and_interval(steps: int, interval: str) -> None:
    look, trainer = _looking()
    trainer.callbacks.append(Slow(steps))
    trainer.fit(Tiny(), DataLoader(Squares(), batch_size=2))
    assert look.facts is not None
    (found,) = look.facts.hook_code  # and none of Lightning's
    line = Slow.on_train_batch_end.__code__.co_firstlineno
    expected = HookCode(name="[Callback]Slow.on_train_batch_end", at=f"{Path(__file__).name}:{line}", interval=interval)
    assert found == expected


class Told(Dataset[int]):
    def __len__(self) -> int:
        return 2

    def set_epoch(self, epoch: int) -> None:
        """Once an epoch, in the training process."""


@pytest.mark.parametrize(
    ("datasets", "may"),
    [
        ([[1]], True),
        ([Told()], False),
        ([Subset(Told(), [0])], False),
        ([[1], Told()], False),
        ([Stream()], False),
        ([], False),
    ],
)
def test_may_persist_is_true_only_for_datasets_fixed_between_epochs(datasets: list[Any], may: bool) -> None:
    loaders = [DataLoader(one) for one in datasets]
    assert training_loader_facts(loaders, reloaded=False).may_persist is may
    assert not training_loader_facts(loaders, reloaded=True).may_persist

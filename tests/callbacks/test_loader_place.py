"""Where the user's program makes the training loader, in the shapes in which programs make it."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.data import _update_dataloader
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset, get_worker_info

from lightning_feed import FastDataModule, LoaderSettings
from lightning_feed.callbacks.loader_place import loader_location, origin_of
from lightning_feed.callbacks.starvation_run import facts_of
from lightning_feed.load.iterable import divides_among_workers
from lightning_feed.measure.facts import with_loaders
from lightning_feed.measure.guard import Guard
from lightning_feed.measure.measurements import HookPlace, LoopFacts, Place

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


class ByHelper(LightningDataModule):
    def train_dataloader(self):
        return self._loader(ROWS)

    def _loader(self, rows):
        return DataLoader(rows)


def make_loader(rows, workers=0):
    return DataLoader(rows, num_workers=workers)


class ByFactory(LightningDataModule):
    def train_dataloader(self):
        return make_loader(ROWS)


class Given(LightningDataModule):
    def __init__(self, loader):
        super().__init__()
        self.loader = loader

    def train_dataloader(self):
        return self.loader
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


def _place(**given: Any) -> Place:
    place = _fit(**given).place
    assert place is not None
    return place


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("Plain", 11),
        ("ByHelper", 23),
        ("ByFactory", 27),
    ],
)
def test_the_line_of_the_call(program: ModuleType, name: str, line: int) -> None:
    place = _place(datamodule=getattr(program, name)())
    words = f"your training DataLoader ({name}.train_dataloader, mydata.py:{line})"
    assert (place.words, place.form, place.datamodule) == (words, "arguments", name)
    assert place.names == ()


def _source(owner: Any) -> Any:
    """As much of a Trainer as tells where its loaders come from."""

    class Source:
        instance = owner

        def is_module(self) -> bool:
            return True

    class Loop:
        _data_source = Source()

    class Fake:
        fit_loop, datamodule, callbacks = Loop(), owner, ()

    return Fake()


def test_a_loader_that_was_made_elsewhere(program: ModuleType) -> None:
    loader = DataLoader(program.ROWS)
    line = sys._getframe().f_lineno - 1
    place = _place(datamodule=program.Given(loader))
    assert place.words == f"your training DataLoader (Given.train_dataloader, {Path(__file__).name}:{line})"


def test_a_loader_that_was_made_before_anything_of_ours(program: ModuleType) -> None:
    loader = DataLoader(program.ROWS)
    del vars(loader)["_feed_origin"]
    owner = program.Given(loader)
    assert origin_of(loader) is None
    assert loader_location(_source(owner), [loader]).words == "your training DataLoader (Given.train_dataloader)"


PACKAGE = """
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader


def make_loader(rows, workers=0):
    return DataLoader(rows, num_workers=workers)


def make_alone(rows, workers=2):
    return DataLoader(rows, num_workers=0)


def train(rows, loader_kwargs=None, **trainer_kwargs):
    return make_it(rows, **(loader_kwargs or {}))


def make_it(rows, **kwargs):
    return DataLoader(rows, **kwargs)


class Data(LightningDataModule):
    def __init__(self, rows, num_workers=0, in_order=True):
        super().__init__()
        self.rows, self.num_workers = rows, num_workers

    def train_dataloader(self):
        return self.loader(self.rows)

    def loader(self, rows):
        return DataLoader(rows, num_workers=self.num_workers)
"""


@pytest.fixture
def package(tmp_path: Path) -> ModuleType:
    file = tmp_path / "site-packages" / "readymade.py"
    file.parent.mkdir()
    file.write_text(PACKAGE)
    return _imported(file)


def test_a_loader_that_a_packages_function_makes(package: ModuleType, program: ModuleType) -> None:
    loader = package.make_loader(program.ROWS)
    here, line = Path(__file__).name, sys._getframe().f_lineno - 1
    assert loader_location(_source(None), [loader]) == Place(
        words=f"your call of make_loader ({here}:{line})", names=(("num_workers", "workers"),)
    )
    origin = origin_of(loader)
    assert origin is not None
    found = (origin.at, origin.function, origin.package, origin.user_at, origin.parameter, origin.taker)
    assert found == ("readymade.py:7", "make_loader", "readymade", f"{here}:{line}", "workers", "make_loader")

    loader = package.make_alone(program.ROWS)  # which does not give its number to the loader
    made = f"made in readymade, readymade.py:11, called from {here}:{sys._getframe().f_lineno - 1}"
    words = loader_location(_source(None), [loader]).words
    assert words == f"your training DataLoader, which trainer.fit is given ({made})"

    loader = package.train(program.ROWS)
    made = f"made in readymade, readymade.py:19, called from {here}:{sys._getframe().f_lineno - 1}"
    words = loader_location(_source(None), [loader]).words
    by = "where train(loader_kwargs=...) may set it"
    assert words == f"your training DataLoader, which trainer.fit is given ({made}, {by})"


def test_a_loader_that_a_packages_data_module_makes(package: ModuleType, program: ModuleType) -> None:
    place = _place(datamodule=package.Data(program.ROWS))
    assert place.words == "your call that makes Data (Data.train_dataloader, readymade.py:31)"
    assert place.names == (("num_workers", "num_workers"), ("in_order", "in_order"))


def test_a_loader_that_lightning_makes_of_the_users_has_the_place_of_that(program: ModuleType) -> None:
    loader = DataLoader(program.ROWS, shuffle=True)
    sampler = DistributedSampler(program.ROWS, num_replicas=2, rank=0)  # type: ignore[var-annotated]
    made = _update_dataloader(loader, sampler)
    assert made is not loader
    assert origin_of(made) == origin_of(loader) is not None


FITS = """
import sys
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader


def main(model, trainer):
    loader = DataLoader(
        [torch.zeros(8) for _ in range(4)])
    {call}


def make():
    return DataLoader([torch.zeros(8)])


def pair():
    return make(), 1
"""


@pytest.mark.parametrize(
    ("call", "place"),
    [
        ("trainer.fit(model, loader)", " (myfit.py:9)"),
        ("trainer.fit(model, DataLoader([torch.zeros(8)]))", " (myfit.py:11)"),
        ("trainer.fit(model, make())", " (myfit.py:15)"),
        ("given, _ = pair()\n    trainer.fit(model, given)", " (myfit.py:16)"),
    ],
)
def test_a_loader_that_fit_is_given(tmp_path: Path, call: str, place: str) -> None:
    file = tmp_path / "myfit.py"
    file.write_text(FITS.format(call=call))
    look, trainer = _looking()
    _imported(file).main(Tiny(), trainer)
    assert look.facts is not None
    assert look.facts.place is not None
    assert look.facts.place.words == f"your training DataLoader, which trainer.fit is given{place}"


class Squares(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index**2))


class Ours(FastDataModule):
    def make_dataset(self, split: str) -> Any:
        return Squares() if split == "train" else None


def test_a_fast_data_module_is_set_by_its_settings() -> None:
    place = _place(datamodule=Ours(batch_size=2, loader=LoaderSettings(num_workers=0)))
    assert (place.words, place.form) == ("loader=LoaderSettings(...) of your Ours", "settings")


def test_a_wrapped_data_module_is_set_where_it_is_wrapped(program: ModuleType) -> None:
    place = _place(datamodule=FastDataModule.wrap(program.Plain(), LoaderSettings(num_workers=0)))
    assert place.form == "settings"
    assert place.words == "the LoaderSettings(...) of FastDataModule.wrap(Plain(...), LoaderSettings(...))"
    assert place.inner == "your training DataLoader (Plain.train_dataloader, mydata.py:11)"


class Text(LightningDataModule):
    def __init__(self, num_workers: int = 0, batch_size: int = 2) -> None:
        super().__init__()
        self.num_workers, self.batch_size = num_workers, batch_size

    def train_dataloader(self) -> Any:
        rows = [torch.zeros(8) for _ in range(8)]
        return DataLoader(rows, batch_size=self.batch_size, num_workers=self.num_workers)  # type: ignore[arg-type]


@pytest.mark.filterwarnings(
    "ignore:The 'train_dataloader' does not have many workers",
    # Lightning's CLI calls jsonargparse by names that it has retired.
    r"ignore:[\s\S]*JSONARGPARSE_DEPRECATION_WARNINGS:DeprecationWarning",
    r"ignore:[\s\S]*was deprecated in v4\.\d+\.0 and will be removed in v5:DeprecationWarning",
)
def test_lightning_cli_has_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "fit"])
    look = Look()
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    LightningCLI(
        Tiny,
        Text,
        trainer_defaults={
            **quiet, "max_steps": 1, "callbacks": [look], "enable_model_summary": False,
            "default_root_dir": str(tmp_path),
        },
        seed_everything_default=False,
    )  # fmt: skip
    assert look.facts is not None
    assert look.facts.place is not None
    assert look.facts.place.overrides == (("num_workers", "--data.num_workers"),)
    assert look.facts.place.trainer_key == "--trainer."


def test_hydra_has_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: ModuleType) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    (tmp_path / ".hydra").mkdir()
    omegaconf.OmegaConf.save({"data": {"num_workers": 0, "n": 3}, "seed": 0}, tmp_path / ".hydra" / "config.yaml")
    monkeypatch.setitem(sys.modules, "hydra.core.hydra_config", _Hydra(tmp_path))
    place = loader_location(_source(program.Plain()), [DataLoader(program.ROWS)])
    assert place.overrides == (("num_workers", "data.num_workers"),)
    omegaconf.OmegaConf.save({"a": {"num_workers": 0}, "b": {"num_workers": 0}}, tmp_path / ".hydra" / "config.yaml")
    assert loader_location(_source(program.Plain()), [DataLoader(program.ROWS)]).overrides == ()


class _Hydra(ModuleType):
    """What ``hydra.core.hydra_config`` is within a program of Hydra's."""

    def __init__(self, folder: Path) -> None:
        super().__init__("hydra.core.hydra_config")

        class Runtime:
            output_dir = str(folder)

        class Run:
            runtime, output_subdir = Runtime, ".hydra"

        class HydraConfig:
            initialized = staticmethod(lambda: True)
            get = staticmethod(lambda: Run)

        self.HydraConfig = HydraConfig


# --- what workers may do ------------------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Divided(Stream):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(4)) if info is None else iter(range(info.id, 4, info.num_workers))


class Heir(Divided):
    pass


class Pipeline(Stream):
    def __init__(self, *names: str) -> None:
        self.pipeline = [type("Stage", (), {"__name__": name})() for name in names]


@pytest.mark.parametrize(
    ("dataset", "divides"),
    [
        ([1, 2], None),
        (Stream(), False),
        (Divided(), True),
        (Heir(), True),
        (Pipeline("split_by_node"), False),
        (Pipeline("split_by_node", "split_by_worker"), True),
    ],
)
def test_whether_a_stream_divides_itself(dataset: Any, divides: bool | None) -> None:
    assert divides_among_workers(DataLoader(dataset)) is divides


def test_a_stream_that_several_workers_serve_divides_itself() -> None:
    assert divides_among_workers(DataLoader(Stream(), num_workers=2)) is True
    assert divides_among_workers(DataLoader(Stream(), num_workers=1)) is False
    assert divides_among_workers(SimpleNamespace(dataset=Stream())) is False  # a loader of the user's


class Counts(Stream):
    """Gives others in the next epoch."""

    epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        yield self.epoch


class Saved(Stream):
    def state_dict(self) -> dict[str, int]:
        return {}


class Around(Stream):
    def __init__(self, inner: Stream) -> None:
        self.inner = inner


@pytest.mark.parametrize(
    ("dataset", "may"),
    [
        ([1], None),
        (Stream(), True),
        (Counts(), False),
        (Saved(), False),
        (Around(Stream()), True),
        (Around(Around(Counts())), False),
    ],
)
def test_whether_a_stream_may_live_in_a_worker(dataset: Any, may: bool | None) -> None:
    assert with_loaders(LoopFacts(), [DataLoader(dataset)], reloaded=False).may_leave_process is may


class Slow(Callback):
    """Its settings are a part of the name that Lightning gives it."""

    def __init__(self, every_n_steps: int = 1, log_every_n_steps: int = 7) -> None:
        self.every_n_steps, self.log_every_n_steps = every_n_steps, log_every_n_steps

    def on_train_batch_end(self, *args: Any) -> None:
        """Nothing."""


@pytest.mark.parametrize(("steps", "interval"), [(1, "every_n_steps"), (2, ""), (True, "")])
def test_the_users_hooks_around_steps(steps: int, interval: str) -> None:
    look, trainer = _looking()
    trainer.callbacks.append(Slow(steps))
    trainer.fit(Tiny(), DataLoader(Squares(), batch_size=2))
    assert look.facts is not None
    (found,) = look.facts.hook_places  # and none of Lightning's
    line = Slow.on_train_batch_end.__code__.co_firstlineno
    expected = HookPlace(
        name="[Callback]Slow.on_train_batch_end", at=f"{Path(__file__).name}:{line}", interval=interval
    )
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
        ([Divided()], False),
        ([], False),
    ],
)
def test_whether_workers_may_live_on(datasets: list[Any], may: bool) -> None:
    loaders = [DataLoader(one) for one in datasets]
    assert with_loaders(LoopFacts(), loaders, reloaded=False).may_persist is may
    assert not with_loaders(LoopFacts(), loaders, reloaded=True).may_persist

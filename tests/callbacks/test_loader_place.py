"""Where the user's program makes the training loader, in the shapes in which programs make it."""

import importlib
import importlib.util
import py_compile
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
from dataclasses import dataclass, field
from typing import Optional, Union

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader


def make_loader(rows, workers=0):
    return DataLoader(rows, num_workers=workers)


def make_alone(rows, workers=2):
    return DataLoader(rows, num_workers=0)


def train(rows, val_loader_kwargs=None, loader_kwargs=None, **trainer_kwargs):
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
        return [DataLoader(one, num_workers=self.num_workers) for one in [rows]][0]


class Images(Data):
    def __init__(self, rows, size=8, **kwargs):
        super().__init__(rows, **kwargs)


class Forecast:
    def __init__(self, horizon, dataloader_kwargs=None, **trainer_kwargs):
        self.dataloader_kwargs = dataloader_kwargs

    def fit(self, rows, **kwargs):
        return make_it(rows, **(self.dataloader_kwargs or {}))


class Atoms:
    def __init__(self, rows, train_dataloader: dict = {}, val_dataloader: dict = {}):
        self.rows, self.config = rows, train_dataloader

    def loader(self):
        return DataLoader(self.rows, **self.config)


class Graphs:
    def __init__(self, rows, **kwargs):
        self.rows, self.kwargs = rows, {"num_workers": 0, **kwargs}

    def loader(self):
        return make_it(self.rows, **self.kwargs)


@dataclass
class TableConfig:
    target: str = "y"
    num_workers: int = 0


class Tables:
    def __init__(self, table_config: Optional[Union[TableConfig, str]] = None, verbose: bool = True):
        self.settings = {**vars(table_config)}

    def fit(self, rows):
        return DataLoader(rows, num_workers=self.settings["num_workers"])


class Lazy:
    def __init__(self, config: "OnlyForTypeCheckers | None" = None):
        pass

    def fit(self, rows, plan_kwargs=None, dataset_kwargs=None):
        return DataLoader(rows)


@dataclass
class Holder:
    rows: list
    loader: object = field(init=False)

    def __post_init__(self):
        self.loader = DataLoader(self.rows)
"""


@pytest.fixture
def package(tmp_path: Path) -> ModuleType:
    file = tmp_path / "site-packages" / "readymade.py"
    file.parent.mkdir()
    file.write_text(PACKAGE)
    return _imported(file)


def _line_of(text: str) -> int:
    return PACKAGE.splitlines().index(text) + 1


def _place_of(loader: object) -> Place:
    return loader_location(_source(None), [loader])


DIRECT = "    return DataLoader(rows, **kwargs)"


@pytest.mark.parametrize(
    ("make", "words", "made", "code"),
    [
        (
            lambda package, rows: package.make_loader(rows),
            "your make_loader(...)", "    return DataLoader(rows, num_workers=workers)", "workers=1",
        ),
        (lambda package, rows: package.make_it(rows, batch_size=2), "your make_it(...)", DIRECT, "num_workers=1"),
        (
            lambda package, rows: package.train(rows),
            "loader_kwargs of your train(...)", DIRECT, 'loader_kwargs={"num_workers": 1}',
        ),
        (
            lambda package, rows: package.train(rows, loader_kwargs={"num_workers": 0}),
            "loader_kwargs of your train(...)", DIRECT, 'loader_kwargs={"num_workers": 1}',
        ),
        (
            lambda package, rows: package.Forecast(2).fit(rows, verbose=True),
            "dataloader_kwargs of your Forecast(...)", DIRECT, 'dataloader_kwargs={"num_workers": 1}',
        ),
        (
            lambda package, rows: package.Atoms(rows).loader(),
            "train_dataloader of your Atoms(...)", "        return DataLoader(self.rows, **self.config)",
            'train_dataloader={"num_workers": 1}',
        ),
        (lambda package, rows: package.Graphs(rows).loader(), "your Graphs(...)", DIRECT, "num_workers=1"),
        (
            lambda package, rows: package.Tables(package.TableConfig()).fit(rows),
            "your TableConfig(...)", '        return DataLoader(rows, num_workers=self.settings["num_workers"])',
            "num_workers=1",
        ),
        (
            lambda package, rows: package.Images(rows).train_dataloader(),
            "your Images(...)",
            "        return [DataLoader(one, num_workers=self.num_workers) for one in [rows]][0]", "num_workers=1",
        ),
    ],
    ids=["function", "kwargs", "dict", "given dict", "class dict", "dict by default", "kept kwargs", "config", "base"],
)  # fmt: skip
def test_the_parameter_by_which_a_package_takes_workers(
    package: ModuleType, program: ModuleType, make: Any, words: str, made: str, code: str
) -> None:
    place = _place_of(make(package, program.ROWS))
    called = f"called from your {Path(__file__).name}:{make.__code__.co_firstlineno}"
    assert place.words == f"{words} (loader made in readymade.py:{_line_of(made)}, {called})"
    assert (place.form, place.code(num_workers=1)) == ("arguments", code)


def test_a_package_without_such_a_parameter(package: ModuleType, program: ModuleType) -> None:
    loaders = [
        package.make_alone(program.ROWS),  # which does not give its number to the loader
        package.Lazy().fit(program.ROWS),
        package.Holder(program.ROWS).loader,
    ]
    line = sys._getframe().f_lineno
    for back, made, loader in zip((4, 3, 2), ("num_workers=0)", "DataLoader(rows)", "rows)"), loaders, strict=True):
        place = _place_of(loader)
        assert place.form == "callback"
        assert place.words.startswith("your training DataLoader (made in readymade.py:")
        at, _, called = place.words.partition("readymade.py:")[2].partition(", ")
        assert PACKAGE.splitlines()[int(at) - 1].endswith(made)
        assert called == f"called from your {Path(__file__).name}:{line - back})"


def test_a_loader_that_a_packages_data_module_makes(package: ModuleType, program: ModuleType) -> None:
    place = _place(datamodule=package.Data(program.ROWS))
    assert place.words.startswith("your Data(...) (loader made in readymade.py:")
    assert place.names == (("num_workers", "num_workers"), ("in_order", "in_order"))


def test_the_place_within_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: ModuleType) -> None:
    folder = tmp_path / "site-packages" / "deepmade" / "data"
    folder.mkdir(parents=True)
    (folder / "loading.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(folder.parents[1])
    origin = origin_of(importlib.import_module("deepmade.data.loading").make_loader(program.ROWS))
    assert origin is not None
    line = _line_of("    return DataLoader(rows, num_workers=workers)")
    assert (origin.at, origin.package) == (f"deepmade/data/loading.py:{line}", "deepmade")


# --- code without a file ------------------------------------------------------------------------------------------

CELL = "from torch.utils.data import DataLoader\n\ndef make(rows):\n    return DataLoader(rows)\n"


@pytest.mark.parametrize(
    ("file", "at"),
    [
        ("/tmp/ipykernel_7/123.py", "123.py:4"),
        ("<ipython-input-3-0a1b>", "<ipython-input-3-0a1b>:4"),
    ],
)
def test_a_loader_that_a_notebook_cell_makes(program: ModuleType, file: str, at: str) -> None:
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(CELL, file, "exec"), cell)
    place = _place_of(cell["make"](program.ROWS))
    assert (place.words, place.form) == (f"your training DataLoader ({at})", "arguments")


def test_a_loader_that_exec_makes_is_made_by_the_line_that_runs_it(program: ModuleType) -> None:
    for names in ({}, {"__name__": "__main__"}):
        made: dict[str, Any] = {**names, "rows": program.ROWS}
        exec(CELL + "loader = make(rows)\n", made)
        at = f"{Path(__file__).name}:{sys._getframe().f_lineno - 1}"
        assert _place_of(made["loader"]).words == f"your training DataLoader ({at})"


def test_a_cell_without_a_name_that_a_notebook_of_a_package_runs(tmp_path: Path, program: ModuleType) -> None:
    file = tmp_path / "site-packages" / "shell.py"
    file.parent.mkdir()
    file.write_text("def run(code, names):\n    exec(code, names)\n")
    cell: dict[str, Any] = {"__name__": "__main__", "rows": program.ROWS}
    _imported(file).run(compile(CELL + "loader = make(rows)\n", "<command-12>", "exec"), cell)
    assert _place_of(cell["loader"]).words.endswith("DataLoader (<command-12>:4)")


def test_a_package_without_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: ModuleType) -> None:
    source, folder = tmp_path / "sourceless.py", tmp_path / "site-packages"
    source.write_text(PACKAGE)
    folder.mkdir()
    py_compile.compile(str(source), cfile=str(folder / "sourceless.pyc"))
    source.unlink()
    monkeypatch.syspath_prepend(folder)
    place = _place_of(importlib.import_module("sourceless").train(program.ROWS))
    line = sys._getframe().f_lineno - 1
    made = f"sourceless.pyc:{_line_of(DIRECT)}, called from your {Path(__file__).name}:{line}"
    assert place.words == f"loader_kwargs of your train(...) (loader made in {made})"


def test_a_loader_that_code_in_c_makes_has_the_line_that_calls_it(program: ModuleType) -> None:
    (loader,) = map(DataLoader, [program.ROWS])
    at = f"{Path(__file__).name}:{sys._getframe().f_lineno - 1}"
    assert _place_of(loader).words == f"your training DataLoader ({at})"


class Odd:
    """Raises at whatever it is asked."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __eq__(self, other: object) -> bool:
        raise RuntimeError


def test_odd_values_on_the_way_neither_raise_nor_hide_the_place(package: ModuleType, program: ModuleType) -> None:
    place = _place_of(package.make_alone(program.ROWS, workers=Odd()))
    assert place.words.startswith("your training DataLoader (made in readymade.py:")


def test_a_loader_from_before_that_a_package_passes_to_fit(tmp_path: Path, program: ModuleType) -> None:
    file = tmp_path / "site-packages" / "runner.py"
    file.parent.mkdir()
    file.write_text("def run(trainer, model, loader):\n    trainer.fit(model, loader)\n")
    run = _imported(file).run
    here = Path(__file__).name
    for call, words in (
        (lambda trainer, loader: trainer.fit(Tiny(), loader), "passed to trainer.fit in {here}:{line}"),
        (
            lambda trainer, loader: run(trainer, Tiny(), loader),
            "passed to trainer.fit in runner.py:2, called from your {here}:{line}",
        ),
    ):
        loader: DataLoader[Any] = DataLoader(program.ROWS)
        del vars(loader)["_feed_origin"]  # as of one that was made before this package was imported
        look, trainer = _looking()
        call(trainer, loader)
        assert look.facts is not None
        assert look.facts.place is not None
        words = words.format(here=here, line=call.__code__.co_firstlineno)
        assert look.facts.place.words == f"your training DataLoader ({words})"


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
    assert look.facts.place.words == f"your training DataLoader{place}"


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

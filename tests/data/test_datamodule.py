"""FastDataModule on real Trainers of both packages: what it makes, builds, says and refuses."""

import copy
import gc
import importlib
import logging
import multiprocessing
import pickle
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from recording import Numbers, quiet_trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

import lightning_feed
from lightning_feed import _host
from lightning_feed.data import datamodule
from lightning_feed.errors import DatasetError, LoaderError, MissingExtraError, SettingsError
from lightning_feed.load.settings import LoaderSettings
from lightning_feed.machine.limits import Machine

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]
HERE = LoaderSettings(num_workers=0)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*`IterableDataset` has `__len__` defined:UserWarning",  # Lightning's word on streams that have a length
)


class Rows(Dataset[Tensor]):
    """Row i is (i, i)."""

    def __init__(self, size: int, first: int = 0) -> None:
        self.size = size
        self.first = first

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((2,), float(self.first + index))


class Stream(IterableDataset[Tensor]):
    """The rows without a length."""

    def __init__(self, size: int) -> None:
        self.rows = Rows(size)

    def __iter__(self) -> Iterator[Tensor]:
        yield from (self.rows[index] for index in range(len(self.rows)))


class Data(lightning_feed.FastDataModule):
    """Gives what it was given, and writes down which splits were asked for."""

    def __init__(self, given: dict[str, Any], batch_size: int = 4, **options: Any) -> None:
        super().__init__(batch_size, **{"loader": HERE, **options})
        self.given = given
        self.asked: list[str] = []

    def make_dataset(self, split: str) -> Any:
        self.asked.append(split)
        return self.given.get(split)


def module(package: str = "lightning.pytorch") -> Any:
    """A model of that package that writes down the batches of each split."""
    base = importlib.import_module(package).LightningModule

    class Model(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)
            self.seen: dict[str, list[Any]] = {split: [] for split in ("train", "val", "test", "predict")}

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen["train"].append(batch)
            rows = batch
            while not isinstance(rows, Tensor):
                rows = next(iter(rows.values())) if isinstance(rows, dict) else rows[0]
            return self.layer(rows / 100).sum()

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.seen["val"].append(batch)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.seen["test"].append(batch)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen["predict"].append(batch)
            return batch[:, 0]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    return Model()


def trainer(package: str = "lightning.pytorch", **options: Any) -> Any:
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
        "num_sanity_val_steps": 0,
    }
    return importlib.import_module(package).Trainer(**{**quiet, **options})


def firsts(batches: list[Tensor]) -> list[int]:
    return [int(value) for batch in batches for value in batch[:, 0]]


@pytest.fixture(autouse=True)
def _no_seed_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")  # so that what seed_everything sets is taken back after the test
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _no_workers_from_elsewhere() -> Iterator[None]:
    yield
    gc.collect()  # Trainers are full of reference cycles


# --- the way from dataset to step -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("package", "workers"), list(zip(PACKAGES, (0, 2), strict=True)))
def test_every_sample_arrives_in_every_stage(package: str, workers: int) -> None:
    kind = importlib.import_module("lightning_feed.pl").FastDataModule if "_" in package else None
    given = {"train": Rows(10), "val": Rows(6, 100), "test": Rows(5, 200), "predict": Rows(3, 300)}
    data: Any = Data(given, loader=LoaderSettings(num_workers=workers))
    if kind is not None:
        data = type("OfThePackage", (kind,), {"make_dataset": lambda self, split: given.get(split)})(
            4, loader=LoaderSettings(num_workers=workers)
        )
    model = module(package)
    trainer(package).fit(model, datamodule=data)
    assert sorted(firsts(model.seen["train"])) == list(range(10))
    assert firsts(model.seen["val"]) == list(range(100, 106))
    assert [len(batch) for batch in model.seen["train"]] == [4, 4, 2]

    trainer(package).validate(model, datamodule=data, verbose=False)
    trainer(package).test(model, datamodule=data, verbose=False)
    predictions = trainer(package).predict(model, datamodule=data)
    assert firsts(model.seen["val"]) == [*range(100, 106)] * 2
    assert firsts(model.seen["test"]) == list(range(200, 205))
    assert torch.cat(predictions).tolist() == [300, 301, 302]
    assert multiprocessing.active_children() == []


def test_a_missing_pytorch_lightning_is_reported_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    monkeypatch.delitem(sys.modules, "lightning_feed.pl", raising=False)
    with pytest.raises(MissingExtraError, match=r"pip install 'lightning-feed\[pl\]'"):
        importlib.import_module("lightning_feed.pl")


@pytest.mark.parametrize(
    ("stage", "splits"),
    [("fit", ["train", "val"]), ("validate", ["val"]), ("test", ["test"]), ("predict", ["predict"])],
)
def test_setup_makes_each_split_of_its_stage_once_and_no_others(stage: str, splits: list[str]) -> None:
    data = Data({split: Rows(8) for split in datamodule.SPLITS})
    data.setup(stage)
    data.setup(stage)
    assert data.asked == splits
    assert data.dataset(splits[0]) is data.given[splits[0]]


def test_training_is_shuffled_and_evaluation_is_not() -> None:
    data = Data({split: Rows(50) for split in datamodule.SPLITS})
    assert isinstance(data.train_dataloader().sampler, RandomSampler)
    for loader in (data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()):
        assert isinstance(loader.sampler, SequentialSampler)


def test_missing_evaluation_splits_give_no_loaders() -> None:
    data = Data({"train": Rows(8)})
    assert data.val_dataloader() == data.test_dataloader() == data.predict_dataloader() == []
    model = module()
    trainer().fit(model, datamodule=data)
    assert len(model.seen["train"]) == 2
    assert model.seen["val"] == []


def test_evaluation_has_its_own_batch_size_and_keeps_the_last_batch() -> None:
    settings = LoaderSettings(num_workers=0, drop_last=True)
    data = Data({"train": Rows(10), "val": Rows(10)}, 4, eval_batch_size=3, loader=settings)
    assert [len(batch) for batch in data.train_dataloader()] == [4, 4]
    assert [len(batch) for batch in data.val_dataloader()] == [3, 3, 3, 1]
    assert Data({"val": Rows(10)}, 4).val_dataloader().batch_size == 4


def test_a_dict_of_datasets_gives_a_dict_of_loaders() -> None:
    data = Data({"train": {"real": Rows(8), "made up": Rows(8, 100)}})
    model = module()
    trainer().fit(model, datamodule=data)
    assert [set(batch) for batch in model.seen["train"]] == [{"real", "made up"}] * 2
    assert sorted(firsts([batch["made up"] for batch in model.seen["train"]])) == list(range(100, 108))
    assert set(data.recommendations) == {"train['real']", "train['made up']"}


def test_datasets_of_equal_size_are_shuffled_differently() -> None:
    data = Data({"train": [Rows(64), Rows(64)]}, 64)
    left, right = (firsts(list(loader)) for loader in data.train_dataloader())
    assert sorted(left) == sorted(right)
    assert left != right


def test_a_stream_gets_one_worker_and_repeats_no_sample() -> None:
    data = Data({"train": Stream(10), "val": Stream(3)}, loader=LoaderSettings())
    model = module()
    trainer().fit(model, datamodule=data)
    assert firsts(model.seen["train"]) == list(range(10))  # not doubled by a second worker
    assert data.recommendations["train"].setting.num_workers == 1


def test_seed_everything_decides_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(seed: str | None) -> int:
        if seed is not None:
            monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        data = Data({"train": Rows(32)})
        trainer().fit(module(), datamodule=data)
        return int(data.state_dict()["seed"])

    assert run("7") == 7
    monkeypatch.delenv("PL_GLOBAL_SEED")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        drawn = run(None), run(None)
        torch.manual_seed(3)
        assert drawn == (run(None), run(None))
    assert drawn[0] != drawn[1]


def test_resuming_takes_the_seed_from_the_checkpoint_and_warns(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = module()
    data = Data({"train": Rows(32)})
    first = trainer()
    first.fit(model, datamodule=data)
    first.save_checkpoint(tmp_path / "last.ckpt")
    resumed = Data({"train": Rows(32)}, loader=LoaderSettings(num_workers=0, seed=5))
    with caplog.at_level(logging.WARNING, "lightning_feed"):
        trainer(max_epochs=2).fit(module(), datamodule=resumed, ckpt_path=tmp_path / "last.ckpt")
    assert resumed.state_dict() == data.state_dict()
    assert "has seed 5. The checkpoint's seed is used" in caplog.text


def test_reloading_loaders_calls_make_dataset_again() -> None:
    data = Data({"train": Rows(8), "val": Rows(4)}, loader=LoaderSettings(num_workers=1))
    trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(module(), datamodule=data)
    assert data.asked.count("train") == 3
    assert not data.recommendations["train"].setting.persistent_workers
    assert "every 1 epochs" in data.loader_report()


def test_a_reload_with_persistent_workers_is_refused() -> None:
    data = Data({"train": Rows(8)}, loader=LoaderSettings(num_workers=1, persistent_workers=True))
    with pytest.raises(SettingsError, match="Leave one of the two out"):
        trainer(reload_dataloaders_every_n_epochs=1).fit(module(), datamodule=data)


# --- overrides ------------------------------------------------------------------------------------------------------


class Collating(Data):
    def collate(self, samples: list[Tensor], split: str) -> Any:
        return torch.stack(samples) + (1000 if split == "train" else 2000)


class Unshared(Collating):
    """Has what cannot be pickled, in the Trainer that it is attached to and in a dataset that is not used."""

    def __init__(self, given: dict[str, Any], **options: Any) -> None:
        super().__init__(given, **options)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        assert state["trainer"] is None
        return {**state, "given": {}}


@pytest.mark.parametrize("start_method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_an_overridden_collate_gets_the_samples_and_the_split(start_method: Any) -> None:
    data = Unshared({"train": Rows(8), "val": Rows(4)}, loader=LoaderSettings(num_workers=1, start_method=start_method))
    data.trainer = trainer()
    loader = data.train_dataloader()
    assert sorted(firsts(list(loader))) == list(range(1000, 1008))
    data.trainer = None
    assert firsts(list(Collating({"val": Rows(4)}).val_dataloader())) == [2000, 2001, 2002, 2003]


def test_an_overridden_sampler_decides_the_order_of_its_split() -> None:
    class Sampling(Data):
        def sampler(self, dataset: Any, split: str) -> Any:
            return [5, 3, 1] if split == "train" else None

    data = Sampling({"train": Rows(8), "val": Rows(3)})
    assert firsts(list(data.train_dataloader())) == [5, 3, 1]
    assert firsts(list(data.val_dataloader())) == [0, 1, 2]


class Transforming(Data):
    def device_transform(self, batch: Tensor, split: str) -> Tensor:
        self.splits = [*getattr(self, "splits", []), split]
        return batch + 1000


class TransformingAfterOwnTransfer(Transforming):
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return super().transfer_batch_to_device(batch * 0 + 7, device, dataloader_idx)


def test_device_transform_runs_in_every_stage_and_knows_the_split() -> None:
    data = Transforming({split: Rows(2, 10) for split in datamodule.SPLITS})
    model = module()
    trainer(num_sanity_val_steps=1).fit(model, datamodule=data)
    assert data.splits == ["val", "train", "val"]
    data.splits = []
    trainer().test(model, datamodule=data, verbose=False)
    predicted = trainer().predict(model, datamodule=data)
    trainer().validate(model, datamodule=data, verbose=False)
    assert data.splits == ["test", "predict", "val"]
    assert torch.cat(predicted).tolist() == [1010, 1011]
    assert sorted(firsts(model.seen["train"])) == [1010, 1011]


def test_device_transform_runs_after_the_data_modules_own_transfer() -> None:
    model = module()
    trainer().fit(model, datamodule=TransformingAfterOwnTransfer({"train": Rows(2)}))
    assert firsts(model.seen["train"]) == [1007, 1007]


@pytest.mark.parametrize("kind", [Transforming, TransformingAfterOwnTransfer])
def test_device_transform_runs_after_the_lightning_modules_transfer(kind: type[Data]) -> None:
    """Unless the data module has one as well, which wins in Lightning, with a warning."""
    model = module()
    default = type(model).transfer_batch_to_device
    type(model).transfer_batch_to_device = lambda self, batch, device, index: default(
        self, batch * 0 + 9, device, index
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer().fit(model, datamodule=kind({"train": Rows(2)}))
    complaints = [warning for warning in caught if "`transfer_batch_to_device` in both" in str(warning.message)]
    assert firsts(model.seen["train"]) == ([1009, 1009] if kind is Transforming else [1007, 1007])
    assert len(complaints) <= (0 if kind is Transforming else 1)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda data: pickle.loads(pickle.dumps(data))])
def test_copied_and_pickled_data_modules_work_like_the_original(duplicate: Any) -> None:
    data = Transforming({"train": Rows(4)})
    trainer().fit(module(), datamodule=data)
    twin = duplicate(data)
    assert twin.trainer is None
    assert data.trainer is not None
    assert twin.state_dict() == data.state_dict()
    assert twin.loader_report() == data.loader_report()
    assert twin.transfer_batch_to_device.__self__ is twin
    model = module()
    trainer().fit(model, datamodule=twin)
    assert sorted(firsts(model.seen["train"])) == [1000, 1001, 1002, 1003]


# --- what was chosen ------------------------------------------------------------------------------------------------


def test_chosen_loader_settings_are_logged_once_and_kept_for_the_report(caplog: pytest.LogCaptureFixture) -> None:
    data = Data({"train": Rows(8), "val": Rows(8)}, loader=LoaderSettings())
    assert data.loader_report() == "No loader has been made yet."
    with caplog.at_level(logging.INFO, "lightning_feed"):
        trainer().fit(module(), datamodule=data)
        trainer().validate(module(), datamodule=data, verbose=False)
    lines = data.loader_report().splitlines()
    assert [line.split("=")[0] for line in lines] == [
        f"{split}: {name}"
        for split in ("train", "val")
        for name in ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
    ]
    assert all(line.split(": ", 2)[2] for line in lines)
    messages = [record.message for record in caplog.records if record.name.startswith("lightning_feed")]
    values = {
        name: ", ".join(line.split(": ")[1] for line in lines if line.startswith(name)) for name in ("train", "val")
    }
    assert sorted(messages) == [
        f"{name}: {chosen} (loader_report() has the reasons)" for name, chosen in values.items()
    ]
    assert set(data.recommendations) == {"train", "val"}


def test_auto_workers_follow_the_cpus_and_the_devices_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    big = Machine(
        usable_cpus=16, cpu_reason="CPUs", available_memory_bytes=None, free_shm_bytes=None, start_method="fork"
    )
    monkeypatch.setattr("lightning_feed.load.build.read_machine", lambda: big)
    # Torch compares with the machine that it is really on.
    monkeypatch.setattr("torch.utils.data.DataLoader.check_worker_number_rationality", lambda self: None)
    data = Data({"train": Rows(4000)}, loader=LoaderSettings())
    assert data.train_dataloader().num_workers == 15
    data.trainer = trainer()
    monkeypatch.setattr(type(data.trainer), "num_devices", 4)
    assert data.train_dataloader().num_workers == 3


def test_lightning_does_not_complain_about_few_workers() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = Data({split: Rows(8) for split in datamodule.SPLITS})
        trainer().fit(module(), datamodule=data)
        trainer().test(module(), datamodule=data, verbose=False)
    assert [str(warning.message) for warning in caught if "workers" in str(warning.message)] == []


# --- bad input ------------------------------------------------------------------------------------------------------


def test_a_missing_make_dataset_is_reported_with_its_signature() -> None:
    with pytest.raises(NotImplementedError, match=r"def make_dataset\(self, split\):"):
        trainer().fit(module(), datamodule=lightning_feed.FastDataModule())


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("make_dataset", r"def make_dataset\(self, split\)"),
        ("collate", r"def collate\(self, samples, split\)"),
        ("sampler", r"def sampler\(self, dataset, split\)"),
        ("device_transform", r"def device_transform\(self, batch, split\)"),
    ],
)
def test_a_method_that_does_not_take_its_arguments_is_refused_at_construction(name: str, line: str) -> None:
    short = type("Short", (Data,), {name: lambda self: None})
    with pytest.raises(SettingsError, match=rf"Short\.{name} cannot be called.* Write it as {line}"):
        short({"train": Rows(4)})


def test_a_device_transform_that_returns_nothing_ends_the_fit() -> None:
    class Forgetful(Data):
        def device_transform(self, batch: Any, split: str) -> Any:
            batch * 2

    with pytest.raises(LoaderError, match=r"Forgetful\.device_transform returned None.*`return batch`"):
        trainer().fit(module(), datamodule=Forgetful({"train": Rows(4)}))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_that_returns_nothing_ends_the_fit(workers: int) -> None:
    class Forgetful(Data):
        def collate(self, samples: Any, split: str) -> Any:
            torch.utils.data.default_collate(samples)

    data = Forgetful({"train": Rows(4)}, loader=LoaderSettings(num_workers=workers))
    with pytest.raises(LoaderError, match=r"Forgetful\.collate returned None.*`return batch`"):
        trainer().fit(module(), datamodule=data)


def test_a_collate_may_return_nothing_for_a_later_batch() -> None:
    class Picky(Data):
        def collate(self, samples: Any, split: str) -> Any:
            batch = torch.utils.data.default_collate(samples)
            return None if self.asked_again() else batch

        def asked_again(self) -> bool:
            self.batches = getattr(self, "batches", 0) + 1
            return self.batches == 3

    loader = Picky({"val": Rows(12)}).val_dataloader()
    assert [batch is None for batch in loader] == [False, False, True]


def test_a_data_module_that_does_not_call_super_init_says_so() -> None:
    class Bare(lightning_feed.FastDataModule):
        def __init__(self) -> None:
            self.size = 3

    with pytest.raises(SettingsError, match=r"Bare\.__init__ does not call super\(\)\.__init__\(\)"):
        trainer().fit(module(), datamodule=Bare())


def test_a_missing_training_dataset_is_reported() -> None:
    with pytest.raises(DatasetError, match=r"make_dataset\('train'\) returned None"):
        trainer().fit(module(), datamodule=Data({"val": Rows(4)}))
    with pytest.raises(DatasetError, match="returned None"):
        Data({}).train_dataloader()


@pytest.mark.parametrize("name", ["training", "Train", "", None])
def test_an_unknown_split_is_reported_with_the_valid_ones(name: Any) -> None:
    with pytest.raises(SettingsError, match="'train', 'val', 'test', 'predict'"):
        Data({"train": Rows(4)}).dataset(name)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (Rows(0), r"dataset of train \(.*Rows\) is empty"),
        (TensorDataset(torch.zeros(0, 3)), "is empty"),
        ([Rows(4), Rows(0)], r"dataset of train\[1\]"),
        ({"a": Rows(4), "b": Rows(0)}, r"dataset of train\['b'\]"),
        ([], "an empty list"),
        ({}, "an empty dict"),
        (7, "returned int for train, not a dataset"),
        (iter([1, 2]), "an IterableDataset for a stream"),
        (DataLoader([1, 2]), "The data module makes the loader"),
        ([(torch.zeros(2), 1)], r"returned tuple for train\[0\], not a dataset"),
        ((Rows(4), Rows(4)), "returned tuple for train"),
        ([[Rows(4)]], r"returned list for train\[0\]"),
        ("train.csv", "returned str for train"),
        (torch.zeros(4, 2), "returned torch.Tensor for train"),
    ],
)
def test_empty_and_invalid_datasets_are_refused_by_name(made: Any, words: str) -> None:
    with pytest.raises(DatasetError, match=words):
        trainer().fit(module(), datamodule=Data({"train": made}))


def test_a_batch_size_that_leaves_no_batch_is_refused() -> None:
    data = Data({"train": {"few": Rows(3)}}, 4, loader=LoaderSettings(num_workers=0, drop_last=True))
    with pytest.raises(SettingsError, match=r"batch_size=4 leaves no batch: train\['few'\] has only 3 samples"):
        data.train_dataloader()
    data = Data({"train": Rows(6)}, 4, loader=LoaderSettings(num_workers=0, drop_last=True))
    data.trainer = trainer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_host, "ranks_that_share_samples", lambda trainer: 2)
        with pytest.raises(SettingsError, match=r"\(3 on each of 2 ranks\)"):
            data.train_dataloader()


@pytest.mark.parametrize("value", [0, -3, 1.5, True, "32"])
def test_invalid_batch_sizes_are_refused(value: Any) -> None:
    with pytest.raises(SettingsError, match=f"batch_size={value!r}"):
        Data({}, value)
    with pytest.raises(SettingsError, match=f"eval_batch_size={value!r}"):
        Data({}, eval_batch_size=value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_workers": 2}, r"Write Data\(\.\.\., loader=LoaderSettings\(num_workers=2\)\)"),
        ({"colour": "red"}, r"Data has no argument colour\.$"),
    ],
)
def test_misplaced_and_unknown_arguments_are_refused_with_advice(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        Data({}, 4, **given)


class OnlyTrains(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("splits", [("train",), ("train", "val")])
def test_validation_data_without_a_validation_step_is_reported(
    splits: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    class Data(lightning_feed.FastDataModule):
        def make_dataset(self, split: str) -> Any:
            return Numbers(8) if split in splits else None

    with caplog.at_level(logging.WARNING, logger="lightning_feed"):
        quiet_trainer([], max_epochs=1).fit(OnlyTrains(), datamodule=Data(loader=LoaderSettings(num_workers=0)))
    records = [record for record in caplog.records if "no validation_step" in record.getMessage()]
    assert len(records) == ("val" in splits)


class Lesson(Rows):
    """Its rows depend on values that the program sets: one by a method, one in an object inside it."""

    level = 0

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.transform = {"hard": False}

    def set_epoch(self, epoch: int) -> None:
        self.level = epoch

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(self.level), float(self.transform["hard"])])


@pytest.mark.parametrize(
    "loader",
    [
        LoaderSettings(num_workers=0),
        pytest.param(LoaderSettings(num_workers=2), marks=pytest.mark.nightly),
        LoaderSettings(num_workers=2, background=2),
        LoaderSettings(num_workers=2, workers="thread"),
        pytest.param(LoaderSettings(num_workers=2, persistent_workers=False), marks=pytest.mark.nightly),
    ],
    ids=["none", "persistent", "background", "threads", "not persistent"],
)
def test_workers_see_dataset_changes_made_between_epochs(loader: LoaderSettings) -> None:
    model = module()
    lessons = {"train": Lesson(8), "val": Lesson(8)}
    workers: list[set[int | None]] = []

    class Teaches(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            workers.append({child.pid for child in multiprocessing.active_children()})
            lessons["train"].set_epoch((trainer.current_epoch + 1) // 2)
            lessons["val"].transform["hard"] = trainer.current_epoch >= 1

    data = Data(lessons, 4, loader=loader)
    trainer(max_epochs=4, callbacks=[Teaches()]).fit(model, datamodule=data)
    assert [int(batch[0, 0]) for batch in model.seen["train"]] == [0, 0, 0, 0, 1, 1, 1, 1]
    # Lightning validates before on_train_epoch_end.
    assert [bool(batch[0, 1]) for batch in model.seen["val"]] == [False] * 4 + [True] * 4
    if data.recommendations["train"].setting.persistent_workers:
        assert len(workers[0] & workers[1]) == 4  # nothing had changed
        assert not workers[1] & workers[2]


class Graded(Rows):
    level = 0

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(self.level)])


def test_workers_stay_alive_while_the_dataset_is_unchanged() -> None:
    lessons = {"train": Graded(8)}
    loader = Data(lessons, 4, loader=LoaderSettings()).train_dataloader()  # its workers are chosen, and so probed
    pids = []
    for level in (0, 0, 1, 1):
        lessons["train"].level = level
        assert {int(row[0]) for batch in loader for row in batch} == {level}
        pids.append([worker.pid for worker in loader._iterator._workers])
    assert pids[0] == pids[1] != pids[2] == pids[3]
    assert [len(each) for each in pids] == [loader.num_workers] * 4

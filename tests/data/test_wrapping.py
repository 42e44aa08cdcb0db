"""``FastDataModule.wrap``: any data module of either package, with batches in place and nothing else changed."""

import copy
import importlib
import logging
import multiprocessing
import pickle
import random
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities import CombinedLoader
from measure.test_ranks_gloo import in_ranks
from recording import quiet_trainer
from slot_memory import memory_of
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_feed import AutotuneCallback, FastDataModule, LoaderSettings, _host
from lightning_feed.data import wrapping
from lightning_feed.errors import SettingsError
from lightning_feed.in_fit.replaced_loader import with_setting
from lightning_feed.in_fit.tuned_loader import LOOK_STEPS
from lightning_feed.load.rehearsal import Rehearsal, rehearse
from lightning_feed.load.settings import Setting
from lightning_feed.load.slot_loaders import uses_slots

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]
TWO = LoaderSettings(num_workers=2, prefetch_factor=3, persistent_workers=False)

pytestmark = [
    # What a user's own loaders and the small module bring about.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata, with torch 2.15
]


@pytest.fixture(autouse=True)
def _rehearsals_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """load/test_rehearsal.py has real ones, each of several processes."""
    monkeypatch.setattr(wrapping, "rehearse", lambda _: Rehearsal())


class Rows(Dataset[torch.Tensor]):
    def __init__(self, size: int = 24, *, noise: float = 0.01) -> None:
        self.size = size
        self.noise = noise

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        row = torch.full((32,), float(index))
        return row + self.noise * torch.rand(32) if self.noise else row


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (torch.ones(32) for _ in range(8))


def stack(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples)


def begin(worker: int) -> None:
    pass


class Plain(LightningDataModule):
    """Writes down which of its hooks were called."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.called: list[str] = []

    def prepare_data(self) -> None:
        self.called.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.called.append(f"setup {getattr(stage, 'value', stage)!s}")
        self.rows = Rows()

    def teardown(self, stage: str) -> None:
        self.called.append(f"teardown {getattr(stage, 'value', stage)!s}")

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, batch_size=4, shuffle=True, collate_fn=stack, worker_init_fn=begin)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if "transfer" not in self.called:
            self.called.append("transfer")
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.called.append(f"load {state_dict}")


class Gives(LightningDataModule):
    def __init__(self, given: Any) -> None:
        super().__init__()
        self.given = given

    def train_dataloader(self) -> Any:
        return self.given


def changed(given: Any, settings: LoaderSettings = TWO) -> Any:
    return FastDataModule.wrap(Gives(given), loader=settings).train_dataloader()


def test_a_wrapped_data_module_keeps_its_hooks_state_and_hyperparameters(tmp_path: Any) -> None:
    data = Plain()
    wrapped = FastDataModule.wrap(data, loader=TWO)
    trainer = quiet_trainer([], max_epochs=1)
    trainer.fit(BoringModel(), datamodule=wrapped)
    loader = trainer.train_dataloader
    assert (loader.num_workers, loader.prefetch_factor, loader.batch_size) == (2, 3, 4)
    assert (loader.collate_fn, loader.dataset) == (stack, data.rows)
    assert data.called == ["prepare_data", "setup fit", "transfer", "teardown fit"]
    assert wrapped is data
    assert wrapped.hparams == {"width": 32}
    assert wrapped.recommendations["train"].setting.num_workers == 2
    assert "train: num_workers=2: as given" in wrapped.loader_report()
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=False)
    assert saved["Plain"] == {"seen": 3}
    assert saved["datamodule_hyper_parameters"] == {"width": 32}
    quiet_trainer([], max_epochs=2).fit(BoringModel(), datamodule=wrapped, ckpt_path=tmp_path / "a.ckpt")
    assert "load {'seen': 3}" in data.called


class Hand(Plain):
    """Its samples draw random numbers in the workers, of which there are ``workers``."""

    workers = 0
    noise = 0.01

    def train_dataloader(self) -> Any:
        rows = Rows(noise=self.noise)
        return DataLoader(rows, 4, shuffle=True, collate_fn=stack, worker_init_fn=begin, num_workers=self.workers)


def weights(data: Any) -> dict[str, torch.Tensor]:
    seed_everything(3, verbose=False)
    model = BoringModel()
    quiet_trainer([], max_epochs=2).fit(model, datamodule=data)
    return {**model.state_dict(), "next": torch.rand(3)}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_wrapped_fit_trains_the_same_as_an_unwrapped_one(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hand, "workers", workers)
    torch.testing.assert_close(weights(FastDataModule.wrap(Hand())), weights(Hand()), rtol=0, atol=0)


def test_a_fit_with_added_workers_trains_the_same_samples_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hand, "noise", 0.0)
    torch.testing.assert_close(weights(FastDataModule.wrap(Hand(), loader=TWO)), weights(Hand()), rtol=0, atol=0)


@pytest.mark.parametrize("persists", [True, False])
def test_wrapping_keeps_all_that_concerns_the_workers(*, persists: bool) -> None:
    context = multiprocessing.get_context("spawn")
    options: dict[str, Any] = {"worker_init_fn": begin, "multiprocessing_context": context, "prefetch_factor": 5}
    loader = changed(DataLoader(Rows(), 4, num_workers=2, persistent_workers=persists, **options), LoaderSettings())
    assert (loader.num_workers, loader.persistent_workers, loader.prefetch_factor) == (2, persists, 5)
    assert loader.worker_init_fn is begin
    assert loader.multiprocessing_context is context


def test_without_workers_one_line_says_that_batches_in_place_need_some(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lightning_feed")
    data = FastDataModule.wrap(Gives(DataLoader(Rows())))
    for _ in range(2):
        assert data.train_dataloader().num_workers == 0
    lines = [record.getMessage() for record in caplog.records if "Batches in place need workers" in record.getMessage()]
    assert len(lines) == 1
    assert "LoaderSettings(num_workers='tune')" in lines[0]


class Draws(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(0)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.rng.random()])


def test_workers_are_not_added_to_a_dataset_that_a_rehearsal_refuses(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrapping, "rehearse", rehearse)
    data = FastDataModule.wrap(Gives(DataLoader(Draws(), 4)), LoaderSettings(num_workers=2))
    for _ in range(2):
        assert data.train_dataloader().num_workers == 0
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith("train: num_workers=2 is not set: sample ")
    assert "depends on what was read before it (dataset.rng)" in warnings[0]
    assert "(dataset.rng)" in data.loader_report()


def test_settings_that_need_workers_are_said_to_have_no_effect_without_any(caplog: pytest.LogCaptureFixture) -> None:
    FastDataModule.wrap(Gives(DataLoader(Rows())), LoaderSettings(prefetch_factor=4)).train_dataloader()
    assert "prefetch_factor=4 has no effect, because the loader has no workers" in caplog.text


def test_num_workers_tune_adds_an_autotune_callback() -> None:
    trainer = quiet_trainer([], max_epochs=1)
    trainer.fit(BoringModel(), datamodule=FastDataModule.wrap(Plain(), LoaderSettings(num_workers="tune")))
    assert sum(type(callback) is AutotuneCallback for callback in _host.callbacks_of(trainer)) == 1


@pytest.mark.parametrize("package", PACKAGES)
def test_data_modules_of_both_packages_can_be_wrapped(package: str) -> None:
    root = importlib.import_module(package)

    class Data(root.LightningDataModule):  # type: ignore[misc, name-defined]
        def train_dataloader(self) -> Any:
            return DataLoader(Rows(), batch_size=4)

    feed = importlib.import_module("lightning_feed" if package == "lightning.pytorch" else "lightning_feed.pl")
    boring = importlib.import_module(f"{package}.demos.boring_classes").BoringModel
    wrapped = feed.FastDataModule.wrap(Data(), loader=TWO)
    trainer = root.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, max_epochs=1,
    )  # fmt: skip
    trainer.fit(boring(), datamodule=wrapped)
    assert trainer.train_dataloader.num_workers == 2


def test_wrapping_keeps_samplers_batch_sizes_and_generators() -> None:
    generator = torch.Generator()
    rows = Rows()
    sampler = WeightedRandomSampler([1.0] * 24, 12)
    batches = BatchSampler(SequentialSampler(rows), 5, drop_last=True)
    one = changed(DataLoader(rows, batch_size=4, sampler=sampler, drop_last=True, generator=generator))
    assert (one.sampler, one.batch_size, one.drop_last, one.generator, one.dataset) == (
        sampler,
        4,
        True,
        generator,
        rows,
    )
    two = changed(DataLoader(rows, batch_sampler=batches, worker_init_fn=begin))
    assert (two.batch_sampler, two.batch_size, two.worker_init_fn) == (batches, None, begin)
    three = changed(DataLoader(rows, batch_size=None))
    assert (three.batch_size, three.batch_sampler) == (None, None)
    four = changed(DataLoader(Stream(), batch_size=3, drop_last=True))
    assert (four.batch_size, four.drop_last) == (3, True)
    assert [loader.num_workers for loader in (one, two, three, four)] == [2] * 4


def test_streams_keep_their_number_of_workers() -> None:
    auto = LoaderSettings()
    assert changed(DataLoader(Stream(), batch_size=2), auto).num_workers == 0
    assert changed(DataLoader(Stream(), batch_size=2, num_workers=2), auto).num_workers == 2
    assert changed(DataLoader(Stream(), batch_size=2), TWO).num_workers == 2


def test_loaders_in_dicts_lists_and_combined_loaders_are_changed() -> None:
    made = changed({"a": DataLoader(Rows()), "b": [DataLoader(Rows()), DataLoader(Rows())]})
    assert [made["a"].num_workers, made["b"][0].num_workers, made["b"][1].num_workers] == [2, 2, 2]
    original = CombinedLoader({"a": DataLoader(Rows(4)), "b": DataLoader(Rows(8))}, "max_size_cycle")
    combined = changed(original)
    assert [loader.num_workers for loader in combined.flattened] == [2, 2]
    assert [loader.num_workers for loader in original.flattened] == [0, 0]
    assert sum(1 for _ in combined) == 8


def test_dataloader_subclasses_keep_their_class_and_others_stay_unchanged(caplog: pytest.LogCaptureFixture) -> None:
    class Own(DataLoader[Any]):
        def __init__(self, rows: Any, extra: str, **options: Any) -> None:
            super().__init__(rows, **options)
            self.extra = extra

    own = changed(Own(Rows(), "kept", batch_size=6))
    assert isinstance(own, Own)
    assert (type(own).__name__, own.extra, own.batch_size, own.num_workers) == ("Own", "kept", 6, 2)
    assert sum(len(batch) for batch in own) == 24
    stateful = changed(StatefulDataLoader(Rows(), batch_size=6, snapshot_every_n_steps=7))
    assert (type(stateful), stateful.snapshot_every_n_steps, stateful.num_workers) == (StatefulDataLoader, 7, 2)
    data = FastDataModule.wrap(Gives([torch.ones(2, 32)]))
    first = data.train_dataloader()
    assert first[0] is data.given[0]
    data.train_dataloader()
    assert caplog.text.count("train[0] is a Tensor, not a torch DataLoader, so it is left as it is") == 1


def test_a_dataset_that_cannot_be_pickled_gets_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(Rows):
        pass

    machine = replace(wrapping.read_machine(), start_method="spawn")
    monkeypatch.setattr(wrapping, "read_machine", lambda: machine)
    data = FastDataModule.wrap(Gives(DataLoader(Local())), LoaderSettings(num_workers=2))
    assert data.train_dataloader().num_workers == 0
    assert "cannot be sent to worker processes" in data.loader_report()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda: FastDataModule.wrap(Rows()), r"A Rows cannot be wrapped.*LightningDataModule\.from_datasets"),
        (lambda: FastDataModule.wrap(Plain), r"Plain is a class\. Pass an object of this class: Plain\(\.\.\.\)"),
        (lambda: FastDataModule.wrap(FastDataModule()), "already chooses its loaders itself"),
        (lambda: FastDataModule.wrap(FastDataModule.wrap(Plain())), "already chooses its loaders itself"),
        (lambda: FastDataModule.wrap(Plain(), loader=LoaderSettings(drop_last=True)), "drop_last=True would have no"),
    ],
)
def test_invalid_objects_and_settings_for_wrap_are_refused(given: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        given()


def test_a_dali_iterator_is_left_unchanged_and_logged_with_advice(caplog: pytest.LogCaptureFixture) -> None:
    kind = type("DALIGenericIterator", (), {"__module__": "nvidia.dali.plugin.pytorch"})
    derived = type("Ours", (kind,), {"__module__": __name__})
    given = {"a": kind(), "b": derived(), "c": torch.zeros(1)}
    assert FastDataModule.wrap(Gives(given)).train_dataloader() == given
    messages = [record.getMessage() for record in caplog.records if "left as it is" in record.getMessage()]
    assert ["DALI loads in threads of its own" in line for line in messages] == [True, True, False]


# --- two real ranks ---------------------------------------------------------------------------------------------------


class Lesson(Rows):
    level = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((32,), float(self.level))


class Lessons(LightningDataModule):
    """Written for loaders without workers: it changes its datasets as the fit goes on."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.lesson = Lesson()
        self.exam = Lesson()
        self.first = first

    def train_dataloader(self) -> Any:
        return [DataLoader(self.lesson, 4), DataLoader(self.lesson, 4)]

    def val_dataloader(self) -> Any:
        return DataLoader(self.exam, 4)


class Learns(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.levels: dict[str, list[float]] = {"train": [], "val": []}
        self.pids: list[set[int | None]] = []

    def train_dataloader(self) -> Any: ...

    val_dataloader = train_dataloader

    def on_train_epoch_start(self) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        data.lesson.level = data.exam.level = self.current_epoch // 2 + data.first

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.levels["train"] += {*torch.cat(batch)[:, 0].tolist()} if batch_idx == 1 else ()
        return super().training_step(batch[0], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.trainer.sanity_checking and batch_idx == 1:
            self.levels["val"] += {*batch[:, 0].tolist()}
            self.pids.append({child.pid for child in multiprocessing.active_children()})


ONE = LoaderSettings(num_workers=1)


def test_added_workers_see_dataset_changes_made_between_epochs() -> None:
    model = Learns()
    trainer = quiet_trainer([], max_epochs=4)
    trainer.fit(model, datamodule=FastDataModule.wrap(Lessons(), ONE))
    assert model.levels == {"train": [0, 0, 1, 1], "val": [0, 0, 1, 1]}


class Course(Lessons):
    """Has one training loader."""

    def train_dataloader(self) -> Any:
        return DataLoader(self.lesson, 4)


class Listens(Learns):
    """Sees the levels of all batches."""

    def __init__(self, *, teaches: bool = False) -> None:
        super().__init__()
        self.teaches = teaches

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.levels["train"].append(float(batch[0, 0]))
        if self.teaches:
            self.trainer.datamodule.lesson.level += 1  # type: ignore[attr-defined]
        return BoringModel.training_step(self, batch, batch_idx)


def test_added_workers_see_a_dataset_change_as_the_first_epoch_begins() -> None:
    """Lightning starts the workers of the first epoch before its hooks."""
    model = Listens()
    trainer = quiet_trainer([], max_epochs=2)
    trainer.fit(model, datamodule=FastDataModule.wrap(Course(first=5), ONE))
    assert model.levels["train"] == [5] * 12
    assert "on_run_start" not in vars(trainer.fit_loop.epoch_loop)


def test_added_workers_go_if_the_dataset_changes_within_an_epoch(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lightning_feed")
    course = Course()
    course.lesson = Lesson(80)
    model = Listens(teaches=True)
    quiet_trainer([], max_epochs=1).fit(model, datamodule=FastDataModule.wrap(course, ONE))
    assert model.levels["train"][LOOK_STEPS:] == list(range(LOOK_STEPS, 20))
    assert "goes back to num_workers=0: the program changes the dataset within an epoch" in caplog.text


def test_reloaded_loaders_see_the_current_state_of_the_dataset() -> None:
    model = Learns()
    trainer = quiet_trainer([], max_epochs=4, reload_dataloaders_every_n_epochs=1)
    trainer.fit(model, datamodule=FastDataModule.wrap(Lessons(), LoaderSettings(num_workers=1)))
    assert model.levels["train"] == [0, 0, 1, 1]


class Sharded(LightningDataModule):
    def train_dataloader(self) -> Any:
        return WithOptions(Rows(), batch_size=4, shuffle=True)


class WithOptions(DataLoader[Any]):
    """Lightning makes it anew from the arguments that it saw."""

    def __init__(self, rows: Any, **options: Any) -> None:
        super().__init__(rows, **options)


class Seen(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rows += batch[:, 0].int().tolist()
        return super().training_step(batch, batch_idx)


def fit_on_a_rank(rank: int) -> Any:
    warnings.filterwarnings("ignore", message="You defined a `validation_step`")
    model = Seen()
    trainer = quiet_trainer([], max_epochs=1, devices=2, strategy="ddp")
    trainer.fit(model, datamodule=FastDataModule.wrap(Sharded(), loader=LoaderSettings(num_workers=1)))
    loader = trainer.train_dataloader
    return loader.num_workers, [type(loader).__name__, type(loader.sampler).__name__], model.rows


def test_two_ranks_divide_the_samples(tmp_path: Path) -> None:
    ranks = in_ranks(2, fit_on_a_rank, tmp_path)
    assert [rank[:2] for rank in ranks] == [[1, ["WithOptions", "DistributedSampler"]]] * 2
    assert sorted(ranks[0][2] + ranks[1][2]) == list(range(24))


def test_a_wrapped_data_module_can_be_pickled_and_copied() -> None:
    data = FastDataModule.wrap(Plain(), loader=TWO)
    data.setup("fit")
    for other in (pickle.loads(pickle.dumps(data)), copy.deepcopy(data)):
        assert type(other) is type(data)
        assert other.train_dataloader().num_workers == 2
        assert other.rows is not data.rows
    assert type(data).__qualname__ == "Plain"


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_lightning_can_rebuild_a_changed_loader_for_several_ranks(kind: Any) -> None:
    from lightning.pytorch.utilities.data import _update_dataloader

    mine = kind(Rows(), batch_size=4, shuffle=True)
    sampler = DistributedSampler(mine.dataset, 2, 0)
    again = _update_dataloader(changed(mine), sampler)
    unwrapped = _update_dataloader(mine, sampler)
    assert (again.num_workers, again.prefetch_factor) == (2, 3)
    assert (again.batch_size, len(again)) == (unwrapped.batch_size, len(unwrapped))


@pytest.mark.parametrize("hand_over", ["slots", "torch"])
def test_a_tuned_copy_hands_batches_over_as_the_wrapped_loader_does(hand_over: Any) -> None:
    settings = LoaderSettings(num_workers=2, hand_over=hand_over)
    loader = FastDataModule.wrap(Gives(DataLoader(Rows(), batch_size=6)), loader=settings).train_dataloader()
    tuned = with_setting(loader, Setting.of(loader).with_workers(1))
    assert [uses_slots(loader), uses_slots(tuned)] == [hand_over == "slots"] * 2
    for batches in (iter(loader), iter(tuned)):
        assert (memory_of(batches) is not None) is (hand_over == "slots")
        assert sum(len(batch) for batch in batches) == 24

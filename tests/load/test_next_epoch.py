"""Workers go on with the next epoch before it begins: the same batches, and only where nothing may change."""

import functools
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import covering, in_gate
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import Callback, seed_everything
from recording import Recording, by_hook, quiet_trainer
from resuming import SaveThenDie, run
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, RandomSampler

from lightning_feed import FastDataModule, LoaderSettings, _host
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.order import EpochOrder
from lightning_feed.load.processes import shut_down_workers

SIZE = 23
PATIENCE_S = 20.0

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
]


class Logged(Dataset[int]):
    """Sample i is i plus ``level``; each sample that is read, in any process, becomes a line of a file."""

    def __init__(self, log: Path, size: int = SIZE) -> None:
        self.log = str(log)
        self.size = size
        self.level = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        file = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, b"x")
        os.close(file)
        return index + self.level


class Epochs:
    """Counts epochs, as a Trainer does."""

    def __init__(self, most: int | None = None) -> None:
        self.now = 0
        self.most = most

    def order(self, seed: int = 7, *, goes_on: bool = True) -> EpochOrder:
        order = EpochOrder(seed=seed, epoch=lambda: self.now)
        if goes_on:
            order.next_epoch = self.next
        return order

    def next(self, epoch: int) -> int | None:
        return None if epoch + 1 == self.most else epoch + 1


SAMPLERS: dict[str, Callable[[Dataset[int]], dict[str, Any]]] = {
    "sequential": lambda _: {"batch_size": 4},
    "shuffled": lambda _: {"batch_size": 4, "shuffle": True},
    "one batch": lambda _: {"batch_size": SIZE, "shuffle": True},
    "two batches": lambda _: {"batch_size": 12, "shuffle": True},
    "single samples": lambda _: {"batch_size": None, "shuffle": True, "collate_fn": torch.as_tensor},
    "batch sampler": lambda data: {"batch_sampler": BatchSampler(RandomSampler(data), 5, drop_last=True)},
    "distributed": lambda data: {"batch_size": 4, "sampler": DistributedSampler(data, 2, 1)},
    "distributed, wrapped": lambda data: {
        "batch_size": 4,
        "sampler": DistributedSamplerWrapper(RandomSampler(data), num_replicas=2, rank=0),
    },
    "distributed, not shuffled": lambda data: {
        "batch_size": 4,
        "sampler": DistributedSampler(data, 2, 1, shuffle=False),
    },
}


def loader_of(data: Dataset[int], order: EpochOrder, sampler: str = "shuffled", **options: Any) -> FeedLoader:
    made = {} if "batch_sampler" in options else SAMPLERS[sampler](data)
    options = {"num_workers": 2, "persistent_workers": True, **made, **options}
    return FeedLoader(data, order=order, **options)


def as_lists(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


def lines(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def wait_for(log: Path, least: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while lines(log) < least:
        assert time.monotonic() < until, f"{lines(log)} samples were read, and {least} were expected"
        time.sleep(0.01)


@covering(sampler=list(SAMPLERS), background=[0, 2])
def test_workers_prefetch_the_next_epoch_and_batches_stay_the_same(
    sampler: str, background: int, tmp_path: Path
) -> None:
    epochs = Epochs(most=3)
    log = tmp_path / "log"
    loader = loader_of(Logged(log), epochs.order(), sampler, background=background)
    plain_epochs = Epochs()
    plain = loader_of(Logged(tmp_path / "plain"), plain_epochs.order(goes_on=False), sampler)
    for epoch in range(3):
        epochs.now = plain_epochs.now = epoch
        assert as_lists(loader) == as_lists(plain)
        if epoch < 2:
            wait_for(log, lines(tmp_path / "plain") + 1)
    assert lines(log) == lines(tmp_path / "plain")  # nothing is made twice, and nothing beyond the last epoch
    loader.close()
    shut_down_workers(loader._iterator)
    shut_down_workers(plain._iterator)


def test_state_dict_counts_yielded_batches_not_prefetched_ones(tmp_path: Path) -> None:
    epochs, plain_epochs = Epochs(), Epochs()
    loader = loader_of(Logged(tmp_path / "log"), epochs.order())
    plain = loader_of(Logged(tmp_path / "plain"), plain_epochs.order(goes_on=False))
    for epoch in range(3):
        epochs.now = plain_epochs.now = epoch
        for one, other in zip(loader, plain, strict=True):
            assert one.tolist() == other.tolist()
            assert loader.state_dict() == plain.state_dict()
        assert loader.state_at_end(loader.state_dict()) == plain.state_at_end(plain.state_dict())


class Kept(Dataset[int]):
    """Has an attribute that a program may change while workers load."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index


class ToldOfEpochs(Kept):
    def set_epoch(self, epoch: int) -> None: ...


class OwnSampler(RandomSampler):
    pass


RESTS: dict[str, Callable[[], dict[str, Any]]] = {
    "a shared value": lambda: {"data": Kept(multiprocessing.Value("i"))},
    "a raw shared value": lambda: {"data": Kept(multiprocessing.RawValue("i"))},
    "a shared array": lambda: {"data": Kept([multiprocessing.Array("i", 3)])},
    "an event": lambda: {"data": Kept(multiprocessing.Event())},
    "a queue": lambda: {"data": Kept(multiprocessing.Queue())},
    "a connection": lambda: {"data": Kept(multiprocessing.Pipe())},
    "a shared tensor": lambda: {"data": Kept(torch.zeros(1).share_memory_())},
    "set_epoch": lambda: {"data": ToldOfEpochs(None)},
    "own sampler": lambda: {"batch_sampler": BatchSampler(OwnSampler(range(SIZE)), 4, drop_last=False)},
    "the user's generator": lambda: {"generator": torch.Generator().manual_seed(1)},
    "any order": lambda: {"in_order": False},
    "the last epoch": lambda: {"order": Epochs(most=1).order()},
    "no order": lambda: {"order": None},
    "workers that end": lambda: {"persistent_workers": False},
}


@pytest.mark.parametrize(
    "name",
    in_gate(
        list(RESTS),
        # All that is shared is found by the same walk, of which test_rehearsal.py has the rest.
        [name for name in RESTS if name in ("a shared value", "a shared tensor") or not re.match("an? ", name)],
    ),
)
def test_next_epoch_is_not_prefetched_where_data_or_order_may_change(name: str) -> None:
    options = {"data": Kept(None), "order": Epochs().order(), **RESTS[name]()}
    loader = loader_of(options.pop("data"), options.pop("order"), **options)
    list(loader)
    assert not loader._index.following
    shut_down_workers(loader._iterator)


def test_next_epoch_is_prefetched_for_a_plain_dataset() -> None:
    loader = loader_of(Kept(None), Epochs().order())
    list(loader)
    assert loader._index.following
    shut_down_workers(loader._iterator)


def test_dataset_change_between_epochs_reaches_the_next_epoch(tmp_path: Path) -> None:
    data = Logged(tmp_path / "log")
    epochs = Epochs()
    loader = loader_of(data, epochs.order(), "sequential")
    loader.probed = True
    assert as_lists(loader)[0] == [0, 1, 2, 3]
    wait_for(tmp_path / "log", SIZE + 1)
    data.level = 100
    epochs.now = 1
    assert as_lists(loader)[0] == [100, 101, 102, 103]
    shut_down_workers(loader._iterator)


@covering(sampler=["sequential", "shuffled"], epoch=[0, 1, 5])
def test_repeated_or_skipped_epoch_gives_the_batches_of_a_plain_loader(
    sampler: str, epoch: int, tmp_path: Path
) -> None:
    """The same epoch once more, or a later one: as if the workers had rested."""
    epochs, plain_epochs = Epochs(), Epochs()
    loader = loader_of(Logged(tmp_path / "log"), epochs.order(), sampler)
    plain = loader_of(Logged(tmp_path / "plain"), plain_epochs.order(goes_on=False), sampler)
    for now in (0, epoch, epoch + 1):
        epochs.now = plain_epochs.now = now
        assert as_lists(loader) == as_lists(plain)
        assert loader.state_dict() == plain.state_dict()
    shut_down_workers(loader._iterator)
    shut_down_workers(plain._iterator)


def test_pass_after_an_early_break_starts_at_the_first_batch(tmp_path: Path) -> None:
    loader = loader_of(Logged(tmp_path / "log"), Epochs().order(), "sequential")
    for _ in range(3):
        batches = iter(loader)
        for _ in range(5):  # the indices of the next epoch were given out by now
            next(batches)
    assert as_lists(loader)[0] == [0, 1, 2, 3]
    shut_down_workers(loader._iterator)


def test_state_loaded_between_epochs_resumes_despite_prefetched_batches(tmp_path: Path) -> None:
    epochs = Epochs()
    loader = loader_of(Logged(tmp_path / "log"), epochs.order())
    states = []
    whole = []
    for batch in loader:
        states.append(loader.state_dict())
        whole.append(batch.tolist())
    loader.load_state_dict(states[2])
    assert as_lists(loader) == whole[3:]
    shut_down_workers(loader._iterator)


def test_worker_killed_between_epochs_raises_and_is_then_replaced(tmp_path: Path) -> None:
    epochs = Epochs()
    loader = loader_of(Logged(tmp_path / "log"), epochs.order())
    list(loader)
    wait_for(tmp_path / "log", SIZE + 1)
    worker = loader._iterator._workers[0]  # type: ignore[union-attr]
    os.kill(worker.pid, signal.SIGKILL)
    epochs.now = 1
    with pytest.raises(RuntimeError, match=r"killed by signal|exited unexpectedly"):
        as_lists(loader)
    assert len(list(loader)) == 6  # with new workers
    shut_down_workers(loader._iterator)


def test_position_gives_the_indices_of_the_awaited_batch_in_a_later_epoch(tmp_path: Path) -> None:
    epochs = Epochs()
    loader = loader_of(Logged(tmp_path / "log"), epochs.order(), "sequential")
    list(loader)
    epochs.now = 1
    batches = iter(loader)
    first = next(batches)
    assert first.tolist() == [0, 1, 2, 3]
    assert batches.position.index_of(batches.source._rcvd_idx - batches.position.before) == [4, 5, 6, 7]
    shut_down_workers(loader._iterator)


# --- in a Trainer -------------------------------------------------------------------------------------------------


class Noise(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


class Birds(FastDataModule):
    def make_dataset(self, split: str) -> Any:
        return Noise() if split in ("train", "val") else None


def birds() -> dict[str, Any]:
    return {"datamodule": Birds(4, loader=LoaderSettings(num_workers=2))}


@functools.cache
def whole_run() -> list[Any]:
    """What a fit trains that is never broken off."""
    return run(birds, [], max_epochs=3)


class Began(Callback):
    """Whether the batches of an epoch, and of a validation, were under way before it began."""

    def __init__(self) -> None:
        self.train: list[bool] = []
        self.validation: list[bool] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not batch_idx:
            self.train.append(trainer.train_dataloader._passes.latest.before > 0)

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        if not batch_idx and not trainer.sanity_checking:
            self.validation.append(trainer.val_dataloaders._passes.latest.before > 0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"val_check_interval": 2},
        {"check_val_every_n_epoch": 2},
        pytest.param({"limit_val_batches": 2}, marks=pytest.mark.nightly),
        {"limit_train_batches": 3},
        pytest.param({"num_sanity_val_steps": 0}, marks=pytest.mark.nightly),
        {"reload_dataloaders_every_n_epochs": 2},
        pytest.param({"max_steps": 8}, marks=pytest.mark.nightly),
    ],
)
def test_fit_with_prefetched_epochs_matches_one_without(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    began = Began()
    with_pause, without = Recording(), Recording()
    seed_everything(7, verbose=False)
    quiet_trainer([began], max_epochs=3, **options).fit(without, **birds())
    monkeypatch.setattr(_host, "next_epoch", lambda *_: None)
    seed_everything(7, verbose=False)
    quiet_trainer([], max_epochs=3, **options).fit(with_pause, **birds())
    assert by_hook(without.events) == by_hook(with_pause.events)
    goes_on = not {"limit_train_batches", "reload_dataloaders_every_n_epochs"} & set(options)
    assert began.train[:2] == [False, goes_on]
    if not options:
        assert began.validation == [False, True, True]


@pytest.mark.parametrize(
    ("moment", "count"),
    [
        pytest.param("on_train_epoch_end", 0, marks=pytest.mark.nightly),
        ("on_train_epoch_end", 1),
        ("on_validation_end", 1),
        ("on_train_batch_end", 8),
    ],
)
def test_fit_with_prefetched_epochs_resumes_exactly(moment: str, count: int, tmp_path: Path) -> None:
    whole = whole_run()
    saved = tmp_path / "saved.ckpt"
    before = run(birds, [SaveThenDie(moment, count, saved)], max_epochs=3)
    after = run(birds, [], max_epochs=3, ckpt_path=saved)
    assert before + after == whole

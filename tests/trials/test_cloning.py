"""Loaders built anew with changes: the same batches, and the user's own as before, bit for bit."""

import random
import warnings
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_feed.errors import LoaderError
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.order import EpochOrder
from lightning_feed.load.random_state import preserve_state
from lightning_feed.load.settings import Setting
from lightning_feed.trials.cloning import Changes, clone_loader


class Numbers(Dataset[int]):
    """Changes everything that a dataset can change about itself."""

    def __init__(self, size: int = 20) -> None:
        self.size = size
        self.reads = 0
        self.seen: list[int] = []
        self.by_index: dict[int, int] = {}
        self.rng = np.random.default_rng(3)
        self.legacy = np.random.RandomState(4)
        self.python = random.Random(5)
        self.generator = torch.Generator().manual_seed(6)
        self.file: Any = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        self.seen.append(index)
        self.by_index[index] = self.reads
        self.file = object()
        self.rng.random()
        self.legacy.rand()
        self.python.random()
        torch.rand(1, generator=self.generator)
        return index + int(torch.rand(()) + np.random.rand() + random.random()) * 0


class Shuffling(Sampler[int]):
    """Shuffles its own list in place, as samplers of users do."""

    def __init__(self, size: int) -> None:
        self.order = list(range(size))
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        random.shuffle(self.order)
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


class Stream(IterableDataset[int]):
    def __init__(self) -> None:
        self.rng = random.Random(1)

    def __iter__(self) -> Iterator[int]:
        for _ in range(30):
            yield self.rng.randrange(100)


def _loaders() -> dict[str, DataLoader[Any]]:
    seeded = torch.Generator().manual_seed(11)
    data = Numbers()
    return {
        "plain": DataLoader(Numbers(), batch_size=3),
        "shuffled": DataLoader(Numbers(), batch_size=3, shuffle=True, drop_last=True),
        "generator": DataLoader(Numbers(), batch_size=3, shuffle=True, generator=seeded),
        "user's sampler": DataLoader(data, batch_size=4, sampler=Shuffling(20)),
        "weighted": DataLoader(Numbers(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 20, 20)),
        "batch sampler": DataLoader(Numbers(), batch_sampler=BatchSampler(RandomSampler(range(20)), 6, False)),
        "no batches": DataLoader(Numbers(), batch_size=None, sampler=SequentialSampler(range(20))),
        "stream": DataLoader(Stream(), batch_size=4),
        "nested": DataLoader(ConcatDataset([Subset(Numbers(), range(5)), Numbers()]), batch_size=4, shuffle=True),
        "ours": FeedLoader(
            Numbers(), batch_size=4, sampler=RandomSampler(range(20)), order=EpochOrder(seed=7, epoch=lambda: 2)
        ),
        "ours ahead": FeedLoader(Numbers(), batch_size=4, background=2),
        "ours, stream": FeedLoader(Stream(), batch_size=4),
        "threads": FeedLoader(Numbers(), batch_size=4, num_workers=2, workers="thread"),
        "stateful": _stateful(),
    }


def _stateful() -> DataLoader[Any]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata 0.11 under torch 2.15
        torch.manual_seed(0)  # its sampler draws a seed when it is made
        return StatefulDataLoader(Numbers(), batch_size=4, shuffle=True)


def _generators(loader: DataLoader[Any]) -> list[Any]:
    """The states of the generators of a loader and its sampler."""
    holders = (loader, loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    generators = [getattr(holder, "generator", None) for holder in holders]
    return [generator.get_state().tolist() for generator in generators if generator is not None]


def _global() -> Any:
    return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()


KINDS = list(_loaders())


@pytest.mark.parametrize("name", KINDS)
def test_clone_gives_the_same_batches_and_leaves_generators_unchanged(name: str) -> None:
    loader, twin = _loaders()[name], _loaders()[name]
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    before, around = _generators(loader), _global()
    with preserve_state([{"train": loader}]):
        found = list(clone_loader(loader))
    assert _generators(loader) == before
    assert _global() == around
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    if isinstance(twin, FeedLoader) and twin.order is not None:
        assert sorted(torch.cat(found).tolist()) == sorted(torch.cat(list(twin)).tolist())  # it has no order of its own
    else:
        expected = list(twin)
        assert len(found) == len(expected)
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(found, expected, strict=True))
    assert type(clone_loader(loader)) in (DataLoader, FeedLoader, StatefulDataLoader)
    assert isinstance(clone_loader(loader), FeedLoader) == isinstance(loader, FeedLoader)


class Negating:
    """In the place of a decoder of whole batches."""

    def run(self, batches: Iterator[Any], under_way: int) -> Generator[Any, None, None]:
        for batch in batches:
            yield -batch


def test_clone_keeps_the_batch_decoder_of_the_loader() -> None:
    loader = FeedLoader(Numbers(), batch_size=4, decode=Negating())
    expected = list(loader)
    assert min(float(batch.min()) for batch in expected) < 0
    for changes in (Changes(), Changes(setting=Setting(num_workers=2, workers="thread"))):
        with preserve_state(loader):
            found = list(clone_loader(loader, changes))
        assert all(bool((batch <= 0).all()) for batch in found)
        assert len(found) == len(expected)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "threads"])
def test_clone_with_new_worker_settings_yields_all_batches(name: str) -> None:
    loader = _loaders()[name]
    around = _global()
    with preserve_state(loader):
        variant = clone_loader(loader, Changes(setting=Setting(num_workers=1, prefetch_factor=3, in_order=False)))
        batches = [torch.as_tensor(batch) for batch in variant]
    assert _global() == around
    assert (variant.num_workers, variant.prefetch_factor, variant.in_order) == (1, 3, False)
    assert len(batches) == len(list(loader))
    del batches


def test_cloning_leaves_a_running_pass_with_persistent_workers_intact() -> None:
    loader = DataLoader(Numbers(), batch_size=2, num_workers=1, persistent_workers=True)
    mine = iter(loader)
    first = next(mine)
    with preserve_state(loader):
        assert len(list(clone_loader(loader))) == 10
    assert loader._iterator is mine
    rest = list(mine)
    assert torch.cat([first, *rest]).tolist() == list(range(20))


def test_clone_neither_uses_nor_changes_the_position_of_the_loader() -> None:
    loader = FeedLoader(Numbers(), batch_size=2)
    mine = iter(loader)
    next(mine)
    place = loader.state_dict()
    with preserve_state(loader):
        assert len(list(clone_loader(loader))) == 10
    assert loader.state_dict() == place
    assert next(mine).tolist() == [2, 3]


def test_clone_keeps_the_settings_of_the_loader() -> None:
    def init(worker: int) -> None:
        pass

    loader = DataLoader(
        Numbers(),
        batch_size=2,
        num_workers=2,
        prefetch_factor=5,
        persistent_workers=True,
        timeout=9,
        worker_init_fn=init,
        multiprocessing_context="spawn",
        in_order=False,
        drop_last=True,
    )
    same = clone_loader(loader)
    for name in ("num_workers", "prefetch_factor", "persistent_workers", "timeout", "worker_init_fn", "in_order"):
        assert getattr(same, name) == getattr(loader, name), name
    assert same.multiprocessing_context.get_start_method() == "spawn"
    assert same.collate_fn is loader.collate_fn
    alone = clone_loader(loader, Changes(setting=Setting.of(loader).with_workers(0)))
    assert (alone.num_workers, alone.prefetch_factor, alone.timeout) == (0, None, 0)
    assert not alone.persistent_workers


def test_cloning_a_loader_over_a_one_time_iterator_raises_an_error() -> None:
    used_up = DataLoader(Numbers(), batch_sampler=iter([[1], [2]]))  # type: ignore[arg-type]
    with pytest.raises(LoaderError, match="iterator, which can be iterated only once"):
        clone_loader(used_up)


class Infinite(DataLoader[int]):
    """Keeps one iterator for ever, as some training codes do."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        object.__setattr__(self, "kept", super().__iter__())

    def __iter__(self) -> Any:
        return self.kept


class Doubled(DataLoader[int]):
    """Iterates in a way of its own, with an argument of its own."""

    def __init__(self, factor: int, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.factor = factor

    def __iter__(self) -> Any:
        return (batch * self.factor for batch in super().__iter__())


def test_cloning_supports_a_custom_iter_and_refuses_a_stored_iterator() -> None:
    infinite = Infinite(Numbers(), batch_size=2)
    with pytest.raises(LoaderError, match="'kept'"):
        clone_loader(infinite)
    assert next(infinite.kept).tolist() == [0, 1]
    doubled = Doubled(2, Numbers(), batch_size=2)
    with preserve_state(doubled):
        variant = clone_loader(doubled, Changes(setting=Setting(num_workers=1), batches=[[3], [4, 5]]))
        assert [batch.tolist() for batch in variant] == [[6], [8, 10]]
    assert (doubled.num_workers, doubled.batch_size) == (0, 2)

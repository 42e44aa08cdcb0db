"""Loaders and their live iterators inside WebLoader, Fabric's loaders, CombinedLoader and generators."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import webdataset
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, IterableDataset

from lightning_feed.diagnosing.parts import parts_of
from lightning_feed.measure.loader_state import (
    Probe,
    TorchProbe,
    iterator_in,
    probe_loader,
)
from lightning_feed.measure.loader_watch import LoaderWatch


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.ones(1), 1)] * 64)


def _loader(workers: int = 0) -> DataLoader[Any]:
    return DataLoader(Endless(), batch_size=2, num_workers=workers)


def _web(workers: int = 0, *, rebatched: bool = False) -> Any:
    made = webdataset.WebLoader(Endless(), batch_size=2, num_workers=workers)
    return made.unbatched().batched(4) if rebatched else made


def _fabric(workers: int = 0) -> Any:
    return Fabric(accelerator="cpu", devices=1).setup_dataloaders(_loader(workers))


WRAPPERS = {
    "webdataset": _web,
    "webdataset, batched anew": lambda workers=0: _web(workers, rebatched=True),
    "Fabric": _fabric,
}


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("workers", [0, 1])
def test_the_live_iterator_inside_is_looked_at(kind: str, workers: int) -> None:
    batches = iter(WRAPPERS[kind](workers))
    next(batches)
    probe = probe_loader(batches)
    assert isinstance(probe, Probe)
    assert probe.iterator() is batches
    assert probe.held == 2 * workers
    assert len(probe.workers().pids) == workers
    state = probe.read()
    assert state is not None
    assert state.taken >= 1


def test_nothing_is_told_of_several_or_none() -> None:
    def both() -> Iterator[Any]:
        yield from zip(_loader(), _loader(), strict=True)

    batches = both()
    next(batches)
    assert iterator_in(batches) is None
    assert probe_loader(batches) is None
    assert probe_loader(iter([1, 2])) is None
    assert isinstance(probe_loader(iter(_loader(1))), TorchProbe)


def test_the_queue_of_a_wrapped_loader_is_watched() -> None:
    batches = iter(_web(1))
    watch = LoaderWatch(lambda: [batches])
    watch.epoch_began()
    for _ in range(8):
        watch.fetch_began()
        next(batches)
        watch.fetch_ended()
    stats = watch.total()
    watch.close()
    assert stats.queue_capacity == 2
    assert stats.produced_per_s is not None


def test_experiments_are_made_on_the_loader_inside_where_that_gives_the_same_batches() -> None:
    web = _web(1)
    assert [part.loader for part in parts_of({"web": web})] == [web.pipeline[0]]
    with pytest.raises(Exception, match="not a torch DataLoader"):
        parts_of(_web(rebatched=True))

"""Loaders and their live iterators inside WebLoader, Fabric's loaders, CombinedLoader and generators."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import webdataset
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, IterableDataset

from lightning_feed.diagnosing.parts import parts_of
from lightning_feed.load.loader_tree import loaders_in
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
def test_a_wrapped_loader_is_found_but_its_iterator_gives_no_figures(kind: str) -> None:
    loader = WRAPPERS[kind](1)
    assert [inside.num_workers for inside in loaders_in({"train": loader})] == [1]
    batches = iter(loader)
    watch = LoaderWatch(lambda: [batches])
    watch.epoch_began()
    for _ in range(4):
        watch.fetch_began()
        next(batches)
        watch.fetch_ended()
    stats = watch.total()
    watch.close()
    assert (stats.queue_capacity, stats.queue_ready, stats.workers_on_cpu_pct) == (None, None, None)


def test_experiments_use_a_wrapped_loader_only_if_its_batches_are_the_same() -> None:
    web = _web(1)
    assert [part.loader for part in parts_of({"web": web})] == [web.pipeline[0]]
    with pytest.raises(Exception, match="not a torch DataLoader"):
        parts_of(_web(rebatched=True))

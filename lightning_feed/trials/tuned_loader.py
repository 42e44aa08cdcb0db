"""A tuned loader in the place of the user's: other workers, the same draws from torch's generators."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.order import DrawsOf, size_of
from lightning_feed.load.processes import shut_down_workers
from lightning_feed.load.settings import RayCluster
from lightning_feed.trials.cloning import twin_of
from lightning_feed.trials.trial import Setting


def why_fixed(loader: Any) -> str:
    """Why the workers of a training loader cannot be changed; empty where they can."""
    kind = type(loader)
    if not isinstance(loader, DataLoader):
        return f"the training loader ({kind.__name__}) is no DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return "the dataset is iterable, so its samples depend on the number of workers"
    known = kind.__iter__ in (DataLoader.__iter__, FeedLoader.__iter__)
    if not known or kind._get_iterator is not DataLoader._get_iterator:
        return f"the training loader ({kind.__name__}) iterates in its own way"
    if isinstance(getattr(loader, "workers", None), RayCluster):
        return "Ray workers run on other machines"
    return ""


def setting_of(loader: DataLoader[Any]) -> Setting:
    """The present setting of a loader."""
    workers = loader.num_workers
    return Setting(
        num_workers=workers,
        prefetch_factor=loader.prefetch_factor if workers else None,
        workers=getattr(loader, "workers", "process") if workers else "process",
        persistent_workers=loader.persistent_workers,
        pin_memory=loader.pin_memory,
    )


def with_setting(loader: DataLoader[Any], setting: Setting) -> DataLoader[Any]:
    """A twin of a loader with the workers of ``setting``, in the same order of samples.

    Its workers are seeded by a generator of their own, and the seed that the given loader would draw for its workers is
    drawn all the same: the numbers that samplers and model draw afterwards stay what they were.

    Args:
        loader: one of which :func:`why_fixed` says nothing. It is left as it is.
        setting: to take ``num_workers``, ``workers``, ``prefetch_factor`` and ``persistent_workers`` from. Workers of
            a loader that has persistent ones stay persistent.
    """
    values: dict[str, Any] = {
        "num_workers": setting.num_workers,
        "prefetch_factor": setting.prefetch_factor,
        "persistent_workers": setting.persistent_workers or loader.persistent_workers,
    }
    if isinstance(loader, FeedLoader):
        if setting.num_workers:
            values["workers"] = setting.workers
        if loader.draws is None:
            values |= {"draws": DrawsOf(loader), "generator": _seeds_for(loader)}
    else:
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        source = getattr(loader, name)
        if not isinstance(source, SameDraws):
            values |= {name: SameDraws(source, loader), "generator": _seeds_for(loader)}
    twin = twin_of(loader, **values)
    if isinstance(twin, FeedLoader) and isinstance(loader, FeedLoader):
        twin.follow(loader)
    return twin


def end_workers(loader: DataLoader[Any]) -> None:
    """End the workers that a loader keeps from pass to pass."""
    if isinstance(loader, FeedLoader):
        loader.close()  # a thread that reads ahead would go on
    iterator, loader._iterator = loader._iterator, None
    shut_down_workers(iterator)


def _seeds_for(loader: DataLoader[Any]) -> torch.Generator:
    own = loader.generator
    seed = torch.initial_seed() if own is None else own.initial_seed()
    return torch.Generator(torch.empty(0).device if own is None else own.device).manual_seed(seed)


class SameDraws:
    """A sampler that draws, with any workers, what it drew with those of the loader that it was taken from.

    When a pass begins, torch begins an iteration of the sampler, draws a seed for the workers, and begins another
    iteration where it has started worker processes (torch 2.6 to 2.15, ``_BaseDataLoaderIter.__init__`` and
    ``_MultiProcessingDataLoaderIter._reset``).

    Args:
        source: the sampler.
        loader: that it was taken from.
    """

    def __init__(self, source: Any, loader: DataLoader[Any]) -> None:
        self.source = source
        self._draws = DrawsOf(loader)

    def __iter__(self) -> Iterator[Any]:
        indices = iter(self.source)
        if self._draws.draw_seed() and self._draws.processes:
            indices = iter(self.source)
        yield from self._draws.walk(indices, size_of(self.source))

    def __len__(self) -> int:
        return len(self.source)

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # not there yet, in a copy that is being made
            raise AttributeError(name)
        return getattr(self.source, name)

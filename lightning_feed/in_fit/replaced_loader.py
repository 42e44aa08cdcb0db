"""Copies of a training loader with other workers and the same samples, for all of an epoch or for its rest."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_feed.load.kinds import AnyIterator, Batch, Index
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.order import DrawsOf, drawing_device, size_of
from lightning_feed.load.processes import shut_down_workers
from lightning_feed.load.settings import Setting
from lightning_feed.trials.cloning import clone_with, set_hand_over


def with_setting(loader: DataLoader[Batch], setting: Setting) -> DataLoader[Batch]:
    """Return a copy of a loader with other workers and the same order of samples.

    A separate generator seeds the copy's workers. The seed that the given loader would draw for its workers is still
    drawn, so that samplers and model draw the same numbers afterwards.

    Args:
        loader: a loader for which :func:`lightning_feed.in_fit.goal.why_fixed` returns nothing. It stays unchanged.
        setting: the values to set.
    """
    values: dict[str, Any] = {
        "num_workers": setting.num_workers,
        "prefetch_factor": setting.prefetch_factor,
        "persistent_workers": setting.persistent_workers,
        "pin_memory": setting.pin_memory,
    }
    if isinstance(loader, FeedLoader):
        if setting.num_workers:
            values["workers"] = setting.workers
        if loader.draws is None:
            values |= {"draws": DrawsOf(loader), "generator": _seeds_for(loader)}
    else:
        name = _sampler_name(loader)
        source = getattr(loader, name)
        if isinstance(source, SameDraws):
            source.keep(setting.batches_ahead)
        else:
            draws = SameDraws(source, loader, ahead=setting.batches_ahead)
            values |= {name: draws, "generator": _seeds_for(loader)}
    clone = clone_with(loader, **values)
    if isinstance(clone, FeedLoader) and isinstance(loader, FeedLoader):
        clone.follow(loader)
    set_hand_over(clone, setting)
    return clone


@dataclass(frozen=True)
class RestOfEpoch:
    """The rest of an epoch, loaded by other workers."""

    loader: DataLoader[Batch]
    """The loader that yields the rest."""
    batches: Iterator[Batch]
    """The loader's iterator."""


def rest_of_epoch(loader: DataLoader[Batch], iterator: AnyIterator, setting: Setting) -> RestOfEpoch | None:
    """Return the rest of the current epoch, loaded by other workers; None if the order of batches does not allow it.

    Args:
        loader: the loader in use, a result of :func:`with_setting` or of this function, or a FeedLoader.
        iterator: the loader's iterator, from which the last batches came.
        setting: the values for the rest of the epoch.
    """
    if not getattr(loader, "in_order", True):
        return None
    if isinstance(loader, FeedLoader):
        if not loader.may_draw_again():
            return None
        clone = with_setting(loader, setting)
        assert isinstance(clone, FeedLoader)
        clone.load_state_dict(loader.state_dict())
        with torch.random.fork_rng(devices=[]):  # the original loader draws its seeds only once in an epoch
            return RestOfEpoch(clone, iter(clone))
    name = _sampler_name(loader)
    draws = getattr(loader, name)
    if not isinstance(draws, _Draws):
        return None
    indices = draws.rest(iterator._num_yielded)
    values: dict[str, Any] = {name: Rest(indices, setting.batches_ahead), "generator": _seeds_for(loader)}
    values |= {"num_workers": setting.num_workers, "prefetch_factor": setting.prefetch_factor}
    rest = clone_with(loader, **values, pin_memory=setting.pin_memory, persistent_workers=False)
    set_hand_over(rest, setting)
    return RestOfEpoch(rest, iter(rest))


def _draws_of(clone: DataLoader[Batch]) -> DrawsOf | None:
    """Return the draws that a result of :func:`with_setting` repeats; None for another loader."""
    if isinstance(clone, FeedLoader):
        return clone.draws
    sampler = getattr(clone, _sampler_name(clone))
    return sampler.draws if isinstance(sampler, SameDraws) else None


def begin_unused(clone: DataLoader[Batch]) -> list[DrawsOf]:
    """Draw now what the original loader draws when a pass begins of which no batch is used.

    Only where the original draws no indices ahead: otherwise the clone's own pass draws as many.

    Returns:
        The draws whose passes yield nothing until their ``is_unused`` is False again; empty if there are none.
    """
    draws = _draws_of(clone)
    if draws is None or draws.is_ahead:
        return []
    if not isinstance(clone, FeedLoader):  # whose sampler begins with the first index
        iter(getattr(clone, _sampler_name(clone)).source)
    with drawing_device(draws.generator):
        draws.draw_seed()
    draws.is_unused = True
    return [draws]


def follow(clone: DataLoader[Batch], latest: DataLoader[Batch]) -> None:
    """Have a clone go on after the latest pass of an earlier clone of the same loader."""
    draws = _draws_of(clone)
    before = _draws_of(latest)
    if draws is not None and before is not None:
        draws.follow(before)
    if isinstance(clone, FeedLoader) and isinstance(latest, FeedLoader):
        clone.follow(latest)


def end_workers(loader: DataLoader[Batch], iterator: AnyIterator | None = None) -> None:
    """End the workers of a loader: persistent ones that it keeps, and those of its current ``iterator``."""
    if isinstance(loader, FeedLoader):
        loader.close()  # else a thread that reads ahead would go on
    kept = loader._iterator
    loader._iterator = None
    shut_down_workers(kept)
    if iterator is not None and iterator is not kept and hasattr(iterator, "_shutdown_workers"):
        shut_down_workers(iterator)


def _sampler_name(loader: DataLoader[Batch]) -> str:
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


def _seeds_for(loader: DataLoader[Batch]) -> torch.Generator:
    own = loader.generator
    seed = torch.initial_seed() if own is None else own.initial_seed()
    return torch.Generator(torch.empty(0).device if own is None else own.device).manual_seed(seed)


class _Draws:
    """Iterates over a sampler's indices, and keeps the latest, so that other workers can load the rest of a pass.

    Args:
        ahead: the largest number of indices drawn for batches that the workers have not handed over yet.
    """

    def __init__(self, ahead: int) -> None:
        self._count = 0
        self._recent: deque[Index] = deque(maxlen=ahead + 1)
        self._walk: Iterator[Index] = iter(())

    def _draw(self, indices: Iterator[Index]) -> Iterator[Index]:
        self._count = 0
        self._recent.clear()
        self._walk = indices
        for index in indices:
            self._count += 1
            self._recent.append(index)
            yield index

    def keep(self, ahead: int) -> None:
        """Keep enough indices for workers that load ``ahead`` batches ahead."""
        self._recent = deque(self._recent, maxlen=ahead + 1)

    def rest(self, yielded: int) -> Iterator[Index]:
        """Return the indices of the current pass after the first ``yielded`` batches, which the loader has yielded."""
        drawn_ahead = self._count - yielded
        recent = list(self._recent)
        return chain(recent[len(recent) - drawn_ahead :], self._walk)


class SameDraws(_Draws):
    """A sampler that draws the same samples as the original loader, with any number of workers.

    At the beginning of a pass, torch begins an iteration of the sampler, draws a seed for the workers, and begins
    another iteration if it has started worker processes (torch 2.6 to 2.15, ``_BaseDataLoaderIter.__init__`` and
    ``_MultiProcessingDataLoaderIter._reset``).

    Args:
        source: the sampler.
        loader: the original loader.
        ahead: the largest number of indices drawn for batches that the workers have not handed over yet.
    """

    def __init__(self, source: Any, loader: DataLoader[Batch], *, ahead: int) -> None:
        self.source = source
        super().__init__(ahead)
        self.draws = DrawsOf(loader)

    def __iter__(self) -> Iterator[Index]:
        if self.draws.is_unused:
            return
        indices = iter(self.source)
        if self.draws.draw_seed() and self.draws.processes:
            indices = iter(self.source)
        yield from self._draw(self.draws.walk(indices, size_of(self.source)))

    def __len__(self) -> int:
        return len(self.source)

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # still missing while a copy is made
            raise AttributeError(name)
        return getattr(self.source, name)


class Rest(_Draws):
    """A sampler that yields the rest of an epoch, and can be iterated once."""

    def __init__(self, indices: Iterator[Index], ahead: int) -> None:
        super().__init__(ahead)
        self._indices = indices

    def __iter__(self) -> Iterator[Index]:
        return self._draw(self._indices)

"""Random numbers in worker threads, and saving, comparing and restoring random states.

Python, NumPy and torch each have one default generator per process, from which worker threads and training would draw
in an unpredictable order. Our recipes draw from :func:`sample_generator` instead. If the first sample of a user's
dataset draws from a default generator, a warning is logged.
"""

import pickle
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_feed.load.loader_tree import walk_loaders
from lightning_feed.load.order import mix_seed
from lightning_feed.load.position import find_samplers


class _DefaultGenerator(NamedTuple):
    """The functions that read and set the state of a default generator."""

    read: Callable[[], Any]
    restore: Callable[[Any], None]


def _restore_torch(state: Any) -> None:
    torch.set_rng_state(torch.from_numpy(state))


class DefaultGenerators:
    """Saved states of torch's, Python's and NumPy's default generators, to find out which were used, and restore them.

    Example:
        >>> before = DefaultGenerators()
        >>> _ = random.random()
        >>> before.restore()
        ["Python's random module"]
    """

    _known: ClassVar[dict[str, _DefaultGenerator]] = {
        "torch's default generator": _DefaultGenerator(lambda: torch.get_rng_state().numpy(), _restore_torch),
        "Python's random module": _DefaultGenerator(random.getstate, random.setstate),
        "numpy.random's functions": _DefaultGenerator(np.random.get_state, np.random.set_state),
    }

    def __init__(self) -> None:
        self._before = {name: generator.read() for name, generator in self._known.items()}

    def read(self) -> dict[str, bytes]:
        """Return the states of the generators when this object was made, by name."""
        return {name: pickle.dumps(state) for name, state in self._before.items()}

    def used(self) -> list[str]:
        """Return the names of the generators used since this object was made."""
        before = self.read()
        return [name for name, generator in self._known.items() if pickle.dumps(generator.read()) != before[name]]

    def restore(self) -> list[str]:
        """Restore the generators used since this object was made. Returns their names."""
        used = self.used()
        for name in used:
            self._known[name].restore(self._before[name])
        return used


# --- worker threads -------------------------------------------------------------------------------------------------


class _Local(threading.local):
    """The current sample of a worker thread."""

    seeds: tuple[int, int, int] | None = None
    """Seed of the pass, number of the batch, and position of the sample in it."""
    generator: torch.Generator | None = None


_thread = _Local()


def begin_sample(seed: int, batch: int, position: int) -> None:
    """Set the current sample of this thread. Its generator is made only when a number is drawn.

    Args:
        seed: seed of the pass.
        batch: number of the batch in the epoch.
        position: position of the sample in the batch.
    """
    _thread.seeds = (seed, batch, position)
    _thread.generator = None


def sample_generator() -> torch.Generator | None:
    """Return the generator for this worker thread's current sample. Returns None, which stands for torch's default
    generator, in all other threads.

    Example:
        >>> flipped = torch.rand(1, generator=sample_generator()) < 0.5
    """
    if _thread.generator is None and _thread.seeds is not None:
        _thread.generator = torch.Generator().manual_seed(mix_seed(*_thread.seeds, "sample"))
    return _thread.generator


# --- restoring state -----------------------------------------------------------------------------------------------


@contextmanager
def preserve_state(*owners: object) -> Iterator[None]:
    """Restore the states of the default generators, and of the generators of loaders and their samplers, at the end of
    a ``with`` block.

    Args:
        owners: loaders, or lists and dicts of them.
    """
    defaults = DefaultGenerators()
    device_states: list[torch.Tensor] = []
    if torch.cuda.is_initialized():
        device_states = torch.cuda.get_rng_state_all()
    holders = [(holder, holder.generator) for holder in _holders_in(owners)]
    states = [(generator, generator.get_state()) for _, generator in holders if isinstance(generator, torch.Generator)]
    try:
        yield
    finally:
        defaults.restore()
        if device_states:
            torch.cuda.set_rng_state_all(device_states)
        for generator, state in states:
            generator.set_state(state)
        for holder, generator in holders:
            if holder.generator is not generator:  # replaced by a PassGenerator
                holder.generator = generator


def _holders_in(owners: Sequence[object]) -> Iterator[Any]:
    """Yield the loaders, and those of their samplers that have an attribute ``generator``."""
    for _, loader in walk_loaders(owners):
        if isinstance(loader, DataLoader):
            yield loader
            samplers = find_samplers(loader.sampler, loader.batch_sampler).values()
            yield from (sampler for sampler in samplers if hasattr(sampler, "generator"))

"""Random numbers in worker threads: a generator for each sample, for our own recipes.

Python, NumPy and torch have one default generator for the whole process. Worker threads that shared it would take its
numbers from each other, in an order left to chance, and from the training. Our recipes draw from
:func:`sample_generator` instead. What else draws is found out with the first sample, and warned of.
"""

import logging
import pickle
import random
import sys
import threading
from typing import Any

import torch

from lightning_feed.load.order import mix_seed

logger = logging.getLogger(__name__)


class _Local(threading.local):
    """What a worker thread knows of the sample that it is at."""

    place: tuple[int, int, int] | None = None
    generator: torch.Generator | None = None


_thread = _Local()


def begin_sample(seed: int, batch: int, place: int) -> None:
    """Say which sample this thread makes now. Costs nothing until something is drawn.

    Args:
        seed: of the pass.
        batch: its number in the epoch.
        place: of the sample in the batch.
    """
    _thread.place, _thread.generator = (seed, batch, place), None


def sample_generator() -> torch.Generator | None:
    """The generator of the sample that this worker thread makes; None, torch's default, in any other thread.

    Example:
        >>> flipped = torch.rand(1, generator=sample_generator()) < 0.5
    """
    if _thread.generator is None and _thread.place is not None:
        _thread.generator = torch.Generator().manual_seed(mix_seed(*_thread.place, "sample"))
    return _thread.generator


class SharedRandom:
    """The states of the default generators, to tell which of them a sample drew from."""

    def __init__(self) -> None:
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        self._numpy: Any = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None

    def restore(self) -> list[str]:
        """Put back what has changed since, and name it."""
        changed = []
        if not torch.equal(torch.get_rng_state(), self._torch):
            torch.set_rng_state(self._torch)
            changed.append("torch's default generator")
        if random.getstate() != self._python:
            random.setstate(self._python)
            changed.append("Python's random module")
        if self._numpy is not None:
            numpy_random = sys.modules["numpy"].random
            if pickle.dumps(numpy_random.get_state()) != pickle.dumps(self._numpy):
                numpy_random.set_state(self._numpy)
                changed.append("numpy.random's functions")
        return changed


def warn_of_shared(changed: list[str], dataset: Any) -> None:
    """Say that the samples draw from default generators, and what to do."""
    logger.warning(
        "A sample of %s draws from %s. Worker threads share that with each other and with the training process, so "
        "its random augmentations are not reproducible, and training that draws from it is changed. Use "
        "workers='process', or give each draw a generator of the sample's own. The crops and flips of "
        "ImageFolderDataModule have one.",
        type(dataset).__name__,
        " and ".join(changed),
    )

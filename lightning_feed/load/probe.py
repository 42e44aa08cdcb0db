"""A probe of a loader's dataset: sees if the program has changed it since the loader's workers started."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

from lightning_feed.errors import LoaderError
from lightning_feed.load.child import Child
from lightning_feed.load.digest import differing
from lightning_feed.load.kinds import AnyLoader
from lightning_feed.load.order import size_of
from lightning_feed.load.rehearsal import LARGE_BYTES, Item, Reading, first_batch, first_items, read_items
from lightning_feed.load.shared_objects import refers_to_shared

PROBE_S = 0.02
"""Seconds in which samples are chosen for a probe."""
MOST_SAMPLES = 32
_FIRST_S = 20.0
"""Seconds after which a probe is given up."""
_LEAST_S = 2.0
_PATIENCE = 20
"""A probe is given up sooner if it takes longer than the first one by this factor, and ``_LEAST_S``."""


class Probe:
    """A few samples of a loader's dataset, as workers that start now would make them.

    They are read in forked children, so that the training process never calls the dataset.

    Args:
        loader: a loader with a map-style dataset, whose workers are about to start.
    """

    def __init__(self, loader: AnyLoader) -> None:
        self._loader = loader
        self._limit_s = _FIRST_S
        self._size = size_of(loader.dataset)
        self._child: Child[list[Reading]] | None = None
        self._first: list[Reading] = []
        self._may_read = not refers_to_shared(loader)
        if self._may_read:
            self._child = _child(partial(_choose_and_read, loader))

    def changed(self) -> bool:
        """True if the samples are others now. Also true if they could not be read, and so are unknown. False if they
        are never read, because reading them could change what is trained."""
        if not self._first:
            self._first = self._result(self._child)
            self._child = None
            taken_s = sum(sum(reading.seconds) for reading in self._first)
            self._limit_s = min(_FIRST_S, max(_LEAST_S, _PATIENCE * taken_s))
        if not self._first:
            return self._may_read
        if size_of(self._loader.dataset) != self._size:
            return True
        one, two = self._first
        now = self._result(_child(partial(_read_again, self._loader, one.items)))
        return not now or _differ(one, two, now[0])

    def _result(self, child: "Child[list[Reading]] | None") -> list[Reading]:
        """The result of a child; empty if it has none."""
        if child is None:
            return []
        try:
            with suppress(LoaderError):
                return child.result(self._limit_s)
            return []
        finally:
            child.end(wait=False)

    def close(self) -> None:
        """End the child, if its result was not needed."""
        child = self._child
        self._child = None
        if child is not None:
            child.end(wait=False)

    __del__ = close


def _child(work: Callable[[], list[Reading]]) -> "Child[list[Reading]] | None":
    with suppress(LoaderError):  # this process may not have children
        return Child(work, guarded=False)
    return None


def _choose_and_read(loader: AnyLoader) -> list[Reading]:
    """Choose samples and read them twice: what differs then says nothing about changes."""
    try:
        first = read_items(loader, islice(first_items(loader), MOST_SAMPLES), _is_enough)
    except Exception:  # noqa: BLE001  # the collate function may refuse samples that are no batch
        first = read_items(loader, first_batch(loader))
    return [first, read_items(loader, first.items)]


def _is_enough(seconds: list[float], nbytes: int) -> bool:
    return sum(seconds) > PROBE_S or nbytes > LARGE_BYTES


def _read_again(loader: AnyLoader, items: list[Item]) -> list[Reading]:
    return [read_items(loader, items)]


def _differ(one: Reading, two: Reading, now: Reading) -> bool:
    """True if samples differ in leaves that did not differ between the first two readings."""
    pairs: list[tuple[Any, Any, Any]] = [(one.batch, two.batch, now.batch)]
    pairs += zip(one.samples, two.samples, now.samples, strict=True)
    return any(differing(before, after) - differing(before, again) for before, again, after in pairs)

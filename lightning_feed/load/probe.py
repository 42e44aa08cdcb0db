"""A watch over workers that the user has not asked for, and a probe that sees if their dataset has changed."""

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import torch

from lightning_feed.errors import FeedError, LoaderError
from lightning_feed.load.child import Child
from lightning_feed.load.digest import differing
from lightning_feed.load.kinds import AnyLoader
from lightning_feed.load.loader_pass import NO_SUBSTITUTES, LoaderPass, Substitutes
from lightning_feed.load.order import size_of
from lightning_feed.load.position import Position
from lightning_feed.load.processes import shut_down_workers
from lightning_feed.load.rehearsal import LARGE_BYTES, Item, Reading, first_batch, first_items, read_items
from lightning_feed.load.shared_objects import refers_to_shared
from lightning_feed.load.worker import failed_in_worker, original_error

logger = logging.getLogger(__name__)

_LATER_LOOK = 10
"""Number of batches of the first pass after which to look again if the dataset has changed."""
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
        """Return True if the samples are others now. Also true if they could not be read, and so are unknown. False if
        they are never read, because reading them could change what is trained."""
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
        """Return the result of a child; empty if it has none."""
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


class AddedWorkers:
    """Worker processes of a FeedLoader that the user has not asked for. They go where training would not be the same.

    Lightning begins the first pass before the hooks of the first epoch, in which the program may change the dataset. So
    a few samples are compared when an epoch begins, and once soon after: workers start anew if the samples have changed
    since they started, and end for good if samples change within an epoch.
    """

    def __init__(self) -> None:
        self._probe: Probe | None = None
        """The samples as the workers make them; None if they are not compared."""
        self._is_first = True
        """True if no batch was yielded before the latest pass."""

    def __getstate__(self) -> dict[str, Any]:
        return {"_probe": None, "_is_first": self._is_first}

    def pass_begins(self, loader: AnyLoader, latest: Position | None) -> None:
        """End the workers before a pass if the dataset has changed since they started.

        Args:
            loader: the loader, which keeps the workers.
            latest: position of the pass before; None if there was none.
        """
        if loader._iterator is not None and self._has_changed():
            shut_down_workers(loader._iterator)
            self._probe = None
        self._is_first = latest is None or not latest.batches

    def workers_start(self, loader: AnyLoader) -> None:
        """Look at the samples if a later pass, or the hooks before the first batch, may find them changed."""
        if loader.persistent_workers or self._is_first:
            self._probe = Probe(loader)

    def substitutes(self, loader: AnyLoader) -> Substitutes:
        """Return what may take the place of a pass that begins."""
        look = NO_SUBSTITUTES.look
        if self._probe is not None and self._is_first:
            look = partial(self._look, loader)
        return Substitutes(look, partial(self._recover, loader))

    def _has_changed(self) -> bool:
        return self._probe is not None and self._probe.changed()

    def _look(self, loader: AnyLoader, taken: int) -> LoaderPass | None:
        """Look if the dataset has changed since the first pass began.

        Args:
            loader: the loader.
            taken: number of batches taken from the pass.

        Returns:
            The pass to go on with, in place of the present one; None to go on with that.
        """
        if taken not in (0, _LATER_LOOK) or not self._has_changed():
            return None
        kind = type(loader.dataset).__name__
        if not loader.may_draw_again():
            logger.warning(
                "The program has changed the dataset (%s) since its worker processes started, and its sampler cannot "
                "repeat its order, so this epoch goes on without the change. Set num_workers=0.",
                kind,
            )
            return None
        if taken:
            logger.warning(
                "The program changes the dataset (%s) within an epoch, which worker processes cannot see. From batch "
                "%d on, batches are made without workers.",
                kind,
                taken,
            )
        return self._rest_of_pass(loader, without_workers=taken > 0)

    def _recover(self, loader: AnyLoader, error: BaseException) -> LoaderPass | None:
        """Go on without the workers if the user's code fails in them.

        Code may fail only there: a worker may have no processes of its own, for example. If it fails everywhere, the
        error comes again.
        """
        if not failed_in_worker(error) or isinstance(error, FeedError) or not loader.may_draw_again():
            return None
        logger.warning(
            "The dataset (%s) fails in worker processes (%s), so from now on batches are made without them. If the "
            "error comes again, the workers are not its cause.",
            type(loader.dataset).__name__,
            ": ".join(original_error(error)),
        )
        return self._rest_of_pass(loader, without_workers=True)

    def _rest_of_pass(self, loader: AnyLoader, *, without_workers: bool) -> LoaderPass:
        """Begin a pass that yields the rest of the present one."""
        state = loader.state_dict()
        shut_down_workers(loader._iterator)
        if without_workers:
            loader.give_up_workers()
        self._probe = None
        loader.load_state_dict(state)
        with torch.random.fork_rng(devices=[]):  # the pass has drawn its seeds already
            rest: LoaderPass = iter(loader)
            return rest


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
    """Return True if samples differ in leaves that did not differ between the first two readings."""
    pairs: list[tuple[Any, Any, Any]] = [(one.batch, two.batch, now.batch)]
    pairs += zip(one.samples, two.samples, now.samples, strict=True)
    return any(differing(before, after) - differing(before, again) for before, again, after in pairs)

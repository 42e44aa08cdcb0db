"""Passes, the course of the passes over one loader: where the latest one is, and where the next one begins."""

from dataclasses import replace

from lightning_feed.load.kinds import AnyIterator
from lightning_feed.load.order import EpochOrder
from lightning_feed.load.position import IndexSource, Position, draws_same_order
from lightning_feed.load.resume import LoaderState


class Passes:
    """The passes over one loader.

    The next pass begins at the first of these that there is: a loaded state; the state from which the latest pass has
    resumed, if it has yielded nothing since, because Lightning may ``iter()`` a loader twice before its first batch; a
    pass that the workers have begun already; the start of the epoch, in a new cycle if it was iterated before.

    Args:
        index: the index source of the loader.
        configuration: the state of the loader before any pass.

    Attributes:
        latest: the position of the latest pass; None before the first one.
    """

    def __init__(self, index: IndexSource, configuration: LoaderState) -> None:
        self._index = index
        self._configuration = configuration
        """The state of the loader before any pass, as it was at the start of the latest pass."""
        self._loaded: LoaderState | None = None
        """A loaded state, from which the next pass resumes."""
        self.latest: Position | None = None

    def state(self) -> LoaderState:
        """Return the state of the latest pass, or the loaded state if no pass has begun since."""
        if self._loaded is not None:
            return self._loaded
        latest = self.latest
        if latest is None:
            return self._configuration
        return replace(
            self._configuration,
            epoch=latest.epoch,
            cycle=latest.cycle,
            batches=latest.batches,
            samplers=dict(latest.samplers),
            drawn=latest.drawn,
            sample_seed=latest.sample_seed,
        )

    def resume_from(self, saved: LoaderState) -> None:
        """Resume with the next pass, or begin anew if no pass had begun when the state was saved."""
        self.latest = None
        self._loaded = saved if saved.begun else None

    def without_pass(self) -> "Passes":
        """Return a copy in which the present state is a loaded one. A pass cannot be pickled, but its state can."""
        copied = Passes(self._index, self._configuration)
        copied.resume_from(self.state())
        return copied

    def give_out(self, position: Position, configuration: LoaderState) -> None:
        """Make the index source yield the indices of a pass, and record the present configuration."""
        self._configuration = configuration
        self._index.position = position

    def take_resume(self, order: EpochOrder | None) -> LoaderState | None:
        """Return the state from which the next pass resumes. Returns None if it resumes from none."""
        state = self._loaded
        self._loaded = None
        if state is None:
            state = self._origin_of_unused_pass()
        if state is None or is_stale(state, order):
            return None
        return state

    def _origin_of_unused_pass(self) -> LoaderState | None:
        """Return the state from which the latest pass resumed. Returns None if that pass has yielded a batch, or did
        not resume."""
        latest = self.latest
        if latest is None or latest.origin is None or latest.ended or latest.batches != latest.origin.batches:
            return None
        if not latest.may_begin_again:
            return None
        return latest.origin

    def take_begun(self, order: EpochOrder | None, workers: AnyIterator) -> Position | None:
        """Return the next pass if the workers have begun it. Returns None if they have begun no pass, or a pass that
        the program does not need now.

        Args:
            order: order of the epochs.
            workers: the iterator that keeps the persistent workers; None if there is none.
        """
        latest = self.latest
        following = self._index.following
        if not following or latest is None or not latest.is_over or getattr(workers, "_shutdown", True):
            return None
        position = following[0]
        begins = self.next_epoch(order)
        if (position.epoch, position.cycle) != begins:
            if not all(map(draws_same_order, self._index.samplers.values())):
                return None
            position.epoch, position.cycle = begins
        return following.popleft()

    def next_epoch(self, order: EpochOrder | None) -> tuple[int | None, int]:
        """Return epoch and cycle of a pass that begins now."""
        if order is None:
            return None, 0
        epoch = order.epoch()
        latest = self.latest
        if latest is None or latest.epoch != epoch:
            return epoch, 0
        if latest.batches:
            return epoch, latest.cycle + 1
        return epoch, latest.cycle


def is_stale(state: LoaderState, order: EpochOrder | None) -> bool:
    """Return True if the epoch of a state was complete and the run is in a later epoch."""
    return order is not None and state.epoch is not None and order.epoch() > state.epoch

"""Adopts the fetcher that a loop draws its batches from, so that batches can be drawn ahead of the loop."""

import functools
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Fetched:
    """One draw from a fetcher: what came, or what went wrong, and how the fetcher stood afterwards."""

    value: Any = None
    error: Exception | None = None
    fetched: int = 0
    done: bool = False
    states: list[dict[str, Any]] | None = None
    """States of the stateful loaders with which a run goes on after this batch was trained. None: as they stand."""
    ahead: bool = False
    """Whether it was drawn before the loop asked for it."""
    staged: Any = None
    """What the prefetcher made of the batch."""


class FetcherTap:
    """What an adopted fetcher carries: batches drawn ahead of the loop, and the loader states that belong to them."""

    def __init__(self, fetcher: Any) -> None:
        # Weak: the fetcher holds its tap, and a ring of the two would keep the loader's workers alive.
        self._fetcher: Any = weakref.proxy(fetcher)
        self.ahead: deque[Fetched] = deque()
        self.owner: Any = None
        """The prefetcher that draws ahead, if there is one."""
        self.checked: set[int] = set()
        """The loaders, by ``dataloader_idx``, whose first batch the prefetcher has looked at."""
        self.closed = False
        """Whether the prefetcher will not touch this fetcher any more."""
        self.on_hand_out: Callable[[Fetched], None] | None = None
        self.track_states = any(_is_stateful(loader) for loader in fetcher.combined_loader.flattened)
        self.trained_states: list[dict[str, Any]] | None = None
        """Loader states after the batch that the loop was handed last, where they differ from the present ones."""
        self.progress: Any = None
        """The training loop's count of its batches; None in other loops."""
        self._before: list[dict[str, Any]] | None = None
        self._processed_before = -1

    def hand_out(self, item: Fetched, before: list[dict[str, Any]] | None) -> None:
        """The loop takes a batch; ``before`` are the loader states without it."""
        self._before, self.trained_states = before, item.states
        if self.progress is not None:
            self._processed_before = self.progress.total.processed
        if self.on_hand_out is not None:
            self.on_hand_out(item)

    def states_to_save(self) -> list[dict[str, Any]] | None:
        """The loader states with which a run goes on that is saved now; None: as they stand.

        A batch whose step has not come to its end, because a signal or an error came first, is to be trained again:
        Lightning does not count it either.
        """
        in_hand = self.progress is not None and self.progress.total.processed == self._processed_before
        return self._before if in_hand else self.trained_states

    def present_states(self) -> list[dict[str, Any]] | None:
        """The states of the stateful loaders as they stand; None where there is no such loader."""
        if not self.track_states:
            return None
        return [loader.state_dict() for loader in self._fetcher.combined_loader.flattened if _is_stateful(loader)]

    def look_ahead(self) -> Fetched:
        """Draw one more batch and keep it for the loop, to which the fetcher looks as if nothing had been drawn.

        An ``Exception`` is kept too: it belongs to the step that would have met it.
        """
        fetcher = self._fetcher
        seen_by_loop = fetcher.fetched, fetcher.done
        if self.ahead:
            fetcher.fetched, fetcher.done = self.ahead[-1].fetched, self.ahead[-1].done
        elif self.trained_states is None:
            self.trained_states = self.present_states()  # the batch in hand was drawn without looking ahead
        try:
            item: Fetched = fetcher._feed_draw()
        finally:
            fetcher.fetched, fetcher.done = seen_by_loop
        if item.states is None:
            item.states = self.present_states()
        item.ahead = True
        self.ahead.append(item)
        return item


@functools.cache
def _adopted(kind: type[Any]) -> type[Any]:
    """A subclass of a fetcher's class, which a live fetcher can be turned into.

    It has that class for its only base: with a mixin before it the layout of the object would differ, and Python would
    refuse to assign ``__class__``.
    """

    class Adopted(kind):  # type: ignore[misc]  # a class that is known only now
        def __next__(self) -> Any:
            tap: FetcherTap = self._feed_tap
            before = tap.trained_states
            if tap.ahead:
                item = tap.ahead.popleft()  # its fetch was profiled when it took place
                self.fetched, self.done = item.fetched, item.done
            else:
                before = tap.present_states() if before is None else before
                item = self._feed_draw()
            if item.error is not None:
                raise item.error
            tap.hand_out(item, before)
            return item.value

        def __iter__(self) -> Any:
            tap: FetcherTap = self._feed_tap
            tap.trained_states = None
            states = tap.present_states()
            super().__iter__()
            if self.length is None:
                tap.trained_states = states  # a loader without a length has been read already
            return self

        def reset(self) -> None:
            self._feed_tap.ahead.clear()
            super().reset()

        def _feed_draw(self) -> Fetched:
            """The fetcher's own ``__next__``, with the loader states that belong to the batch it returns."""
            # Lightning reads a loader without a length one batch ahead: the states after the batch that comes out now
            # are those from before the draw. With a length they are those from after it.
            states = self._feed_tap.present_states() if self.length is None else None
            item = Fetched(states=states)
            try:
                item.value = super().__next__()
            except Exception as error:  # noqa: BLE001  # raised by the caller, in the step that the batch belongs to
                item.error = error
            item.fetched, item.done = self.fetched, self.done
            return item

    return Adopted


def adopt_fetcher(fetcher: Any) -> FetcherTap | None:
    """Let ``fetcher`` be drawn from ahead of its loop, and know the loader states of what was trained.

    The class of the live object is changed to a subclass of its own class: nothing that holds the fetcher notices.
    Returns the same tap when called again, and None for a fetcher that hands its iterator to ``training_step``. Read in
    2.4.0, 2.5.6 and 2.6.6 (``loops/fetchers.py``); a public look-ahead in the fetcher would replace it.
    """
    if not hasattr(fetcher, "prefetch_batches"):
        return None
    tap: FetcherTap | None = getattr(fetcher, "_feed_tap", None)
    if tap is None:
        tap = fetcher._feed_tap = FetcherTap(fetcher)
        fetcher.__class__ = _adopted(type(fetcher))  # type: ignore[arg-type]  # every class is hashable
    return tap


def _is_stateful(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def more_to_draw(fetcher: Any) -> bool:
    """Whether the fetcher, with what was drawn ahead of it, has another batch to give."""
    ahead = fetcher._feed_tap.ahead
    last = ahead[-1] if ahead else fetcher
    return not last.done and not (ahead and ahead[-1].error is not None)

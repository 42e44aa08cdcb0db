"""Batches drawn ahead of a loop from its fetcher, and the matching loader states for checkpoints."""

import functools
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_feed._host.types import AnyTrainer, Checkpoint, LoaderStates


@dataclass
class Fetched:
    """One draw from a fetcher: the batch or the error, and the fetcher's state afterwards."""

    value: Any = None
    error: Exception | None = None
    fetched: int = 0
    done: bool = False
    states: LoaderStates | None = None
    """The stateful loaders' states to save once this batch is trained; None if their current states are to be saved."""
    ahead: bool = False
    """True if the batch was drawn before the loop asked for it."""
    staged: Any = None
    """The copy of the batch to the device, issued by the prefetcher; None if the batch was not copied ahead."""


class FetcherTap:
    """State of a fetcher after :func:`adopt_fetcher`: batches drawn ahead of the loop, and matching loader states."""

    def __init__(self, fetcher: Any) -> None:
        # Weak: the fetcher holds its tap, and a reference cycle would keep the loader's workers alive.
        self._fetcher: Any = weakref.proxy(fetcher)
        self.ahead: deque[Fetched] = deque()
        self.owner: Any = None
        """The prefetcher that draws ahead, if there is one."""
        self.checked: set[int] = set()
        """The ``dataloader_idx`` of each loader whose first batch the prefetcher has checked."""
        self.closed = False
        """True once the prefetcher no longer uses this fetcher."""
        self.epoch_over = False
        """True if a run was resumed from the end of an epoch: it draws no batch before the next ``iter()``."""
        self.on_hand_out: Callable[[Fetched], None] | None = None
        self.track_states = any(is_stateful(loader) for loader in fetcher.combined_loader.flattened)
        self.trained_states: LoaderStates | None = None
        """Loader states after the last batch that the loop received; None if those are the loaders' current states."""
        self.progress: Any = None
        """The training loop's counters of batches (``batch_progress``); None in other loops."""
        self._before: LoaderStates | None = None
        self._processed_before = -1

    def hand_out(self, item: Fetched, before: LoaderStates | None) -> None:
        """Note that the loop takes a batch. ``before`` holds the loader states before that batch was drawn."""
        self._before = before
        self.trained_states = item.states
        if self.progress is not None:
            self._processed_before = self.progress.total.processed
        if self.on_hand_out is not None:
            self.on_hand_out(item)

    def states_to_save(self) -> LoaderStates | None:
        """Return the loader states for a checkpoint saved now; None if the loaders' current states are to be saved.

        If a signal or an error interrupted a step, these are the states before its batch, so that a resumed run trains
        the batch again. Lightning does not count that batch as processed, either.
        """
        is_in_hand = self.progress is not None and self.progress.total.processed == self._processed_before
        return self._before if is_in_hand else self.trained_states

    def present_states(self) -> LoaderStates | None:
        """Return the current states of the stateful loaders; None if there is no such loader."""
        if not self.track_states:
            return None
        return [loader.state_dict() for loader in self._fetcher.combined_loader.flattened if is_stateful(loader)]

    def look_ahead(self) -> Fetched:
        """Draw one more batch and keep it until the loop asks for it. The loop sees the fetcher as before.

        If drawing raises an ``Exception``, it takes the batch's place, and is raised when the loop asks for it.
        """
        fetcher = self._fetcher
        fetched = fetcher.fetched  # what the loop sees
        done = fetcher.done
        if self.ahead:
            fetcher.fetched = self.ahead[-1].fetched
            fetcher.done = self.ahead[-1].done
        elif self.trained_states is None:
            self.trained_states = self.present_states()  # the batch in hand was drawn without looking ahead
        try:
            item: Fetched = fetcher._feed_draw()
        finally:
            fetcher.fetched = fetched
            fetcher.done = done
        if item.states is None:
            item.states = self.present_states()
        item.ahead = True
        self.ahead.append(item)
        return item


@functools.cache
def _adopted(kind: type[Any]) -> type[Any]:
    """Return a subclass of a fetcher's class, to assign to a live fetcher's ``__class__``.

    That class is its only base: with a mixin the object's layout would differ, and Python would refuse the assignment.
    """

    class Adopted(kind):  # type: ignore[misc]  # the base class is only known here
        def __next__(self) -> Any:
            tap: FetcherTap = self._feed_tap
            if tap.epoch_over:
                raise StopIteration
            before = tap.trained_states
            if tap.ahead:
                item = tap.ahead.popleft()  # the fetch was profiled when the batch was drawn
                self.fetched = item.fetched
                self.done = item.done
            else:
                before = tap.present_states() if before is None else before
                item = self._feed_draw()
            if item.error is not None:
                try:
                    raise item.error
                finally:
                    del item  # the error's traceback holds this frame, and the frame would hold the error
            tap.hand_out(item, before)
            return item.value

        def __iter__(self) -> Any:
            tap: FetcherTap = self._feed_tap
            tap.trained_states = None
            tap.epoch_over = False
            states = tap.present_states()
            super().__iter__()
            if self.length is None:
                tap.trained_states = states  # Lightning has already read a loader without a length
            return self

        def reset(self) -> None:
            self._feed_tap.ahead.clear()
            super().reset()

        def _feed_draw(self) -> Fetched:
            """Call the fetcher's own ``__next__``, and add the loader states that match its batch."""
            # Lightning reads a loader without a length one batch ahead: this draw reads a batch, and returns the one
            # read before. The states that match the returned batch are then those before the draw, else those after.
            states = self._feed_tap.present_states() if self.length is None else None
            item = Fetched(states=states)
            try:
                item.value = super().__next__()
            except Exception as error:  # noqa: BLE001  # raised by the caller, in the step that the batch belongs to
                # A StopIteration's traceback holds frames that hold the fetcher, and with it the loader's workers.
                item.error = error.with_traceback(None) if isinstance(error, StopIteration) else error
            item.fetched = self.fetched
            item.done = self.done
            return item

    return Adopted


def adopt_fetcher(fetcher: Any) -> FetcherTap | None:
    """Prepare ``fetcher`` for drawing batches ahead of its loop, and for tracking the states of its loaders.

    Changes the class of the live object to a subclass of its own class, so all references stay valid. Returns the same
    tap if called again, and None if the step takes ``dataloader_iter``. Relies on internals of ``loops/fetchers.py``,
    checked against Lightning 2.4.0, 2.5.6 and 2.6.6; a public look-ahead in the fetcher would replace this function.
    """
    if not hasattr(fetcher, "prefetch_batches"):
        return None
    tap = tap_of(fetcher)
    if tap is None:
        tap = fetcher._feed_tap = FetcherTap(fetcher)
        fetcher.__class__ = _adopted(type(fetcher))  # type: ignore[arg-type]  # every class is hashable
    return tap


def tap_of(fetcher: object) -> FetcherTap | None:
    """Return the FetcherTap of a fetcher; None if :func:`adopt_fetcher` was not called for it."""
    tap: FetcherTap | None = getattr(fetcher, "_feed_tap", None)
    return tap


def is_stateful(loader: object) -> bool:
    """Return True if a loader has ``state_dict`` and ``load_state_dict``, so that Lightning saves its state in
    checkpoints."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def more_to_draw(fetcher: Any) -> bool:
    """Check if the fetcher has another batch after those already drawn ahead."""
    ahead = fetcher._feed_tap.ahead
    last = ahead[-1] if ahead else fetcher
    return not last.done and not (ahead and ahead[-1].error is not None)


# --- loader states in checkpoints --------------------------------------------------------------------------------


def checkpoint_loader_states(checkpoint: Checkpoint) -> LoaderStates | None:
    """Return the training loaders' states in a checkpoint; None if the checkpoint has none.

    Checked against Lightning 2.4.0 and 2.6.6 (``loops/fit_loop.py: on_save_checkpoint``).
    """
    states: LoaderStates | None = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader")
    return states


def write_loader_states(checkpoint: Checkpoint, states: LoaderStates) -> None:
    """Replace the loader states in a checkpoint by ``states``, or remove them if ``states`` is empty."""
    fit_loop = checkpoint["loops"]["fit_loop"]["state_dict"]
    if states:
        fit_loop["combined_loader"] = states
    else:
        fit_loop.pop("combined_loader", None)


def epoch_is_trained(checkpoint: Checkpoint) -> bool:
    """Return True if a checkpoint was saved after the last batch of an epoch.

    Lightning then also restores the loaders' states, but does not call ``iter()``: a loader that continues from there
    has nothing left, and the new epoch would be empty. Checked against Lightning 2.4.0 and 2.6.6
    (``loops/training_epoch_loop.py: reset``).
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    current = progress["current"]
    if current["started"] < current["ready"] == current["processed"]:
        return True  # `on_train_batch_start` returned -1, which ends the epoch
    return bool(progress["is_last_batch"] and current["ready"] == current["processed"])


def batches_to_skip(checkpoint: Checkpoint) -> int:
    """Return the number of batches already trained in a checkpoint's unfinished epoch; 0 if the epoch is finished."""
    fit_loop = checkpoint["loops"]["fit_loop"]
    epochs = fit_loop["epoch_progress"]["current"]
    batches = fit_loop["epoch_loop.batch_progress"]["current"]
    is_unfinished = epochs["processed"] < epochs["ready"] and not epoch_is_trained(checkpoint)
    return int(batches["processed"]) if is_unfinished else 0


def end_epoch(checkpoint: Checkpoint) -> bool:
    """Mark an epoch whose batches are all trained as finished, so that a resumed run starts the next one at batch 0.

    Lightning compares the saved batch count with the loader's current length, which may differ. An epoch whose
    ``on_train_epoch_end`` has yet to run is left unchanged.

    Returns:
        True if the epoch is finished; False if it was left unchanged.
    """
    fit_loop = checkpoint["loops"]["fit_loop"]
    epochs = fit_loop["epoch_progress"]
    batches = fit_loop["epoch_loop.batch_progress"]
    if epochs["current"]["processed"] < epochs["current"]["ready"]:
        if batches["current"]["completed"] == batches["current"]["processed"]:
            return False
        # Saved in `on_train_batch_end`, as by ModelCheckpoint(every_n_train_steps=...): 2.6.6 counts that batch and the
        # epoch, but 2.4.0 would train one more batch.
        batches["total"]["completed"] += 1
        fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
        for count in epochs.values():
            count["processed"] += 1
    for count in epochs.values():
        count["completed"] = count["processed"]
    batches["current"] = dict.fromkeys(batches["current"], 0)
    batches["is_last_batch"] = False
    return True


def reopen_epoch(checkpoint: Checkpoint) -> None:
    """Let a resumed run finish an epoch that ``max_steps``, ``max_time`` or ``should_stop`` interrupted.

    Lightning counts such an epoch as finished, and would train the rest as a separate epoch.
    """
    epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]
    if epochs["current"]["processed"] == epochs["current"]["ready"] > 0:
        for count in epochs.values():
            count["processed"] -= 1
            count["completed"] = count["processed"]


def count_the_batch_in_hand(trainer: AnyTrainer, checkpoint: Checkpoint) -> None:
    """Count the batch whose ``on_train_batch_end`` was running when an older Lightning saved a checkpoint.

    ``ModelCheckpoint(every_n_train_steps=...)`` saves in that hook. Lightning 2.6.6 counts the batch, but 2.4.0 would
    train one more.
    """
    if hasattr(trainer.fit_loop.epoch_loop, "restarted_on_train_batch_end"):
        return
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    current = progress["current"]
    if current["ready"] > current["processed"]:
        progress["is_last_batch"] = False  # it will be trained again, and 2.4.0 would count the epoch as ended
    elif current["completed"] == current["processed"] - 1:
        for count in (current, progress["total"]):
            count["completed"] += 1


def load_states_once(trainer: AnyTrainer, states: LoaderStates) -> None:
    """Restore the training loaders' ``states`` when the loaders are made, once.

    Lightning itself restores them only in the middle of an epoch.
    Checked against Lightning 2.4.0 and 2.6.6 (``loops/fit_loop.py: _load_combined_loader_states``).
    """

    def load() -> None:
        forget_states(trainer)
        combined = trainer.fit_loop._combined_loader
        assert combined is not None
        combined._load_state_dicts(states)

    vars(trainer.fit_loop)["_load_combined_loader_states"] = load


def forget_states(trainer: AnyTrainer) -> None:
    """Undo :func:`load_states_once` after a fit that ended before its loaders were made."""
    vars(trainer.fit_loop).pop("_load_combined_loader_states", None)


def begin_epoch(trainer: AnyTrainer) -> None:
    """Let a resumed run begin a new epoch, even where Lightning, which counts only steps, assumes that it has begun.

    Call this in ``on_train_start``. Checked against Lightning 2.4.0 and 2.6.6 (``loops/fit_loop.py: restarting``).
    """
    trainer.fit_loop.epoch_loop.restarting = False

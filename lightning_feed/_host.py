"""The only file that touches Lightning's private parts.

Each function says in which versions it was read, and what public thing would replace it. Objects of both packages
(``lightning`` and ``pytorch_lightning``) pass through here, so nothing is imported from either: they are told apart by
what they have, not by what they are.
"""

import functools
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# --- wrapping methods on instances ------------------------------------------------------------------------------------


class Wrap:
    """``around(original, *args)`` in the place of ``owner.name(*args)``, on this one instance, until :meth:`undo`.

    A wrap that another tool has wrapped in its turn cannot be taken out; it then goes dead and passes calls through.
    It pickles and deep-copies as the plain method, so a module copied or saved in the middle of a fit stays usable.
    """

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self._owner, self._name = owner, name
        self._original = getattr(owner, name)
        self._shadowed = vars(owner).get(name)
        self._around: Callable[..., Any] | None = around
        functools.update_wrapper(self, self._original)  # Lightning's is_overridden looks through __wrapped__
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._around is None:
            return self._original(*args, **kwargs)
        return self._around(self._original, *args, **kwargs)

    def undo(self) -> None:
        """Take the wrap out, or make it dead where something else holds on to it."""
        self._around = None
        if vars(self._owner).get(self._name) is not self:
            return
        if self._shadowed is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._shadowed)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, self._name)


def wrap_transfer(trainer: Any, convert_input: Callable[..., Any], batch_hook: Callable[..., Any]) -> list[Wrap]:
    """Put ``around`` functions before the three things that every loop does to a fetched batch.

    ``convert_input(original, batch)`` stands in for the precision plugin's, and
    ``batch_hook(original, name, batch, *args)`` for the module's dispatch of ``on_before_batch_transfer``,
    ``transfer_batch_to_device`` and ``on_after_batch_transfer``. Read in 2.4.0, 2.5.6 and 2.6.6
    (``core/module.py: _call_batch_hook``); a public hook that gives a callback the next batch would replace it.
    """
    return [
        Wrap(trainer.precision_plugin, "convert_input", convert_input),
        Wrap(trainer.lightning_module, "_call_batch_hook", batch_hook),
    ]


# --- the fetcher that a loop draws its batches from -------------------------------------------------------------------


@dataclass
class Fetched:
    """One draw from a fetcher: what came, or what went wrong, and how the fetcher stood afterwards."""

    value: Any = None
    error: Exception | None = None
    fetched: int = 0
    done: bool = False
    states: list[dict[str, Any]] | None = None
    """States of the stateful loaders with which a run goes on after this batch was trained. None: as they stand."""
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
        self.checked = self.closed = False
        """Whether the prefetcher has looked at a first batch, and whether it will not touch this fetcher any more."""
        self.on_hand_out: Callable[[Fetched], None] | None = None
        self.track_states = any(_is_stateful(loader) for loader in fetcher.combined_loader.flattened)
        self.trained_states: list[dict[str, Any]] | None = None
        """Loader states after the batch that the loop was handed last, where they differ from the present ones."""

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
            if tap.ahead:
                # The loop's own fetch is profiled as always; it just does not have to wait.
                self._start_profiler()
                item = tap.ahead.popleft()
                self._stop_profiler()
                self.fetched, self.done = item.fetched, item.done
            else:
                item = self._feed_draw()
            if item.error is not None:
                raise item.error
            tap.trained_states = item.states
            if tap.on_hand_out is not None:
                tap.on_hand_out(item)
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


# --- where the trainer stands -----------------------------------------------------------------------------------------


def epochs_processed(trainer: Any) -> int:
    """Training epochs that were trained to their end, which is the number of the epoch to train now.

    Lightning gives this number to ``sampler.set_epoch``. ``trainer.current_epoch`` is behind it on a resumed run until
    the fit loop starts. Read in 2.4.0 and 2.6.6 (``loops/fit_loop.py: on_advance_start``).
    """
    return int(trainer.fit_loop.epoch_progress.current.processed)


def ranks_that_share_samples(trainer: Any) -> int:
    """Among how many ranks Lightning divides the samples of a map-style dataset.

    Read in 2.4.0 and 2.6.6 (``connectors/data_connector.py: _requires_distributed_sampler``).
    """
    connector = trainer._accelerator_connector
    return int(trainer.world_size) if connector.use_distributed_sampler and connector.is_distributed else 1


def live_fetcher(trainer: Any) -> Any:
    """The fetcher of the loop that runs now, or None before it exists. Read in 2.4.0, 2.5.6 and 2.6.6."""
    if trainer.training:
        return train_fetcher(trainer)
    if trainer.sanity_checking or trainer.validating:
        fitting = trainer.state.fn == "fit"
        return (trainer.fit_loop.epoch_loop.val_loop if fitting else trainer.validate_loop)._data_fetcher
    if trainer.testing:
        return trainer.test_loop._data_fetcher
    if trainer.predicting:
        return trainer.predict_loop._data_fetcher
    return None


def train_fetcher(trainer: Any) -> Any:
    """The training loop's fetcher, or None outside of a fit. Read in 2.4.0, 2.5.6 and 2.6.6."""
    return trainer.fit_loop._data_fetcher


def read_already(trainer: Any) -> bool:
    """Whether Lightning has drawn a batch that no step was given yet, as it does for loaders without a length."""
    return bool(trainer.fit_loop._data_fetcher.batches)


def train_batches_to_follow(trainer: Any, *, at_most: int, step_pending: bool) -> int:
    """How many batches the training loop will surely go straight on to after this one, up to ``at_most``.

    None when the run ends here, and none when validation comes first: what validation draws from the global random
    generators would otherwise come after the next training batch was loaded, not before.

    Args:
        at_most: the answer is not looked for beyond it.
        step_pending: the optimizer step of this batch is still to come, so the step count is one behind.

    Read in 2.4.0 and 2.6.6 (``loops/training_epoch_loop.py``).
    """
    loop = trainer.fit_loop.epoch_loop
    if trainer.should_stop or loop.batch_progress.is_last_batch:
        return 0
    if trainer.max_steps != -1:
        at_most = min(at_most, trainer.max_steps - trainer.global_step - step_pending)
    if at_most <= 0 or loop._should_check_val_fx(trainer.fit_loop._data_fetcher):
        return 0
    return at_most


def is_overridden(owner: Any, hook: str) -> bool:
    """Whether the user's module or callback has a ``hook`` of its own, not Lightning's empty one."""
    method = getattr(owner, hook, None)
    return method is not None and not defined_by_lightning(getattr(method, "__wrapped__", method))


def defined_by_lightning(thing: Any) -> bool:
    """Whether a class, object or function comes from Lightning or from this package."""
    module = getattr(thing, "__module__", None) or type(thing).__module__
    return module.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_feed")


# --- measuring, logging and printing beside the loop ------------------------------------------------------------------


def step_actions(trainer: Any) -> tuple[str, str, str]:
    """What the profiler calls fetching a training batch, taking it to the device, and running the step on it.

    Read in 2.4.0 and 2.6.6 (``loops/training_epoch_loop.py``, ``trainer/call.py: _call_strategy_hook``).
    """
    fetch = f"[{type(trainer.fit_loop.epoch_loop).__name__}].train_dataloader_next"
    return fetch, f"[Strategy]{type(trainer.strategy).__name__}.batch_to_device", "run_training_batch"


def profiler_does_nothing(trainer: Any) -> bool:
    """Whether the profiler is Lightning's empty one. Read in 2.4.0 and 2.6.6 (``profilers/base.py``)."""
    kind = type(trainer.profiler)
    return kind.__name__ == "PassThroughProfiler" and defined_by_lightning(kind)


def step_to_log(trainer: Any, every: int) -> int | None:
    """The loggers' number of the step that just ended, if one in ``every`` falls on it; None while accumulating.

    Read in 2.4.0 and 2.6.6 (``connectors/logger_connector: should_update_logs, update_train_step_metrics``).
    """
    loop = trainer.fit_loop.epoch_loop
    step: int = loop._batches_that_stepped
    return None if (step + 1) % every or loop._should_accumulate() else step


def train_loaders(trainer: Any) -> list[Any]:
    """The training loaders, flattened. Read in 2.4.0 and 2.6.6 (``loops/fit_loop.py: setup_data``)."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def bar_printer(trainer: Any) -> Callable[[str], object] | None:
    """What prints a line above a live progress bar; None where a plain ``print`` does.

    Lightning's TQDM bar prints nothing at all when it is closed or disabled; other bars let a ``print`` through. Read
    in 2.4.0 and 2.6.6 (``callbacks/progress/tqdm_progress.py: print``).
    """
    bar = trainer.progress_bar_callback
    live = getattr(bar, "_train_progress_bar", None)
    return bar.print if live is not None and not live.disable else None


# --- loader states in a checkpoint ------------------------------------------------------------------------------------


def checkpoint_loader_states(checkpoint: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The training loaders' states in a checkpoint.

    Read in 2.4.0 and 2.6.6 (``loops/fit_loop.py: on_save_checkpoint``).
    """
    states: list[dict[str, Any]] | None = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader")
    return states


def write_loader_states(checkpoint: dict[str, Any], states: list[dict[str, Any]]) -> None:
    """Put ``states`` in the place of those that Lightning took; none at all where nothing was trained yet."""
    fit_loop = checkpoint["loops"]["fit_loop"]["state_dict"]
    if states:
        fit_loop["combined_loader"] = states
    else:
        fit_loop.pop("combined_loader", None)


def resumes_in_a_new_epoch(trainer: Any, checkpoint: dict[str, Any]) -> bool:
    """Whether a run resumed from ``checkpoint`` starts a new epoch with the loader states that it loads.

    It does when the last batch of an epoch had been trained. Lightning gives the loaders their states then too, but no
    new ``iter()``: a loader that goes on from there has nothing left, and the new epoch would be empty. Read in 2.6.6
    (``loops/training_epoch_loop.py: reset``).
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    current = progress["current"]
    if not progress["is_last_batch"] or current["ready"] != current["processed"]:
        return False
    return current["completed"] == current["processed"] or _counts_the_batch_in_hand(trainer)


def count_the_batch_in_hand(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Let an older Lightning know that a batch was trained whose ``on_train_batch_end`` was still running.

    ``ModelCheckpoint(every_n_train_steps=...)`` saves there. 2.6.6 counts that batch, and 2.4.0 would train one more in
    its place. The epoch is ended too where it was the last batch, as 2.6.6 does (``loops/fit_loop.py: reset``).
    """
    if _counts_the_batch_in_hand(trainer):
        return
    fit_loop = checkpoint["loops"]["fit_loop"]
    progress = fit_loop["epoch_loop.batch_progress"]
    current = progress["current"]
    if not current["ready"] == current["processed"] == current["completed"] + 1:
        return
    for part in (current, progress["total"]):
        part["completed"] += 1
    if progress["is_last_batch"]:
        for part in fit_loop["epoch_progress"].values():
            part["processed"] += 1
            part["completed"] += 1
        current.update(dict.fromkeys(current, 0))
        progress["is_last_batch"] = False


def _counts_the_batch_in_hand(trainer: Any) -> bool:
    return hasattr(trainer.fit_loop.epoch_loop, "restarted_on_train_batch_end")

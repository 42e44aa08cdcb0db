"""Checkpoints in the middle of an epoch hold the loaders' state after the last *trained* batch.

Lightning saves a stateful loader's own position. That is one batch too far for a loader without a length, which
Lightning reads ahead, and ``depth`` batches too far with a prefetcher. The batches in between would never be trained.
"""

import logging
from typing import Any, Literal

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_feed import _host
from lightning_feed._host import (
    AnyTrainer,
    FetcherTap,
    adopt_fetcher,
    batches_to_skip,
    begin_epoch,
    checkpoint_loader_states,
    count_the_batch_in_hand,
    end_epoch,
    epoch_is_trained,
    forget_states,
    is_stateful,
    load_states_once,
    reopen_epoch,
    tap_of,
    write_loader_states,
)
from lightning_feed.errors import LoaderError, ResumeError
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.resume import DAMAGED, LoaderState, is_feed_state

logger = logging.getLogger(__name__)


class ExactResume(Callback):
    """Writes into each checkpoint the loader states after the last trained batch.

    ``PrefetchCallback`` is a subclass. ``FastDataModule`` adds an ExactResume if the Trainer has none. Works for any
    loader with ``state_dict`` and ``load_state_dict``; ignores other loaders.
    """

    def __init__(self) -> None:
        self._loaded: list[dict[str, object]] = []
        """The states in the checkpoint, until the first batch is trained."""
        self._is_uneven = False
        """True if the ranks have different numbers of batches, so that they may be in different epochs."""
        self._resumed: Literal["", "in a new epoch", "at the end of an epoch", "without a state"] = ""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reset the state from an earlier fit of the Trainer."""
        forget_states(trainer)
        self._loaded = []
        self._resumed = ""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, object]) -> None:
        """Keep the states that Lightning loads: they are valid until the first batch is trained.

        Raises:
            ResumeError: a state was changed after it was saved, or lacks data for the next epoch.
        """
        if trainer.state.fn != "fit":
            return  # ``trainer.validate(ckpt_path=...)`` restores no training loader
        states = checkpoint_loader_states(checkpoint) or []
        are_ours = all(map(is_feed_state, states))
        if not states:
            if batches_to_skip(checkpoint):
                self._resumed = "without a state"
        elif epoch_is_trained(checkpoint):
            # Our loaders can begin the next epoch; others can only start from the beginning.
            if not are_ours or any(LoaderState.from_dict(state).batches for state in states):
                states = []
            self._begin_next_epoch(trainer, checkpoint, states)
        elif are_ours:
            self._check(checkpoint, states)
            reopen_epoch(checkpoint)
            count_the_batch_in_hand(trainer, checkpoint)
        self._loaded = states

    def _begin_next_epoch(
        self, trainer: Trainer, checkpoint: dict[str, object], states: list[dict[str, object]]
    ) -> None:
        write_loader_states(checkpoint, states)
        self._resumed = "at the end of an epoch"
        if end_epoch(checkpoint):
            self._resumed = "in a new epoch"
            load_states_once(trainer, states)

    @staticmethod
    def _check(checkpoint: dict[str, object], states: list[dict[str, object]]) -> None:
        """Check the states here, since an error in a later hook would be hidden by an error in Lightning's teardown."""
        batches = [LoaderState.from_dict(state).batches for state in states]
        # With several loaders, the shorter ones may have started again.
        if len(states) == 1 and batches[0] < batches_to_skip(checkpoint):
            raise ResumeError(DAMAGED)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Track the loader states from the first batch.

        Raises:
            LoaderError: the ranks have different numbers of batches, so training would hang.
            ResumeError: the checkpoint was saved in mid-epoch without a loader state.
        """
        self._is_uneven = not check_equal_ranks(trainer)
        loaders = _host.train_loaders(trainer)
        resumed = self._resumed
        self._resumed = ""
        if resumed == "without a state" and any(isinstance(loader, FeedLoader) for loader in loaders):
            raise ResumeError(
                "The checkpoint was saved in the middle of an epoch without the state of the training loader, so "
                "samples that were trained already would be trained again. It was saved without a FastDataModule, its "
                "'combined_loader' was removed, or the ranks had different numbers of batches. Resume from a "
                "checkpoint that was saved at the end of an epoch."
            )
        tap = self._adopt(trainer, self._loaded)
        self._loaded = []
        if tap is not None:
            tap.epoch_over = resumed == "at the end of an epoch"
        if resumed == "in a new epoch":
            begin_epoch(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Track the states of the new loaders if the loaders were reloaded."""
        self._adopt(trainer, [])

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, object]) -> None:
        """Correct the states that Lightning has saved. Called on all ranks."""
        fetcher = _host.train_fetcher(trainer)
        if fetcher is None:
            return
        tap = tap_of(fetcher)
        states = None
        if tap is not None:
            states = tap.states_to_save()
        if states is None:
            states = checkpoint_loader_states(checkpoint)
        if states is None:
            return
        loaders = fetcher.combined_loader.flattened
        if epoch_is_trained(checkpoint):
            states = list(map(_state_at_end, filter(is_stateful, loaders), states))
        if self._is_uneven and any(isinstance(loader, FeedLoader) for loader in loaders):
            states = []  # one rank's position is not valid for the other ranks
        write_loader_states(checkpoint, states)

    @staticmethod
    def _adopt(trainer: Trainer, before: list[dict[str, object]]) -> FetcherTap | None:
        """Track the training fetcher. ``before`` holds the states to save until its first batch is trained."""
        fetcher = _host.train_fetcher(trainer)
        if fetcher is None:
            return None
        tap = adopt_fetcher(fetcher)
        if tap is None:
            return None
        tap.progress = _host.train_progress(trainer)
        if tap.track_states and tap.trained_states is None and _host.read_already(trainer):
            tap.trained_states = before
        return tap


def _state_at_end(loader: object, state: dict[str, object]) -> dict[str, object]:
    """Return the state of a loader whose epoch is trained. Only a FeedLoader's state can begin the next epoch."""
    if isinstance(loader, FeedLoader):
        return loader.state_at_end(state)
    return state


def check_equal_ranks(trainer: AnyTrainer) -> bool:
    """Compare the number of batches per epoch on all ranks, if known. All ranks must call this function.

    Ranks wait for each other in each step. If one rank has no more batches, it ends its epoch, and the others hang.

    Returns:
        True if all ranks have the same number, or no rank knows its number.

    Raises:
        LoaderError: the numbers differ, and neither ``max_steps`` nor ``max_time`` limits the run.
    """
    if trainer.world_size < 2 or not dist.is_initialized():
        return True
    lengths: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(lengths, trainer.num_training_batches)
    are_equal = len(set(lengths)) == 1
    if are_equal or float("inf") in lengths:
        return are_equal
    numbers = ", ".join(f"{length} on rank {rank}" for rank, length in enumerate(lengths))
    message = (
        f"The ranks have different numbers of training batches in an epoch: {numbers}. Ranks wait for each other in "
        "each step, so the run would hang for ever when the shortest epoch is over. Give all ranks as many samples "
        f"(leave the sampler to Lightning, or cut the shards), or set limit_train_batches={min(lengths)}."
    )
    has_timer = any(_host.has_class(callback, "Timer") for callback in _host.callbacks_of(trainer))  # made by max_time
    if trainer.max_steps == -1 and not has_timer:
        raise LoaderError(message)
    if trainer.is_global_zero:
        logger.warning("%s The run does not hang if max_steps or max_time ends it before.", message)
    return False

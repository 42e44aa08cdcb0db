"""A checkpoint taken in mid-epoch holds the loaders as they stood after the last batch that was *trained*.

Lightning saves what a stateful loader has handed out. That is one batch too far for a loader without a length, which
Lightning reads ahead, and ``depth`` too far behind a prefetcher; the batches in between would never be trained. With
several ranks it saves rank zero's state for all of them.
"""

import logging
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_feed import _host
from lightning_feed._host.fetcher import (
    FetcherTap,
    adopt_fetcher,
    checkpoint_loader_states,
    count_the_batch_in_hand,
    resumes_in_a_new_epoch,
    shift_batches,
    write_loader_states,
)
from lightning_feed.errors import LoaderError
from lightning_feed.load.carry_over import begin_next_epoch, is_feed_state
from lightning_feed.load.loader import FeedLoader

logger = logging.getLogger(__name__)


class ExactResume(Callback):
    """Writes the loader states that belong to the trained batches into each checkpoint.

    ``PrefetchCallback`` is one, and ``FastDataModule`` adds one where there is none. It works for any loader with
    ``state_dict`` and ``load_state_dict``; loaders without them are none of its business.
    """

    def __init__(self) -> None:
        self._loaded: list[dict[str, Any]] = []

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Remember what Lightning gives to the loaders: it is true until the first batch is trained."""
        if trainer.state.fn != "fit":
            return  # ``trainer.validate(ckpt_path=...)``: no training loader is given a state
        states = checkpoint_loader_states(checkpoint) or []
        ours = all(map(is_feed_state, states))
        if states and resumes_in_a_new_epoch(trainer, checkpoint):
            # Our loaders can begin the epoch after the one that ended; others can only begin afresh.
            states = [begin_next_epoch(state) for state in states] if ours else []
            write_loader_states(checkpoint, states)
        elif len(states) > 1 and ours:
            states = [{**state, "beside": len(states) - 1} for state in states]
            write_loader_states(checkpoint, states)
        if states and ours:
            count_the_batch_in_hand(trainer, checkpoint)
        self._loaded = states

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Follow the fetcher from its first batch on.

        Raises:
            LoaderError: the ranks have different numbers of batches, and would hang.
        """
        check_equal_ranks(trainer)
        self._adopt(trainer, self._loaded)
        self._loaded = []
        loaders = _host.train_loaders(trainer)
        if len(loaders) == 1 and isinstance(loaders[0], FeedLoader) and loaders[0].shift:
            # Lightning ends the epoch by its own count, which comes from the checkpoint.
            shift_batches(trainer, loaders[0].shift)
            loaders[0].shift = 0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reloading the loaders makes a new fetcher."""
        self._adopt(trainer, [])

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Correct the states that Lightning took. Every rank takes part, as it does in saving."""
        fetcher = _host.train_fetcher(trainer)
        if fetcher is None:
            return
        tap: FetcherTap | None = getattr(fetcher, "_feed_tap", None)
        states = tap.states_to_save() if tap is not None else None
        if states is None:
            states = checkpoint_loader_states(checkpoint)
        if states is None:
            return
        if trainer.world_size > 1 and any(
            getattr(loader, "state_differs_by_rank", False) for loader in fetcher.combined_loader.flattened
        ):
            by_rank: list[Any] = [None] * trainer.world_size
            dist.all_gather_object(by_rank, states)
            states = [{"ranks": list(ranks)} for ranks in zip(*by_rank, strict=True)]
        write_loader_states(checkpoint, states)

    @staticmethod
    def _adopt(trainer: Trainer, before: list[dict[str, Any]]) -> None:
        """Follow the fetcher. ``before`` are the states until its first batch is trained."""
        fetcher = _host.train_fetcher(trainer)
        tap = None if fetcher is None else adopt_fetcher(fetcher)
        if tap is not None:
            tap.progress = _host.train_progress(trainer)
            if tap.track_states and tap.trained_states is None and _host.read_already(trainer):
                tap.trained_states = before


def check_equal_ranks(trainer: Any) -> None:
    """Compare the batches of an epoch on all ranks, where they are known. Every rank takes part.

    Ranks wait for each other in each step. One that has no batch left ends its epoch, and the others hang for ever.

    Raises:
        LoaderError: they differ, and nothing ends the run before the shorter epoch is over.
    """
    if trainer.world_size < 2 or not dist.is_initialized():
        return
    lengths: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(lengths, trainer.num_training_batches)
    if len(set(lengths)) == 1 or float("inf") in lengths:
        return
    told = ", ".join(f"{length} on rank {rank}" for rank, length in enumerate(lengths))
    message = (
        f"The ranks have different numbers of training batches in an epoch: {told}. Ranks wait for each other in each "
        "step, so the run would hang for ever when the shortest epoch is over. Give all ranks as many samples (leave "
        f"the sampler to Lightning, or cut the shards), or set limit_train_batches={min(lengths)}."
    )
    timed = any(type(callback).__name__ == "Timer" for callback in trainer.callbacks)  # what max_time makes
    if trainer.max_steps == -1 and not timed:
        raise LoaderError(message)
    if trainer.is_global_zero:
        logger.warning("%s Unless max_steps or max_time end it before.", message)

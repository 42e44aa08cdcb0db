"""Ranks that would train different numbers of batches are told before they hang.

Ranks wait for each other in each step. One that has no batch left ends its epoch, and the others wait for it for ever.
"""

import logging
from typing import Any

import torch.distributed as dist

from lightning_feed.errors import LoaderError

logger = logging.getLogger(__name__)


def check_equal_ranks(trainer: Any) -> None:
    """Compare the batches of an epoch on all ranks, where they are known. Every rank takes part.

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

"""A batch size for evaluation that leaves no small last batch."""

from dataclasses import dataclass

from lightning_feed.errors import SettingsError


@dataclass(frozen=True, kw_only=True)
class EvenBatch:
    """A batch size, and why."""

    batch_size: int
    left: int
    """Samples in the last, smaller batch of each rank; 0 when all are full."""
    reason: str


def even_batch_size(wished: int, samples: int, world_size: int = 1) -> EvenBatch:
    """The batch size of at most ``wished``, and at least half of it, that leaves the fewest samples for a last batch.

    The larger of two that leave as many. All samples are seen with any of them. Each rank has
    ``ceil(samples / world_size)`` of them: a DistributedSampler repeats some to make the ranks equal.

    Args:
        wished: the largest batch that fits.
        samples: of the data set.
        world_size: ranks among which they are divided.

    Raises:
        SettingsError: for a number that is not positive.

    Example:
        >>> even_batch_size(512, 50_000).batch_size
        500
    """
    for name, value in (("wished", wished), ("samples", samples), ("world_size", world_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SettingsError(f"{name}={value!r} is not possible. Give a whole number of 1 or more.")
    share = -(-samples // world_size)
    of_each = f"{share} samples" if world_size == 1 else f"{share} samples of each of {world_size} ranks"
    if share <= wished:
        return EvenBatch(batch_size=wished, left=share % wished, reason=f"the {of_each} fit into one batch")
    best = min(range((wished + 1) // 2, wished + 1), key=lambda size: (share % size, -size))
    left, before = share % best, share % wished
    if best == wished:
        reason = f"the {of_each} leave {left} for a last batch, and no size from half of {wished} on leaves fewer"
    else:
        reason = f"the {of_each} leave {left} for a last batch, and {before} with {wished}"
    return EvenBatch(batch_size=best, left=left, reason=reason)

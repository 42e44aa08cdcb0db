"""Streams (iterable datasets) that are known to divide their samples among worker processes."""

from typing import Any

from torch.utils.data import IterableDataset

from lightning_feed.load.kinds import AnyDataset, AnyLoader

_DIVIDING_PACKAGES = ("litdata", "streaming")
"""Packages whose streams always divide themselves among workers."""


def divides_among_workers(loader: AnyLoader) -> bool | None:
    """Return True if a loader's stream is known to divide its samples among workers, and False if this is unknown.
    Returns None if the dataset is not a stream.

    If this is unknown, each worker may yield all samples. Only running the user's code could answer the question.
    """
    dataset = getattr(loader, "dataset", None)
    if not isinstance(dataset, IterableDataset):
        return None
    return _divides_itself(dataset)


def _divides_itself(dataset: AnyDataset) -> bool:
    package = type(dataset).__module__.partition(".")[0]
    if package == "datasets":  # Hugging Face's: at most one worker per shard gets samples
        shards: Any = getattr(dataset, "num_shards", getattr(dataset, "n_shards", 1))
        return int(shards) > 1
    if package in _DIVIDING_PACKAGES:
        return True
    stages = getattr(dataset, "pipeline", None)  # WebDataset's
    return isinstance(stages, list) and any(getattr(stage, "__name__", "") == "split_by_worker" for stage in stages)

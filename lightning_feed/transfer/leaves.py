"""The leaves of samples and batches that are made of plain containers, with their places."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from lightning_feed.errors import DatasetError


def map_leaves(batch: Any, function: Callable[[Any], Any]) -> Any:
    """A batch of the same containers, with ``function(leaf)`` in the place of each leaf."""
    if isinstance(batch, Mapping):
        return {key: map_leaves(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_leaves(value, function) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_leaves(value, function) for value in batch)
    return function(batch)


def leaves(batch: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a batch in order, each with its place, such as ``['image'][0]``."""
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from leaves(value, f"{place}[{key!r}]")
    elif isinstance(batch, (list, tuple)):
        for number, value in enumerate(batch):
            yield from leaves(value, f"{place}[{number}]")
    else:
        yield place, batch


def shapes_of(sample: Any, index: int) -> dict[str, str]:
    """What each leaf of a sample is, by its place in it: ``{"['image']": "uint8 (32, 32, 3)"}``."""
    shapes = {}
    for place, leaf in leaves(sample):
        if isinstance(leaf, Tensor) or (isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc"):
            shapes[place] = f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
        elif isinstance(leaf, (bool, int, float, np.number, np.bool_)):
            shapes[place] = f"a {type(leaf).__name__}"
        else:
            raise DatasetError(
                f"Sample {index} has a {type(leaf).__name__} at sample{place}, which cannot be kept on a device. Give "
                "tensors, arrays and numbers only."
            )
    return shapes

"""Type aliases for user objects that torch passes on, which may be of any type."""

from typing import Any, TypeAlias

import numpy.typing as npt

Sample: TypeAlias = Any
"""A sample of a dataset."""
Batch: TypeAlias = Any
"""A collated batch."""
Index: TypeAlias = Any
"""An item of a sampler or batch sampler."""
AnyDataset: TypeAlias = Any
"""A dataset, map-style or iterable, with the methods that torch requires, but not always of torch's class."""
AnyLoader: TypeAlias = Any
"""A loader: a DataLoader, or an iterable of another package."""
AnyIterator: TypeAlias = Any
"""An iterator over a loader: torch's (with its private attributes), ours, or another package's."""
AnySampler: TypeAlias = Any
"""A sampler or batch sampler, with the methods that torch requires, but not always of torch's class."""
Array: TypeAlias = npt.NDArray[Any]
"""A decoded sample."""
State: TypeAlias = dict[str, Any]
"""The state of a loader, or of a part of a loader, as it is pickled into a checkpoint."""

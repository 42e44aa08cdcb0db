"""Names for what users give and torch passes on, which may be of any type."""

from collections.abc import Mapping
from typing import Any, TypeAlias

Sample: TypeAlias = Any
"""A sample of a dataset."""
Batch: TypeAlias = Any
"""A collated batch."""
Index: TypeAlias = Any
"""An item of a sampler or batch sampler."""
AnyDataset: TypeAlias = Any
"""A dataset, map-style or iterable: torch's contract, but not always its class."""
AnySampler: TypeAlias = Any
"""A sampler or batch sampler: torch's contract, but not always its class."""
State: TypeAlias = dict[str, Any]
"""The state of a loader or of a part of it, as it is pickled into a checkpoint."""
SavedState: TypeAlias = Mapping[str, Any]
"""A state that is only read."""

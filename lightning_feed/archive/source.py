"""What every place that samples are read from offers: a folder, a pack, a staged copy of either."""

from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

Encoded: TypeAlias = "bytes | memoryview | npt.NDArray[np.uint8]"
"""The bytes of one sample: a whole file as it was, or decoded uint8 pixels, (H, W, 3)."""


@runtime_checkable
class SampleSource(Protocol):
    """Labelled samples by index. Can be pickled and forked: files are opened in the process that reads them."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the labels, sorted; ``labels`` are indices into it."""

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """Shape (n,)."""

    def __len__(self) -> int:
        """Samples."""

    def read(self, index: int) -> Encoded:
        """The bytes of sample ``index``.

        Raises:
            DatasetError: when they cannot be read, with the name of the sample and the reason.
        """

    def name(self, index: int) -> str:
        """What errors call sample ``index``: its path, or its path inside the pack."""

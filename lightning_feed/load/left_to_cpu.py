"""What a device cannot decode and the CPU does instead: counted by reason, and each reason said once."""

import logging
from collections import Counter

from lightning_feed.errors import printable

logger = logging.getLogger(__name__)


class LeftToCpu:
    """The images of one dataset that a device's decoder leaves to the CPU's, in the process that trains.

    Attributes:
        known: index of an image -> why the device's decoder failed on it: it is not tried again.
        worked: whether the device's decoder has decoded any image yet.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self.known: dict[int, str] = {}
        self.worked = False

    def add(self, reason: str, name: str) -> None:
        """Count one image, and say it if it is the first with this reason.

        Args:
            reason: what kind of image it is.
            name: of the image.
        """
        self._counts[reason] += 1
        if self._counts[reason] == 1:
            logger.warning(
                "The CPU decodes %s, and others like it, in the training process: %s. Further ones are only counted. "
                'Where most images are like that, backend="torch" is faster: its workers decode.',
                printable(name),
                reason,
            )

    def as_dict(self) -> dict[str, int]:
        """Images by reason; one counts each time that it is decoded."""
        return dict(self._counts)

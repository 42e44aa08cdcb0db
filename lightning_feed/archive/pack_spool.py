"""Payloads on their way into a pack: one file that grows, with a record for each, so that a kill loses nothing."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

RECORD = np.dtype([("source", "<i8"), ("size", "<i8"), ("checksum", "<u4"), ("kept", "<u4")])
"""For each sample of the source, in its order: its number, and its payload if it was kept."""


class Spool:
    """Payloads of one part, appended in the order of the source.

    A record is written after its payload. What a killed process left without a record is cut off when it is opened
    again, so that the number of records is where to go on.

    Args:
        folder: an existing folder, for this part alone.
    """

    def __init__(self, folder: Path) -> None:
        self._payloads = (folder / "payloads").open("ab")
        self._records = (folder / "records").open("ab")
        self._folder = folder
        whole = self._records.tell() // RECORD.itemsize
        found = self.records()[:whole]
        # A record may have reached the disk before the payload that it speaks of, when the machine itself went down.
        fits = np.cumsum(found["size"]) <= self._payloads.tell()
        self.done = int(fits.sum())
        """Samples of the source that are dealt with."""
        self.total_bytes = int(found["size"][: self.done].sum())
        self._records.truncate(self.done * RECORD.itemsize)
        self._payloads.truncate(self.total_bytes)

    def cut(self, count: int) -> None:
        """Drop all samples of the source from number ``count`` on."""
        found = self.records()[: self.done]
        self.done = min(self.done, count)
        self.total_bytes = int(found["size"][: self.done].sum())
        self._records.truncate(self.done * RECORD.itemsize)
        self._payloads.truncate(self.total_bytes)

    def append(self, payload: bytes | None, checksum: int) -> None:
        """Add the payload of the next sample; None for one that is left out."""
        size = 0 if payload is None else len(payload)
        record = np.array([(self.done, size, checksum, payload is not None)], RECORD)
        if payload is not None:
            self._payloads.write(payload)
        self._records.write(record.tobytes())
        self.done += 1
        self.total_bytes += size

    def flush(self) -> None:
        """Hand what was appended to the system: payloads first."""
        self._payloads.flush()
        self._records.flush()

    def close(self) -> None:
        """Flush to the disk and close."""
        self.flush()
        os.fsync(self._payloads.fileno())
        self._payloads.close()
        self._records.close()

    def abandon(self) -> None:
        """Close after an error, such as a full disk: what cannot be written is left out and done again next time."""
        for file in (self._payloads, self._records):
            try:
                file.close()
            except OSError:  # the buffer's rest does not fit; the file is closed all the same
                continue

    def records(self) -> "np.ndarray[tuple[int], np.dtype[np.void]]":
        """All records, in the order of the source."""
        raw = (self._folder / "records").read_bytes()
        return np.frombuffer(raw[: len(raw) // RECORD.itemsize * RECORD.itemsize], RECORD)

    def payloads(self) -> Iterator[bytes]:
        """The payloads that were kept, in order."""
        with (self._folder / "payloads").open("rb") as file:
            for record in self.records():
                if record["kept"]:
                    yield file.read(int(record["size"]))

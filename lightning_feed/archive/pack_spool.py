"""Payloads on their way into a pack: one file that grows, with a record for each, so that a kill loses nothing."""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

RECORD = np.dtype([("source", "<i8"), ("size", "<i8"), ("changed_ns", "<i8"), ("checksum", "<u4"), ("kept", "<u4")])
"""For each sample of the source, in its order: its number, its payload, when its file had last changed, and whether it
was kept (1) or left out (2): a record of zeros, as a crash of the machine may leave, is neither."""
KEPT, LEFT_OUT = 1, 2


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
        # When the machine itself went down, a record may have reached the disk before the payload that it speaks of, or
        # be of zeros.
        whole_ones = (
            (found["source"] == np.arange(whole))
            & np.isin(found["kept"], (KEPT, LEFT_OUT))
            & (found["size"] >= 0)
            & (np.cumsum(found["size"]) <= self._payloads.tell())
        )
        self.done = int(np.argmin(np.append(whole_ones, False)))
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

    def undamaged(self) -> int:
        """How many samples, from the first on, are as they were written, by their checksums."""
        with (self._folder / "payloads").open("rb") as file:
            for record in self.records()[: self.done]:
                if record["kept"] == KEPT and zlib.crc32(file.read(int(record["size"]))) != record["checksum"]:
                    return int(record["source"])
        return self.done

    def append(self, payload: bytes | None, checksum: int, changed_ns: int = 0) -> None:
        """Add the payload of the next sample; None for one that is left out."""
        size = 0 if payload is None else len(payload)
        record = np.array([(self.done, size, changed_ns, checksum, LEFT_OUT if payload is None else KEPT)], RECORD)
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
        return records_of(self._folder)

    def payloads(self) -> Iterator[bytes]:
        """The payloads that were kept, in order."""
        with (self._folder / "payloads").open("rb") as file:
            for record in self.records():
                if record["kept"] == KEPT:
                    yield file.read(int(record["size"]))


def records_of(folder: Path) -> "np.ndarray[tuple[int], np.dtype[np.void]]":
    """The records of a spool, whose payloads may be gone; none where there is no spool."""
    try:
        raw = (folder / "records").read_bytes()
    except FileNotFoundError:
        raw = b""
    return np.frombuffer(raw[: len(raw) // RECORD.itemsize * RECORD.itemsize], RECORD)

"""Speed of a remote place, measured with a bounded number of requests."""

import asyncio
import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from lightning_feed.errors import ArchiveError
from lightning_feed.storage.remote import REQUESTS, Connection, RemotePlace
from lightning_feed.storage.remote_folder import parse_entries

ALONE = 8
"""Number of sequential one-byte requests."""
TOGETHER = 2 * REQUESTS
"""Maximum number of concurrent requests for files."""
_MOST_BYTES = 1 << 19
"""Maximum bytes of each concurrent request."""
_MOST_S = 5.0


class Wanted(NamedTuple):
    """A file to read in the measurement."""

    name: str
    """Path below the place."""
    size: int
    """Bytes."""


class RemoteSpeed(NamedTuple):
    """Latency and throughput of a place."""

    latency_ms: float
    """Time of a one-byte request in ms: median of :data:`ALONE` sequential requests."""
    mb_per_s: float | None
    """Throughput of many concurrent requests; None if none of them ended in time."""
    requests: int
    """Number of concurrent requests sent."""


def measure_speed(place: RemotePlace, wanted: Sequence[Wanted]) -> RemoteSpeed:
    """Time a few sequential one-byte requests, then many concurrent ones for at most 5 s. At most 64 MiB, 137 requests.

    Args:
        place: the place to measure.
        wanted: files to read there, at least one.

    Raises:
        ArchiveError: if they cannot be read.
    """
    connection = place.connection()
    return connection.submit(_measure(connection, wanted[:TOGETHER])).result()


async def _measure(connection: Connection, wanted: Sequence[Wanted]) -> RemoteSpeed:
    first = wanted[0]
    took_ms = []
    for _ in range(1 + ALONE):  # the first request opens the connection
        began = time.perf_counter()
        await connection.fetch(first.name, 1, whole=False)
        took_ms.append(1e3 * (time.perf_counter() - began))
    began = time.perf_counter()
    parts = [connection.fetch(one.name, min(one.size, _MOST_BYTES), whole=False) for one in wanted]
    reads = [asyncio.ensure_future(part) for part in parts]
    done, pending = await asyncio.wait(reads, timeout=_MOST_S)
    for one in pending:
        one.cancel()
    size = sum(len(one.result()) for one in done)
    seconds = time.perf_counter() - began
    return RemoteSpeed(median(took_ms[1:]), size / 1e6 / seconds if size else None, len(wanted))


def some_files(place: RemotePlace) -> list[Wanted]:
    """Return some files of a place, from the first folder that has any.

    Raises:
        ArchiveError: if it cannot be listed, or has no files.
    """
    connection = place.connection()
    folder = ""
    while True:
        entries = connection.submit(connection.call("ls", folder, detail=True)).result()
        files, inside = parse_entries(entries, folder, connection.path(folder))
        found = [Wanted(path, size) for path, size, _ in files if size > 0]
        if found:
            return found[:TOGETHER]
        if not inside:
            raise ArchiveError(f"{place} has no files. Check the URL.")
        folder = inside[0]

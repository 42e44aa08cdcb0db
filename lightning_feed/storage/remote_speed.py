"""The speed of a remote place, measured by a bounded number of requests."""

import asyncio
import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from lightning_feed.errors import ArchiveError
from lightning_feed.storage.remote import REQUESTS, Connection, RemotePlace
from lightning_feed.storage.remote_folder import parse_entries

ALONE = 8
"""Requests of one byte, one after the other."""
TOGETHER = 2 * REQUESTS
"""Requests for files at the same time, at most."""
_MOST_BYTES = 1 << 19
"""Of each of them."""
_MOST_S = 5.0


class Wanted(NamedTuple):
    """A file."""

    name: str
    """Its path below the place."""
    size: int
    """Bytes."""


class RemoteSpeed(NamedTuple):
    """Latency and throughput of a place."""

    latency_ms: float
    """From asking for one byte to having it: median of :data:`ALONE` requests, one after the other."""
    mb_per_s: float | None
    """With many requests at the same time; None where none of them ended in time."""
    requests: int
    """Number of requests sent at the same time."""


def measure_speed(place: RemotePlace, wanted: Sequence[Wanted]) -> RemoteSpeed:
    """Time a few small requests one after the other, and then many at once. At most 64 MiB, 5 s and 137 requests.

    Args:
        place: whose files these are.
        wanted: what may be read of it, at least one.

    Raises:
        ArchiveError: when it cannot be read.
    """
    connection = place.connection()
    return connection.submit(_measure(connection, wanted[:TOGETHER])).result()


async def _measure(connection: Connection, wanted: Sequence[Wanted]) -> RemoteSpeed:
    first, took_ms = wanted[0], []
    for _ in range(1 + ALONE):  # the first one opens the connection
        began = time.perf_counter()
        await connection.fetch(first.name, 1, whole=False)
        took_ms.append(1e3 * (time.perf_counter() - began))
    began = time.perf_counter()
    parts = [connection.fetch(one.name, min(one.size, _MOST_BYTES), whole=False) for one in wanted]
    reads = [asyncio.ensure_future(part) for part in parts]
    done, pending = await asyncio.wait(reads, timeout=_MOST_S)
    for one in pending:
        one.cancel()
    size, seconds = sum(len(one.result()) for one in done), time.perf_counter() - began
    return RemoteSpeed(median(took_ms[1:]), size / 1e6 / seconds if size else None, len(wanted))


def some_files(place: RemotePlace) -> list[Wanted]:
    """Some files of a place: those of its first folder that has any.

    Raises:
        ArchiveError: when it cannot be listed, or there are none.
    """
    connection, folder = place.connection(), ""
    while True:
        entries = connection.submit(connection.call("ls", folder, detail=True)).result()
        files, inside = parse_entries(entries, folder, connection.path(folder))
        found = [Wanted(path, size) for path, size, _ in files if size > 0]
        if found:
            return found[:TOGETHER]
        if not inside:
            raise ArchiveError(f"{place} has no files. Check the URL.")
        folder = inside[0]

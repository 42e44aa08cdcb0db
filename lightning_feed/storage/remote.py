"""Data at any fsspec URL: one file system per process, with retried and checked reads.

All requests of a process run in fsspec's event loop, many at a time: as coroutines if the file system supports them,
else in threads. Both use one code path, so that retries, time limits and checks are written once.
"""

import asyncio
import hashlib
import logging
import os
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, cast

import fsspec
from fsspec.asyn import get_loop

from lightning_feed.errors import ArchiveError, DatasetError, MissingExtraError, SettingsError, printable
from lightning_feed.storage.read_through import ReadThrough

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_chance = random.SystemRandom()  # never the user's generators

REQUESTS = 64
"""Concurrent requests of each process."""
SLOWEST_BYTES_PER_S = 1_000_000
"""Slowest accepted rate of a large read. The time limit of a request is extended by its size divided by this rate."""
_THREADS = 32
"""Threads for file systems without coroutines."""
_ATTEMPTS = 6
_FIRST_DELAY_S = 0.2
_LONGEST_DELAY_S = 10.0
_RENEW_EVERY_S = 60
_PASSING = (408, 425, 429)
"""HTTP 4xx statuses worth another attempt; all 5xx are, too."""
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError")
_MISSING_LIBRARY = {"s3": "lightning-feed[s3]", "s3a": "lightning-feed[s3]", "gs": "gcsfs", "gcs": "gcsfs",
                    "abfs": "adlfs", "abfss": "adlfs", "az": "adlfs", "hf": "huggingface_hub"}  # fmt: skip


class GoneError(ArchiveError, DatasetError):
    """An object that is missing, or differs from the listing. Also a DatasetError: it counts as a bad sample."""


def is_url(path: object) -> bool:
    """True if a path is a URL for fsspec: ``s3://bucket/birds``, or a chain such as ``zip://::s3://bucket/birds.zip``."""
    return isinstance(path, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)", path) is not None


def without_secrets(text: str) -> str:
    """Remove passwords, and queries (which may be signatures), from a URL or a message with URLs."""
    return re.sub(r"\?(?=[^\s'\"]*=)(?:(?!::)[^\s'\"])+", "?...", re.sub(r"//[^/\s]*@", "//", text))


def _joined(url: str, name: str) -> str:
    """Return the URL of a file below a URL. In a chain, the name is added to the first link if that has a path."""
    if not name:
        return url
    first, chained, rest = url.partition("::")
    if chained and "://" in first:
        return f"{first}{'' if first.endswith('/') else '/'}{name}::{rest}"
    return f"{url}/{name}"


def place_of(path: str | Path, storage_options: Mapping[str, object] | None = None) -> "Path | RemotePlace":
    """Return a RemotePlace for a URL, a Path for any other path.

    Raises:
        SettingsError: for options without a URL.
    """
    if isinstance(path, str) and is_url(path):
        return RemotePlace(path, storage_options)
    if storage_options:
        raise SettingsError(f"storage_options are for URLs, but {str(path)!r} is a path. Leave them out.")
    return Path(path)


class RemotePlace:
    """A folder or a file at a URL. Can be pickled and forked: each process makes its own file system.

    Args:
        url: URL for fsspec, with its protocol.
        options: ``storage_options`` of fsspec: credentials, endpoints.
        cache: cache for files that have been read; None to fetch a file at every read.
        readahead_bytes: number of bytes to fetch into the cache in advance, for the next samples.
        timeout_s: time limit of one request; the time for its bytes is added (:data:`SLOWEST_BYTES_PER_S`).

    Raises:
        SettingsError: if ``url`` is not a URL.

    Example:
        >>> place = RemotePlace("memory://birds")
        >>> place.url_of("wren/1.jpg")
        'memory://birds/wren/1.jpg'
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        cache: ReadThrough | None = None,
        readahead_bytes: int = 0,
        timeout_s: float = 30.0,
    ) -> None:
        if not is_url(url):
            raise SettingsError(
                f"{url!r} is not a URL such as s3://bucket/folder. Pass a URL, or a path without options."
            )
        self.url = url if "::" in url else url.rstrip("/")
        self.options = dict(options or {})
        self.timeout_s = timeout_s
        self.cache = cache
        self.readahead_bytes = readahead_bytes
        self.is_http = self.url.startswith(("http://", "https://"))
        about = repr((self.url, sorted(self.options.items(), key=lambda item: item[0])))
        self.key = hashlib.blake2b(about.encode(), digest_size=12).hexdigest()
        """Digest of the URL and options, which does not reveal the options."""

    def __str__(self) -> str:
        return printable(without_secrets(self.url))

    def __repr__(self) -> str:
        return f"RemotePlace({str(self)!r})"

    def url_of(self, name: str) -> str:
        """Return the URL of a file by its path below the place."""
        return printable(_joined(str(self), name))

    def below(self, name: str) -> "RemotePlace":
        """Return a folder or file below the place."""
        return RemotePlace(
            _joined(self.url, name),
            self.options,
            cache=self.cache,
            readahead_bytes=self.readahead_bytes,
            timeout_s=self.timeout_s,
        )

    def connection(self) -> "Connection":
        """Return this process's connection.

        Raises:
            SettingsError: if the protocol is unknown, or the file system refuses the options.
            MissingExtraError: if its library is not installed.
        """
        key = (os.getpid(), self.key, self.timeout_s)
        if key not in _connections:
            # Not system.process_lock: a finalizer in the event loop may take that lock, while this code waits for the
            # loop.
            with _connecting.setdefault(os.getpid(), threading.RLock()):
                if key not in _connections:
                    _connections[key] = Connection(self)
        return _connections[key]


_connecting: dict[int, threading.RLock] = {}
_connections: "dict[tuple[int, str, float], Connection]" = {}
"""Connections by process and place. A forked child neither uses nor drops the inherited ones, because closing them
needs the parent's event loop."""


class Connection:
    """fsspec file system of this process, and the event loop that runs its requests."""

    def __init__(self, place: RemotePlace) -> None:
        self.place = place
        self.loop = get_loop()  # fsspec makes a new one in a forked child
        self._slots = asyncio.Semaphore(REQUESTS)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="lightning-feed-remote")
        self._renewing = asyncio.Lock()
        self._renewed_s = float("-inf")
        self._open()

    def _open(self) -> None:
        place = self.place
        protocol = re.split("::|://", place.url)[0]
        options = dict(place.options)
        if protocol in ("s3", "s3a"):
            # Without this, botocore and s3fs would each try five times within each of our attempts.
            once = {"retries": {"total_max_attempts": 1}, "max_pool_connections": REQUESTS}
            options["config_kwargs"] = {**once, **options.get("config_kwargs", {})}
        try:
            # Not from fsspec's instance cache, which a forked child empties.
            self.fs, self.root = fsspec.url_to_fs(place.url, skip_instance_cache=True, **options)
        except ImportError as error:
            library = _MISSING_LIBRARY.get(protocol)
            how = f"Install it:  pip install '{library}'" if library else str(error)
            raise MissingExtraError(f"Reading {place} needs a library that is not installed. {how}") from error
        except (ValueError, TypeError, KeyError) as error:
            raise SettingsError(
                f"fsspec cannot open {place}: {without_secrets(str(error))}. Check the protocol, and the names in "
                "storage_options."
            ) from error
        except Exception as error:
            raise self.error_for(error, "") from error
        self.root = self.root.rstrip("/")
        if protocol in ("s3", "s3a"):
            self.fs.retries = 1
        if hasattr(getattr(self.fs, "dircache", None), "use_listings_cache"):
            self.fs.dircache.use_listings_cache = False  # a cache would hold a million entries per process

    def submit(self, work: Coroutine[Any, Any, _T]) -> "Future[_T]":
        """Start a coroutine in the loop, from any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def path(self, name: str) -> str:
        """Return the file system's path of a file below the place."""
        return f"{self.root}/{name}" if name and self.root else name or self.root

    async def fetch(
        self, name: str, size: int | None = None, *, begin: int = 0, whole: bool = True, **options: Any
    ) -> bytes:
        """Return the bytes of a file, or ``size`` bytes from ``begin``; with ``whole``, the file must end after them.

        Raises:
            GoneError: if the file is missing, or differs from the listing.
            ArchiveError: if it cannot be read.
        """
        if size == 0:
            return b""  # S3 refuses a range of an empty object
        if size is None:
            return bytes(await self.call("cat_file", name, **options))

        def check(data: bytes) -> None:
            if len(data) != size:
                more = "or more " if whole and len(data) > size else ""
                raise ReplacedError(
                    f"{len(data)} bytes {more}arrived, but {size} were listed: it was replaced, or cut short"
                )

        # Request one byte more than expected, to notice a longer object. If both ends are given, s3fs sends only one
        # request.
        options |= {"start": begin, "end": begin + size + whole}
        return bytes(await self.call("cat_file", name, grace_s=size / SLOWEST_BYTES_PER_S, check=check, **options))

    async def call(
        self,
        method: str,
        name: str,
        *,
        grace_s: float = 0.0,
        check: Callable[[Any], None] | None = None,
        **options: object,
    ) -> Any:
        """Call a file system method for a file. Retry temporary errors with growing pauses.

        Raises:
            GoneError: if the file is missing, or ``check`` refuses the result each time.
            ArchiveError: for any other error.
        """
        for attempt in range(_ATTEMPTS):
            began_s = time.monotonic()
            try:
                async with self._slots:
                    found = await asyncio.wait_for(self._begin(method, name, options), self.place.timeout_s + grace_s)
                if check is not None:
                    check(found)
                return found
            except Exception as error:
                cause = error
                if method == "info" and self.place.is_http and isinstance(error.__cause__, Exception):
                    cause = error.__cause__  # over HTTP, "info" reports every failure as a missing file
                passing = _may_pass(cause) or await self._renew(cause, began_s)
                if not passing or attempt == _ATTEMPTS - 1:
                    raise self.error_for(cause, name) from error
            # Random pauses, so that readers that failed together do not retry together.
            await asyncio.sleep(min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2**attempt) * _chance.uniform(0.5, 1.0))
        raise AssertionError("the last attempt returns or raises")

    def _begin(self, method: str, name: str, options: dict[str, object]) -> Awaitable[object]:
        path = self.path(name)
        if self.fs.async_impl:
            return cast("Awaitable[object]", getattr(self.fs, f"_{method}")(path, **options))
        work = partial(getattr(self.fs, method), path, **options)
        return cast("Awaitable[object]", self.loop.run_in_executor(self._pool, work))

    async def _renew(self, error: Exception, since_s: float) -> bool:
        """Reload expired credentials, with a minimum interval. True if they were reloaded since ``since_s``."""
        if not _is_refusal(error) or "expired" not in str(error).lower():
            return False
        async with self._renewing:
            if self._renewed_s <= since_s and time.monotonic() >= self._renewed_s + _RENEW_EVERY_S:
                await self.loop.run_in_executor(self._pool, self._open)
                self._renewed_s = time.monotonic()
        return self._renewed_s > since_s

    def error_for(self, error: Exception, name: str) -> ArchiveError:
        """Return the error to raise for a library's error: the file, the failure, and advice."""
        if isinstance(error, ArchiveError):
            return error
        url = self.place.url_of(name)
        status = status_of(error)
        if isinstance(error, ReplacedError) or status == 416:
            what = "it is shorter than listed" if status == 416 else error
            return GoneError(f"{url} cannot be used: {what}. Start the run again, which lists the files again.")
        if isinstance(error, FileNotFoundError) or status == 404:
            return GoneError(f"{url} does not exist (404). Check the URL; if it existed before, start the run again.")
        return ArchiveError(f"{url} {self._failure(error)}")

    def _failure(self, error: Exception) -> str:
        why = without_secrets(f"{type(error).__name__}: {error}") if str(error) else type(error).__name__
        if type(error).__name__ in _NO_CREDENTIALS:
            return (
                "cannot be read: there are no credentials for it. Set them as for fsspec (environment, files or "
                "storage_options), or storage_options={'anon': True} for public data."
            )
        if _is_refusal(error):
            return f"may not be read ({why}). Check that the credentials are for this place and have not expired."
        if not _may_pass(error):
            return f"cannot be read ({why})."
        limit = f" within {self.place.timeout_s:g} s" if isinstance(error, (TimeoutError, asyncio.TimeoutError)) else ""
        return f"could not be read{limit} in {_ATTEMPTS} attempts, last: {why}. Check the network and the server."


class ReplacedError(OSError):
    """The bytes differ from the listed version."""


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, PermissionError) or status_of(error) in (401, 403)


def _may_pass(error: Exception) -> bool:
    """True if another attempt may succeed."""
    status = status_of(error)
    if isinstance(error, FileNotFoundError) or _is_refusal(error):
        return False
    if status is not None:
        return status in _PASSING or status >= 500
    # Without a status: network failures (time-outs, resets, DNS, truncated bodies), but not our own bugs.
    ours = (TypeError, AttributeError, NotImplementedError, ImportError)
    return not isinstance(error, ours) and type(error).__name__ not in (*_NO_CREDENTIALS, "ParamValidationError")


def status_of(error: BaseException | None) -> int | None:
    """Return the HTTP status in an error of any library; None if there is none."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):  # botocore
            response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        found = (getattr(error, name, None) for name in ("status", "status_code", "code"))  # aiohttp, Azure, gcsfs
        for status in chain((response, getattr(response, "status_code", None)), found):  # aiohttp warns of its `code`
            # aiohttp also sets a code, which no server sent, on a broken response.
            if isinstance(status, int) and 400 <= status < 600 and type(error).__module__ != "aiohttp.http_exceptions":
                return status
        error = error.__cause__
    return None

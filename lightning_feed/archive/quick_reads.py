"""Reads from S3 by obstore, to spare the CPU time that a request takes in s3fs, in a process that is never forked.

What it reads, s3fs would read too, and with the same credentials; all that fails is asked of s3fs once more, which says
what is wrong. Where s3fs then succeeds several times, only s3fs is asked from then on. obstore's threads do not survive
a fork (https://github.com/developmentseed/obstore/pull/441), so it is for a process of its own that reads ahead.
"""

import asyncio
from collections.abc import Awaitable
from datetime import datetime, timedelta, timezone
from typing import Any, Protocol

allowed = False
"""Whether this process is one that is never forked."""
FAILURES = 3
"""One after the other, of what s3fs then read, after which only s3fs is asked."""
_KNOWN = {"key", "secret", "token", "anon", "endpoint_url", "profile", "client_kwargs", "config_kwargs"}
"""Options of s3fs that are understood here. With any other, s3fs reads."""
_KNOWN_CLIENT = {"endpoint_url", "region_name"}
_CREDENTIALS_S = 300
_LONGEST_S = 3600
SLOWEST_BYTES_PER_S = 1_000_000
"""How long a large read may take beyond the time limit of any request."""


class Read(Protocol):
    """Reads ``size`` bytes of a file from ``begin`` on; all of it where ``whole``."""

    error: Exception | None
    """The last one."""

    def __call__(self, path: str, begin: int, size: int | None, *, whole: bool) -> Awaitable[bytes | None]:
        """The bytes, or None where s3fs has to be asked."""


async def open_s3(file_system: Any, root: str, given: dict[str, Any], timeout_s: float) -> Read | None:
    """Reads for what an ``s3fs.S3FileSystem`` reads; None where only that can: obstore is missing, or an option is new.

    Args:
        file_system: of s3fs.
        root: bucket and folder.
        given: the options that the user gave for it.
        timeout_s: of a request.
    """
    try:
        from obstore.store import S3Store
    except ImportError:
        return None
    options = dict(file_system.storage_options)
    client_options = options.get("client_kwargs") or {}
    if not (set(options) <= _KNOWN and set(client_options) <= _KNOWN_CLIENT) or "config_kwargs" in given:
        return None
    try:
        client = await file_system.set_session()
    except Exception:  # noqa: BLE001  # s3fs meets the same when it reads, and says what is wrong
        return None
    endpoint, region = client.meta.endpoint_url, client.meta.region_name
    settings: dict[str, Any] = {"region": region or "us-east-1"}
    if not endpoint.endswith((".amazonaws.com", ".amazonaws.com.cn")):
        settings["endpoint"] = endpoint
    if file_system.anon:
        settings["skip_signature"] = True

    async def credentials() -> dict[str, Any]:
        found = file_system
        if not file_system.key:
            found = await (await file_system.session.get_credentials()).get_frozen_credentials()
        return {
            "access_key_id": found.key if found is file_system else found.access_key,
            "secret_access_key": found.secret if found is file_system else found.secret_key,
            "token": found.token,
            "expires_at": datetime.now(timezone.utc) + timedelta(seconds=_CREDENTIALS_S),
        }

    make_store: Any = S3Store
    store = make_store(
        root.partition("/")[0],
        config=settings,
        client_options={"allow_http": endpoint.startswith("http:"), "timeout": timedelta(seconds=_LONGEST_S)},
        retry_config={"max_retries": 0},  # they are tried again where all requests are
        credential_provider=None if file_system.anon else credentials,
    )
    return _Reads(store, timeout_s)


class _Reads:
    def __init__(self, store: Any, timeout_s: float) -> None:
        self._store, self._timeout_s = store, timeout_s
        self.error: Exception | None = None

    async def __call__(self, path: str, begin: int, size: int | None, *, whole: bool) -> bytes | None:
        limit_s = self._timeout_s + (size or 0) / SLOWEST_BYTES_PER_S
        try:
            return await asyncio.wait_for(self._read(path.partition("/")[2], begin, size, whole=whole), limit_s)
        except Exception as error:  # noqa: BLE001  # s3fs is asked the same, and says what is wrong
            self.error = error
            return None

    async def _read(self, key: str, begin: int, size: int | None, *, whole: bool) -> bytes:
        if size is not None and not whole:
            return bytes(await self._store.get_range_async(key, start=begin, length=size))
        found = await self._store.get_async(key)
        if size is not None and found.meta["size"] != size:
            raise ValueError(f"{found.meta['size']} bytes in place of {size}")
        return bytes(await found.bytes_async())

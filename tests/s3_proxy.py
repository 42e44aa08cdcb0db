"""A proxy before an HTTP server: with latency, a bandwidth limit, and faults for the paths that are named.

It runs in a thread of its own, or as a process: ``python s3_proxy.py UPSTREAM_PORT LATENCY_S BYTES_PER_S``.
"""

import asyncio
import sys
import threading
import time
from collections import Counter
from typing import Any

EXPIRED = b"""<?xml version="1.0"?><Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message>
</Error>"""


class Proxy:
    """Forwards to a server on loopback.

    Args:
        upstream: its port.
        latency_s: before each request is forwarded.
        bytes_per_s: of all responses together; 0: no limit.
        remember: whether objects that were read whole once are answered from memory, so that the server costs no CPU.

    Attributes:
        faults: by a part of the path, what happens to the next requests for it, in turn: ``"stall"``, ``"short"``
            (the connection breaks in the middle of the body), ``"long"`` and ``"cut"`` (a whole body of another
            length), or a status such as 503. ``"*"`` is any path. The last one stays where it is followed by ``...``.
        seen: requests, by path.
        most: requests that were in flight at the same time.
    """

    def __init__(
        self, upstream: int, *, latency_s: float = 0.0, bytes_per_s: float = 0, remember: bool = False
    ) -> None:
        self.upstream, self.latency_s, self.bytes_per_s = upstream, latency_s, bytes_per_s
        self.faults: dict[str, list[Any]] = {}
        self.seen: Counter[str] = Counter()
        self.most = self._now = 0
        self._memory: dict[str, tuple[bytes, bytes]] | None = {} if remember else None
        self._free_at = 0.0
        self._idle: list[Any] = []
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> "Proxy":
        self._thread.start()
        self._ready.wait(10)
        return self

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def reset(self) -> None:
        self.faults, self.latency_s, self.bytes_per_s, self.most = {}, 0.0, 0, 0
        self.seen.clear()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self.listen())
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._server.close()
        for _, writer in self._idle:
            writer.close()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self._ready.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(int(_header(head, b"content-length") or 0))
                self._now += 1
                self.most = max(self.most, self._now)
                try:
                    stay = await self._answer(head, body, writer)
                finally:
                    self._now -= 1
                if not stay:
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> bool:
        path = head.split(b" ", 2)[1].decode()
        self.seen[path.partition("?")[0]] += 1
        free = self._memory is not None and bool(_header(head, b"x-free"))  # to fill the memory
        await asyncio.sleep(0 if free else self.latency_s)
        fault = self._fault(path)
        if fault == "stall":
            await asyncio.sleep(3600)
        if isinstance(fault, int):
            text = EXPIRED if fault == 401 else b""
            status = 400 if fault == 401 else fault  # as S3 answers with ExpiredToken
            writer.write(b"HTTP/1.1 %d Fault\r\nContent-Length: %d\r\n\r\n" % (status, len(text)) + text)
            return True
        response = self._remembered(path, head)
        if response is None:
            response = await self._forward(head, body)
            if self._memory is not None and head.startswith(b"GET") and response[9:12] == b"200" and "?" not in path:
                front, _, data = response.partition(b"\r\n\r\n")
                self._memory[path] = (front, data)
        if fault == "short":
            response = response[: len(response) - max(1, len(response.partition(b"\r\n\r\n")[2]) // 2)]
        if fault in ("long", "cut"):
            front, _, data = response.partition(b"\r\n\r\n")
            old, data = len(data), data + b"more" if fault == "long" else data[:-4]
            front = front.replace(b"Content-Length: %d" % old, b"Content-Length: %d" % len(data))
            response = front + b"\r\n\r\n" + data
        await self._pace(0 if free else len(response))
        writer.write(response)
        await writer.drain()
        return fault != "short"

    def _remembered(self, path: str, head: bytes) -> bytes | None:
        if self._memory is None or path not in self._memory or not head.startswith((b"GET", b"HEAD")):
            return None
        front, data = self._memory[path]
        wanted = _header(head, b"range").removeprefix(b"bytes=").split(b"-")
        if len(wanted) == 2:
            first, last = int(wanted[0]), min(int(wanted[1] or len(data)), len(data) - 1)
            about = b"\r\nContent-Range: bytes %d-%d/%d" % (first, last, len(data))
            front = front.replace(b"Content-Length: %d" % len(data), b"Content-Length: %d" % (last + 1 - first)) + about
            front, data = front.replace(b" 200 OK", b" 206 Partial Content"), data[first : last + 1]
        return front + b"\r\n\r\n" + (b"" if head.startswith(b"HEAD") else data)

    def _fault(self, path: str) -> Any:
        for part, faults in self.faults.items():
            if faults and (part == "*" or part in path):
                return faults[0] if faults[1:] == [...] else faults.pop(0)
        return None

    async def _pace(self, size: int) -> None:
        if self.bytes_per_s and size:
            self._free_at = max(self._free_at, time.monotonic()) + size / self.bytes_per_s
            await asyncio.sleep(max(0.0, self._free_at - time.monotonic()))

    async def _forward(self, head: bytes, body: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.upstream)
        try:
            writer.write(head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + body)
            await writer.drain()
            front = await reader.readuntil(b"\r\n\r\n")
            data = b"" if head.startswith(b"HEAD") else await reader.read()
        finally:
            writer.close()
        lines = [line for line in front.rstrip().split(b"\r\n") if not line.lower().startswith(b"connection:")]
        lines[0] = lines[0].replace(b"HTTP/1.0", b"HTTP/1.1")
        return b"\r\n".join(lines) + b"\r\n\r\n" + data


def _header(head: bytes, name: bytes) -> bytes:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return b""


if __name__ == "__main__":
    served = Proxy(
        int(sys.argv[1]), latency_s=float(sys.argv[2]), bytes_per_s=float(sys.argv[3]), remember=True
    ).start()
    print(served.port, flush=True)  # noqa: T201
    sys.stdin.read()

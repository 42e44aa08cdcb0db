"""An HTTP server on loopback whose objects can be replaced, and which can answer as badly as servers do."""

import hashlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class HttpStore:
    """Its objects and its manners.

    Attributes:
        objects: content by path.
        etag: ``"content"``, ``"constant"``, ``"random"`` or None.
        dated: whether it gives the time of the last change, which the tests set by ``changed``.
        head: ``"full"``; ``"empty"``, a length of 0; ``"bare"``, a length alone; ``"hang up"``; or a status.
        sized: whether it gives the length to GET; else the end of the connection ends the body.
        ranges: whether it knows them.
        cut: paths whose bodies are cut in half, with the length of the half.
        status: of each GET and HEAD of a path.
        before_get: called with the path before a body is sent.
        seen: requests, by method and path.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.etag: str | None = "content"
        self.dated, self.changed = False, Counter[str]()
        self.head: str | int = "full"
        self.sized = self.ranges = True
        self.cut: set[str] = set()
        self.status: dict[str, int] = {}
        self.before_get: Callable[[str], None] = lambda _: None
        self.seen: Counter[tuple[str, str]] = Counter()
        self.url = ""

    def put(self, path: str, content: bytes) -> None:
        self.objects[path] = content
        self.changed[path] += 1

    def gets(self) -> int:
        return sum(count for (method, path), count in self.seen.items() if method == "GET" and path in self.objects)

    def page(self, folder: str) -> bytes:
        names = {path.removeprefix(folder).partition("/") for path in self.objects if path.startswith(folder)}
        return "".join(f'<a href="{name}{slash}">{name}</a>\n' for name, slash, _ in sorted(names)).encode()

    def headers(self, path: str) -> dict[str, str]:
        """Those that tell one version from another."""
        tags = {
            "content": f'"{hashlib.md5(self.objects[path]).hexdigest()}"',
            "constant": '"always"',
            "random": f'"{random.random()}"',
        }
        found = {} if self.etag is None else {"ETag": tags[self.etag]}
        return {**found, "Last-Modified": formatdate(1e9 + self.changed[path], usegmt=True)} if self.dated else found


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one packet
    server: "_Server"

    def do_HEAD(self) -> None:
        store, path = self.server.store, self.path[1:]
        store.seen["HEAD", path] += 1
        if store.head == "hang up":
            self.close_connection = True
        elif isinstance(store.head, int):
            self._answer(store.head, {"Content-Length": "0"})
        elif path not in store.objects or path in store.status:
            self._answer(store.status.get(path, 404), {"Content-Length": "0"})
        else:
            size = 0 if store.head == "empty" else len(store.objects[path])
            versions = {} if store.head == "bare" else store.headers(path)
            self._answer(200, {"Content-Length": str(size), **versions})

    def do_GET(self) -> None:
        store, path = self.server.store, self.path[1:]
        store.seen["GET", path] += 1
        page = store.page(f"{path}/".lstrip("/"))
        if page:
            self._answer(200, {"Content-Type": "text/html", "Content-Length": str(len(page))}, page)
        elif path not in store.objects or path in store.status:
            self._answer(store.status.get(path, 404), {"Content-Length": "0"})
        else:
            store.before_get(path)
            self._send(path)

    def _send(self, path: str) -> None:
        store = self.server.store
        body, headers, status = store.objects[path], store.headers(path), 200
        asked = self.headers.get("Range")
        if asked and store.ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(body) - 1}/{len(body)}"
            body, status = body[int(first) : int(last or len(body)) + 1], 206
        if path in store.cut:
            body, status = body[: len(body) // 2], 200
        if store.sized:
            headers["Content-Length"] = str(len(body))
        else:
            headers["Connection"] = "close"
            self.close_connection = True
        self._answer(status, headers, body)

    def _answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    store: HttpStore

    def handle_error(self, *_: Any) -> None:
        pass  # a client that went away


@contextmanager
def running_http(store: HttpStore) -> Iterator[HttpStore]:
    """The server, while the block runs."""
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.store = store
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        store.url = f"http://127.0.0.1:{server.server_port}"
        yield store
        server.shutdown()

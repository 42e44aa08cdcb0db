"""A real S3 server on loopback, moto's, in a process of its own, behind a proxy that makes faults."""

import io
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from PIL import Image
from s3_proxy import Proxy

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


class ObjectStore:
    """The server, its proxy, and a client that goes past the proxy."""

    def __init__(self, port: int, proxy: Proxy) -> None:
        import boto3

        self.proxy = proxy
        self.client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}")
        self.options: dict[str, Any] = {"endpoint_url": proxy.url}

    def put(self, bucket: str, files: dict[str, bytes]) -> None:
        for name, content in files.items():
            self.client.put_object(Bucket=bucket, Key=name, Body=content, ACL="public-read")

    def gets(self, part: str = "") -> int:
        """Requests that the proxy has seen for paths with ``part`` in them."""
        return sum(count for path, count in self.proxy.seen.items() if part in path)


@contextmanager
def running_store() -> Iterator[ObjectStore]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(CREDENTIALS)
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    proxy = None
    try:
        until = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert time.monotonic() < until, "moto's server does not start"
                time.sleep(0.05)
        proxy = Proxy(port).start()
        yield ObjectStore(port, proxy)
    finally:
        if proxy is not None:
            proxy.stop()
        server.kill()
        server.wait()
        for name in CREDENTIALS:
            os.environ.pop(name, None)


def picture(shade: int, size: int = 48, filler: int = 0) -> bytes:
    """A JPEG, with bytes behind it that no decoder reads."""
    content = io.BytesIO()
    Image.new("RGB", (size, size - 8), (shade % 256, 90, 30)).save(content, "JPEG")
    return content.getvalue() + bytes(filler)


def birds(count: int = 10) -> dict[str, bytes]:
    """Pictures in class folders below train and val."""
    return {
        f"{split}/{name}/{index}.jpg": picture(20 * index + 7 * len(split), filler=100 * index)
        for split, share in (("train", count), ("val", max(2, count // 4)))
        for name in ("crow", "wren")
        for index in range(share)
    }

"""Workers that wait for another machine: how that is seen, what is measured of it, and what is said."""

import http.client
import http.server
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from measure.small_fits import make_trainer
from object_store import birds, running_store
from torch.utils.data import DataLoader, Dataset
from verdict.cases import ASLEEP, BUSY, measured

from lightning_feed import FastDataModule, GPUStarvationCallback, LoaderSettings
from lightning_feed.errors import ArchiveError
from lightning_feed.measure.kernel import count_connections
from lightning_feed.storage.remote import RemotePlace
from lightning_feed.storage.remote_speed import ALONE, TOGETHER, Wanted, measure_speed, some_files
from lightning_feed.verdict.decide import diagnose

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:Unclosed:ResourceWarning")

# --- connections of workers -------------------------------------------------------------------------------------------


def test_only_connections_of_their_own_count() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    inherited = socket.create_connection(server.getsockname())
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        opened = [socket.create_connection(server.getsockname()) for _ in range(3)]
        opened.append(socket.socketpair()[0])  # no network
        os.write(ready[1], b"x")
        os.read(done[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        assert count_connections([child]) == 3
        assert count_connections([os.getpid()]) == 0
    finally:
        os.write(done[1], b"x")
        os.waitpid(child, 0)
        inherited.close()
        server.close()
        for end in (*ready, *done):
            os.close(end)


def test_a_process_that_is_gone_has_none_and_a_kernel_without_a_table_does_not_tell(tmp_path: Path) -> None:
    assert count_connections([2**22 + 1]) == 0
    assert count_connections([1], tmp_path) is None


class _Slow(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        time.sleep(0.02)
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"bytes")

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def _server() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


class Fetched(Dataset[torch.Tensor]):
    """Each sample is a request, over a connection that each worker keeps."""

    def __init__(self, port: int) -> None:
        self.port, self.connection = port, None

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> torch.Tensor:
        self.connection = self.connection or http.client.HTTPConnection("127.0.0.1", self.port)
        self.connection.request("GET", f"/{index}")
        return torch.full((32,), float(len(self.connection.getresponse().read())))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:The number of training batches")
def test_a_fit_whose_workers_wait_for_a_server() -> None:
    callback = GPUStarvationCallback(every_n_steps=10, nvml=False, report=False)
    with _server() as port:
        make_trainer(callback, max_epochs=1).fit(BoringModel(), DataLoader(Fetched(port), num_workers=2))
    found = callback.report()
    assert found.measurements.loaders.connections == 2
    assert (found.bottleneck, found.cause) == ("data", "remote reads")
    assert "the workers are blocked, with 2 network connections open" in found.evidence


# --- what is said of it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loaders", "facts", "cause"),
    [
        (ASLEEP | {"connections": 2.0}, {}, "remote reads"),
        (ASLEEP | {"connections": 0.9}, {}, "waiting"),
        (ASLEEP | {"connections": 0.9}, {"remote": True}, "remote reads"),
        (BUSY | {"connections": 2.0}, {}, "cpu"),
        (ASLEEP | {"connections": 2.0, "page_cache_pct": 1.0, "disk_mb_per_s": 50.0}, {}, "cold reads"),
    ],
)
def test_blocked_workers_with_connections_wait_for_the_network(loaders: Any, facts: Any, cause: str) -> None:
    assert diagnose(measured(loaders=loaders, **facts)).cause == cause


def test_files_that_are_no_faster_from_memory_may_still_come_over_the_network() -> None:
    found = {"loader_per_s": 10.0, "cached_bytes_per_s": 10.0}
    assert diagnose(measured(loaders=ASLEEP | {"connections": 2.0}, found=found)).cause == "remote reads"
    assert diagnose(measured(loaders=ASLEEP, found=found)).cause == "waiting"


def test_more_workers_than_cpus_are_advised_for_they_only_wait() -> None:
    found = diagnose(measured(loaders=ASLEEP | {"connections": 2.0}, usable_cpus=2, persistent_workers=True))
    assert found.remedies[0].changes.startswith("num_workers=")
    assert int(found.remedies[0].changes.removeprefix("num_workers=")) > 2
    assert any("one request in flight" in note for note in found.notes)


def test_a_url_that_is_read_as_it_comes_is_to_be_read_ahead() -> None:
    found = diagnose(measured(loaders=ASLEEP, remote=True, staged=False))
    assert any("stage_limit" in note and "a step takes 60.0 ms" in note for note in found.notes)
    staged = diagnose(measured(loaders=ASLEEP, remote=True, staged=True))
    assert not any("stage_limit" in note for note in staged.notes)


def test_files_of_a_url_may_be_kept_in_memory() -> None:
    run = {"remote": True, "decoder": "turbo", "cache": "off"}
    found = diagnose(measured(loaders=ASLEEP, data=80.0, every_num_workers=(2,), **run))
    assert 'cache="bytes"' in [remedy.code for remedy in found.remedies]


def test_how_many_cpus_are_missing() -> None:
    busy = BUSY | {"workers_on_cpu_pct": 95.0, "workers_blocked_pct": 0.0}
    run = {"device_type": "cuda", "num_workers": 8, "usable_cpus": 8, "host_cpu_ms": 40.0, "batch_bytes": 38_000_000}
    found = diagnose(measured(data=75.0, loaders=busy, **run))
    [said] = [note for note in found.notes if "more would keep the device busy" in note]
    # 8 workers at 95 % of 100 ms, and 40 ms of training, in the 25 ms that a step needs: 32 CPUs of which 8 are there
    assert "about 24 more" in said
    assert 'LoaderSettings(workers="ray")) would send 1520 MB/s of batches' in said
    plain = diagnose(measured(data=75.0, loaders=busy, loop="plain", **run))
    assert not any("MB/s of batches" in note for note in plain.notes)  # Ray is for loaders of a Trainer
    assert not any("more would feed" in note for note in diagnose(measured(data=75.0, loaders=busy)).notes)


# --- the speed of a place ---------------------------------------------------------------------------------------------


@pytest.fixture
def in_memory() -> Iterator[RemotePlace]:
    import fsspec

    memory = fsspec.filesystem("memory")
    for index in range(3):
        memory.pipe(f"/speed/deep/{index}.bin", bytes(1000 + index))
    memory.pipe("/speed/deep/empty.bin", b"")
    yield RemotePlace("memory://speed")
    memory.rm("/speed", recursive=True)


def test_files_are_found_below_and_read_in_part(in_memory: RemotePlace) -> None:
    wanted = some_files(in_memory)
    assert wanted == [Wanted(f"deep/{index}.bin", 1000 + index) for index in range(3)]
    speed = measure_speed(in_memory, wanted)
    assert speed.requests == 3
    assert speed.latency_ms > 0
    assert speed.mb_per_s is not None


def test_a_place_without_files_is_an_error() -> None:
    import fsspec

    fsspec.filesystem("memory").mkdir("/nothing")
    with pytest.raises(ArchiveError, match="memory://nothing has no files"):
        some_files(RemotePlace("memory://nothing"))


@pytest.mark.slow
def test_a_bounded_number_of_requests_goes_to_a_server() -> None:
    with running_store() as store:
        store.client.create_bucket(Bucket="photos")
        store.put("photos", birds(100))
        store.proxy.latency_s = 0.02
        place = RemotePlace("s3://photos/train", store.options)
        speed = measure_speed(place, some_files(place))
        assert speed.latency_ms >= 20
        assert speed.mb_per_s is not None
        assert store.gets(".jpg") == 1 + ALONE + min(TOGETHER, 100)


class Remote(FastDataModule):
    def make_dataset(self, split: str) -> Any:
        return self.remote_dir.names() if split == "train" else None


def test_a_data_module_tells_that_its_data_are_remote(in_memory: RemotePlace, tmp_path: Path) -> None:
    remote = Remote(1, data_dir="memory://speed", loader=LoaderSettings(num_workers=0))
    remote.remote_dir.names()
    assert (remote._feed_facts()["remote"], remote._feed_facts()["staged"]) == (True, False)
    copied = Remote(1, data_dir="memory://speed", stage_to=tmp_path, loader=LoaderSettings(num_workers=0))
    assert copied.staged_dir.is_dir()
    assert copied._feed_facts()["remote"] is False

"""Workers that wait for another machine: how that is seen, what is measured of it, and what is said."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from object_store import birds, running_store
from torch.utils.data import DataLoader
from verdict.cases import ASLEEP, BUSY, measured

from lightning_feed import FastDataModule, ImageFolderDataModule, LoaderSettings, cli
from lightning_feed.diagnosing.run import run_data_experiments
from lightning_feed.errors import ArchiveError
from lightning_feed.measure.experiment_results import DiskFacts
from lightning_feed.storage.remote import RemotePlace
from lightning_feed.storage.remote_speed import ALONE, TOGETHER, Wanted, measure_speed, some_files
from lightning_feed.verdict.decide import diagnose

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:Unclosed:ResourceWarning")

# --- what is said of it -----------------------------------------------------------------------------------------------

DISK = DiskFacts(file_system="s3", kind="network", mean_file_bytes=1e5, latency_ms=21.0, line_mb_per_s=60.0)


@pytest.mark.parametrize(
    ("loaders", "facts", "cause"),
    [
        (ASLEEP, {}, "waiting"),
        (ASLEEP, {"remote": True}, "remote reads"),
        (BUSY, {"remote": True}, "cpu"),
    ],
)
def test_blocked_workers_that_read_a_url_wait_for_the_network(loaders: Any, facts: Any, cause: str) -> None:
    assert diagnose(measured(loaders=loaders, **facts)).cause == cause


def test_files_that_are_no_faster_from_memory_may_still_come_over_the_network() -> None:
    found = {"loader_per_s": 10.0, "cached_bytes_per_s": 10.0}
    assert diagnose(measured(loaders=ASLEEP, remote=True, found=found)).cause == "remote reads"
    assert diagnose(measured(loaders=ASLEEP, found=found)).cause == "waiting"


def test_more_workers_than_cpus_are_advised_for_they_only_wait() -> None:
    found = diagnose(measured(loaders=ASLEEP, remote=True, usable_cpus=2, persistent_workers=True))
    assert found.remedies[0].changes.startswith("num_workers=")
    assert int(found.remedies[0].changes.removeprefix("num_workers=")) > 2


def test_a_url_that_is_read_as_it_comes_is_to_be_read_ahead() -> None:
    found = diagnose(measured(loaders=ASLEEP, remote=True, staged=False, found={"disk": DISK}))
    assert "a request takes 21.0 ms, and 60 MB/s with many requests at once" in found.evidence
    assert any("stage_limit" in note and "a step takes 60.0 ms" in note for note in found.notes)
    assert any("60 MB/s, or 600 samples/s" in note for note in found.notes)
    staged = diagnose(measured(loaders=ASLEEP, remote=True, staged=True, found={"disk": DISK}))
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


def test_the_doctor_asks_a_url(in_memory: RemotePlace, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--data", "memory://speed"]) == 0
    assert "ms a request" in capsys.readouterr().out
    cli.main(["doctor", "--data", "memory://nowhere"])
    assert "memory://nowhere" in capsys.readouterr().out
    cli.main(["doctor", "--data", "nosuch://place"])
    assert "fsspec cannot open nosuch://place" in " ".join(capsys.readouterr().out.split())


def test_the_samples_at_a_url_are_timed() -> None:
    import fsspec

    for name, content in birds().items():
        fsspec.filesystem("memory").pipe(f"/timed/{name}", content)
    data = ImageFolderDataModule("memory://timed/train", image_size=16).dataset("train")
    [*_, results] = run_data_experiments(
        DataLoader(data, batch_size=4, collate_fn=list), budget_s=2.0, only=frozenset({"disk", "cached-files"})
    )
    assert dict(results.left_out).keys() == {"cached-files"}
    assert results.disk is not None
    assert (results.disk.file_system, results.disk.kind) == ("memory", "network")
    assert results.disk.mean_file_bytes is not None
    assert results.disk.latency_ms is not None
    assert results.disk.line_mb_per_s is not None


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

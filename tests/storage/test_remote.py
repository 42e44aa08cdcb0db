"""Data at URLs: the samples of the folder, whatever the network does, and an error where no retry helps."""

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from object_store import ObjectStore, birds, picture, running_store

from lightning_feed import FastDataModule, ImageFolderDataModule, LoaderSettings, cli
from lightning_feed.errors import ArchiveError, MissingExtraError, SettingsError
from lightning_feed.storage import PackedDataset, pack, remote, stage, stage_copy, system, unstage
from lightning_feed.storage.folder import FolderSource, index_of
from lightning_feed.storage.remote import Connection, GoneError, RemotePlace
from lightning_feed.storage.remote_folder import RemoteFolder, RemoteSource, list_files

# The connections of a process live as long as it does; what they have open is closed with them.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:Unclosed:ResourceWarning")


@pytest.fixture(scope="module")
def running() -> Iterator[ObjectStore]:
    with running_store() as found:
        found.client.create_bucket(Bucket="photos")
        yield found


@pytest.fixture
def store(running: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    running.proxy.reset()
    running.put("photos", birds())
    monkeypatch.setattr(remote, "_FIRST_DELAY_S", 0.01)
    return running


@pytest.fixture
def place(store: ObjectStore, request: pytest.FixtureRequest) -> RemotePlace:
    """Where nothing stalls, no request is given up on a busy machine."""
    return RemotePlace("s3://photos", store.options, timeout_s=1.0 if "stall" in request.node.name else 30.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in birds().items():
        (tmp_path / "birds" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "birds" / name).write_bytes(content)
    return tmp_path / "birds"


def train(place: RemotePlace) -> RemoteSource:
    return RemoteSource.of(place, list_files(place), "train")


def batches(datamodule: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(images.clone(), labels.clone()) for images, labels in datamodule.train_dataloader()]


# --- the same as a folder ---------------------------------------------------------------------------------------------


def test_a_listing_has_the_files_of_the_folder_in_the_same_order(folder: Path) -> None:
    for name in ("train/crow/below/x.png", "train/crow/below-2/a.jpg", "train/notes.txt", "train/.git/z.jpg"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"...")
    fsspec.filesystem("memory").put(f"{folder}/", "/same", recursive=True)
    ours = train(RemotePlace("memory://same"))
    theirs = FolderSource(folder / "train", index_of(folder / "train"))
    assert ours.classes == theirs.classes
    assert ours.labels.tolist() == theirs.labels.tolist()
    assert [ours.index.path(i) for i in range(len(ours))] == [theirs.index.path(i) for i in range(len(theirs))]
    assert [ours.read(i) for i in range(len(ours))] == [theirs.read(i) for i in range(len(theirs))]


@pytest.mark.parametrize("workers", ["process", "thread"])
def test_training_sees_the_batches_of_the_folder(
    store: ObjectStore, place: RemotePlace, folder: Path, workers: Any
) -> None:
    train(place).read(0)  # in this process first: a forked worker must not use its connection
    settings = LoaderSettings(num_workers=2, workers=workers, seed=3)
    given = {"batch_size": 5, "image_size": 16, "decoder": "pillow", "loader": settings}
    torch.manual_seed(1)
    ours = batches(ImageFolderDataModule("s3://photos", storage_options=store.options, **given))
    torch.manual_seed(1)
    theirs = batches(ImageFolderDataModule(folder, **given))
    assert len(ours) == len(theirs) == 4
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(ours, theirs, strict=True))


def test_samples_that_are_expected_are_read_at_the_same_time(store: ObjectStore, place: RemotePlace) -> None:
    source, store.proxy.latency_s = train(place), 0.2
    source.read(0)
    expected = source.expect(range(20))
    assert [len(source.read(index)) for index in range(20)] == source.sizes.tolist()
    assert store.proxy.most >= 10
    assert store.gets("train/") == 21
    del expected


def test_samples_that_nobody_waits_for_any_more_are_not_kept(store: ObjectStore, place: RemotePlace) -> None:
    source = train(place)
    expected = source.expect(range(20))
    wait(expected)
    assert [number in source._expected for number in range(20)] == [True] * 20
    del expected
    until = time.monotonic() + 20
    while len(source._expected):  # the loop lets go of the last ones
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_listing_is_kept_for_the_next_run(store: ObjectStore, place: RemotePlace) -> None:
    first = list_files(place)
    store.proxy.seen.clear()
    second = list_files(place)
    assert not store.proxy.seen
    assert list(first.files()) == list(second.files())
    assert list_files(place, fresh=True).stamps.tolist() == first.stamps.tolist()


# --- what may pass ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("faults", [["short"], ["long"], ["cut"], [503], [429], [500, 503], ["short", "cut", 502]])
def test_what_may_pass_is_tried_again(store: ObjectStore, place: RemotePlace, faults: list[Any]) -> None:
    source = train(place)
    store.proxy.faults = {"crow/3.jpg": list(faults)}
    assert source.read(3) == birds()["train/crow/3.jpg"]
    assert store.gets("crow/3.jpg") == len(faults) + 1


def test_a_server_that_stalls_is_asked_again(store: ObjectStore, place: RemotePlace) -> None:
    source = train(place)
    store.proxy.faults = {"crow/3.jpg": ["stall"]}
    began = time.monotonic()
    assert source.read(3) == birds()["train/crow/3.jpg"]
    assert 0.9 < time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (503, r"in 6 attempts.*Check the network"),
        ("short", r"in 6 attempts"),
        ("cut", r"(in 6 attempts, last: .*checksum|\d+ bytes arrived, but)"),
    ],
)
def test_what_does_not_pass_is_an_error_in_the_end(
    store: ObjectStore, place: RemotePlace, fault: Any, told: str
) -> None:
    source = train(place)
    store.proxy.faults = {"crow/3.jpg": [fault, ...]}
    with pytest.raises(ArchiveError, match=rf"Sample 3: s3://photos/train/crow/3.jpg .*{told}"):
        source.read(3)
    assert store.gets("crow/3.jpg") == 6


# --- what cannot ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "error", "attempts", "told"),
    [
        (403, ArchiveError, 1, "may not be read .*credentials"),
        (404, GoneError, 1, r"does not exist \(404\)"),
        (401, ArchiveError, 2, "may not be read .*expired"),  # with credentials read again
    ],
)
def test_a_refusal_is_an_error_at_once(
    store: ObjectStore, place: RemotePlace, fault: int, error: type, attempts: int, told: str
) -> None:
    source = train(place)
    store.proxy.faults = {"crow/3.jpg": [fault, ...]}
    with pytest.raises(error, match=f"Sample 3: s3://photos/train/crow/3.jpg {told}"):
        source.read(3)
    assert store.gets("crow/3.jpg") == attempts


@pytest.mark.parametrize("size", [-1000, 1000])
def test_an_object_that_was_replaced_is_never_a_sample(store: ObjectStore, place: RemotePlace, size: int) -> None:
    source = train(place)
    store.put("photos", {"train/wren/9.jpg": bytes(int(source.sizes[19]) + size)})
    with pytest.raises(
        GoneError, match=r"wren/9.jpg cannot be used.*replaced, or cut short.*which lists the files again"
    ):
        source.read(19)
    assert len(train(place).read(19)) == source.sizes[19] + size


def test_an_object_that_was_deleted_is_a_bad_sample(store: ObjectStore) -> None:
    datamodule = ImageFolderDataModule(
        "s3://photos", 10, image_size=16, decoder="pillow", on_error="skip", storage_options=store.options,
        loader=LoaderSettings(num_workers=0),
    )  # fmt: skip
    datamodule.dataset("train")
    store.client.delete_object(Bucket="photos", Key="train/crow/4.jpg")
    assert sum(len(images) for images, _ in datamodule.train_dataloader()) == 20
    assert datamodule.failures() == 1


def test_places_that_cannot_be_opened_say_why(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(url: str, **options: Any) -> None:
        list_files(RemotePlace(url, {**store.options, **options}, timeout_s=1))

    with pytest.raises(GoneError, match=r"s3://no-such-bucket.* does not exist"):
        opened("s3://no-such-bucket/birds")
    with pytest.raises(
        GoneError, match=r"There are no files at s3://photos/nothing|s3://photos/nothing does not exist"
    ):
        opened("s3://photos/nothing")
    with pytest.raises(ArchiveError, match=r"could not be read.*Check the network"):
        opened("s3://photos", endpoint_url="http://no-such-host.invalid")
    with pytest.raises(ArchiveError, match=r"could not be read.*Check the network"):
        opened("s3://photos", endpoint_url="http://127.0.0.1:9")
    with pytest.raises(SettingsError, match="Protocol not known: nope"):
        RemotePlace("nope://x").connection()
    with pytest.raises(SettingsError, match="is not a URL"):
        RemotePlace("/data")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    with pytest.raises(ArchiveError, match="there are no credentials"):
        opened("s3://photos", client_kwargs={})


def test_a_finalizer_in_the_event_loop_waits_for_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a shared cache takes the lock of the process, wherever the collector calls it."""
    taken = []

    async def finalize() -> None:
        taken.append(system.process_lock.acquire(timeout=5))
        system.process_lock.release()

    monkeypatch.setattr(Connection, "_open", lambda self: self.submit(finalize()).result())
    monkeypatch.setattr(Connection, "fs", fsspec.filesystem("memory"), raising=False)
    RemotePlace("memory://finalized").connection()
    assert taken == [True]


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(MissingExtraError, match="pip install 'gcsfs'"):
        RemotePlace("gs://bucket").connection()


def test_a_name_that_leads_out_of_its_folder_is_refused(store: ObjectStore, tmp_path: Path) -> None:
    store.put("photos", {"up/../../../escaped.jpg": b"..."})
    try:
        with pytest.raises(ArchiveError, match="leads out of its folder"):
            stage("s3://photos/up", tmp_path / "deep", storage_options=store.options)
    finally:
        store.client.delete_object(Bucket="photos", Key="up/../../../escaped.jpg")
    assert not list(tmp_path.rglob("*.jpg"))


# --- stage, pack and packs --------------------------------------------------------------------------------------------


def test_staging_copies_what_is_new(store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_copy, "_PART_BYTES", 800)  # so that most are read in parts
    done = stage("s3://photos", tmp_path, storage_options=store.options)
    assert done.copied_files == len(birds())
    copied = {str(path.relative_to(done.path)): path.read_bytes() for path in done.path.rglob("*.jpg")}
    assert copied == birds()
    assert stage("s3://photos", tmp_path, storage_options=store.options).copied_files == 0
    store.put("photos", {"train/crow/1.jpg": picture(99), "train/crow/empty.txt": b""})
    again = stage("s3://photos", tmp_path, storage_options=store.options)
    assert (again.copied_files, again.source) == (2, "s3://photos")
    store.client.delete_object(Bucket="photos", Key="train/crow/empty.txt")
    assert (done.path / "train/crow/1.jpg").read_bytes() == picture(99)
    assert unstage("s3://photos", tmp_path)


def test_a_copy_that_is_broken_off_has_whole_files_only(store: ObjectStore, tmp_path: Path) -> None:
    store.proxy.faults = {"crow/7.jpg": [403, ...]}
    with pytest.raises(ArchiveError, match=r"crow/7.jpg.*may not be read"):
        stage("s3://photos", tmp_path, storage_options=store.options)
    for path in (tmp_path / "photos").rglob("*.jpg"):
        assert path.read_bytes() == birds()[str(path.relative_to(tmp_path / "photos"))]
    store.proxy.faults = {}
    assert stage("s3://photos", tmp_path, storage_options=store.options).files == len(birds())


def test_an_object_that_stays_cut_short_is_no_copy(store: ObjectStore, tmp_path: Path) -> None:
    store.proxy.faults = {"crow/3.jpg": ["short", ...]}
    with pytest.raises(ArchiveError, match=r"crow/3\.jpg "):
        stage("s3://photos", tmp_path, storage_options=store.options)
    assert not (tmp_path / "photos/train/crow/3.jpg").exists()


def test_a_pack_at_a_url_is_refused_and_read_from_its_copy(store: ObjectStore, tmp_path: Path) -> None:
    report = pack("s3://photos", tmp_path / "made" / "birds.pack", workers=0, storage_options=store.options)
    assert report.samples == len(birds())
    files = {str(path.relative_to(tmp_path / "made")): path.read_bytes() for path in report.path.rglob("*.*")}
    store.client.create_bucket(Bucket="packs")
    store.put("packs", files)
    url, given = "s3://packs/birds.pack", {"storage_options": store.options, "loader": LoaderSettings(num_workers=0)}
    with pytest.raises(SettingsError, match=rf"Stage it first: lightning-feed stage {url} FOLDER"):
        PackedDataset(url, "train", storage_options=store.options)
    with pytest.raises(SettingsError, match="Stage it first"):
        ImageFolderDataModule(url, **given).dataset("train")
    local = PackedDataset(report.path, "train")
    staged = PackedDataset(stage(url, tmp_path / "fast", storage_options=store.options).path, "train")
    assert [staged[index] for index in range(20)] == [local[index] for index in range(20)]
    module = ImageFolderDataModule(url, 20, image_size=16, stage_to=tmp_path / "fast", **given)
    assert batches(module)[0][0].shape == (20, 3, 16, 16)


# --- settings ---------------------------------------------------------------------------------------------------------


class Plain(FastDataModule):
    def make_dataset(self, split: str) -> Any:
        return Files(self.remote_dir) if split == "train" else None


class Files(torch.utils.data.Dataset[int]):
    def __init__(self, folder: RemoteFolder) -> None:
        self.folder, self.names = folder, folder.names()

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> int:
        return len(self.folder.read(self.names[index]))


def test_a_dataset_of_the_users_reads_files_by_name(store: ObjectStore) -> None:
    datamodule = Plain(6, data_dir="s3://photos", storage_options=store.options, loader=LoaderSettings(num_workers=2))
    lengths = sorted(int(length) for batch in datamodule.train_dataloader() for length in batch)
    assert lengths == sorted(map(len, birds().values()))
    with pytest.raises(GoneError, match=r"s3://photos/none.jpg is not among the 24 files"):
        datamodule.remote_dir.read("none.jpg")
    with pytest.raises(SettingsError, match=r"is a URL, so there is no folder.*remote_dir"):
        _ = datamodule.staged_dir
    with pytest.raises(SettingsError, match="staged_dir"):
        _ = Plain(6, data_dir="/data").remote_dir


def test_a_url_is_staged_whole_where_it_has_no_limit(store: ObjectStore, tmp_path: Path) -> None:
    datamodule = ImageFolderDataModule("s3://photos", 4, stage_to=tmp_path, storage_options=store.options)
    assert datamodule.staged_dir == tmp_path / "photos"
    assert datamodule.classes == ("crow", "wren")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"data_dir": "/data", "storage_options": {"anon": True}}, "storage_options are for URLs"),
        ({"data_dir": "/data", "stage_to": "/x", "stage_limit": "1GiB"}, "stage_limit=.*Give a URL"),
        ({"data_dir": "s3://b", "stage_limit": "1GiB"}, "stage_limit=.*Give a URL and stage_to"),
        ({"data_dir": "s3://b", "stage_to": "/x", "stage_limit": "much"}, "The limit 'much'"),
        ({"data_dir": "s3://b", "stage_to": "/x", "readahead": "50%"}, "share of the memory"),
        ({"data_dir": "s3://b", "stage_to": "/x", "readahead": "2GiB"}, "readahead='2GiB' needs a cache"),
        ({"data_dir": "ftp://me:secret@b/c", "stage_limit": "1GiB"}, "data_dir='ftp://b/c'"),
        ({"data_dir": "s3://b", "stage_to": "/x", "stage_wait": False}, "stage_wait=False"),
        ({"data_dir": "s3://b", "stage_to": "/x", "stage_limit": "1GiB", "stage_remove": True}, "stage_remove=True"),
    ],
)
def test_what_would_have_no_effect_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        Plain(4, **given)


@pytest.mark.parametrize("server", ["http", "zip"])
def test_other_file_systems_give_the_same_samples(folder: Path, server: str) -> None:
    theirs = FolderSource(folder / "train", index_of(folder / "train"))
    if server == "zip":
        shutil.make_archive(str(folder.parent / "packed"), "zip", folder)
        url = f"zip://::file://{folder.parent}/packed.zip"
        ours = train(RemotePlace(url))
        assert ours.name(0) == f"zip://train/crow/0.jpg::file://{folder.parent}/packed.zip"
        assert [ours.read(index) for index in range(20)] == [theirs.read(index) for index in range(20)]
        return
    handler = functools.partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        ours = train(RemotePlace(f"http://127.0.0.1:{running.server_port}"))
        ours.expect(range(20))
        assert [ours.read(index) for index in range(20)] == [theirs.read(index) for index in range(20)]
        assert stage(f"{ours.place.url}/crow", folder.parent).copied_files == 10
        running.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def test_the_commands_take_urls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in birds().items():
        fsspec.filesystem("memory").pipe(f"/commands/{name}", content)
    assert cli.main(["stage", "memory://commands", str(tmp_path)]) == 0
    assert cli.main(["pack", "memory://commands", str(tmp_path / "pack"), "--workers", "0"]) == 0
    assert len(list((tmp_path / "commands").rglob("*.jpg"))) == len(birds())
    assert sum(PackedDataset.manifest_of(tmp_path / "pack").parts.values()) == len(birds())


@pytest.mark.slow
def test_the_commands_take_options_from_the_environment(store: ObjectStore, tmp_path: Path) -> None:
    environment = {**os.environ, "FSSPEC_S3_ENDPOINT_URL": store.proxy.url}
    for command in (["stage", "s3://photos", str(tmp_path)], ["pack", "s3://photos", str(tmp_path / "pack")]):
        done = subprocess.run(
            [sys.executable, "-m", "lightning_feed", *command], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "photos").rglob("*.jpg"))) == len(birds())

"""What is fetched of a URL and kept on this machine: whole, ended at once where it is to end, and without secrets."""

import asyncio
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import fsspec
import pytest
from torch.utils.data import Dataset

from lightning_feed.archive import PackedDataset, pack, remote_folder, stage, stage_remote
from lightning_feed.archive.remote import GoneError, RemotePlace, without_secrets
from lightning_feed.archive.remote_folder import list_files
from lightning_feed.archive.remote_pack import lmdb_offsets
from lightning_feed.archive.stage_copy import FileStamp
from lightning_feed.archive.stage_path import find_place
from lightning_feed.archive.staging import StageWork
from lightning_feed.errors import ArchiveError

LARGE = bytes(range(256)) * 40


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> RemotePlace:
    """A file of eleven parts, at a place of its own."""
    monkeypatch.setattr(stage_remote, "_PART_BYTES", 1000)
    fsspec.filesystem("memory").pipe("/large/a.bin", LARGE)
    return RemotePlace("memory://large")


def fetched(place: RemotePlace, part: Path, advance: Any = lambda _: True) -> bool:
    return stage_remote.fetch_file(place, "a.bin", FileStamp(len(LARGE), 7), part, advance)


# --- large files ------------------------------------------------------------------------------------------------------


def test_a_large_file_is_fetched_in_parts_that_are_told_of(large: RemotePlace, tmp_path: Path) -> None:
    told: list[int] = []
    assert fetched(large, tmp_path / "part", lambda size: told.append(size) is None)
    assert (tmp_path / "part").read_bytes() == LARGE
    assert sorted(told) == [240, *[1000] * 10]


def test_a_write_that_fits_in_part_is_gone_on_with(
    large: RemotePlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:300], at))
    assert fetched(large, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == LARGE


def test_after_a_part_that_fails_no_other_is_written(
    large: RemotePlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is closed then, and its number may be that of another file."""
    ended: list[int] = []

    async def fetch(name: str, begin: int, size: int) -> bytes:
        if begin == 1000:
            raise ArchiveError("no more")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(begin)
        return bytes(size)

    monkeypatch.setattr(large.connection(), "fetch", fetch)
    with pytest.raises(ArchiveError, match="no more"):
        fetched(large, tmp_path / "part")
    assert sorted(ended) == [0, 2000, 3000]


def test_a_large_file_is_not_fetched_to_its_end_after_ctrl_c(
    large: RemotePlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, begun = large.connection(), list[int]()
    real = connection.fetch

    async def fetch(name: str, begin: int, size: int) -> bytes:
        begun.append(begin)
        return await real(name, begin, size)

    monkeypatch.setattr(connection, "fetch", fetch)
    assert not fetched(large, tmp_path / "part", lambda _: False)
    assert len(begun) == 4  # those that were on their way


@pytest.mark.parametrize("replaced", [False, True])
def test_a_large_file_that_is_replaced_is_seen_whatever_the_listing_said(
    large: RemotePlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, replaced: bool
) -> None:
    """Some stores list the time of a change with its milliseconds, and tell it of one object without."""
    connection, asked = large.connection(), list[str]()
    real = connection.call

    async def call(method: str, name: str, **options: Any) -> Any:
        if method != "info":
            return await real(method, name, **options)
        asked.append(name)
        return {"size": len(LARGE), "LastModified": f"2026-11-22T10:00:0{len(asked) if replaced else 0}Z"}

    monkeypatch.setattr(connection, "call", call)
    if not replaced:
        assert fetched(large, tmp_path / "part")
        return
    with pytest.raises(GoneError, match=r"memory://large/a\.bin was replaced"):
        fetched(large, tmp_path / "part")


def test_a_folder_of_this_machine_is_never_its_own_copy(tmp_path: Path) -> None:
    (tmp_path / "birds").mkdir()
    (tmp_path / "birds/1.jpg").write_bytes(b"the only one")
    with pytest.raises(ArchiveError, match="lies on this machine"):
        stage(f"file://{tmp_path}/birds", tmp_path, force=True)
    assert (tmp_path / "birds/1.jpg").read_bytes() == b"the only one"


# --- secrets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("ftp://me:secret@host/birds", "ftp://host/birds"),
        ("ftp://me:p@secret@host/birds", "ftp://host/birds"),
        ("https://host/birds?sig=secret&se=2027-01-01T00:00:00Z", "https://host/birds?..."),
        ("zip://::https://me:secret@host/birds.zip?sig=secret", "zip://::https://host/birds.zip?..."),
        ("zip://a.jpg::https://host/birds?sig=secret::file:///x", "zip://a.jpg::https://host/birds?...::file:///x"),
        ("s3://bucket/what?/b@d", "s3://bucket/what?/b@d"),
    ],
)
def test_what_is_secret_in_a_url_is_not_told(url: str, told: str) -> None:
    assert str(RemotePlace(url)) == told
    assert without_secrets(f"403, message='Forbidden', url='{url}'") == f"403, message='Forbidden', url='{told}'"
    assert without_secrets(told) == told


def test_what_is_secret_in_a_url_stands_in_no_name_and_no_record(tmp_path: Path) -> None:
    url = "https://me:secret@host/data/birds/?sig=secret"
    work = StageWork(url, tmp_path)
    assert work.place.target == tmp_path / "birds"
    assert work.origin == work.mirror.source.root == "https://host/data/birds/?..."
    assert find_place(work.origin, tmp_path)[1].target == work.place.target  # as it is found by the record


def test_the_error_of_a_library_is_told_without_them() -> None:
    told = RemotePlace("memory://large").connection().told(OSError("403 of https://host/a?sig=secret"), "a")
    assert "https://host/a?..." in str(told)
    assert "secret" not in str(told)


# --- what is kept -----------------------------------------------------------------------------------------------------


class Words(Dataset[str]):
    def __init__(self, words: list[str]) -> None:
        self.words = words

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> str:
        return self.words[index]


def test_a_range_that_is_not_there_any_more_is_a_bad_sample() -> None:
    error = OSError("The requested range is not satisfiable")
    error.status = 416  # type: ignore[attr-defined]
    told = RemotePlace("memory://large").connection().told(error, "a")
    assert isinstance(told, GoneError)
    assert "it ends before what was to be read" in str(told)


def test_where_nothing_can_be_kept_a_place_is_listed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "birds").mkdir()
    (tmp_path / "birds/1.jpg").write_bytes(b"...")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    place = RemotePlace(f"file://{tmp_path}/birds")
    assert [name for name, _ in list_files(place).files()] == ["1.jpg"]
    (tmp_path / "birds/pack.json").write_bytes(b"{}")
    with pytest.raises(ArchiveError, match=r"cannot be kept in /proc/none.*Set XDG_CACHE_HOME"):
        PackedDataset(str(place))


def test_a_pack_that_took_the_place_of_another_is_read_where_the_server_tells_no_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_folder, "stamp_of", lambda _: 7)
    sent = b""
    for label, words in enumerate((["one", "two"], ["ein", "zwo"])):
        pack(Words(words), tmp_path / str(label), workers=0)
        fsspec.filesystem("memory").put(f"{tmp_path / str(label)}/", "/replaced", recursive=True)
        found = PackedDataset("memory://replaced")
        assert [found[index] for index in range(2)] == words
        if label:
            with pytest.raises(ArchiveError, match="memory://replaced is another pack than the one that this"):
                pickle.loads(sent)[0]  # as a spawned worker gets it
        sent = pickle.dumps(found)


def test_a_pack_whose_pages_lead_in_a_circle_is_refused() -> None:
    page, head = 4096, struct.Struct("<QHHHH")
    meta = struct.pack("<IIQQ I44x IHHQQQQQQQ", 0xBEEFC0DE, 1, 0, 0, page, 0, 0, 0, 0, 0, 0, 0, 2, 0, 1)
    node = struct.pack("<HHHH", 2, 0, 0, 0)  # of the page 2, without a key
    branch = head.pack(2, 0, 1, head.size + 2, 0) + struct.pack("<H", 100)
    branch = branch.ljust(100, b"\0") + node
    content = b"".join(part.ljust(page, b"\0") for part in (head.pack(0, 0, 8, 0, 0) + meta,) * 2 + (branch,))
    fsspec.filesystem("memory").pipe("/circle/data.mdb", content)
    with pytest.raises(ArchiveError, match="lead in a circle"):
        lmdb_offsets(RemotePlace("memory://circle"), "data.mdb", range(3))  # type: ignore[arg-type]

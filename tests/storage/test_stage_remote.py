"""Staging of a URL: interrupted at once, and without secrets."""

import asyncio
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lightning_feed.errors import ArchiveError
from lightning_feed.storage import stage, stage_copy
from lightning_feed.storage.remote import GoneError, RemotePlace, without_secrets
from lightning_feed.storage.remote_folder import list_files
from lightning_feed.storage.stage_copy import RemoteOrigin
from lightning_feed.storage.staging import find_place

LARGE = bytes(range(256)) * 40


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> RemotePlace:
    """A file of eleven parts, at a place of its own."""
    monkeypatch.setattr(stage_copy, "_PART_BYTES", 1000)
    fsspec.filesystem("memory").pipe("/large/a.bin", LARGE)
    return RemotePlace("memory://large")


# --- large files ------------------------------------------------------------------------------------------------------


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
        assert (stage("memory://large", tmp_path).path / "a.bin").read_bytes() == LARGE
        return
    with pytest.raises(GoneError, match=r"memory://large/a\.bin was replaced"):
        stage("memory://large", tmp_path)
    assert not (tmp_path / "large/a.bin").exists()


def test_a_file_is_not_fetched_to_its_end_after_ctrl_c(large: RemotePlace, tmp_path: Path) -> None:
    async def never(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    def stopped(_: int) -> None:
        raise KeyboardInterrupt

    connection, source = large.connection(), RemoteOrigin(large)
    began, connection.fetch = time.monotonic(), never  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            source.fetch("a.bin", stage_copy.FileStamp(len(LARGE), 7), tmp_path / "part", stopped)
    finally:
        del connection.fetch
    assert time.monotonic() - began < 10


def test_a_large_file_is_fetched_in_parts_that_are_reported(large: RemotePlace, tmp_path: Path) -> None:
    told, stamp = list[int](), stage_copy.FileStamp(len(LARGE), 7)
    RemoteOrigin(large).fetch("a.bin", stamp, tmp_path / "part", told.append)
    assert (tmp_path / "part").read_bytes() == LARGE
    assert [size for size in told if size] == [*[1000] * 10, 240]


def test_a_folder_of_this_machine_is_never_its_own_copy(tmp_path: Path) -> None:
    (tmp_path / "birds").mkdir()
    (tmp_path / "birds/1.jpg").write_bytes(b"the only one")
    with pytest.raises(ArchiveError, match="is on this machine"):
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
def test_what_is_secret_in_a_url_is_not_shown(url: str, told: str) -> None:
    assert str(RemotePlace(url)) == told
    assert without_secrets(f"403, message='Forbidden', url='{url}'") == f"403, message='Forbidden', url='{told}'"
    assert without_secrets(told) == told


def test_what_is_secret_in_a_url_stands_in_no_name_and_no_record(tmp_path: Path) -> None:
    url = "https://me:secret@host/data/birds/?sig=secret"
    origin, place = find_place(url, tmp_path)
    assert place.target == tmp_path / "birds"
    assert origin == RemoteOrigin(RemotePlace(url)).root == "https://host/data/birds/?..."
    assert find_place(origin, tmp_path)[1].target == place.target  # as it is found by the record


def test_the_error_of_a_library_is_reported_without_them() -> None:
    told = RemotePlace("memory://large").connection().error_for(OSError("403 of https://host/a?sig=secret"), "a")
    assert "https://host/a?..." in str(told)
    assert "secret" not in str(told)


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_a_range_that_is_not_there_any_more_is_a_bad_sample() -> None:
    error = OSError("The requested range is not satisfiable")
    error.status = 416  # type: ignore[attr-defined]
    told = RemotePlace("memory://large").connection().error_for(error, "a")
    assert isinstance(told, GoneError)
    assert "it is shorter than listed" in str(told)


def test_where_nothing_can_be_kept_a_place_is_listed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "birds").mkdir()
    (tmp_path / "birds/1.jpg").write_bytes(b"...")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    place = RemotePlace(f"file://{tmp_path}/birds")
    assert [name for name, _ in list_files(place).files()] == ["1.jpg"]

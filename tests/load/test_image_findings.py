"""Findings about image folders are remembered, and nothing that goes wrong with that is an error."""

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lightning_feed.archive import files
from lightning_feed.load import image_findings
from lightning_feed.load.image_findings import ImageFinding, ImageFindings, key_of_images

FOUND = ImageFinding(
    backend="torch",
    by="diagnose",
    day="2026-11-21",
    batch_size=64,
    cpu_bound=True,
    starved_pct=60.0,
    samples_per_s=900.0,
)


def _key(root: Path, **changes: Any) -> dict[str, Any]:
    return key_of_images(root, **({"image_size": 224, "quality": "exact", "device": "A Board"} | changes))


@pytest.fixture
def store(tmp_path: Path) -> ImageFindings:
    return ImageFindings(tmp_path / "images")


def _file(store: ImageFindings) -> Path:
    (file,) = store.folder.iterdir()
    return file


def test_what_was_saved_is_found(store: ImageFindings, tmp_path: Path) -> None:
    key = _key(tmp_path)
    assert store.load(key) == ()
    store.save(key, FOUND)
    assert store.load(key) == (FOUND,)
    assert [file.suffix for file in store.folder.iterdir()] == [".json"]


def test_one_for_each_backend_and_command(store: ImageFindings, tmp_path: Path) -> None:
    key, others = _key(tmp_path), [replace(FOUND, backend="nvjpeg"), replace(FOUND, by="tune")]
    for one in (FOUND, *others, replace(FOUND, samples_per_s=1000.0)):
        store.save(key, one)
    assert store.load(key) == (*others, replace(FOUND, samples_per_s=1000.0))


@pytest.mark.parametrize("change", [{"image_size": 225}, {"quality": "fast"}, {"device": "Another"}])
def test_it_holds_for_nothing_else(change: dict[str, Any], store: ImageFindings, tmp_path: Path) -> None:
    store.save(_key(tmp_path), FOUND)
    assert store.load(_key(tmp_path, **change)) == ()
    assert store.load(_key(tmp_path / "other")) == ()


def test_another_machine(store: ImageFindings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(_key(tmp_path), FOUND)
    monkeypatch.setattr(image_findings.socket, "gethostname", lambda: "elsewhere")
    assert store.load(_key(tmp_path)) == ()


def test_a_link_is_the_folder_that_it_leads_to(store: ImageFindings, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    store.save(_key(tmp_path / "real"), FOUND)
    assert store.load(_key(tmp_path / "link")) == (FOUND,)


def test_by_default_it_lies_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ImageFindings().folder == tmp_path / "lightning_feed" / "images"


# --- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spoil",
    [
        lambda kept: "",
        lambda kept: json.dumps(kept)[:-20],
        lambda kept: "[1, 2]",
        lambda kept: json.dumps({**kept, "version": 99}),
        lambda kept: json.dumps({**kept, "key": {}}),
        lambda kept: json.dumps({**kept, "findings": None}),
        lambda kept: json.dumps({**kept, "findings": [{"backend": "torch"}]}),
        lambda kept: json.dumps({**kept, "findings": [{**asdict(FOUND), "samples_per_s": -1}]}),
        lambda kept: json.dumps({**kept, "findings": [{**asdict(FOUND), "model_samples_per_s": float("nan")}]}),
        lambda kept: json.dumps({**kept, "findings": [{**asdict(FOUND), "samples_per_s": float("inf")}]}),
        lambda kept: json.dumps({**kept, "findings": [{**asdict(FOUND), "starved_pct": "many"}]}),
        lambda kept: json.dumps({**kept, "findings": [{**asdict(FOUND), "starved_pct": None}]}),
        lambda kept: json.dumps({**kept, "findings": [{**asdict(FOUND), "starved_pct": 101}]}),
        lambda kept: json.dumps({**kept, "findings": [{**asdict(FOUND), "movable_pct": -1}]}),
        lambda kept: json.dumps({**kept, "findings": [{**asdict(FOUND), "cpu_bound": "no"}]}),
        lambda kept: json.dumps({**kept, "findings": [{**asdict(FOUND), "batch_size": 0}]}),
        lambda kept: json.dumps({**kept, "findings": [{**asdict(FOUND), "num_workers": "two"}]}),
        lambda kept: json.dumps({**kept, "findings": [{**asdict(FOUND), "day": None}]}),
    ],
)
def test_a_spoiled_file_is_as_good_as_none(spoil: Any, store: ImageFindings, tmp_path: Path) -> None:
    key = _key(tmp_path)
    store.save(key, FOUND)
    file = _file(store)
    file.write_text(spoil(json.loads(file.read_text())))
    assert store.load(key) == ()
    store.save(key, FOUND)
    assert store.load(key) == (FOUND,)


def test_bytes_that_are_no_text(store: ImageFindings, tmp_path: Path) -> None:
    store.save(_key(tmp_path), FOUND)
    _file(store).write_bytes(b"\xff\xfe\x00")
    assert store.load(_key(tmp_path)) == ()


def test_what_a_newer_version_adds_is_left_out(store: ImageFindings, tmp_path: Path) -> None:
    store.save(_key(tmp_path), FOUND)
    kept = json.loads(_file(store).read_text())
    kept["findings"][0]["new"] = 1
    _file(store).write_text(json.dumps(kept))
    assert store.load(_key(tmp_path)) == (FOUND,)


def test_a_folder_that_cannot_be_made_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    store = ImageFindings(tmp_path / "file" / "images")
    with caplog.at_level(logging.INFO):
        store.save(_key(tmp_path), FOUND)
    (said,) = caplog.messages
    assert "could not be remembered" in said
    assert store.load(_key(tmp_path)) == ()


def test_a_folder_that_cannot_be_written_keeps_what_it_had(
    store: ImageFindings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store.save(_key(tmp_path), FOUND)

    def refuse(*args: Any, **options: Any) -> Any:  # what mkstemp does in a read-only folder, for root too
        raise PermissionError(13, "Permission denied", str(store.folder))

    monkeypatch.setattr(files.tempfile, "mkstemp", refuse)
    with caplog.at_level(logging.INFO):
        store.save(_key(tmp_path), replace(FOUND, samples_per_s=1.0))
    assert "Permission denied" in caplog.text
    assert store.load(_key(tmp_path)) == (FOUND,)


def test_a_disk_that_is_full_leaves_nothing_behind(
    store: ImageFindings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(_key(tmp_path), FOUND)

    def full(self: Path, target: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    store.save(_key(tmp_path), replace(FOUND, samples_per_s=1.0))
    assert store.load(_key(tmp_path)) == (FOUND,)
    assert [file.suffix for file in store.folder.iterdir()] == [".json"]

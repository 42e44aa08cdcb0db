"""Whether reports can be written into a folder is known before, and asking leaves nothing."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_feed.errors import ReportError
from lightning_feed.watch.reports.files import check_writable, find_report, write_whole


@pytest.mark.parametrize("folder", ["", "here", "new", "new/below/it"])
def test_a_folder_that_can_be(folder: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "feed_report.json").write_text("what is there")
    check_writable(tmp_path / folder)
    assert sorted(str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*")) == ["here", "here/feed_report.json"]


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_file_is_in_the_way(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ReportError, match=r"reports cannot be written into .*: Not a directory\. Give another folder"):
        check_writable(tmp_path / folder)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_the_right_to_write(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o500)
    with pytest.raises(ReportError, match="Permission denied"):
        check_writable(tmp_path / "theirs")


def test_what_was_made_goes_again_where_the_rest_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(ReportError, match="No space left on device"):
        check_writable(tmp_path / "new" / "below")
    assert list(tmp_path.iterdir()) == []


def test_what_others_put_there_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        (tmp_path / "new" / "theirs").touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(ReportError, match="No space left on device"):
        check_writable(tmp_path / "new")
    assert (tmp_path / "new" / "theirs").exists()


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "", "\ud800"])
def test_names_that_no_file_can_have(name: str) -> None:
    with pytest.raises(ReportError):
        find_report(Path(name))
    with pytest.raises(ReportError, match="could not be written"):
        write_whole(Path(name), "text")


def test_folders_too_deep_to_be_searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(1500):
        os.mkdir("d")  # noqa: PTH102  # as long as its path is, no path object could name it
        os.chdir("d")
    monkeypatch.chdir(tmp_path)
    if sys.version_info < (3, 13):  # from then on folders are walked without recursion
        with pytest.raises(ReportError, match=r"too deep to be searched. Give the feed_report.json itself"):
            find_report(Path())
    subprocess.run(["rm", "-r", tmp_path / "d"], check=True)  # pytest's own way is recursive, too

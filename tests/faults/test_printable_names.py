"""File names that hold what a terminal obeys: errors, lists and reports show it, and never send it."""

from pathlib import Path

import pytest
from report.sample_reports import (
    sample,
    sample_report,
    saying,
)

from lightning_feed import cli
from lightning_feed.errors import ArchiveError, DatasetError
from lightning_feed.images.image_dataset import CpuFallback
from lightning_feed.report.files import as_markdown, as_text
from lightning_feed.wording import printable

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202egpj.jpg"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202egpj.jpg"


def test_harmless_names_stay_unchanged() -> None:
    for name in ("crow 1.jpg", "Ünïcödé 日本\u3000.jpg", "C:\\x1b.jpg", "a\tb", "🐦"):
        assert printable(name) == name
    assert printable("a\nb \udcff\ud800") == r"a\nb \xff\ud800"


@pytest.mark.parametrize("kind", [ArchiveError, DatasetError])
def test_errors_escape_control_characters(kind: type[Exception]) -> None:
    assert str(kind(f"{EVIL}\nsecond line")) == f"{SHOWN}\nsecond line"


def test_log_lines_escape_control_characters(caplog: pytest.LogCaptureFixture) -> None:
    CpuFallback().add("a CMYK JPEG", EVIL)
    assert SHOWN in caplog.text
    assert "\x1b" not in caplog.text


def test_reports_escape_control_characters() -> None:
    diagnosis = sample(evidence=(saying(EVIL),))
    for text in (as_text(diagnosis), as_markdown(sample_report(diagnosis))):
        assert not set("\x1b\x07\x9b\r\u202e") & set(text)
        assert "owned" in text


def test_commands_escape_control_characters_in_their_output(
    class_folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (class_folders / "cats" / EVIL).write_bytes(b"no image")
    command = ["pack", str(class_folders), str(tmp_path / f"{EVIL}.pack"), "--size", "16"]
    assert cli.main(command) == 1
    assert cli.main([*command, "--on-error", "skip"]) == 0
    out, printed = capsys.readouterr()
    assert f"{SHOWN}.pack: " in out
    assert "\x1b" not in out
    assert printed.count(SHOWN) == 2
    assert "\x1b" not in printed.replace("\x1b[A", "")  # of the progress bar
    assert cli.main(["stage", str(class_folders), str(tmp_path / EVIL)]) == 0
    out = capsys.readouterr().out
    assert SHOWN in out
    assert "\x1b" not in out

"""The examples run as a user runs them, on small input. What they measure is not judged here."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[1] / "examples"


def _run(script: str, *arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        capture_output=True, text=True, cwd=cwd, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quickstart(class_folders: Path, tmp_path: Path) -> None:
    for file in list(class_folders.glob("*/*.jpg")):
        for copy in range(42):  # eight batches of 64 in all: of a few steps there is no report
            (file.parent / f"{file.stem}_{copy}.jpg").symlink_to(file)
    printed = _run("quickstart.py", "--data", str(class_folders), "--fast", cwd=tmp_path)
    assert printed.count("FEED") >= 2  # a report for each run
    logs = tmp_path / "lightning_logs"
    assert {folder.name for folder in logs.iterdir()} == {"plain", "fed"}
    assert len(list(logs.glob("*/version_0/events.out.*"))) == 2
    assert not (tmp_path / "feed_demo").exists()


def test_quickstart_has_at_most_60_lines() -> None:
    assert len((EXAMPLES / "quickstart.py").read_text().splitlines()) <= 60


def test_before_after(tmp_path: Path) -> None:
    printed = _run("before_after.py", "--samples", "64", "--delay-ms", "1", "--epochs", "1", cwd=tmp_path)
    assert re.search(r"^machine   \d+ CPUs, .+, Python 3\.\d+\.\d+, torch \d", printed, re.MULTILINE)
    seconds = {
        name: float(value)
        for name, value in re.findall(r"^(before|after) +([\d.]+) s per epoch", printed, re.MULTILINE)
    }
    assert seconds["before"] >= 64 * 0.001  # 64 sleeps, one after the other
    assert seconds["after"] > 0
    (ratio,) = re.findall(r"^ratio +([\d.]+) x$", printed, re.MULTILINE)
    assert float(ratio) > 0

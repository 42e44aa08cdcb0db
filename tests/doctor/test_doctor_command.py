"""``lightning-feed doctor``: exit codes, the screen, JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_feed import cli
from lightning_feed.doctor import LEVELS, Finding, as_plain, as_text


def test_it_looks_at_this_machine_without_lightning(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom lightning_feed import cli\n"
        f"assert cli.main(['doctor', '--json', '--data', {str(tmp_path)!r}]) == 0\n"
        "assert not {'lightning', 'pytorch_lightning'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["schema"] == "lightning_feed.doctor/1"
    assert {"CPUs", "memory", "/dev/shm", "torch", "data"} <= {one["topic"] for one in printed["findings"]}
    assert all(set(one) == {"topic", "value", "level", "meaning", "do"} for one in printed["findings"])
    assert {one["level"] for one in printed["findings"]} <= set(LEVELS)


def test_a_path_that_is_not_there_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--data", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: there is no such file or folder" in capsys.readouterr().err


def test_the_screen_shows_the_worst_first() -> None:
    found = [
        Finding("a", "1"),
        Finding(topic="b", value="2", level="warning", meaning="slow", do="mend it"),
        Finding(topic="c", value="3", level="problem", meaning="word " * 60),
    ]
    lines = as_text(found).splitlines()
    assert lines[0].startswith("PROBLEM  c  3: word")
    assert [line[:7] for line in lines if line[:1].strip()] == ["PROBLEM", "warning", "ok     ", "1 probl"]
    assert "            -> mend it" in lines
    assert lines[-1] == "1 problem, 1 warning."
    assert max(map(len, lines)) <= 110
    assert [one["topic"] for one in as_plain(found)["findings"]] == ["a", "b", "c"]
    assert as_text(found[:1]).endswith("Nothing to fix.")

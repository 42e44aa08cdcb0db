"""``lightning-feed report`` and ``compare``: output, exit codes, and a gate that does not pass on nothing."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report.json_checker import problems
from report.sample_reports import sample, sample_facts, sample_report, sample_stats

from lightning_feed.cli import main
from lightning_feed.report.document import json_schema
from lightning_feed.report.files import as_text, write_report
from lightning_feed.verdict.diagnosis import Diagnosis


def _alone(**stats: Any) -> Diagnosis:
    """Of a single rank."""
    found = sample(stats=sample_stats(**stats))
    return replace(found, measurements=replace(found.measurements, ranks=None))


def _run(folder: Path, found: Diagnosis) -> str:
    write_report(sample_report(found), folder)
    return str(folder)


def test_report_command_prints_the_report_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _run(tmp_path, sample())
    assert main(["report", run]) == 0
    assert capsys.readouterr().out == as_text(sample()) + "\n"
    assert main(["report", f"{run}/feed_report.json"]) == 0
    assert capsys.readouterr() == (as_text(sample()) + "\n", "")


def test_report_command_names_the_report_found_in_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, age in (("old", 2), ("new", 1), ("older", 3)):
        below = tmp_path / name / "version_0"
        _run(below, sample())
        os.utime(below / "feed_report.json", (1e9 - age, 1e9 - age))
    assert main(["report", str(tmp_path), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)
    shown = tmp_path / "new" / "version_0" / "feed_report.json"
    assert printed.err == f"lightning-feed: {shown}, written {sample_report().written_at}\n"


def test_report_command_prints_json_that_fits_the_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _run(tmp_path, sample())
    assert main(["report", run, "--json"]) == 0
    assert problems(json.loads(capsys.readouterr().out), json_schema()) == []


@pytest.mark.parametrize("command", [["report", "nowhere"], ["compare", "nowhere", "nowhere"]])
def test_commands_exit_1_without_a_report(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 1
    assert capsys.readouterr() == (
        "",
        "lightning-feed: nowhere does not exist. Give a feed_report.json, or the folder of a run.\n",
    )


def test_compare_command_prints_text_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = _run(tmp_path / "a", sample())
    after = _run(tmp_path / "b", sample(stats=sample_stats(step_ms=60.0), facts=sample_facts(num_workers=14)))
    assert main(["compare", before, after]) == 0
    out = capsys.readouterr().out
    assert f"before   {before}/feed_report.json\nafter    {after}/feed_report.json\n" in out
    assert "changed  num_workers 6 -> 14\n" in out
    assert main(["compare", before, after, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["changed"] == [{"name": "num_workers", "before": 6, "after": 14}]
    assert found["times_as_fast"] == pytest.approx(87.2 / 60)


@pytest.mark.parametrize(("command", "unbuffered"), [("report", ""), ("compare", "1")])
def test_commands_exit_141_if_the_output_pipe_is_closed(command: str, unbuffered: str, tmp_path: Path) -> None:
    run = _run(tmp_path, sample())
    argv = [sys.executable, "-m", "lightning_feed", command, run, *([run] if command == "compare" else [])]
    reads, writes = os.pipe()
    os.close(reads)  # as head does when it has its lines
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with os.fdopen(writes, "wb") as gone:
        done = subprocess.run(
            argv, stdout=gone, stderr=subprocess.PIPE, text=True, timeout=60, check=False, env=environment
        )
    assert done.returncode == 141
    assert [line for line in done.stderr.splitlines() if not line.startswith(f"lightning-feed: {run}")] == []


def test_reports_are_read_without_torch(tmp_path: Path) -> None:
    run = _run(tmp_path, sample())
    code = (
        "import sys; from lightning_feed.cli import main; main(['report', sys.argv[1]]); "
        "sys.exit('torch' in sys.modules or 'lightning' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, run], check=False, capture_output=True).returncode == 0


@pytest.mark.parametrize("form", ["--json", None])
def test_report_command_prints_names_that_stdout_cannot_encode(
    form: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_report(sample_report(), tmp_path)
    file = tmp_path / "feed_report.json"
    document = json.loads(file.read_text())
    document["remedies"][0]["code"] = "W\u00e4chter \ud800"
    file.write_text(json.dumps(document))
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["report", str(tmp_path), *([form] if form else [])]) == 0
    assert b"chter" in out.buffer.getvalue()  # type: ignore[attr-defined]

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
from report.sample_reports import nothing_measured, sample, sample_facts, sample_report, sample_stats
from verdict.cases import loop_facts

from lightning_feed.cli import main
from lightning_feed.errors import ReportError
from lightning_feed.measure.experiment_results import ExperimentResults
from lightning_feed.measure.measurements import Measurements
from lightning_feed.report.compare import check_starved
from lightning_feed.report.document import json_schema
from lightning_feed.report.files import as_text, write_report
from lightning_feed.verdict.decide import decide
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


@pytest.mark.parametrize(
    ("limit", "code"),
    [("0", 1), ("33.89", 1), ("33.9", 0), ("100", 0)],
)
def test_fail_above_exits_1_only_above_its_limit(
    limit: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _run(tmp_path, _alone())
    assert main(["report", run, "--fail-above", limit]) == code
    out, err = capsys.readouterr()
    assert out.startswith("FEED  ")  # the report is shown either way
    said = f"training waits for data 33.90 % of step time (starved_pct), limit {limit} % (confidence high): "
    assert f"\nlightning-feed: {said}" in err
    assert ("too long" in err) == bool(code)
    assert ("fine" in err) == (not code)


def test_fail_above_counts_the_waiting_of_all_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fed = sample(stats=sample_stats(starved_pct=1.0))  # this rank waits for the other
    assert main(["report", _run(tmp_path, fed), "--fail-above", "20"]) == 1
    assert "waits for data 35.00 % of all ranks' step time (ranks.starved_pct)" in capsys.readouterr().err


def _slow_start(**changes: Any) -> Diagnosis:
    """67 % of an epoch of 20 steps goes by before its first batch, and 6 % of each step waiting."""
    stats = sample_stats(step_ms=50.0, compute_ms=47.0, data_ms=3.0, starved_pct=6.0, input_pct=6.0, epoch_start_s=2.0)
    facts = loop_facts(device_type="cuda", num_workers=2, usable_cpus=2, batches_per_epoch=20)
    return decide(replace(Measurements(stats=stats, facts=facts), **changes))


def test_fail_above_counts_the_wait_for_the_first_batch_of_an_epoch() -> None:
    report = sample_report(_slow_start())
    with pytest.raises(ReportError, match=r"66\.57 % of each epoch, for its first batch, limit 20 %"):
        check_starved(report, above_pct=20)
    assert check_starved(report, above_pct=66.6).endswith("fine")
    without = replace(_slow_start().measurements.facts, batches_per_epoch=None)
    assert "data 6.00 % of step time (starved_pct)" in check_starved(
        sample_report(_slow_start(facts=without)), above_pct=20
    )


def test_fail_above_passes_if_the_model_alone_takes_the_whole_step() -> None:
    stats = replace(_slow_start().stats, epoch_start_s=0.0)
    compute_bound_confirmed = _slow_start(stats=stats, experiments=ExperimentResults(model_per_s=20.0), diagnosed=True)
    assert compute_bound_confirmed.grade == "OK"
    assert "fine, the model alone takes as long as a step" in check_starved(
        sample_report(compute_bound_confirmed), above_pct=5
    )
    for per_s in (40.0, 5.0):  # faster than its steps, and impossibly slow
        waiting = _slow_start(stats=stats, experiments=ExperimentResults(model_per_s=per_s), diagnosed=True)
        with pytest.raises(ReportError, match=r"6\.00 % of step time \(starved_pct\), limit 5 %"):
            check_starved(sample_report(waiting), above_pct=5)


@pytest.mark.parametrize(
    "found", [nothing_measured(), _alone(starved_pct=None), replace(_alone(), grade="not measured")]
)
def test_fail_above_exits_1_if_nothing_was_measured(
    found: Diagnosis, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", _run(tmp_path, found), "--fail-above", "100"]) == 1
    assert "nothing to compare with the limit of 100 %" in capsys.readouterr().err


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
    assert found["settings"] == [{"name": "num_workers", "before": 6, "after": 14}]
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

"""Every report is valid JSON of the documented form, and reads back as it was."""

import copy
import json
import os
import platform
from dataclasses import MISSING, fields, is_dataclass, replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from report.any_reports import any_report
from report.json_checker import problems
from report.sample_reports import HOSTILE, nothing_measured, sample, sample_report, sample_stats, saying

from lightning_feed.errors import ReportError
from lightning_feed.report.document import (
    SCHEMA,
    Parts,
    as_document,
    as_json,
    from_document,
    json_schema,
    read_document,
)
from lightning_feed.report.files import check_writable, write_report
from lightning_feed.report.report import Report, RunIdentity, read_environment, read_identity

ANY = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} in JSON")


@ANY
@given(any_report(finite=True))
def test_a_report_is_equal_after_a_json_round_trip(report: Report) -> None:
    assert from_document(json.loads(as_json(report))) == report


@ANY
@given(any_report(finite=False))
def test_every_report_is_valid_json_of_the_schema(report: Report) -> None:
    document = json.loads(as_json(report), parse_constant=_no_constant)
    assert problems(document, json_schema()) == []
    again = as_document(from_document(document))
    derived = {"throughput", "remedies"}  # rates that are computed anew: NaN in, None out
    assert {name: again[name] for name in again.keys() - derived} == {
        name: document[name] for name in document.keys() - derived
    }


def test_a_document_holds_verdict_figures_and_environment() -> None:
    document = as_document(sample_report())
    assert document["schema"] == SCHEMA == "lightning_feed.report/1"
    assert document["written_at"] == "2026-03-01T12:30:00+00:00"
    assert document["verdict"]["bottleneck"] == "data"
    assert document["step"]["prefetch_active"] is None
    assert document["throughput"] == {"batches_per_s": 1000 / 87.2, "samples_per_s": 32_000 / 87.2}
    assert [remedy["least_step_ms"] for remedy in document["remedies"]] == [57.6, 61.0, None]
    assert document["environment"]["torch"] == "2.15.0"


def test_figures_that_are_not_finite_are_null() -> None:
    odd = sample(stats=sample_stats(step_ms=float("nan"), starved_pct=float("inf")))
    step = as_document(sample_report(odd))["step"]
    assert (step["step_ms"], step["starved_pct"]) == (None, None)


# --- units --------------------------------------------------------------------------------------------------------

UNITS = ("_ms", "_s", "_pct", "_bytes", "_per_batch", "_per_step", "_cpus", "_workers", "_tensors", "_per_epoch", "_px")
PLAIN_NUMBERS = {
    "torch_threads",
    "tensors",
    "val_fraction",
    "parts",
    "speedup_if_free",
    "amplification",
    "steps",
    "lost_steps",
    "warm_up_steps",
    "sampled_steps",
    "max_epochs",
    "queue_ready",
    "queue_capacity",
    "world_size",
    "slow_rank",
    "prefetch_factor",
    "log_every_n_steps",
    "bar_refresh_rate",
    "checkpoint_steps",
    "check_val_every_n_epoch",
    "val_check_batches",
    "seconds",
    "times",
    "batch_size",
    "cut_short",
    "line",
    "data_ms_by_rank",
}
"""Ratios and counts, whose names say what is counted, and rows of figures."""


def _numbers(hint: Any, name: str) -> list[str]:
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return [found for one in fields(hint) for found in _numbers(hints[one.name], one.name)]
    if get_origin(hint) in (Union, UnionType, tuple):
        return [found for one in get_args(hint) if one is not ... for found in _numbers(one, name)]
    return [name] if hint in (int, float) else []


def test_every_figure_has_its_unit_in_its_name() -> None:
    unclear = {name for name in _numbers(Parts, "") if not name.endswith(UNITS)} - PLAIN_NUMBERS
    assert unclear == set()


# --- files --------------------------------------------------------------------------------------------------------


def test_write_report_writes_three_files_and_the_json_reads_back(tmp_path: Path) -> None:
    report = sample_report()
    written = write_report(report, tmp_path / "new" / "run")
    assert [one.name for one in written] == ["feed_report.json", "feed_report.md", "feed_report.html"]
    assert read_document(written[0]) == replace(report, path=written[0])
    assert sorted(written[0].parent.iterdir()) == sorted(written)


def test_write_report_keeps_the_reports_of_other_runs(tmp_path: Path) -> None:
    first, second = (replace(sample_report(), run=read_identity()) for _ in range(2))
    (tmp_path / "feed_report.json").write_text("of an earlier version, or cut off")
    names = [write_report(one, tmp_path)[0].name for one in (first, second, first, second)]
    assert names == ["feed_report-2.json", "feed_report-3.json"] * 2
    assert (tmp_path / "feed_report.json").read_text() == "of an earlier version, or cut off"
    assert read_document(tmp_path).run == second.run
    os.utime(tmp_path / "feed_report-2.json", (2e9, 2e9))
    assert read_document(tmp_path).run == first.run


def test_a_document_without_an_identity_can_be_read() -> None:
    document = as_document(sample_report())
    del document["identity"]
    assert from_document(document).run == RunIdentity()


def test_a_write_that_fails_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = read_identity()
    written = write_report(replace(sample_report(), run=run), tmp_path)
    path = written[0]
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ReportError, match=r"feed_report\.json could not be written: No space left on device"):
        write_report(replace(sample_report(nothing_measured()), run=run), tmp_path)
    assert path.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == sorted(written)


@pytest.mark.parametrize("folder", ["", "here", "new", "new/below/it"])
def test_check_writable_leaves_no_files_behind(folder: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "feed_report.json").write_text("what is there")
    check_writable(tmp_path / folder)
    assert sorted(str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*")) == ["here", "here/feed_report.json"]


def test_read_document_takes_a_folders_own_report_or_the_newest_below(tmp_path: Path) -> None:
    old, new = tmp_path / "version_0", tmp_path / "version_1"
    for age, folder in enumerate((new, old)):
        path, *_ = write_report(sample_report(), folder)
        os.utime(path, (1000 - age, 1000 - age))
    assert read_document(tmp_path).path == new / "feed_report.json"
    os.utime(old / "feed_report.json", (2000, 2000))
    assert read_document(tmp_path).path == old / "feed_report.json"
    write_report(sample_report(), tmp_path)
    os.utime(tmp_path / "feed_report.json", (0, 0))
    assert read_document(tmp_path).path == tmp_path / "feed_report.json"


# --- bad input ----------------------------------------------------------------------------------------------------


def _document(**changes: Any) -> dict[str, Any]:
    return as_document(sample_report()) | changes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("\xff\xfe", "is not JSON"),
        ("[]", "it has no schema"),
        ("{}", "it has no schema"),
        ('{"schema": 1}', "it has no schema"),
        ('{"schema": "other/1"}', "its schema is 'other/1', and this"),
        ('{"schema": "lightning_feed.report/x"}', "and this"),
        ('{"schema": "lightning_feed.report/2"}', "update lightning_feed"),
        ('{"schema": "lightning_feed.report/1"}', "written_at is missing"),
        ('{"schema": "lightning_feed.report/1", "written_at": "now"}', "environment is missing"),
    ],
)
def test_files_that_are_not_a_report_raise_a_report_error(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "feed_report.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ReportError, match=message) as caught:
        read_document(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("step", "step_ms"), "87.2", r"step\.step_ms is '87\.2', and must be a finite number"),
        (("step", "step_ms"), True, "must be a finite number"),
        (("step", "step_ms"), 10**400, "must be a finite number"),
        (("step", "steps"), 1.5, r"step\.steps is 1\.5, and must be a whole number"),
        (("step", "steps"), None, "must be a whole number"),
        (("step", "steps"), 10**30, "must be a whole number"),
        (("step", "confidence"), "sure", "must be one of 'high', 'medium', 'low'"),
        (("run", "loader", "pin_memory"), 1, "must be true or false"),
        (("run", "syncs"), "prog_bar", "must be a list"),
        (("run", "device_type"), None, "must be text"),
        (("hooks",), [{"name": "a"}], r"hooks\[0\]\.ms_per_step is missing"),
        (("hooks",), [3], r"hooks\[0\] is 3, and must be an object"),
        (("experiments", "left_out"), [["a"]], "must be a list of 2"),
        (("loaders",), None, "loaders is None, and must be an object"),
    ],
)
def test_values_of_the_wrong_type_raise_a_report_error(place: tuple[str, ...], value: Any, message: str) -> None:
    document = copy.deepcopy(_document())
    inner = document
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    with pytest.raises(ReportError, match=message):
        from_document(document)


def test_a_document_without_a_required_part_raises_a_report_error() -> None:
    for part in (one.name for one in fields(Parts) if one.default is one.default_factory is MISSING):
        document = _document()
        del document[part]
        with pytest.raises(ReportError, match=f"{part} is missing"):
            from_document(document)


def test_a_missing_report_raises_a_report_error(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="does not exist"):
        read_document(tmp_path / "nowhere")
    with pytest.raises(ReportError, match=r"there is no feed_report\.json in .* or below it"):
        read_document(tmp_path)


def test_an_unreadable_report_raises_a_report_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(sample_report(), tmp_path)

    def fail(_: Path) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(ReportError, match="cannot be read: Input/output error"):
        read_document(tmp_path)


# --- environment --------------------------------------------------------------------------------------------------


def test_read_environment_describes_this_process_and_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_environment()
    assert found.torch
    assert found.usable_cpus
    assert found.start_method in ("fork", "forkserver", "spawn")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        "processor : 0\nmodel : 85\nmodel name\t: Example: CPU\nmodel name\t: other\n"
    )
    assert read_environment(tmp_path).cpu == "Example: CPU"
    (tmp_path / "proc/cpuinfo").write_text("processor : 0\n")
    assert read_environment(tmp_path).cpu == platform.machine()
    monkeypatch.setattr("lightning_feed.extras.version", _not_installed)
    assert read_environment(tmp_path / "none").torch is None


def _not_installed(name: str) -> str:
    raise PackageNotFoundError(name)


def test_hostile_names_survive_the_round_trip() -> None:
    report = sample_report(sample(evidence=(saying(HOSTILE),)))
    assert from_document(json.loads(as_json(report))) == report

"""The report in words: on the console, as Markdown, and the pipeline."""

import io
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from report.any_reports import any_report
from report.sample_reports import (
    HOSTILE,
    nothing_measured,
    sample,
    sample_experiments,
    sample_facts,
    sample_report,
    sample_stats,
    saying,
)
from verdict.cases import ASLEEP, changed_facts, loop_facts, measured

from lightning_feed.measure.experiment_results import ExperimentResults, KeyBytes, LighterSample, PackedImages
from lightning_feed.measure.measurements import HookTime, Measurements
from lightning_feed.report.files import (
    as_html,
    as_line,
    as_markdown,
    as_short_text,
    as_text,
    print_text,
    short_markdown,
    show_report,
)
from lightning_feed.report.report import Report, RunIdentity, arguments_now, headline, read_identity
from lightning_feed.report.sections import Pipeline, pipeline_text, read_pipeline
from lightning_feed.verdict.decide import decide
from lightning_feed.verdict.diagnosis import (
    Bottleneck,
    Change,
    Diagnosis,
    Note,
    Remedy,
)

ANY = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def _bare(**changes: Any) -> Diagnosis:
    """Without experiments, ranks and hooks: what a fit finds."""
    found = sample(**changes)
    measured = replace(found.measurements, experiments=ExperimentResults(), diagnosed=False, ranks=None, hooks=())
    return replace(found, measurements=measured)


LATE = ASLEEP | {"head_of_line_pct": 50.0}
"""A slow batch delays finished ones, so the remedy is ``in_order=False``."""


# --- console ------------------------------------------------------------------------------------------------------


def test_text_report_of_a_starved_gpu_has_the_expected_lines() -> None:
    assert as_text(_bare()).splitlines() == [
        "FEED  highly data-bound: GPU idle 34 % of each step waiting for data "
        "(95 % CI 32-36, confidence high, 412 steps)",
        "step 87.2 ms = compute 52.9 | data 29.6 | copy 1.1 | other 3.6        if data were free: 1.51 x as fast",
        "cause cpu",
        "why   29.6 of 87.2 ms (34 %) waiting for data; the loader has 6 workers on 20 CPUs",
        "fix   FastDataModule(loader=LoaderSettings(num_workers=14))    # more workers make more batches at once "
        "(at most 1.51 x as fast)",
        '      ImageFolderDataModule(root, decoder="turbo")    # 2.00 ms of CPU for a sample instead of 4.00 '
        "(at most 1.43 x as fast)",
        "      def device_transform(self, batch, split): ...    # the host waits for copies from pageable memory",
        "next: train with LIGHTNING_FEED=tune, or with `AutotuneCallback()`: it tries numbers of workers if samples "
        "stay the same, and takes the fastest",
    ]


def test_every_report_form_mentions_an_epoch_that_ended_early() -> None:
    for step in (1.0, 100.0):  # also where steps are so short that there is no other advice
        found = decide(measured(data=0.0, step=step, cut_short=(40, 80)))
        assert "note  the loader ended after 40 of 80 batches" in as_text(found)
        assert "the loader ended after 40 of 80 batches" in as_line(sample_report(found))


@pytest.mark.parametrize(
    ("later", "retracted"),
    [
        (measured(data=60.0, loaders=LATE), ""),
        (measured(data=52.0, loaders=LATE), ""),  # another figure, the same verdict
        (
            measured(data=1.0, loaders=LATE),
            ". No longer true, as reported after 180 steps: highly data-bound, try in_order=False",
        ),
        (measured(data=60.0, loaders=LATE, in_order=False), ". No longer true"),
    ],
)
def test_a_report_that_contradicts_the_previous_one_says_so_first(later: Measurements, retracted: str) -> None:
    before = decide(measured(data=60.0, loaders=LATE, stats={"confidence": "medium", "steps": 180}))
    first_line = as_text(decide(later), before=before, width=300).splitlines()[0]
    assert (retracted in first_line) if retracted else ("No longer" not in first_line)


def test_a_report_with_a_first_fix_does_not_contradict_one_without_any() -> None:
    later = decide(measured(data=60.0, loaders=LATE))
    assert later.remedies
    first_line = as_text(later, before=replace(later, remedies=()), width=300).splitlines()[0]
    assert "No longer" not in first_line


def test_steps_of_training_itself_are_told_from_those_of_trials() -> None:
    experiments = replace(sample_experiments(), own_fit_ms=146.8, chosen_fit_ms=88.3, trained_workers=0)
    (own,) = [setting for setting in experiments.tried if setting.own]
    text = " ".join(as_text(decide(replace(measured(data=60.0), experiments=experiments, diagnosed=True))).split())
    assert f"training with {own.num_workers} workers: 146.8 ms; training with 0 workers: 88.3 ms" in text


def test_text_report_without_a_verdict_still_shows_the_experiments() -> None:
    alone = nothing_measured()
    measured = replace(alone.measurements, experiments=sample_experiments(), diagnosed=True, facts=sample_facts())
    text = as_text(replace(alone, measurements=measured))
    assert text.startswith("FEED  no verdict: ")
    assert "Pipeline (samples/s, ms a batch)" in text
    assert "costs decode: 9.80 ms; RandomResizedCrop: 3.20 ms; read: 1.90 ms; ColorJitter: 1.40 ms" in text
    assert "tried 6 workers: 87.0 ms; 12 workers: 58.0 ms" in text
    assert "batch its samples, in one process: 390.0 ms; collating them: 41.0 ms; start of the loader: 0.40 s" in text
    assert "code  Birds.__getitem__ (birds.py:41), calling ColorJitter: 120.0 ms a batch" in text
    assert "skip  cached-files: an iterable dataset decides itself" in text


def test_text_report_lists_the_ways_with_less_work_for_a_sample() -> None:
    pack = PackedImages(
        root="birds", path="birds-256.pack", short_side_px=256, decoded=False, folder_bytes=2**20, pack_bytes=2**19
    )
    lighter = (
        LighterSample(setting="quality", value="fast", now_ms=2.4, then_ms=1.7),
        LighterSample(setting="backend", value="nvjpeg", now_ms=2.4, then_ms=0.3, device_ms=0.11),
        LighterSample(setting="root", value=pack.path, now_ms=2.4, then_ms=0.6, pack=pack),
    )
    found = sample()
    measured = replace(found.measurements, experiments=ExperimentResults(lighter=lighter))
    text = as_text(replace(found, measurements=measured), width=300)
    assert (
        'less  quality="fast": 2.40 -> 1.70 ms; backend="nvjpeg": 2.40 -> 0.30 ms, and 0.11 ms on the device; '
        "pack --size 256: 2.40 -> 0.60 ms\n"
    ) in text


def test_steps_dominated_by_python_are_reported_in_one_sentence() -> None:
    found = _bare(stats=sample_stats(step_ms=0.71))
    assert as_text(found).splitlines() == [
        "FEED  Steps of 0.7 ms: Python overhead dominates; use larger batches.",
        "next: use larger batches: no other setting makes steps this short faster",
    ]
    for page in (as_markdown(sample_report(found)), as_html(sample_report(found))):
        assert "Steps of 0.7 ms: Python overhead dominates; use larger batches" in page
        assert "num_workers=14" not in page


def test_text_report_of_a_cpu_run_shows_no_copy_time() -> None:
    found = _bare(facts=sample_facts(device_type="cpu", num_workers=0))
    assert "step 87.2 ms = compute 52.9 | data 29.6 | other 4.7" in as_text(found)


def test_steps_of_the_warm_up_are_named_beside_those_that_count() -> None:
    stats = replace(sample_stats(), warm_up_steps=20)
    assert "confidence high, 412 steps after 20 of warm-up)" in as_text(_bare(stats=stats)).splitlines()[0]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_lines_fit_the_terminal_and_code_stays_whole(width: int) -> None:
    code = "def on_after_batch_transfer(self, batch, dataloader_idx):\n    return {key: batch[key] for key in SENT}"
    place = "in your training DataLoader (BirdData.train_dataloader, projects/birds/data.py:41)"
    remedies = (
        Remedy(code=code, where=place, why=(saying("fewer bytes are sent " * 8),)),
        Remedy(code="x" * 90, why=()),
    )
    notes = (saying("`lightning-feed tune train.py -- --epochs 2 --lr 0.1` " * 3 + "words " * 40),)
    path = "files /a/folder with spaces/that/is/rather/long/and/has/to/stay/in/one/piece/feed_report.html, .json, .md"
    text = as_text(sample(remedies=remedies, notes=notes), beside=[path], width=width)
    lines = text.splitlines()
    whole = ("x" * 90, *code.splitlines(), path)
    assert all(any(one in line for line in lines) for one in whole)
    assert "`lightning-feed tune train.py -- --epochs 2 --lr 0.1`" in text
    wide = [one for one in lines if len(one) > width and not any(part in one for part in (*whole, "`"))]
    assert wide == []
    assert "        # this takes the fastest accurate one, here" in text
    start = next(at for at, line in enumerate(lines) if line.startswith("note  "))
    assert lines[start + 1].startswith("      ")


def test_remedies_without_a_step_time_show_the_percentage_saved() -> None:
    remedy = Remedy(code="Trainer()", why=(Note.of("copied once"),), most_gain_pct=57.0)
    assert "# the files are copied once, if they fit (saves at most 57 % of the time)" in as_text(
        _bare(remedies=(remedy,))
    )


def test_keys_of_list_items_are_added_up_in_one_row() -> None:
    keys = tuple(KeyBytes(name=f"1.{at}.image_id", bytes_per_batch=500) for at in range(9))
    keys += (KeyBytes(name="0", bytes_per_batch=9_000),)
    found = sample()
    results = replace(sample_experiments(), keys=keys)
    text = as_markdown(sample_report(replace(found, measurements=replace(found.measurements, experiments=results))))
    rows = [line for line in text.splitlines() if "kB a batch" in line]
    assert rows == ["| `batch[1][*].image_id` | 4.5 kB a batch |", "| `batch[0]` | 9.0 kB a batch |"]


def test_text_report_of_too_few_steps_says_no_verdict() -> None:
    assert as_text(nothing_measured()).splitlines() == [
        "FEED  no verdict: 3 steps were measured, and a verdict needs 10: the first of an epoch and those after a "
        "validation do not count.",
        "next: train for 30 steps or more",
    ]
    assert as_text(replace(nothing_measured(), evidence=())).startswith("FEED  no verdict: nothing was measured.\n")


@pytest.mark.parametrize(
    ("changes", "headline"),
    [
        (
            {"bottleneck": "compute", "cause": "compute", "grade": "OK"},
            "FEED  OK: limited by the model. 34 % of time waiting for data. (95",
        ),
        (
            {"bottleneck": "compute", "cause": "oversubscribed", "grade": "OK"},
            "FEED  limited by the step itself, not by data: 34 % of time waiting for data (95",
        ),
        (
            {"bottleneck": "framework", "grade": "OK"},
            "FEED  framework-bound: 4 % of each step between the steps; GPU idle 34 % of each step waiting for data",
        ),
        (
            {"bottleneck": "copy", "facts": sample_facts(device_type="cpu")},
            "FEED  limited by transfer hooks: 1 % of each step in hooks; training waits for data 34 % of each step",
        ),
    ],
)
def test_headline_follows_from_the_verdict(changes: dict[str, Any], headline: str) -> None:
    assert as_text(_bare(**changes)).startswith(headline)


def test_text_report_lists_skipped_experiments() -> None:
    lines = as_text(sample()).splitlines()
    assert lines[-2] == "skip  cached-files: an iterable dataset decides itself which samples come"


def test_show_report_prints_the_full_short_and_one_line_forms(capsys: pytest.CaptureFixture[str]) -> None:
    show_report(sample_report())
    assert capsys.readouterr().out == as_text(sample()) + "\n"
    lines: list[str] = []
    written = [Path("run/feed_report.json"), Path("run/feed_report.html")]
    show_report(sample_report(), lines.append, written)
    *before, last = as_text(sample()).splitlines()
    assert lines[0].splitlines() == [*before, "files run/feed_report.html, .json", last]
    show_report(sample_report(), lines.append, written, form="short")
    assert lines[1].splitlines() == [before[0], "files run/feed_report.html, .json", last]
    show_report(sample_report(), lines.append, written, form="line")
    assert lines[2] == (
        "FEED  highly data-bound: GPU idle 34 % of each step waiting for data (412 steps, run/feed_report.html)"
    )
    assert as_line(sample_report()).endswith("(412 steps)")
    assert capsys.readouterr().out == ""


def test_reports_name_their_run() -> None:
    run = RunIdentity(program="src/train.py", has_arguments=True, folder="version_3")
    report = replace(sample_report(sample(cause="cpu", remedies=())), run=run)
    bare = replace(report, diagnosis=_bare(remedies=(), cause="cpu", facts=sample_facts(tuned=True)))
    assert as_markdown(report).startswith("# train.py, version\\_3: highly data-bound: GPU idle 34 %")
    assert short_markdown(bare).splitlines()[-1] == (
        "next: `lightning-feed diagnose src/train.py -- ARGUMENTS` finds the lines of your code that take the time"
    )
    typed = as_short_text(bare, arguments="--epochs 2").splitlines()[-1]
    assert "`lightning-feed diagnose src/train.py -- --epochs 2`" in typed
    page = as_html(report)
    assert "<title>train.py, version_3: highly data-bound</title>" in page
    assert "<h1>train.py, version_3: highly data-bound</h1>" in page


def test_read_identity_names_the_program_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    main: Any = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    for argv, program, has_arguments in (
        (["src/train.py", "--epochs", "2"], "src/train.py", True),
        (["/venv/bin/chemprop"], "/venv/bin/chemprop", False),
        (["-c"], "", False),
        ([""], "", False),
        ([], "", False),
        (["/venv/bin/lightning-feed", "diagnose", "data.py:make"], "", False),
    ):
        monkeypatch.setattr(sys, "argv", argv)
        found = read_identity("version_3")
        assert (found.program, found.has_arguments, found.folder) == (program, has_arguments, "version_3")
    assert read_identity().id != read_identity().id
    monkeypatch.setattr(main, "__spec__", ModuleSpec("package.train", None))
    assert read_identity().program == "-m package.train"
    monkeypatch.setattr(main, "__spec__", ModuleSpec("package.__main__", None))
    assert read_identity().program == "-m package"
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=object))  # type: ignore[arg-type]
    assert read_identity().program == "notebook"


def test_print_text_writes_all_lines_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in for stdout under a bar of rich keeps an unfinished line back, and draws the bar before it."""
    written: list[str] = []

    class Proxy(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stdout", Proxy())
    print_text("a\nb")
    assert written == ["a\nb\n"]


def test_headline_names_the_slow_rank_if_this_rank_waits_little() -> None:
    first = as_text(sample(cause="one rank")).splitlines()[0]
    assert "all ranks wait 35 % of each step for the data of rank 1" in first
    assert "GPU idle" not in first


def _slow_start(*, device: str = "cpu", start_s: float = 2.0) -> Diagnosis:
    """Epochs of 20 steps of 50 ms, 3 ms of each waiting, and two seconds to the first batch."""
    stats = sample_stats(
        step_ms=50.0, compute_ms=47.0, data_ms=3.0, copy_ms=0.0, other_ms=0.0, starved_pct=6.0, input_pct=6.0,
        starved_low_pct=5.0, starved_high_pct=7.0, speedup_if_free=1.06, epoch_start_s=start_s,
    )  # fmt: skip
    facts = loop_facts(device_type=device, num_workers=2, usable_cpus=2, batches_per_epoch=20)
    return decide(Measurements(stats=stats, facts=facts))


def test_headline_of_a_slow_epoch_start_gives_the_share_of_each_epoch() -> None:
    first, second, *_ = as_text(_slow_start()).splitlines()
    assert first == (
        "FEED  highly data-bound: training waits for data 67 % of each epoch, for its first batch "
        "(confidence high, 412 steps)"
    )
    assert second.endswith(
        "if data were free: 3.19 x as fast, starts of epochs included"
    )  # 2 s + 20 x 50 ms, to 20 x 47 ms
    assert headline(_slow_start(device="cuda")) == (
        "highly data-bound: GPU idle 67 % of each epoch waiting for its first batch"
    )
    assert "CI" not in short_markdown(sample_report(_slow_start()))
    assert headline(_slow_start(start_s=0.05)) == "limited by the model: 6 % of time waiting for data"


def test_the_headline_says_why_waiting_does_not_count() -> None:
    found = _slow_start(start_s=0.0, device="cuda")
    alone = replace(found.measurements, experiments=ExperimentResults(model_per_s=20.0), diagnosed=True)
    assert headline(decide(alone)) == (
        "OK: limited by the model. 6 % of time waiting for data, which faster loading would not change: "
        "the model alone takes as long as a step."
    )


@ANY
@given(any_report(finite=False))
def test_any_report_can_be_written_as_text_and_markdown(report: Report) -> None:
    assert as_text(report.diagnosis).startswith("FEED  ")
    assert as_markdown(report).startswith("# ")


# --- the pipeline -------------------------------------------------------------------------------------------------


def _pipeline(
    facts: Any = None, remedies: tuple[Remedy, ...] = (), bottleneck: Bottleneck = "data", **changes: Any
) -> Any:
    found = sample(facts=facts, remedies=remedies, bottleneck=bottleneck)
    measured = replace(found.measurements, experiments=ExperimentResults(**changes))
    return read_pipeline(replace(found, measurements=measured))


def _rates(pipeline: Pipeline | None, *kinds: str) -> dict[str, float]:
    assert pipeline is not None
    return {one.name: one.per_s for one in pipeline.bars if one.kind in (kinds or ("stage", "part"))}


def _narrowest(pipeline: Pipeline | None) -> list[str]:
    assert pipeline is not None
    return [one.name for one in pipeline.bars if one.narrowest]


def test_read_pipeline_computes_the_rate_of_each_stage() -> None:
    pipeline = read_pipeline(sample())
    assert pipeline is not None
    assert pipeline.unit == "samples/s"
    assert {name: round(per_s) for name, per_s in _rates(pipeline).items()} == {
        "read": 3158,  # 6 workers, 1.9 ms each
        "decode": 612,
        "transforms": 1304,  # 3.2 + 1.4 ms
        "collate, send": 3040,
        "loader": 371,
        "model": 589,
    }
    assert _narrowest(pipeline) == ["decode", "loader"]
    assert _rates(pipeline, "fit") == {"fit as it ran": pytest.approx(32_000 / 87.2)}
    assert _rates(pipeline, "if")["files in memory"] == pytest.approx(412.8)
    assert pipeline.longest_ms == pytest.approx(87.2)  # of the fit
    assert {bar.name: bar.batch_ms for bar in pipeline.bars}["loader"] == pytest.approx(32_000 / 371.2)


def test_only_the_stage_that_the_headline_names_is_marked() -> None:
    rates = {"loader_per_s": 10.0, "model_per_s": 20.0, "batch_size": 32}
    marks = {
        bottleneck: _narrowest(_pipeline(bottleneck=bottleneck, **rates))
        for bottleneck in ("data", "copy", "framework", "compute", "unknown")
    }
    assert marks == {"data": ["loader"], "copy": [], "framework": [], "compute": [], "unknown": []}
    slow_model = {**rates, "loader_per_s": 15.0, "model_per_s": 12.0}
    assert _narrowest(_pipeline(bottleneck="compute", **slow_model)) == ["model"]
    assert _narrowest(_pipeline(bottleneck="data", **slow_model)) == []


def test_no_stage_is_marked_if_loading_and_training_take_turns() -> None:
    rates = {"loader_per_s": 10.0, "model_per_s": 20.0, "batch_size": 32}
    facts = sample_facts(device_type="cpu", num_workers=0)
    assert _narrowest(_pipeline(facts, **rates)) == []
    workers = (Remedy(code="num_workers=2", why=(), change=Change("num_workers", "2")),)
    assert _narrowest(_pipeline(facts, workers, **rates)) == ["loader"]
    found = _bare(facts=changed_facts(facts, tuned=True), remedies=())
    assert headline(found) == "highly data-bound: loading takes 34 % of each step, and does not overlap with training"
    assert headline(replace(found, remedies=workers)).endswith("training waits for data 34 % of each step")
    untried = _bare(facts=facts, remedies=())
    assert headline(untried).endswith("training waits for data 34 % of each step")


def test_a_model_alone_much_slower_than_its_steps_is_no_stage() -> None:
    stages = {ms: [*_rates(_pipeline(loader_per_s=20.0, model_per_s=1000 / ms))] for ms in (95, 96)}
    assert stages == {95: ["loader", "model"], 96: ["loader"]}  # steps of 87.2 ms


def test_decode_rate_without_workers_is_that_of_one_process() -> None:
    facts = sample_facts(num_workers=0, usable_cpus=None)
    pipeline = _pipeline(facts, batch_size=32, costs=sample_experiments().costs)
    assert _rates(pipeline)["decode"] == pytest.approx(1 / 9.8e-3)


def test_pipeline_text_draws_a_bar_for_each_stage() -> None:
    pipeline = _pipeline(batch_size=32, loader_per_s=10.0, model_per_s=20.0, ceiling_per_s=1e4)
    lines = pipeline_text(pipeline)
    assert lines[0] == "Pipeline (samples/s, ms a batch)"
    assert lines[1].split() == ["collate,", "send", "320", "000", "0.10", "#"]
    assert lines[2].split() == ["loader", "320", "100.0", "#" * 32, "<-", "bottleneck"]
    assert lines[3].split() == ["model", "640", "50.0", "#" * 16]
    assert lines[4].split() == ["fit", "as", "it", "ran", "367", "87.2", "#" * 28]


def test_pipeline_bars_have_one_scale() -> None:
    pipeline = _pipeline(batch_size=1, loader_per_s=130.0, model_per_s=178.0, ceiling_per_s=2e5)
    lengths = {line.split()[0]: line.count("#") for line in pipeline_text(pipeline)[1:]}
    assert lengths["loader"] / lengths["model"] == pytest.approx(178 / 130, rel=0.1)


# --- Markdown -----------------------------------------------------------------------------------------------------


def test_markdown_report_has_the_expected_content() -> None:
    text = as_markdown(sample_report())
    assert text.startswith("# highly data-bound: GPU idle 34 % of each step waiting for data\n")
    assert "95 % CI 32-36, confidence high, 412 steps; if data were free: 1.51 x as fast." in text
    assert "| `data` | 29.6 | 33.9 | the device waited for data |" in text
    assert (
        "| `FastDataModule(loader=LoaderSettings(num_workers=14))` | more workers make more batches at once |" in text
    )
    assert "| at most 1.51 x as fast |" in text
    assert "\n".join(pipeline_text(read_pipeline(sample()))) in text  # type: ignore[arg-type]
    assert "| `rank 1 (the slow one)` | 29.60 |" in text
    assert "| `decode` | 9.80 ms | 9.60 ms |" in text
    assert "| `[Callback]ModelCheckpoint.on_train_batch_end` | 2.40 |" in text
    assert "| `cached-files` | an iterable dataset decides itself which samples come |" in text


def test_hostile_names_cannot_break_markdown_tables() -> None:
    found = sample(evidence=(saying(HOSTILE),), remedies=(Remedy(code=HOSTILE, why=(saying(HOSTILE),)),))
    hooks = (HookTime(name=HOSTILE, ms_per_step=1.0),)
    text = as_markdown(sample_report(replace(found, measurements=replace(found.measurements, hooks=hooks))))
    rows = [line for line in text.splitlines() if "alert" in line]
    assert len(rows) == 3  # nothing starts a new line
    assert "\n# no heading" not in text
    (evidence,) = (row for row in rows if row.startswith("- "))
    assert "<script>" not in evidence
    for row in set(rows) - {evidence}:
        bars = row.replace("\\|", "").count("|")
        assert bars in (3, 4)  # the cells of its table and no more


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ([], ""),
        (["--lr", "0.1", "a b"], "--lr 0.1 'a b'"),
        (["--config", "c.yaml", *(f"--data.{name}=1" for name in "abcdefgh")], "SAME ARGUMENTS"),
    ],
)
def test_long_arguments_become_the_placeholder_same_arguments(
    words: list[str], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    assert arguments_now() == shown


# --- the speed-up that can be reached ---------------------------------------------------------------------------------


def test_the_headline_promises_no_more_than_the_remedies() -> None:
    diagnosis = sample()
    step_ms = diagnosis.stats.step_ms or 0.0
    free = replace(diagnosis.stats, speedup_if_free=24.58)
    found = replace(diagnosis, measurements=replace(diagnosis.measurements, stats=free))
    remedy = replace(found.remedies[0], least_step_ms=step_ms / 2, most_gain_pct=None)
    bounded = as_text(replace(found, remedies=(remedy,)))
    assert "24.58" not in bounded
    assert "at most 2.00 x as fast with what is advised below" in bounded
    assert "at most 2.00 x as fast" in bounded
    unbounded = replace(remedy, least_step_ms=None)
    assert "if data were free: 24.58 x as fast" in as_text(replace(found, remedies=(unbounded,)))
    saves = replace(remedy, least_step_ms=None, most_gain_pct=20.0)
    assert "at most 1.25 x as fast with what is advised below" in as_text(replace(found, remedies=(saves,)))
    assert "1.25" in as_html(sample_report(replace(found, remedies=(saves,))))

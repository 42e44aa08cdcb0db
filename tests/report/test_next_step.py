"""The last line of a report: one step to take, whatever the verdict."""

from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest
from report.sample_reports import nothing_measured, sample, sample_facts, sample_stats
from verdict.cases import BUSY, READY, measured

from lightning_feed.measure.experiment_results import (
    ExperimentResults,
    FunctionCost,
    NamedCost,
    ThreadsTrial,
    TriedSetting,
)
from lightning_feed.measure.measurements import LoaderCode
from lightning_feed.measure.wall import WallPart, WallStats
from lightning_feed.report.document import make_report
from lightning_feed.report.files import as_html, as_markdown, as_text
from lightning_feed.report.next_step import next_step
from lightning_feed.report.report import RunIdentity
from lightning_feed.verdict.decide import decide
from lightning_feed.verdict.diagnosis import Bottleneck, Cause, Change, Diagnosis, Grade, Note, Remedy

RUN = RunIdentity(program="train.py", has_arguments=True)
WORKERS = Remedy(
    code="num_workers=2",
    where="num_workers: 0 -> 2 in your training DataLoader (Data.train_dataloader, data.py:41)",
    why=(),
    change=Change("num_workers", "2"),
)
BIRDS = FunctionCost(
    name="Birds.__getitem__", file="project/birds.py", line=41, calls=None, stage="samples", ms_per_batch=120.0
)
FINDS = "finds the lines of your code that take the time"


def _found(experiments: ExperimentResults | None = None, facts: Any = None, **changes: Any) -> Diagnosis:
    """A verdict without a remedy."""
    found = sample(facts=facts or sample_facts(), **{"remedies": (), **changes})
    measured = replace(
        found.measurements, experiments=experiments or ExperimentResults(), diagnosed=experiments is not None
    )
    return replace(found, measurements=measured)


ON_CPU = {"device_type": "cpu", "num_workers": 0}
LEFT_OUT = ExperimentResults(left_out=(("the rest of the fit", "validation, CSVLogger: not run, since it may write"),))
MODEL_ONLY: dict[str, Any] = {"bottleneck": "compute", "cause": "compute", "grade": "OK"}


TUNE = "train with LIGHTNING_FEED=tune, or with `AutotuneCallback()`"
TRY_NUMBERS = (
    "`LIGHTNING_FEED=tune python train.py --epochs 2` tries numbers of workers if samples stay the same, and takes the "
    "fastest"
)
PROFILER = '`Trainer(profiler="simple")` names the callback or hook that takes the time between the steps'
A_NOTE = Note.of("combine tensors")
SAID = "each of the many small tensors is copied separately: combine them into one tensor in collate"
VAIN = Note.of("more workers in vain", ms=90.0, own_ms=87.2)
TUNED = {"tuned": True}
TUNED_FACTS = sample_facts(tuned=True)
TWO_LINES = Remedy(code="def a():\n    b", where="in Model", why=())


@pytest.mark.parametrize(
    ("found", "step"),
    [
        (_found(cause="cpu"), TRY_NUMBERS),
        (_found(cause="cpu", notes=(A_NOTE,)), TRY_NUMBERS),
        (_found(cause="cpu", remedies=(TWO_LINES,)), TRY_NUMBERS),
        (_found(cause="no workers", facts=sample_facts(**ON_CPU)), TRY_NUMBERS),
        (_found(ExperimentResults(), remedies=(WORKERS,)), f"{WORKERS.where}: `num_workers=2`"),
        (_found(cause="jitter", remedies=(TWO_LINES,)), TRY_NUMBERS),
        (_found(cause="jitter", remedies=(TWO_LINES,), facts=TUNED_FACTS), "paste the first fix, in Model"),
        (_found(cause="cpu", facts=TUNED_FACTS), f"`lightning-feed diagnose train.py -- --epochs 2` {FINDS}"),
        (
            _found(cause="cpu", facts=TUNED_FACTS, notes=(A_NOTE,)),
            f"`lightning-feed diagnose train.py -- --epochs 2` {FINDS}",
        ),
        (_found(cause="jitter", notes=(A_NOTE,), facts=TUNED_FACTS), SAID),
        (_found(cause="jitter", facts=TUNED_FACTS), f"`lightning-feed diagnose train.py -- --epochs 2` {FINDS}"),
        (
            _found(cause="no workers", facts=sample_facts(**ON_CPU, tuned=True), why_not=(VAIN,)),
            "loading and training take turns, and workers would gain nothing; "
            f"`lightning-feed diagnose train.py -- --epochs 2` {FINDS}",
        ),
        (
            _found(ExperimentResults(functions=(BIRDS,)), sample_facts(**ON_CPU), cause="no workers"),
            "loading and training take turns; make Birds.__getitem__ faster, most of all birds.py:41: it takes "
            "120.0 ms a batch",
        ),
        (_found(ExperimentResults(), notes=(A_NOTE,)), SAID),
        (
            _found(ExperimentResults()),
            "make a batch with less work: no loader setting is known to help",
        ),
        (
            _found(cause="cpu", facts=sample_facts(loop="plain")),
            "`lightning_feed.tune(loader)` tries other settings of this loader",
        ),
        (
            _found(cause="waiting", facts=sample_facts(stage="validate")),
            "`lightning_feed.tune(loader)` tries other settings of this loader",
        ),
        (
            # Diagnosing measures what helps beside other programs.
            _found(cause="cpu", facts=replace(TUNED_FACTS, others_cpu_pct=60.0)),
            "`lightning-feed diagnose train.py -- --epochs 2` finds the lines of your code that take the time",
        ),
        (
            _found(bottleneck="unknown", grade="not measured"),
            "`lightning-feed diagnose train.py -- --epochs 2` measures each part alone",
        ),
        (nothing_measured(), "train for 30 steps or more"),
        (
            _found(
                ExperimentResults(loader_per_s=4.0),
                bottleneck="unknown",
                grade="not measured",
                stats=sample_stats(steps=0),
            ),
            "diagnose a program that trains, or call diagnose() with a LightningModule",
        ),
        (_found(stats=sample_stats(step_ms=0.7)), "use larger batches: no other setting makes steps this short faster"),
        (_found(**MODEL_ONLY), "nothing, the loader keeps up"),
        (_found(**MODEL_ONLY, notes=(A_NOTE,)), "nothing, the loader keeps up"),
        (_found(**MODEL_ONLY, facts=sample_facts(others_cpu_pct=60.0)), "nothing, the loader keeps up"),
        (
            _found(cause="hand-over", grade="slightly data-bound"),
            "nothing: batches are ready in time, and only handing them over takes time",
        ),
        (_found(cause="hand-over", grade="slightly data-bound", notes=(A_NOTE,)), SAID),
        (_found(cause="hand-over"), f"{TUNE}: it tries other numbers of workers"),
        *(
            (
                _found(cause="hand-over", facts=sample_facts(**facts)),
                "batches are ready in time, and handing one over takes 29.6 ms: fewer or smaller tensors take less",
            )
            for facts in (
                {"tuned": True},
                {"map_style": False},
                {"stage": "validate"},
                {"every_num_workers": (2, 2)},
            )
        ),
        (
            _found(LEFT_OUT, **MODEL_ONLY),
            "nothing in loading; `LIGHTNING_FEED=1 python train.py --epochs 2` measures what was left out here "
            "(validation, CSVLogger)",
        ),
        (
            _found(LEFT_OUT, notes=(Note.of("left out of the fit", parts="validation"),)),
            "nothing in loading; `LIGHTNING_FEED=1 python train.py --epochs 2` measures what was left out here "
            "(validation, CSVLogger)",
        ),
        (_found(**{**MODEL_ONLY, "cause": "launch"}, notes=(A_NOTE,)), SAID),
        (_found(**{**MODEL_ONLY, "cause": "unknown"}), PROFILER),
        (
            _found(bottleneck="framework", cause="hooks", notes=(A_NOTE,)),
            SAID,
        ),
        (
            _found(bottleneck="copy", cause="transfer hooks", facts=sample_facts(**ON_CPU, normalizes=True)),
            "nothing: on a CPU, ImageFolderDataModule normalises images in the training process",
        ),
        (_found(bottleneck="checkpoints"), "save less often: `ModelCheckpoint(every_n_train_steps=...)`"),
    ],
)
def test_next_step_follows_from_the_verdict(found: Diagnosis, step: str) -> None:
    assert next_step(found, RUN, arguments="--epochs 2") == step


def test_a_fix_that_training_has_tried_comes_before_trials_of_workers() -> None:
    own = TriedSetting(num_workers=6, prefetch_factor=2, step_ms=155.0, shortest_ms=150.0, longest_ms=160.0, own=True)
    threads = ThreadsTrial(torch_threads=1, num_workers=6, step_ms=60.0, own_ms=100.0)
    experiments = {"tried": (own,), "inconclusive": True, "threads": threads}
    facts: dict[str, Any] = {"num_workers": 6, "every_num_workers": (6,), "workers": "process", "device_type": "cpu"}
    found = decide(measured(experiments=experiments, loaders=BUSY, usable_cpus=8, torch_threads=8, **facts))
    assert next_step(found, RUN).endswith("after `import torch`: `torch.set_num_threads(1)`")


def test_a_note_on_validation_time_is_not_the_next_step() -> None:
    parts = (WallPart(name="train", seconds=6.0, times=1), WallPart(name="validation", seconds=4.0, times=1))
    for bottleneck, cause, step in (
        ("compute", "compute", "the loader keeps up; validate less often: `Trainer(check_val_every_n_epoch=...)`"),
        ("framework", "hooks", SAID),
        ("data", "pin thread", SAID),
    ):
        found = _found(bottleneck=bottleneck, cause=cause, grade="OK")
        measured = replace(found.measurements, wall=WallStats(wall_s=10.0, parts=parts))
        notes = (Note.of("share of the run"), A_NOTE)
        assert next_step(replace(found, measurements=measured, notes=notes), RUN).startswith(step)


def test_next_step_without_a_fix_names_the_most_expensive_part() -> None:
    costs = (NamedCost(name="decode", cpu_ms=1.2, wall_ms=1.3), NamedCost(name="Flip", cpu_ms=0.1, wall_ms=0.1))
    measured = _found().measurements
    found = _found(cause="no workers", notes=(), why_not=(Note.of("crops in vain", whole_ms=1.0, crop_ms=0.9),))
    experiments = replace(measured.experiments, costs=costs, functions=())
    found = replace(found, measurements=replace(found.measurements, experiments=experiments, diagnosed=True))
    step = next_step(found, RUN)
    assert "make a batch with less work, above all in decode (1.2 ms of CPU for a sample): no loader" in step
    assert "workers would gain nothing" not in step


@pytest.mark.parametrize(
    ("run", "diagnosed", "trained"),
    [
        (RunIdentity(), "`lightning-feed diagnose SCRIPT.py`", "`LIGHTNING_FEED=1 python SCRIPT.py`"),
        (
            RunIdentity(program="a b/train.py"),
            "`lightning-feed diagnose 'a b/train.py'`",
            "`LIGHTNING_FEED=1 python 'a b/train.py'`",
        ),
        (
            RunIdentity(program="-m project.train", has_arguments=True),
            "`lightning-feed diagnose -m project.train -- ARGUMENTS`",
            "`LIGHTNING_FEED=1 python -m project.train ARGUMENTS`",
        ),
        (
            RunIdentity(program="/bin/chemprop", has_arguments=True),
            "`lightning-feed diagnose /bin/chemprop -- ARGUMENTS`",
            "`LIGHTNING_FEED=1 /bin/chemprop ARGUMENTS`",
        ),
        (RunIdentity(program="notebook"), "`lightning_feed.diagnose(trainer, model)`", "`GPUStarvationCallback()`"),
    ],
)
def test_next_step_commands_contain_the_name_of_the_program(run: RunIdentity, diagnosed: str, trained: str) -> None:
    assert diagnosed in next_step(_found(cause="cpu", facts=TUNED_FACTS), run)
    assert trained in next_step(_found(LEFT_OUT, **MODEL_ONLY), run)


@pytest.mark.parametrize(
    ("facts", "run", "step"),
    [
        (
            {},
            RUN,
            "try `OMP_NUM_THREADS=3 LIGHTNING_FEED=1 python train.py --epochs 2`, since torch's 8 threads wait for "
            "each other",
        ),
        (
            {"usable_cpus": 2},
            RunIdentity(program="notebook"),
            "try `torch.set_num_threads(1)`, since torch's 8 threads wait for each other",
        ),
    ],
)
def test_next_step_beside_other_programs_gives_torch_the_free_cpus(
    facts: dict[str, Any], run: RunIdentity, step: str
) -> None:
    busy: dict[str, Any] = {"device_type": "cpu", "usable_cpus": 8, "torch_threads": 8, "others_cpu_pct": 60.0}
    found = _found(facts=sample_facts(**busy | facts), **{**MODEL_ONLY, "cause": "oversubscribed"})
    assert next_step(found, run, arguments="--epochs 2") == f"the loader keeps up; {step}"


def test_commands_keep_omp_num_threads_of_a_run_beside_other_programs() -> None:
    """Without them, the diagnosis would only find that torch has too many threads."""
    busy: dict[str, Any] = {"device_type": "cpu", "usable_cpus": 2, "torch_threads": 1, "others_cpu_pct": 60.0}
    for changed, threads in (({}, "OMP_NUM_THREADS=1 "), ({"others_cpu_pct": 0.0}, ""), ({"device_type": "cuda"}, "")):
        for facts, command in (
            (busy | {"tuned": True}, "lightning-feed diagnose train.py -- -b 2"),
            (busy | {"num_workers": 0}, "LIGHTNING_FEED=tune python train.py -b 2"),
        ):
            found = _found(cause="cpu", facts=sample_facts(**facts | changed))
            assert next_step(found, RUN, arguments="-b 2").startswith(f"`{threads}{command}`")


@pytest.mark.parametrize("bottleneck", get_args(Bottleneck))
def test_every_report_ends_with_one_next_step(bottleneck: Bottleneck) -> None:
    """Of each cause and grade, with and without a remedy, experiments, workers and other programs."""
    remedies, results = ((), (WORKERS,)), (None, ExperimentResults())
    facts = [sample_facts(num_workers=workers, others_cpu_pct=pct) for workers, pct in product((0, 4), (0.0, 60.0))]
    for cause, grade, *rest in product(get_args(Cause), get_args(Grade), remedies, results, facts):
        tried, experiments, fact = rest
        found = _found(experiments, fact, bottleneck=bottleneck, cause=cause, grade=grade, remedies=tried)
        step = next_step(found, RUN)
        assert step
        assert "\n" not in step
    report = make_report(found)
    for text in (as_text(found), as_markdown(report)):
        assert [line for line in text.splitlines() if line.startswith("next: ")] == [text.splitlines()[-1]]
    assert as_html(report).count("<b>next:</b>") == 1


def test_text_report_gives_each_command_once_with_the_program_name() -> None:
    note = Note.of("left out of the fit", parts="validation")
    text = as_text(_found(LEFT_OUT, notes=(note,)), RUN)
    assert text.count("LIGHTNING_FEED=1") == 1
    lines = Note.of("diagnose", tries="lines")
    crops = Note.of("diagnose whole images")
    for notes, last in (((lines,), f"train.py` {FINDS}"), ((crops, lines), "train.py` times decoding only the crops")):
        text = as_text(_found(cause="cpu", facts=TUNED_FACTS, notes=notes), RunIdentity(program="train.py"))
        assert "your_script.py" not in text
        assert " ".join(text.split()).endswith(last)
        assert text.count("train.py") == len(notes)
    hidden = as_text(_found(cause="jitter", notes=(A_NOTE, crops)), RunIdentity(program="notebook"))
    assert "`lightning_feed.diagnose(trainer, model)` times decoding only the crops" in " ".join(hidden.split())


@pytest.mark.parametrize("cause", ["no workers", "cpu", "hand-over", "waiting"])
def test_next_step_never_suggests_tune_for_a_dataset_that_a_fork_breaks(cause: Cause) -> None:
    facts = {"num_workers": 0, "persistent_workers": None, "prefetch_factor": None}
    reason = "dataset.pool (concurrent.futures.ThreadPoolExecutor) belongs to this process"
    assert "tune" in next_step(_found(facts=sample_facts(**facts), cause=cause), RUN)
    broken = _found(facts=sample_facts(**facts, why_no_workers=reason), cause=cause)
    assert "tune" not in next_step(broken, RUN)


def test_a_note_used_as_the_next_step_is_printed_once() -> None:
    found = _found(cause="jitter", notes=(Note.of("deeper queue", prefetch_factor=4), A_NOTE), facts=TUNED_FACTS)
    text = as_text(found)
    assert text.count("prefetch_factor=4") == 1
    assert f"note  {SAID}"[:40] in text


BY_TORCH: dict[str, Any] = {
    "num_workers": 8,
    "usable_cpus": 16,
    "workers": "process",
    "device_type": "cuda",
    "size_bytes": 100_000_000,
    "may_use_slots": True,
    "in_place": False,
    "pin_memory": False,
    "pinned": False,
    "loader_code": LoaderCode(
        words="your training DataLoader (Birds.train_dataloader, train.py:9)", datamodule="Birds"
    ),
    "stats": {"prefetch_active": True},
}
"""Eight workers that send large batches as torch does, seen with LIGHTNING_FEED=1."""
PINNED = {"pin_memory": True, "pinned": True}
IN_PLACE = PINNED | {"may_use_slots": False, "in_place": True}
BY_COMMAND = {"tuned": True, "tuned_outside": True}
WRAPPED = {"loader_code": LoaderCode(words="the LoaderSettings(...)", form="settings", datamodule="Birds")}
COPIES: dict[str, Any] = {"step": 33.2, "data": 1.0, "copy": 24.0}
WAITS: dict[str, Any] = {"step": 10.3, "data": 6.0, "loaders": READY}
TRY_IN_PLACE = (
    "`LIGHTNING_FEED=tune python train.py` hands batches over in place, tries numbers of workers, and takes the fastest"
)
OTHER_NUMBERS = f"{TUNE}: it tries other numbers of workers"
SEND_LESS = "send fewer bytes: a smaller dtype, such as uint8 images, or smaller batches"
HAND_LESS = "batches are ready in time, and handing one over takes 6.0 ms: fewer or smaller tensors take less"
KEEPS_UP = "nothing, the loader keeps up"
BUSY_RUN: dict[str, Any] = PINNED | {"step": 60.0, "data": 40.0, "loaders": BUSY}
DIAGNOSED: dict[str, Any] = {"experiments": {}}
ALONE: dict[str, Any] = {"num_workers": 0, "workers": None, "may_use_slots": None, "in_place": None}
TURNS = "loading and training take turns; "
BROKEN = {"why_no_workers": "a rehearsal gave other samples"}
ANY_NUMBER = TRY_NUMBERS.replace(" --epochs 2", "")
FIND_LINES = f"`lightning-feed diagnose train.py` {FINDS}"
LESS_WORK = "make a batch with less work: no loader setting is known to help"
NO_WORKERS = "no workers, though they would load while the model trains: a rehearsal gave other samples"
PIN = "pin_memory: False -> True in your training DataLoader (Birds.train_dataloader, train.py:9): `pin_memory=True`"


@pytest.mark.parametrize(
    "runs",
    [
        [(COPIES, TRY_IN_PLACE), (IN_PLACE | TUNED | COPIES | {"data": 0.0, "copy": 0.0}, KEEPS_UP)],
        [(COPIES, TRY_IN_PLACE), (IN_PLACE | TUNED | COPIES, SEND_LESS)],
        [(COPIES, TRY_IN_PLACE), (IN_PLACE | TUNED | WAITS, HAND_LESS)],
        [(WAITS, TRY_IN_PLACE), (IN_PLACE | TUNED | WAITS, HAND_LESS)],
        [(PINNED | COPIES, TRY_IN_PLACE), (IN_PLACE | TUNED | COPIES, SEND_LESS)],
        # The user wraps the data module instead.
        [
            (WAITS, TRY_IN_PLACE),
            (IN_PLACE | WRAPPED | WAITS, OTHER_NUMBERS),
            (IN_PLACE | WRAPPED | TUNED | WAITS, HAND_LESS),
        ],
        # Training is no faster with batches in place.
        [
            (COPIES, TRY_IN_PLACE),
            (TUNED | COPIES, PIN),
            (TUNED | PINNED | COPIES, SEND_LESS),
        ],
        [(WAITS, TRY_IN_PLACE), (TUNED | WAITS, HAND_LESS)],
        # More workers may help.
        [(BUSY_RUN, ANY_NUMBER), (TUNED | BUSY_RUN, FIND_LINES), (DIAGNOSED | BUSY_RUN, LESS_WORK)],
        [
            (BUSY_RUN | ALONE, ANY_NUMBER),
            (TUNED | BUSY_RUN | ALONE, f"{TURNS}{FIND_LINES}"),
            (BROKEN | DIAGNOSED | BUSY_RUN | ALONE, f"{TURNS}{NO_WORKERS}"),
        ],
        [(BUSY_RUN | {"every_num_workers": (8, 8)}, FIND_LINES), (DIAGNOSED | BUSY_RUN, LESS_WORK)],
        [
            (BUSY_RUN, ANY_NUMBER),
            (BUSY_RUN | {"num_workers": 14}, FIND_LINES),
            (DIAGNOSED | BUSY_RUN | {"num_workers": 14}, LESS_WORK),
        ],
        [
            (COPIES | BUSY_RUN | {"step": 80.0}, ANY_NUMBER),
            (IN_PLACE | TUNED | COPIES, SEND_LESS),
        ],
        # Batches cannot come in place.
        [({"may_use_slots": False} | COPIES, PIN), ({"may_use_slots": False} | PINNED | COPIES, SEND_LESS)],
    ],
)
def test_following_each_next_step_leads_neither_in_a_circle_nor_to_a_dead_end(runs: list[Any]) -> None:
    steps = []
    for run, expected in runs:
        diagnosis = decide(measured(**BY_TORCH | run))
        step = next_step(diagnosis, RunIdentity(program="train.py"))
        assert step == expected
        steps.append(step)
    assert len(set(steps)) == len(steps)
    assert steps[-1].removeprefix(TURNS) in (SEND_LESS, HAND_LESS, KEEPS_UP, LESS_WORK, NO_WORKERS)


def test_batches_in_place_come_first_after_a_diagnosis_and_in_a_notebook_too() -> None:
    diagnosed = decide(measured(**BY_TORCH | COPIES, experiments={}))
    assert next_step(diagnosed, RunIdentity(program="train.py")) == TRY_IN_PLACE
    assert next_step(diagnosed, RunIdentity(program="notebook")) == (
        f"{TUNE}: it hands batches over in place, tries numbers of workers, and takes the fastest"
    )


def test_the_text_says_what_batches_in_place_save_at_most() -> None:
    lines = as_text(decide(measured(**BY_TORCH | COPIES)), RunIdentity(program="train.py")).splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("fix"))
    assert lines[first] == "fix   as the datamodule of trainer.fit, in place of Birds(...)"
    assert "FastDataModule.wrap(Birds(...))" in lines[first + 2]
    assert "at most 3.61 x as fast" in " ".join(lines)
    assert not any("pin_memory" in line for line in lines)


def test_a_short_run_is_told_of_batches_in_place_and_not_of_trials_that_cannot_make_them() -> None:
    """`lightning-feed tune` tries settings outside of training, and hands batches over as torch does it."""
    wall = WallStats(wall_s=8.0, parts=(WallPart(name="train", seconds=8.0, times=1),))
    short = decide(measured(**BY_TORCH | COPIES, wall=wall, left_s=0.0))
    assert short.remedies[0].change.setting == "hand_over"
    step = next_step(short, RunIdentity(program="train.py"))
    assert step == "paste the first fix, as the datamodule of trainer.fit, in place of Birds(...)"

"""Every leaf of the verdict, and each of its limits from both sides."""

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verdict.cases import figures_of, kinds, loop_facts, under

from lightning_feed.measure.experiment_results import (
    CropTrial,
    ExperimentResults,
    FunctionCost,
    KeyBytes,
    LighterSample,
    NamedCost,
    PackedImages,
    ThreadsTrial,
    TriedSetting,
)
from lightning_feed.measure.measurements import SYNCS, DeviceWait, HookTime, Measurements
from lightning_feed.measure.stats import LoaderStats, RankStats, StarvationStats
from lightning_feed.report.words import words
from lightning_feed.verdict.decide import decide
from lightning_feed.verdict.diagnosis import Diagnosis, Note
from lightning_feed.verdict.thresholds import (
    BLOCKED_PCT,
    BUSY_DEVICE_SHARE,
    BUSY_PCT,
    CPU_PRESSURE_PCT,
    DATA_PCT,
    DISK_MB_PER_S,
    FASTER_RATIO,
    HANDOVER_PCT,
    HEAD_OF_LINE_PCT,
    HEADLINE_PCT,
    HIGH_PCT,
    IO_PRESSURE_PCT,
    LAUNCH_SHARE,
    LEAST_GAIN_PCT,
    MANY_TENSORS,
    MODEL_FAR_RATIO,
    MODEL_MOST_SHARE,
    MODEL_SHARE,
    MOST_NOTES,
    MOST_REMEDIES,
    NAMED_SHARE,
    NO_FASTER_RATIO,
    PIN_SHARE,
    QUEUE_READY_SHARE,
    RUN_QUEUE_PCT,
    SMALL_TENSOR_BYTES,
    THROTTLED_PCT,
    WARM_PCT,
)

WAIT_MS = 40
DATA: dict[str, Any] = {"data": WAIT_MS, "compute": 60}
COPY: dict[str, Any] = {"copy": 40, "compute": 60}
OTHER: dict[str, Any] = {"other": 40, "compute": 60}
FED: dict[str, Any] = {}
TWO = {"num_workers": 2, "usable_cpus": 2}
CUDA = {"device_type": "cuda"}
SMALL_BATCH_BYTES = MANY_TENSORS * SMALL_TENSOR_BYTES


def _measured(
    parts: dict[str, Any],
    facts: dict[str, Any] | None = None,
    loaders: dict[str, Any] | None = None,
    experiments: dict[str, Any] | None = None,
    **more: Any,
) -> Measurements:
    given: dict[str, float] = {"other": 0.0, "data": 0.0, "copy": 0.0, "compute": 100.0} | {
        name: value for name, value in parts.items() if name in ("other", "data", "copy", "compute")
    }
    step = sum(given.values())
    stats = StarvationStats(
        steps=412,
        confidence="high",
        step_ms=step,
        other_ms=given["other"],
        data_ms=given["data"],
        copy_ms=given["copy"],
        compute_ms=given["compute"],
        starved_pct=100 * given["data"] / step,
        input_pct=100 * (given["data"] + given["copy"]) / step,
        next_wait_ms=given["data"],
        hidden_wait_ms=0.0,
    )
    return Measurements(
        stats=replace(stats, **{name: value for name, value in parts.items() if name not in given}),
        facts=loop_facts(**(facts or {})),
        loaders=LoaderStats(**(loaders or {})),
        experiments=ExperimentResults(**(experiments or {})),
        diagnosed=experiments is not None,
        **more,
    )


def _of(on_cpu: float, run_queue: float, **more: Any) -> dict[str, Any]:
    """What workers do."""
    shares = {"workers_on_cpu_pct": on_cpu, "workers_run_queue_pct": run_queue}
    return shares | {"workers_blocked_pct": 100 - on_cpu - run_queue} | more


def _cause(*args: Any, **more: Any) -> tuple[str, str]:
    diagnosis = decide(_measured(*args, **more))
    return diagnosis.bottleneck, diagnosis.cause


RANKS = RankStats(
    world_size=3, steps=400, starved_pct=30.0, max_data_ms=30.0, slow_rank=2, data_ms_by_rank=(1.0, 2.0, 30.0)
)


@pytest.mark.parametrize(
    ("facts", "loaders", "cause"),
    [
        (TWO, {}, "unknown"),
        ({"num_workers": None}, {}, "unknown"),
        ({"num_workers": 0}, {}, "no workers"),
        ({"num_workers": 0}, _of(90, 5), "no workers"),
        # --- oversubscribed
        (TWO, _of(12, 86), "oversubscribed"),
        (TWO, _of(60, RUN_QUEUE_PCT), "oversubscribed"),
        (TWO, _of(60, under(RUN_QUEUE_PCT)), "cpu"),
        (TWO, _of(12, 86, head_of_line_pct=90.0, queue_ready=4.0, queue_capacity=4.0), "oversubscribed"),
        (TWO, _of(90, 5, throttled_pct=THROTTLED_PCT), "oversubscribed"),
        (TWO, _of(90, 5, throttled_pct=under(THROTTLED_PCT)), "cpu"),
        ({"num_workers": 3, "usable_cpus": 2}, {"cpu_pressure_pct": CPU_PRESSURE_PCT}, "oversubscribed"),
        ({"num_workers": 3, "usable_cpus": 2}, {"cpu_pressure_pct": under(CPU_PRESSURE_PCT)}, "unknown"),
        (TWO, {"cpu_pressure_pct": 90.0}, "unknown"),  # no more workers than CPUs: somebody else's
        ({"num_workers": 3, "usable_cpus": 2}, _of(90, 5, cpu_pressure_pct=90.0), "cpu"),
        # batches are ready, and training has no CPU to take them with
        ({"num_workers": 8, "usable_cpus": 2}, _of(20, 20, cpu_pressure_pct=90.0, handover_pct=95.0), "oversubscribed"),
        (
            {"num_workers": 8, "usable_cpus": 2},
            _of(20, 20, cpu_pressure_pct=under(CPU_PRESSURE_PCT), handover_pct=95.0),
            "hand-over",
        ),
        ({"num_workers": 2, "usable_cpus": 2}, _of(20, 20, cpu_pressure_pct=90.0, handover_pct=95.0), "hand-over"),
        # --- pin thread
        (TWO, _of(2, 2, pin_lag_ms=PIN_SHARE * WAIT_MS), "pin thread"),
        (TWO, _of(2, 2, pin_lag_ms=under(PIN_SHARE * WAIT_MS), disk_mb_per_s=0.0), "waiting"),
        (TWO | {"pin_memory": False}, _of(2, 2, pin_lag_ms=40.0, disk_mb_per_s=0.0), "waiting"),
        (TWO, _of(99, 1, pin_lag_ms=40.0), "cpu"),  # workers that are never idle are the limit, not the thread
        # --- head of line
        (TWO, _of(2, 2, head_of_line_pct=HEAD_OF_LINE_PCT), "head of line"),
        (TWO, _of(2, 2, head_of_line_pct=under(HEAD_OF_LINE_PCT), disk_mb_per_s=0.0), "waiting"),
        (TWO, {"head_of_line_pct": HEAD_OF_LINE_PCT}, "head of line"),
        (TWO, _of(BUSY_PCT - 1, 0.9, head_of_line_pct=HEAD_OF_LINE_PCT), "head of line"),
        (TWO, _of(BUSY_PCT - 1, 1, head_of_line_pct=90.0), "cpu"),  # never idle: nothing is lost to the order
        # --- handed over
        (TWO, _of(2, 2, handover_pct=HANDOVER_PCT, queue_ready=3.9, queue_capacity=4.0), "hand-over"),
        (TWO, _of(2, 2, handover_pct=under(HANDOVER_PCT), queue_ready=3.9, queue_capacity=4.0), "jitter"),
        (TWO, _of(87, 2, handover_pct=90.0, queue_ready=3.9, queue_capacity=4.0), "cpu"),
        (TWO, _of(2, 2, handover_pct=90.0, head_of_line_pct=30.0), "head of line"),
        # --- jitter
        (TWO, _of(2, 2, queue_ready=4 * QUEUE_READY_SHARE, queue_capacity=4.0), "jitter"),
        (TWO, _of(2, 2, queue_ready=under(4 * QUEUE_READY_SHARE), queue_capacity=4.0, disk_mb_per_s=0.0), "waiting"),
        (TWO, {"queue_ready": 3.0, "queue_capacity": 4.0}, "jitter"),
        (TWO, _of(BUSY_PCT - 10, 10, queue_ready=3.0, queue_capacity=4.0), "cpu"),  # never idle
        (TWO, _of(BUSY_PCT - 10, 9.9, queue_ready=3.0, queue_capacity=4.0), "jitter"),
        (TWO, {"queue_ready": 0.0, "queue_capacity": 0.0}, "unknown"),
        # --- work
        (TWO, _of(87, 12), "cpu"),
        (TWO, _of(100.1 - BLOCKED_PCT, 0), "cpu"),
        (TWO, _of(100 - BLOCKED_PCT, 0, disk_mb_per_s=0.0), "waiting"),
        # --- waiting, for storage or else
        (TWO, _of(3, 1), "unknown"),  # for storage or not
        (TWO, _of(3, 1, disk_mb_per_s=0.0), "waiting"),
        (TWO, _of(3, 1, page_cache_pct=under(WARM_PCT)), "cold reads"),
        (TWO, _of(3, 1, page_cache_pct=WARM_PCT), "waiting"),
        (TWO, _of(3, 1, page_cache_pct=10.0, disk_mb_per_s=DISK_MB_PER_S), "cold reads"),
        (TWO, _of(3, 1, page_cache_pct=10.0, disk_mb_per_s=under(DISK_MB_PER_S)), "waiting"),
        (TWO, _of(3, 1, disk_mb_per_s=30.0, io_pressure_pct=IO_PRESSURE_PCT), "cold reads"),  # mapped into memory
        (TWO, _of(3, 1, disk_mb_per_s=30.0, io_pressure_pct=under(IO_PRESSURE_PCT)), "waiting"),
        (TWO, _of(3, 1, disk_mb_per_s=0.0, io_pressure_pct=90.0), "waiting"),  # another process reads
        (TWO, _of(3, 1, io_pressure_pct=IO_PRESSURE_PCT), "cold reads"),
        (TWO, _of(3, 1, io_pressure_pct=under(IO_PRESSURE_PCT)), "waiting"),
    ],
)
def test_cause_of_data_waits_follows_from_facts_and_loader_figures(
    facts: dict[str, Any], loaders: dict[str, Any], cause: str
) -> None:
    assert _cause(DATA, facts, loaders) == ("data", cause)


def _start_s(pct: float) -> float:
    """Seconds to the first batch that are this share of an epoch of 100 steps of 100 ms."""
    return 10 * pct / (100 - pct)


@pytest.mark.parametrize(
    ("facts", "parts", "expected"),
    [
        # (0.4 s - 0) of (0.4 + 5 x 0.1) s
        ({"batches_per_epoch": 5}, {"epoch_start_s": 0.4}, ("data", "epoch start")),
        ({"batches_per_epoch": 100}, {"epoch_start_s": _start_s(HEADLINE_PCT)}, ("data", "epoch start")),
        ({"batches_per_epoch": 100}, {"epoch_start_s": _start_s(DATA_PCT)}, ("compute", "compute")),  # no headline
        ({"batches_per_epoch": 100}, {"epoch_start_s": _start_s(under(DATA_PCT))}, ("compute", "compute")),
        ({}, {"epoch_start_s": 0.4}, ("compute", "compute")),  # nobody knows how long an epoch is
        ({"batches_per_epoch": 5}, {"epoch_start_s": 0.4, "data": 50, "compute": 50}, ("data", "unknown")),
        ({"batches_per_epoch": 5}, {"epoch_start_s": 0.02, "data": 20, "compute": 80}, ("data", "unknown")),
    ],
)
def test_slow_epoch_starts_make_a_run_data_bound(
    facts: dict[str, Any], parts: dict[str, Any], expected: tuple[str, str]
) -> None:
    assert _cause(parts, facts) == expected


def test_busy_workers_that_persist_are_the_cause_of_a_slow_epoch_start_too() -> None:
    """No worker starts: the first batch takes as long to make as the others."""
    facts = {"num_workers": 15, "usable_cpus": 16, "batches_per_epoch": 16}
    parts = {"data": 19, "compute": 81, "epoch_start_s": 0.6}
    assert _cause(parts, facts | {"persistent_workers": True}, _of(95, 0)) == ("data", "cpu")
    assert _cause(parts, facts | {"persistent_workers": False}, _of(95, 0)) == ("data", "epoch start")
    assert _cause(parts, facts | {"persistent_workers": True}, _of(20, 0)) == ("data", "epoch start")


def test_a_slow_rank_makes_the_run_data_bound_for_all_ranks() -> None:
    """This rank waits for no data, but for the gradients of the one that does."""
    diagnosis = decide(_measured(FED, TWO, ranks=RANKS))
    assert (diagnosis.bottleneck, diagnosis.cause, diagnosis.grade) == ("data", "one rank", "highly data-bound")
    assert Note.of("slowest rank", rank=2, ranks=3) in diagnosis.evidence
    assert Note.of("part of the step", part="data", ms=30, step_ms=100, pct=30, by_ranks=True) in diagnosis.evidence
    assert (diagnosis.remedies, diagnosis.notes) == ((), (Note.of("slow rank", rank=2),))
    balanced = replace(RANKS, slow_rank=None)
    assert _cause(DATA, TWO, _of(90, 5), ranks=balanced) == ("data", "cpu")
    assert _cause(FED, TWO, ranks=replace(RANKS, starved_pct=under(DATA_PCT))) == ("compute", "compute")
    assert _cause(FED, TWO, ranks=replace(RANKS, starved_pct=None)) == ("compute", "compute")


@pytest.mark.parametrize(
    ("loaders", "experiments", "cause"),
    [
        (_of(3, 1), {"loader_per_s": 10.0, "cached_bytes_per_s": 10 * FASTER_RATIO}, "cold reads"),
        (_of(3, 1), {"loader_per_s": 10.0, "cached_bytes_per_s": under(10 * NO_FASTER_RATIO)}, "waiting"),
        (_of(3, 1), {"loader_per_s": 10.0, "cached_bytes_per_s": under(10 * FASTER_RATIO)}, "unknown"),
        (_of(3, 1, page_cache_pct=0.0), {"loader_per_s": 10.0, "cached_bytes_per_s": 10.0}, "waiting"),
        (_of(90, 1), {"loader_per_s": 10.0, "cached_bytes_per_s": 20.0}, "cpu"),
        ({}, {"loader_per_s": 10.0, "cached_bytes_per_s": 10 * FASTER_RATIO}, "cold reads"),
        ({}, {"loader_per_s": 10.0, "cached_bytes_per_s": under(10 * FASTER_RATIO)}, "unknown"),
        ({}, {"costs": (NamedCost(name="decode", cpu_ms=BUSY_PCT / 10, wall_ms=10.0),)}, "cpu"),
        ({}, {"costs": (NamedCost(name="decode", cpu_ms=under(BUSY_PCT / 10), wall_ms=10.0),)}, "unknown"),
        (
            {},
            {
                "costs": (NamedCost(name="ask", cpu_ms=10 - BLOCKED_PCT / 10, wall_ms=10.0),),
                "loader_per_s": 10.0,
                "cached_bytes_per_s": 10.0,
            },
            "waiting",
        ),
        ({}, {"costs": (NamedCost(name="ask", cpu_ms=10 - BLOCKED_PCT / 10, wall_ms=10.0),)}, "unknown"),
        ({}, {"loader_per_s": 10.0, "ceiling_per_s": under(10 * NO_FASTER_RATIO)}, "cpu"),
        ({}, {"loader_per_s": 10.0, "ceiling_per_s": 10 * NO_FASTER_RATIO}, "unknown"),
        ({}, {"loader_per_s": 0.0, "ceiling_per_s": 11.0}, "unknown"),
    ],
)
def test_experiments_decide_causes_that_running_figures_cannot(
    loaders: dict[str, Any], experiments: dict[str, Any], cause: str
) -> None:
    assert _cause(DATA, TWO, loaders, experiments) == ("data", cause)


def test_a_run_is_not_data_bound_if_the_model_alone_takes_the_whole_step() -> None:
    gpu = TWO | CUDA
    diagnosis = decide(_measured(DATA, gpu, _of(90, 5), {"model_per_s": 10 / MODEL_SHARE}))
    assert (diagnosis.bottleneck, diagnosis.cause, diagnosis.grade) == ("compute", "compute", "OK")
    assert "model alone" in kinds(diagnosis.evidence)
    assert _cause(DATA, gpu, _of(90, 5), {"model_per_s": 10 / under(MODEL_SHARE)}) == ("data", "cpu")
    assert _cause(DATA, gpu, _of(90, 5), {"model_per_s": 0.0}) == ("data", "cpu")
    several = decide(_measured({"data": 40, "other": 20, "compute": 40}, gpu, {}, {"model_per_s": 10.0}))
    assert (several.bottleneck, several.grade) == ("framework", "OK")
    assert "model alone" in kinds(several.evidence)


def test_a_run_on_a_cpu_stays_data_bound_whatever_the_model_alone_takes() -> None:
    """Batches sorted by length: one of them, again and again, took as long as a step with 16 % of waiting in it."""
    sixteen = {"data": 16, "compute": 84}
    assert _cause(sixteen, {"num_workers": 0}, {}, {"model_per_s": 1000 / 96}) == ("data", "no workers")


@pytest.mark.parametrize(
    ("alone_ms", "acquits"), [(100 * MODEL_MOST_SHARE, True), (100.1 * MODEL_MOST_SHARE, False), (400.0, False)]
)
def test_a_run_stays_data_bound_if_the_model_alone_is_slower_than_its_steps(alone_ms: float, acquits: bool) -> None:
    gpu = TWO | CUDA
    measured = _measured(DATA, gpu, _of(90, 5), {"model_per_s": 1000 / alone_ms, "loader_per_s": 10.0})
    diagnosis = decide(measured)
    assert diagnosis.bottleneck == ("compute" if acquits else "data")
    assert diagnosis.measurements == measured
    if acquits:
        return
    assert (diagnosis.cause, diagnosis.grade, diagnosis.confidence) == ("cpu", "highly data-bound", "medium")
    assert figures_of("model disturbed", diagnosis.evidence) == {"ms": pytest.approx(alone_ms), "step_ms": 100.0}
    without = decide(_measured(DATA, gpu, _of(90, 5), {"loader_per_s": 10.0}))
    assert diagnosis.remedies == without.remedies


@pytest.mark.parametrize(
    ("compute", "loaders", "cause", "confidence"),
    [
        (100.0, {}, "compute", "high"),
        (under(100 * MODEL_FAR_RATIO), {"cpu_pressure_pct": 98.0}, "compute", "high"),
        (100 * MODEL_FAR_RATIO, {"cpu_pressure_pct": 98.0}, "oversubscribed", "low"),
        (100 * MODEL_FAR_RATIO, {"cpu_pressure_pct": CPU_PRESSURE_PCT}, "oversubscribed", "low"),
        (100 * MODEL_FAR_RATIO, {"cpu_pressure_pct": under(CPU_PRESSURE_PCT)}, "unknown", "low"),
        (100 * MODEL_FAR_RATIO, {}, "unknown", "low"),
    ],
)
def test_compute_has_low_confidence_if_steps_far_exceed_the_model_alone(
    compute: float, loaders: dict[str, Any], cause: str, confidence: str
) -> None:
    diagnosis = decide(_measured({"compute": compute}, TWO, loaders, {"model_per_s": 10.0}))
    assert (diagnosis.bottleneck, diagnosis.cause, diagnosis.confidence) == ("compute", cause, confidence)
    said = kinds(diagnosis.evidence)
    assert ("not the model" in said) == (confidence == "low")
    assert ("CPU pressure" in said) == (cause == "oversubscribed")


@pytest.mark.parametrize(
    ("facts", "stats", "experiments", "cause"),
    [
        ({}, {}, None, "transfer hooks"),  # on the CPU
        (CUDA, {}, None, "unknown"),
        (CUDA | {"pin_memory": False}, {}, None, "unpinned"),
        (CUDA | {"pin_memory": True}, {}, None, "not overlapped"),
        (CUDA | {"pin_memory": True, "pinned": True}, {}, None, "not overlapped"),
        (CUDA | {"pin_memory": True, "pinned": False}, {}, None, "unpinned"),  # seen counts more than believed
        (CUDA | {"pin_memory": True, "pinned": False, "in_place": True}, {}, None, "unpinned"),
        (CUDA | {"pin_memory": False, "pinned": True}, {}, None, "not overlapped"),
        (CUDA | {"backend": "dali-gpu", "pin_memory": True, "pinned": False}, {}, None, "not overlapped"),
        (CUDA | {"pin_memory": True}, {"prefetch_active": False}, None, "not overlapped"),
        (CUDA | {"pin_memory": True}, {"prefetch_active": True}, None, "unknown"),
        (
            CUDA | {"pin_memory": True, "tensors": MANY_TENSORS, "size_bytes": SMALL_BATCH_BYTES},
            {},
            None,
            "small tensors",
        ),
        (
            CUDA | {"pin_memory": True, "tensors": MANY_TENSORS - 1, "size_bytes": SMALL_TENSOR_BYTES},
            {},
            None,
            "not overlapped",
        ),
        (
            CUDA | {"pin_memory": True, "tensors": MANY_TENSORS, "size_bytes": SMALL_BATCH_BYTES + 1},
            {},
            None,
            "not overlapped",
        ),
        (CUDA | {"backend": "dali-gpu", "pin_memory": False}, {}, None, "unpinned"),
    ],
)
def test_cause_of_exposed_copies_follows_from_facts_and_experiments(
    facts: dict[str, Any], stats: dict[str, Any], experiments: dict[str, Any] | None, cause: str
) -> None:
    assert _cause(COPY | stats, facts, {}, experiments) == ("copy", cause)


def _hooks(*ms: float, name: str = "[Callback]Slow.on_train_batch_end") -> tuple[HookTime, ...]:
    return tuple(HookTime(name=f"{name}{number or ''}", ms_per_step=each) for number, each in enumerate(ms))


@pytest.mark.parametrize(
    ("facts", "hooks", "cause"),
    [
        ({}, (), "hooks"),
        ({"syncs": ("prog_bar",)}, (), "hooks"),  # on the CPU nothing waits for a device
        (CUDA | {"syncs": ("prog_bar",)}, (), "synchronisation"),
        (CUDA, (), "hooks"),
        (CUDA | {"syncs": ("prog_bar",)}, _hooks(40 * NAMED_SHARE), "hooks"),
        (CUDA | {"syncs": ("prog_bar",)}, _hooks(under(40 * NAMED_SHARE)), "synchronisation"),
        (CUDA | {"syncs": ("prog_bar",)}, _hooks(20 * NAMED_SHARE, 20 * NAMED_SHARE), "hooks"),
        (CUDA | {"syncs": ("prog_bar",)}, _hooks(30.0, name="[Callback]TQDMProgressBar.x"), "synchronisation"),
    ],
)
def test_cause_of_time_between_steps_follows_from_facts_and_hooks(
    facts: dict[str, Any], hooks: Any, cause: str
) -> None:
    assert _cause(OTHER, facts, hooks=hooks) == ("framework", cause)


def test_device_syncs_are_named_with_advice_if_framework_bound() -> None:
    diagnosis = decide(_measured(OTHER, CUDA | {"syncs": tuple(SYNCS)}))
    assert [note.names["sync"] for note in diagnosis.evidence if note.kind == "waits for the device"] == list(SYNCS)
    assert diagnosis.remedies == ()
    assert Note.of("avoid waits", sync="grad_scaler") in diagnosis.notes
    fed = decide(_measured(FED, CUDA | {"syncs": tuple(SYNCS)}))
    assert "waits for the device" not in kinds(fed.evidence)


def test_evidence_names_the_most_expensive_hooks() -> None:
    hooks = _hooks(20.0, 8.0, 4.0, 1.0)
    diagnosis = decide(_measured(OTHER, hooks=hooks))
    slow = [note for note in diagnosis.evidence if note.kind == "slow hook"]
    assert slow[0] == Note.of("slow hook", hook="[Callback]Slow.on_train_batch_end", ms=20.0)
    assert [note.figures["ms"] for note in slow] == [20.0, 8.0, 4.0]
    assert diagnosis.notes[0].kind == "rarer hook"


READS = DeviceWait(file="train.py", line=82, code="loss.item()", steps=16, sampled_steps=16)
"""A line that waits for the device in each step."""
SPINS = CUDA | {"cpu_ms": 100.0}
"""The training thread is on a CPU all the time: it launches, or waits for the device."""


@pytest.mark.parametrize(
    ("facts", "busy_pct", "cause"),
    [
        (CUDA | {"cpu_ms": 100 * LAUNCH_SHARE}, 40.0, "launch"),
        (CUDA | {"cpu_ms": under(100 * LAUNCH_SHARE)}, 40.0, "unknown"),
        ({"cpu_ms": 100.0}, 40.0, "compute"),  # the CPU is the device
        (SPINS, 100 * BUSY_DEVICE_SHARE, "compute"),  # a host that is far ahead waits for the device, and spins
        (SPINS, under(100 * BUSY_DEVICE_SHARE), "launch"),
        (SPINS, None, "compute"),  # the device was not seen idle
        (SPINS | {"waits": (READS,)}, 97.0, "compute"),
        (SPINS | {"waits": (READS,)}, 60.0, "synchronisation"),
        (SPINS | {"waits": (READS,)}, 16.0, "launch"),  # it can have waited for 16 ms at most
        (SPINS | {"waits": (replace(READS, steps=3),)}, 60.0, "launch"),  # not in each step
        (SPINS | {"syncs": ("grad_scaler",)}, 60.0, "synchronisation"),
        (CUDA | {"cpu_ms": 30.0, "waits": (READS,)}, 25.0, "unknown"),  # time.sleep, other processes, ...
        (CUDA, 97.0, "compute"),
    ],
)
def test_the_cause_of_a_long_step_follows_the_device_and_the_training_thread(
    facts: dict[str, Any], busy_pct: float | None, cause: str
) -> None:
    measured = _measured(FED, facts, device_busy_pct=busy_pct)
    diagnosis = decide(measured)
    assert (diagnosis.bottleneck, diagnosis.cause) == ("compute", cause)


def test_launch_bound_check_adds_backward_time_to_cpu_time() -> None:
    measured = _measured(FED, CUDA | {"cpu_ms": 50.0}, device_busy_pct=40.0)
    assert decide(measured).cause == "unknown"
    assert decide(replace(measured, stats=replace(measured.stats, backward_ms=45.0))).cause == "launch"


@pytest.mark.parametrize(("busy_pct", "cost_pct"), [(97.0, 0.0), (70.0, 30.0), (16.0, 16.0), (None, None)])
def test_evidence_names_the_line_that_waits_and_what_it_costs(busy_pct: float | None, cost_pct: float | None) -> None:
    diagnosis = decide(_measured(FED, SPINS | {"waits": (READS,)}, device_busy_pct=busy_pct))
    found = figures_of("device wait", diagnosis.evidence)
    assert (found["at"], found["code"]) == ("train.py:82", "loss.item()")
    assert found.get("cost_pct") == (None if cost_pct is None else pytest.approx(cost_pct))
    assert found.get("busy_pct") == (None if busy_pct is None else pytest.approx(busy_pct))


def test_the_wait_is_named_beside_another_bottleneck_too() -> None:
    parts = {"data": 40.0, "compute": 60.0}
    diagnosis = decide(_measured(parts, CUDA | {"waits": (READS,)}, device_busy_pct=55.0))
    assert diagnosis.bottleneck == "data"
    found = figures_of("device wait", diagnosis.evidence)
    assert (found["at"], found["cost_pct"]) == ("train.py:82", 0.0)
    assert found["busy_pct"] == pytest.approx(100 * 55 / 60)


def test_a_wait_that_costs_time_is_advised_against_with_its_line() -> None:
    diagnosis = decide(_measured(FED, SPINS | {"waits": (READS,)}, device_busy_pct=70.0))
    assert diagnosis.notes[0] == Note.of("rarer wait", at="train.py:82")
    busy = decide(_measured(FED, SPINS | {"waits": (READS,)}, device_busy_pct=97.0))
    assert "rarer wait" not in kinds(busy.notes)


# --- confidence ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "confidence"),
    [
        (36, 44, "high"),
        (under(HIGH_PCT), 44, "medium"),
        (HIGH_PCT, 44, "high"),
        (under(DATA_PCT), DATA_PCT, "medium"),
        (DATA_PCT, under(HIGH_PCT), "high"),
        (None, 44, "high"),
    ],
)
def test_an_interval_that_crosses_a_limit_lowers_confidence(low: float | None, high: float, confidence: str) -> None:
    parts = DATA | {"starved_low_pct": low, "starved_high_pct": high}
    assert decide(_measured(parts, TWO, _of(90, 5))).confidence == confidence


@pytest.mark.parametrize(
    ("loaders", "confidence"),
    [(_of(BUSY_PCT - 5, 5), "high"), (_of(BUSY_PCT - 6, 5), "medium"), ({}, "medium"), (_of(3, 1), "medium")],
)
def test_missing_or_unclear_loader_figures_lower_confidence(loaders: dict[str, Any], confidence: str) -> None:
    assert decide(_measured(DATA, TWO, loaders)).confidence == confidence


# --- anything at all ----------------------------------------------------------------------------------------------

_PCT = st.none() | st.floats(0, 100)
_RATE = st.none() | st.floats(0, 1e4)
_MS = st.floats(0, 1e3)
_COUNT = st.none() | st.integers(0, 64)


def _frozen(kind: Any, **known: Any) -> Any:
    """Instances of a dataclass of percentages, each of which may be None."""
    return st.builds(kind, **({field.name: _PCT for field in fields(kind)} | known))


_FACTS = st.builds(
    loop_facts,
    device_type=st.sampled_from(["cpu", "cuda"]),
    num_workers=_COUNT,
    prefetch_factor=st.none() | st.integers(1, 8),
    pin_memory=st.none() | st.booleans(),
    persistent_workers=st.none() | st.booleans(),
    in_order=st.none() | st.booleans(),
    workers=st.sampled_from([None, "process", "thread"]),
    in_place=st.none() | st.booleans(),
    may_use_slots=st.none() | st.booleans(),
    tuned=st.none() | st.booleans(),
    tuned_outside=st.none() | st.booleans(),
    ours=st.none() | st.booleans(),
    size_bytes=st.none() | st.integers(0, 1 << 30),
    tensors=_COUNT,
    batches_per_epoch=_COUNT,
    decoder=st.sampled_from([None, "turbo"]),
    usable_cpus=st.none() | st.integers(1, 64),
    map_style=st.none() | st.booleans(),
    may_persist=st.none() | st.booleans(),
    bar_refresh_rate=_COUNT,
    log_every_n_steps=_COUNT,
    free_shm_bytes=st.none() | st.integers(0, 1 << 34),
    load_cpu_ms=st.none() | _MS,
    syncs=st.sets(st.sampled_from([*SYNCS, "unheard of"])).map(tuple),
    cpu_ms=st.none() | _MS,
)
_STEP_MS = st.floats(0.01, 1e4)
_TRIED = st.builds(
    TriedSetting,
    num_workers=st.integers(0, 64),
    prefetch_factor=st.none() | st.integers(1, 8),
    step_ms=_STEP_MS,
    shortest_ms=_STEP_MS,
    longest_ms=_STEP_MS,
    own=st.booleans(),
    chosen=st.booleans(),
)
_LIGHTER = st.builds(
    LighterSample,
    setting=st.sampled_from(["decoder", "backend", "quality", "root"]),
    value=st.just("new"),
    now_ms=_MS,
    then_ms=_MS,
    device_ms=st.none() | _MS,
    pack=st.none(),
) | st.builds(
    LighterSample,
    setting=st.just("root"),
    value=st.just("a.pack"),
    now_ms=_MS,
    then_ms=_MS,
    pack=st.builds(
        PackedImages,
        root=st.just("a"),
        path=st.just("a.pack"),
        short_side_px=st.none() | st.just(256),
        decoded=st.booleans(),
        folder_bytes=st.just(1),
        pack_bytes=st.just(1),
    ),
)
_THREADS = st.builds(
    ThreadsTrial, torch_threads=st.integers(1, 64), num_workers=st.integers(1, 64), step_ms=_MS, own_ms=_MS
)
_EXPERIMENTS = _frozen(
    ExperimentResults,
    batch_size=_COUNT,
    **dict.fromkeys(
        ["model_per_s", "loader_per_s", "cached_bytes_per_s", "no_transform_per_s", "ceiling_per_s"], _RATE
    ),
    **dict.fromkeys(["samples_ms", "collate_ms", "taking_ms"], st.none() | _MS),
    costs=st.lists(st.builds(NamedCost, name=st.just("x"), cpu_ms=_MS, wall_ms=_MS), max_size=2).map(tuple),
    tried=st.lists(_TRIED, max_size=4).map(tuple),
    why_chosen=st.just(""),
    keys=st.lists(st.builds(KeyBytes, name=st.just("k"), bytes_per_batch=st.just(1))).map(tuple),
    functions=st.just(()),
    threads=st.none() | _THREADS,
    trained_workers=st.none() | _COUNT,
    crops=st.none() | st.builds(CropTrial, folder=st.just("f"), val_fraction=st.none(), whole_ms=_MS, crop_ms=_MS),
    lighter=st.lists(_LIGHTER, max_size=4).map(tuple),
    left_out=st.just(()),
)
_RANKS = st.none() | st.builds(
    RankStats,
    world_size=st.integers(1, 4),
    steps=st.integers(0, 100),
    max_data_ms=st.none() | _MS,
    slow_rank=st.none() | st.integers(0, 3),
    starved_pct=_PCT,
    data_ms_by_rank=st.lists(_MS, max_size=4).map(tuple),
)
_STATS = st.fixed_dictionaries(
    {"other": _MS, "data": _MS, "copy": _MS, "compute": st.floats(1e-3, 1e3)},
    optional={
        "epoch_start_s": st.none() | st.floats(0, 100),
        "starved_low_pct": _PCT,
        "starved_high_pct": _PCT,
        "steps": st.integers(0, 500),
        "prefetch_active": st.none() | st.booleans(),
        "next_wait_ms": st.none() | _MS,
        "other_ms": st.none(),
        "copy_ms": st.none(),
        "data_ms": st.none(),
        "compute_ms": st.none(),
        "starved_pct": st.none(),
        "step_ms": st.none() | st.just(0.0),
    },
)
_HOOKS = st.lists(
    st.builds(
        HookTime, name=st.sampled_from(["a", "[Callback]TQDMProgressBar.b", "logger A.log_metrics"]), ms_per_step=_MS
    ),
    max_size=3,
)


@st.composite
def _anything(draw: Any) -> Measurements:
    return replace(
        _measured(draw(_STATS)),
        facts=draw(_FACTS),
        loaders=draw(_frozen(LoaderStats)),
        experiments=draw(st.just(ExperimentResults()) | _EXPERIMENTS),
        diagnosed=draw(st.booleans()),
        ranks=draw(_RANKS),
        hooks=draw(_HOOKS.map(tuple)),
    )


@settings(max_examples=150, deadline=None)
@given(_anything())
def test_diagnose_gives_a_sound_verdict_for_any_measurements(measured: Measurements) -> None:
    diagnosis = decide(measured)
    assert diagnosis.evidence
    assert decide(measured) == diagnosis
    if diagnosis.bottleneck == "unknown":
        assert (diagnosis.remedies, diagnosis.confidence) == ((), "low")
        return
    _is_sound(diagnosis)


@pytest.mark.parametrize(
    ("samples", "collate", "slowest"),
    [
        (4.0, 12.0, {"stage": "collate", "function": "pad", "at": "text.py:7"}),
        (12.0, 4.0, {"stage": "samples", "function": "A.get", "at": "a.py:3"}),
    ],
)
def test_evidence_names_what_takes_most_of_a_batch(samples: float, collate: float, slowest: dict[str, str]) -> None:
    functions = (
        FunctionCost(name="A.get", file="/x/a.py", line=3, calls=None, stage="samples", ms_per_batch=3.0),
        FunctionCost(name="pad", file="/x/text.py", line=7, calls=None, stage="collate", ms_per_batch=2.0),
    )
    experiments = {"samples_ms": samples, "collate_ms": collate}
    takes = {"ms": 16.0, "pct": 75.0}
    named = decide(_measured(DATA, TWO, _of(90, 5), experiments | {"functions": functions})).evidence
    assert figures_of("making a batch", named) == takes | slowest
    unnamed = decide(_measured(DATA, TWO, _of(90, 5), experiments)).evidence
    assert figures_of("making a batch", unnamed) == takes | {"stage": slowest["stage"]}
    assert "making a batch" not in kinds(decide(_measured(FED, TWO, {}, experiments)).evidence)


@pytest.mark.parametrize(
    ("facts", "loaders", "known"),
    [
        ({"num_workers": 1}, {"workers_blocked_pct": 95.0}, {"workers": 1.0, "blocked_pct": 95.0}),
        (TWO, {}, {"workers": 2.0, "cpus": 2.0}),
        (TWO, _of(91, 4), {"workers": 2.0, "cpus": 2.0, "on_cpu_pct": 91, "queue_pct": 4, "blocked_pct": 5}),
    ],
)
def test_evidence_describes_the_workers_of_the_loader(
    facts: dict[str, Any], loaders: dict[str, Any], known: dict[str, float]
) -> None:
    found = figures_of("workers", decide(_measured(DATA, facts, loaders)).evidence)
    assert {name: value for name, value in found.items() if value is not None} == known | {"in_place": 0.0}


def test_evidence_says_that_loading_and_training_take_turns_without_workers() -> None:
    assert Note.of("takes turns", stage="fit") in decide(_measured(DATA, {"num_workers": 0}, {})).evidence


def _is_sound(diagnosis: Diagnosis) -> None:
    step = diagnosis.stats.step_ms
    assert step is not None
    order = ["low", "medium", "high"]
    assert order.index(diagnosis.confidence) <= order.index(diagnosis.stats.confidence)
    assert len({remedy.code for remedy in diagnosis.remedies}) == len(diagnosis.remedies)
    gains = [remedy.most_gain_pct for remedy in diagnosis.remedies]
    changes = [str(remedy.change) for remedy in diagnosis.remedies]
    assert len(gains) <= MOST_REMEDIES
    assert gains == sorted(gains, key=lambda gain: -(gain or 0.0))
    for remedy in diagnosis.remedies:
        assert remedy.form is not None
        assert remedy.change
        assert remedy.where
        assert remedy.why
        assert "\n" not in remedy.code or remedy.form == "replacement"
        assert remedy.most_gain_pct is not None
        assert LEAST_GAIN_PCT <= remedy.most_gain_pct <= 100 * (1 + 1e-9)
        assert remedy.least_step_ms is None or 0 <= remedy.least_step_ms <= step * (1 + 1e-9), remedy
    assert len({*changes} & {"hand_over=slots", "pin_memory=True"}) <= 1
    assert len(diagnosis.notes) <= MOST_NOTES
    notes = (*diagnosis.evidence, *diagnosis.notes, *diagnosis.why_not)
    sentences = [words(note, diagnosis.measurements) for note in notes]
    assert all(sentences)
    assert not any("\n" in sentence or "{" in sentence or "None" in sentence for sentence in sentences)

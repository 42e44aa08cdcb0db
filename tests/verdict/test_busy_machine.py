"""The verdict beside other programs: who has the CPUs decides, and what cannot be told is not guessed."""

from typing import Any

import pytest
from verdict.cases import READY, ROOM, measured

from lightning_feed.measure.experiment_results import REST_OF_THE_FIT
from lightning_feed.measure.measurements import HookTime
from lightning_feed.measure.wall import Part, WallPart, WallStats
from lightning_feed.report.files import as_text
from lightning_feed.report.next_step import next_step
from lightning_feed.verdict.decide import diagnose
from lightning_feed.verdict.shares import queue_is_of_others

TWO = {"num_workers": 2, "usable_cpus": 2}
BUSY_MACHINE = TWO | {"others_cpu_pct": 60.0}


def _workers(on_cpu: float, queue: float, **more: float) -> dict[str, Any]:
    return {
        "workers_on_cpu_pct": on_cpu,
        "workers_run_queue_pct": queue,
        "workers_blocked_pct": 100.0 - on_cpu - queue,
        **more,
    }


def test_a_ready_batch_and_a_thread_without_a_cpu_is_not_the_loaders_fault() -> None:
    busy = measured(step=24.0, data=8.0, loaders=READY, load_queue_ms=7.5, host_queue_ms=9.0, **BUSY_MACHINE)
    found = diagnose(busy)
    assert (found.bottleneck, found.cause, found.grade) == ("compute", "oversubscribed", "OK")
    assert "batches are ready; other programs have the CPUs" in found.evidence[1]
    assert not found.remedies
    assert not any("num_workers" in note for note in found.notes)


def test_the_step_shows_how_much_of_the_wait_was_for_a_cpu() -> None:
    busy = measured(step=24.0, data=8.0, loaders=READY, load_queue_ms=7.5, host_queue_ms=9.0, **BUSY_MACHINE)
    step = next(line for line in as_text(diagnose(busy), width=200).splitlines() if line.startswith("step "))
    assert "| data 8.0 (7.5 of it waiting for a CPU) |" in step


def test_two_clocks_that_differ_make_no_worker_exceed_its_cpu() -> None:
    assert queue_is_of_others(measured(loaders=_workers(60.1, 40.0), **BUSY_MACHINE))
    assert not queue_is_of_others(measured(loaders=_workers(60.1, 40.0), **BUSY_MACHINE | {"num_workers": 3}))


@pytest.mark.parametrize("workers", [2, 8])
def test_no_other_number_of_workers_is_named_beside_other_programs(workers: int) -> None:
    """Beside one program, 8 workers on 2 CPUs were as fast as 2, and faster than 1."""
    facts = BUSY_MACHINE | {"num_workers": workers}
    found = diagnose(
        measured(
            step=24.0, data=8.0, loaders=READY | _workers(12.0, 40.0), load_queue_ms=7.5, host_queue_ms=9.0, **facts
        )
    )
    assert "workers" not in next_step(found)


def test_a_ready_batch_and_own_threads_on_the_cpus_is_oversubscription() -> None:
    found = diagnose(measured(step=24.0, data=8.0, loaders=READY, load_queue_ms=7.5, **TWO))
    assert (found.bottleneck, found.cause) == ("data", "oversubscribed")
    assert "the training thread waits 7.5 of 8.0 ms for a CPU" in found.evidence[1]


def test_workers_that_are_never_idle_are_too_slow_whoever_has_the_cpus() -> None:
    found = diagnose(measured(step=9.0, data=3.2, loaders=_workers(77.0, 20.0), load_queue_ms=1.7, **TWO))
    assert (found.bottleneck, found.cause) == ("data", "cpu")


def test_handing_over_is_not_blamed_beside_other_programs() -> None:
    """The worker that answers for its tensors may lack a CPU, too."""
    handed: dict[str, Any] = {"step": 24.0, "data": 8.0, "loaders": READY, "load_queue_ms": 0.5}
    assert diagnose(measured(**handed, **BUSY_MACHINE)).bottleneck == "unknown"
    found = diagnose(measured(**handed, **TWO))
    assert (found.bottleneck, found.cause) == ("data", "hand-over")


def test_workers_that_lack_a_cpu_may_be_busy_or_blocked() -> None:
    """As with two loaders, of which one computes and one sleeps: on a CPU 8 %, ready 42 %, blocked 50 %."""
    found = diagnose(
        measured(data=80.0, loaders=_workers(8.0, 42.0, page_cache_pct=100.0), load_queue_ms=1.0, **BUSY_MACHINE)
    )
    assert found.bottleneck == "unknown"


@pytest.mark.parametrize(
    ("on_cpu", "queue", "cause"),
    [(38.0, 60.0, "cpu"), (5.0, 10.0, "waiting")],
)
def test_the_queue_that_other_programs_make_does_not_hide_the_cause(on_cpu: float, queue: float, cause: str) -> None:
    """A step of 100 ms waits 80: workers without other programs would still take far longer than the other 20."""
    loaders = _workers(on_cpu, queue, page_cache_pct=100.0, disk_mb_per_s=0.0)
    found = diagnose(measured(data=80.0, loaders=loaders, load_queue_ms=1.0, host_queue_ms=2.0, **BUSY_MACHINE))
    assert (found.bottleneck, found.cause) == ("data", cause)


def test_workers_that_would_keep_up_with_a_cpu_are_not_too_slow() -> None:
    loaders = _workers(30.0, 65.0)
    found = diagnose(measured(data=40.0, loaders=loaders, load_queue_ms=1.0, host_queue_ms=2.0, **BUSY_MACHINE))
    assert (found.bottleneck, found.cause, found.grade) == ("compute", "oversubscribed", "OK")
    assert any("the workers spend 65 % of their time waiting for a CPU" in one for one in found.evidence)


def test_too_close_to_tell() -> None:
    """A batch in 57 ms without other programs, beside 59 ms of training."""
    loaders = _workers(50.0, 43.0)
    found = diagnose(measured(data=40.0, loaders=loaders, load_queue_ms=1.0, host_queue_ms=2.0, **BUSY_MACHINE))
    assert (found.bottleneck, found.grade, found.confidence) == ("unknown", "highly data-bound", "low")
    assert found.evidence[0].startswith("other programs have 60 % of the CPUs: training waits 39 %")
    assert found.remedies == ()


def test_too_many_workers_are_oversubscribed_whoever_else_computes() -> None:
    loaders = _workers(20.0, 75.0)
    found = diagnose(measured(data=40.0, loaders=loaders, **BUSY_MACHINE | {"num_workers": 8}))
    assert (found.bottleneck, found.cause) == ("data", "oversubscribed")


def test_time_between_the_steps_that_no_hook_explains() -> None:
    between = {"data": 1.0, "other": 20.0, **BUSY_MACHINE}
    assert diagnose(measured(**between)).bottleneck == "unknown"
    named = (HookTime(name="[Callback]Slow.on_train_batch_end", ms_per_step=18.0),)
    assert diagnose(measured(hooks=named, **between)).bottleneck == "framework"
    assert diagnose(measured(**between | {"others_cpu_pct": 5.0})).bottleneck == "framework"


def test_no_transfer_hook_is_blamed_if_there_is_none() -> None:
    on_cpu = {"data": 1.0, "h2d": 8.0, "other": 1.0, "usable_cpus": 2}
    assert diagnose(measured(batch_hooks=False, **on_cpu)).bottleneck == "compute"
    assert diagnose(measured(batch_hooks=True, **on_cpu)).bottleneck == "copy"
    assert diagnose(measured(batch_hooks=False, device_transform=True, **on_cpu)).bottleneck == "copy"


@pytest.mark.parametrize(
    ("cpu_ms", "queue_ms", "cause"),
    [(38.0, 0.0, "no workers"), (20.0, 18.0, "no workers"), (2.0, 0.0, "unknown")],
)
def test_a_generator_is_named_with_its_cost(cpu_ms: float, queue_ms: float, cause: str) -> None:
    plain = {"num_workers": None, "generator": "batches (train.py:12)"}
    found = diagnose(measured(load_cpu_ms=cpu_ms, load_queue_ms=queue_ms, **plain))
    assert (found.bottleneck, found.cause) == ("data", cause)
    assert (
        f"batches (train.py:12) takes 40.0 ms in the training process, {cpu_ms:.1f} of them on a CPU"
        in found.evidence[1]
    )


def _part(name: Part, seconds: float) -> WallPart:
    return WallPart(name=name, seconds=seconds, times=3)


@pytest.mark.parametrize(("validation_s", "noted"), [(1.4, False), (2.4, True)])
def test_validation_of_a_good_part_of_the_run_is_noted(validation_s: float, *, noted: bool) -> None:
    parts = (_part("train", 9.0), _part("validation", validation_s))
    wall = WallStats(wall_s=sum(part.seconds for part in parts), parts=parts)
    found = diagnose(measured(data=1.0, wall=wall))
    assert found.bottleneck == "compute"
    assert any("validation takes" in note for note in found.notes) == noted


@pytest.mark.parametrize(("data", "fixed"), [(8.0, False), (40.0, True)])
def test_a_diagnosis_without_the_users_callbacks_fixes_only_what_is_surely_the_loader(
    data: float, *, fixed: bool
) -> None:
    tried = {"worker_scaling": ((2, 10.0), (4, 20.0)), "left_out": ((REST_OF_THE_FIT, "SlowCallback: not run, since"),)}
    found = diagnose(measured(data=data, found=tried, **ROOM))
    assert bool(found.remedies) == fixed
    assert any(note.startswith("SlowCallback: not run here") for note in found.notes) != fixed


def test_other_programs_that_take_more_than_the_loader_are_named_first() -> None:
    slow: dict[str, Any] = {"data": 7.0, "num_workers": 0, "load_cpu_ms": 5.0, "load_queue_ms": 2.0, "usable_cpus": 2}
    found = diagnose(measured(**slow, host_queue_ms=52.0, others_cpu_pct=58.0))
    assert (found.bottleneck, found.cause) == ("compute", "oversubscribed")
    waits = "outside loading, the training thread waits 50.0 of 100.0 ms for a free CPU"
    assert found.evidence[1] == waits
    assert diagnose(measured(**slow, host_queue_ms=12.0, others_cpu_pct=58.0)).bottleneck == "data"


def test_a_busy_machine_beside_a_model_that_takes_all_is_no_ok() -> None:
    found = diagnose(measured(data=1.0, host_queue_ms=55.0, load_queue_ms=0.1, **BUSY_MACHINE))
    assert (found.bottleneck, found.cause, found.grade) == ("compute", "oversubscribed", "OK")

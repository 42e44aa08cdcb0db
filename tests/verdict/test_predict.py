"""What a remedy is predicted to give follows from what was measured, and from nothing else."""

from typing import Any

import pytest
from verdict.cases import ASLEEP, BUSY, measured

from lightning_feed.measure.experiment_results import CropTrial, NamedCost
from lightning_feed.measure.measurements import Measurements
from lightning_feed.verdict import predict
from lightning_feed.verdict.decide import diagnose
from lightning_feed.verdict.shares import Shares, shares_of


def _shares(run: Measurements) -> Shares:
    shares = shares_of(run)
    assert shares is not None
    return shares


def _with_workers(number: int, **run: Any) -> float | None:
    made = measured(**run)
    return predict.with_workers(made, _shares(made), number)


# --- loading and training take turns without workers --------------------------------------------------------------


def test_files_that_are_in_memory_already_are_not_staged() -> None:
    """A GAN whose files were in the page cache: staging them was said to take 119 ms to 61, and left it at 123."""
    run = measured(
        step=119.0,
        data=61.0,
        num_workers=0,
        usable_cpus=2,
        prefetch_factor=None,
        load_cpu_ms=60.0,
        process_cpu_ms=176.0,
        found={"loader_per_s": 15.6, "cached_bytes_per_s": 16.6},
    )
    assert predict.with_rate(run, _shares(run), 16.6, 15.6) == pytest.approx(118.2, abs=0.1)  # 61 - 1000 / 16.6 saved
    found = diagnose(run)
    assert found.remedies == ()
    assert not any("stage" in note for note in found.notes)


def test_what_is_saved_of_loading_is_saved_of_the_step() -> None:
    run = measured(num_workers=0)
    assert [predict.with_batch_in(run, _shares(run), ms) for ms in (40.0, 30.0, 10.0, 0.0)] == [100.0, 90.0, 70.0, 60.0]


def test_workers_find_no_cpu_beside_a_model_that_computes_on_all() -> None:
    """The GAN on two CPUs: 50.7 ms were predicted, and 114 to 119 achieved of 119."""
    run: dict[str, Any] = {"step": 119.0, "data": 61.0, "num_workers": 0, "usable_cpus": 2, "load_cpu_ms": 60.0}
    predicted = _with_workers(2, **run, process_cpu_ms=60.0 + 2 * 58.0)
    assert predicted is not None
    assert 0.85 * 114 <= predicted <= 1.15 * 119
    assert diagnose(measured(**run, process_cpu_ms=176.0)).remedies == ()


def test_a_rank_with_one_cpu_gains_nothing_by_a_worker() -> None:
    """Two ranks on two CPUs: 145.8 ms were predicted, and 246.8 achieved."""
    run: dict[str, Any] = {"step": 246.0, "data": 100.2, "num_workers": 0, "usable_cpus": 1, "world_size": 2}
    for known in ({"process_cpu_ms": 244.0, "load_cpu_ms": 99.0}, {"host_cpu_ms": 244.0}, {}):
        predicted = _with_workers(1, **run, **known)
        assert predicted == pytest.approx(246.8, rel=0.02)
        assert diagnose(measured(**run, **known)).remedies == ()


def test_a_worker_that_loads_in_place_of_a_single_thread_that_trains() -> None:
    # Training takes one CPU, so loading 40 ms beside 60 costs nothing but taking the batch; and both work at once, in
    # the same memory.
    for cpus, step in ((4, 60.7), (2, 1.2 * 100.8 / 1.7)):
        run = {"num_workers": 0, "usable_cpus": cpus, "load_cpu_ms": 40.0, "process_cpu_ms": 100.0}
        assert _with_workers(1, **run) == pytest.approx(step)


def test_workers_beside_a_small_model_whose_batches_take_long() -> None:
    """Two views of each photo on two CPUs: 303 ms were predicted of 227, and 191 to 198 achieved with two workers, 213
    to 218 with one. Threads of torch spent CPU time as they waited, and no worker has such."""
    run: dict[str, Any] = {"step": 227.1, "data": 183.4, "num_workers": 0, "usable_cpus": 2, "load_cpu_ms": 292.4}
    run |= {"process_cpu_ms": 292.4 + 84.3, "found": {"worker_scaling": ((0, 5.42), (1, 5.76), (2, 10.34))}}
    one, two = (_with_workers(number, **run) for number in (1, 2))
    assert one == pytest.approx(215, rel=0.2)
    assert two == pytest.approx(195, rel=0.05)


def test_small_steps_beside_workers_are_not_slowed_without_end() -> None:
    """Volumes that are unpacked, on two CPUs: 58.4 ms were predicted of 55.5, and 50.1 achieved with two workers."""
    run: dict[str, Any] = {"step": 55.7, "data": 44.2, "num_workers": 0, "usable_cpus": 2, "load_cpu_ms": 44.1}
    assert _with_workers(2, **run, process_cpu_ms=44.1 + 2 * 11.5) == pytest.approx(50.1, rel=0.1)


def test_every_loader_has_workers_of_its_own() -> None:
    """Two loaders with two workers each take as much from training as one with four."""
    run: dict[str, Any] = {"step": 55.7, "data": 44.2, "num_workers": 0, "usable_cpus": 2, "load_cpu_ms": 44.1}
    run |= {"process_cpu_ms": 44.1 + 2 * 11.5}
    one, two = measured(**run), measured(**run, every_num_workers=(0, 0))
    four, less = (predict.filled_ms(one, _shares(one), 20.0, workers=number) for number in (4, 2))
    assert predict.filled_ms(two, _shares(two), 20.0, workers=2) == four > less


def test_what_other_programs_take_is_not_free() -> None:
    run: dict[str, Any] = {"num_workers": 0, "usable_cpus": 2, "load_cpu_ms": 40.0, "process_cpu_ms": 100.0}
    # 100.8 ms of CPU time for each step, with what sending a batch takes, and one CPU is left for it.
    assert _with_workers(1, **run, others_cpu_pct=50.0) == pytest.approx(100.8)
    # And 0.3 of what is left stays idle.
    assert _with_workers(1, **run, others_cpu_pct=25.0) == pytest.approx(1.2 * 100.8 / 1.2)


def test_time_in_the_run_queue_is_no_waiting() -> None:
    """Decoding on two CPUs of which others took 86 %: 4 workers and 695 ms were predicted, of 2853."""
    run: dict[str, Any] = {"step": 2853.0, "data": 2200.0, "num_workers": 0, "usable_cpus": 2, "others_cpu_pct": 86.0}
    run |= {"load_cpu_ms": 610.0, "load_queue_ms": 1560.0, "process_cpu_ms": 790.0}
    assert all((_with_workers(number, **run) or 0.0) >= 2800 for number in (1, 2, 4))
    found = diagnose(measured(**run))
    assert (found.remedies, found.why_not, found.confidence) == ((), (), "low")
    assert "loading takes 2200.0 ms, 610.0 of them on a CPU and 1560.0 waiting for one" in (found.evidence)


def test_workers_for_a_loader_that_waits_beside_other_programs() -> None:
    """It needs few CPUs: reads that wait 135 ms, 13 ms of work, and a CPU most of the time that it asks for one."""
    run: dict[str, Any] = {"step": 165.0, "data": 149.0, "num_workers": 0, "usable_cpus": 2, "others_cpu_pct": 92.0}
    run |= {"load_cpu_ms": 13.0, "load_queue_ms": 7.0, "process_cpu_ms": 29.0}
    (remedy,) = diagnose(measured(**run)).remedies
    assert 29.0 / (13 / 20) <= (remedy.predicted_step_ms or 0.0) < 80.0


def test_more_workers_take_no_cpu_from_other_programs() -> None:
    """One worker beside a program: 24 ms were predicted for two workers, and steps stayed at 31."""
    run: dict[str, Any] = {"step": 31.4, "data": 15.5, "num_workers": 1, "usable_cpus": 2, "others_cpu_pct": 50.0}
    busy = {"workers_on_cpu_pct": 61.4, "workers_run_queue_pct": 38.5, "workers_blocked_pct": 0.1}
    assert diagnose(measured(**run, process_cpu_ms=10.1, load_queue_ms=1.8, loaders=busy)).remedies == ()


def test_several_ranks_beside_another_program_get_the_cpus_that_their_threads_got() -> None:
    """Their share of other programs is unknown. 31 ms were predicted for a first worker, and steps stayed at 45."""
    run: dict[str, Any] = {"step": 42.0, "data": 24.4, "num_workers": 0, "usable_cpus": 1, "world_size": 2}
    run |= {"load_cpu_ms": 13.0, "process_cpu_ms": 20.5}
    assert diagnose(measured(**run, load_queue_ms=11.6)).remedies == ()
    assert _with_workers(1, **run, load_queue_ms=0.0) == pytest.approx((20.5 + 0.8) / 0.7)  # alone on the machine


def test_several_ranks_on_gpus_have_the_other_cpus_for_workers() -> None:
    """Their one loading thread uses one of 16 CPUs, and gets it whenever it is ready."""
    run = ONE_GPU | {"load_cpu_ms": 76.0, "process_cpu_ms": 96.0, "host_cpu_ms": 96.0}
    alone, ranks = (diagnose(measured(**run, load_queue_ms=4.0, world_size=size)).remedies for size in (1, 8))
    assert [one.code for one in ranks] == [one.code for one in alone] == ["num_workers=4"]


TWO_CPUS: dict[str, Any] = {"num_workers": 0, "usable_cpus": 2, "process_cpu_ms": 100.0}
"""Steps of 100 ms, 60 of which a single thread trains. 40.8 ms of a worker beside them: 1.2 x 100.8 on 1.7 CPUs."""
ONE_GPU: dict[str, Any] = {"device_type": "cuda", "usable_cpus": 16, "num_workers": 0, "data": 80.0}
"""Steps of 100 ms, in 20 of which the host has the GPU compute."""


@pytest.mark.parametrize(
    ("run", "number", "step"),
    [
        (TWO_CPUS | {"load_cpu_ms": 40.0, "load_queue_ms": 0.0}, 1, 71.2),
        (TWO_CPUS | {"load_cpu_ms": 40.0}, 1, 71.2),  # no run queue known: no more workers than CPUs
        # Training on both CPUs: a worker takes one of them away, and all of its time comes on top.
        (TWO_CPUS | {"load_cpu_ms": 40.0, "load_queue_ms": 0.0, "process_cpu_ms": 160.0}, None, None),
        (TWO_CPUS | {"load_cpu_ms": 40.0, "load_queue_ms": 0.0, "others_cpu_pct": 50.0}, None, None),
        # Loading waits for a network: workers that wait need no CPU, but one is enough for 40 ms beside 60.
        (TWO_CPUS | {"load_cpu_ms": 1.0, "load_queue_ms": 0.0, "process_cpu_ms": 61.0}, 1, 60.7),
        (TWO_CPUS | {"data": 90.0, "load_cpu_ms": 1.0, "load_queue_ms": 0.0, "process_cpu_ms": 11.0}, 4, 22.7),
        (TWO_CPUS | {"data": 90.0, "load_cpu_ms": 1.0, "load_queue_ms": 50.0, "process_cpu_ms": 11.0}, 2, 45.5),
        (TWO_CPUS | {"data": 90.0, "load_cpu_ms": 1.0, "process_cpu_ms": 11.0}, 2, 45.5),  # blocked, or in the queue?
        (TWO_CPUS | {"data": 90.0, "load_cpu_ms": 45.0, "load_queue_ms": 0.0, "process_cpu_ms": 55.0}, 3, 39.4),
        # Loading that used both CPUs from one process takes twice as long in one worker.
        (TWO_CPUS | {"data": 90.0, "load_cpu_ms": 180.0, "load_queue_ms": 0.0, "process_cpu_ms": 190.0}, None, None),
        (ONE_GPU | {"load_cpu_ms": 80.0, "load_queue_ms": 0.0, "process_cpu_ms": 100.0}, 4, 20.7),
        # Others take half of the 16 CPUs, and 8 are enough; or nearly all of them.
        (ONE_GPU | {"load_cpu_ms": 80.0, "process_cpu_ms": 100.0, "others_cpu_pct": 50.0}, 4, 21.4),
        (ONE_GPU | {"load_cpu_ms": 60.0, "process_cpu_ms": 80.0, "others_cpu_pct": 95.0}, None, None),
        (ONE_GPU | {"load_cpu_ms": 2.0, "load_queue_ms": 0.0, "process_cpu_ms": 22.0}, 4, 20.7),
        # One GPU and two CPUs: 100.8 ms of CPU time on 1.7 of them, since 0.3 stay idle.
        (ONE_GPU | {"usable_cpus": 2, "load_cpu_ms": 80.0, "load_queue_ms": 0.0, "process_cpu_ms": 100.0}, 2, 59.3),
    ],
)  # fmt: skip
def test_workers_where_there_were_none(run: dict[str, Any], number: int | None, step: float | None) -> None:
    remedies = [one for one in diagnose(measured(**run)).remedies if one.changes.startswith("num_workers")]
    assert [one.changes for one in remedies] == ([] if number is None else [f"num_workers={number}"])
    assert [one.predicted_step_ms for one in remedies] == ([] if step is None else [pytest.approx(step, abs=0.1)])


@pytest.mark.parametrize(
    ("others", "number", "step"),
    [(None, 4, 60.0), (50.0, 4, 240 / 3.7), (70.0, None, None)],
)
def test_workers_beside_others(others: float | None, number: int | None, step: float | None) -> None:
    """Two workers take 180 ms of CPU time for each step, and training 60: 240 ms on what is left of 8 CPUs."""
    found = diagnose(measured(loaders=BUSY, others_cpu_pct=others)).remedies
    assert [one.changes for one in found] == ([] if number is None else [f"num_workers={number}"])
    assert [one.predicted_step_ms for one in found] == ([] if step is None else [pytest.approx(step)])


def test_no_more_waiting_workers_than_their_blocking_pays_for() -> None:
    half = {"workers_on_cpu_pct": 45.0, "workers_run_queue_pct": 0.0, "workers_blocked_pct": 55.0, "disk_mb_per_s": 0.0}
    (remedy,) = diagnose(measured(data=90.0, loaders=half, usable_cpus=2, device_type="cuda")).remedies
    assert (remedy.changes, remedy.predicted_step_ms) == ("num_workers=4", pytest.approx(90 / 1.7))
    unseen = {"cached_bytes_per_s": 30.0, "loader_per_s": 20.0, "worker_scaling": ((2, 20.0),)}  # cold reads
    assert not [one for one in diagnose(measured(found=unseen, usable_cpus=2)).remedies if "num_workers" in one.code]


def test_small_samples_are_sooner_made_than_handed_over() -> None:
    """Graphs: steps of 6.5 ms without workers took 10.6 to 11.5 with the two that were advised."""
    graphs: dict[str, Any] = {"step": 6.5, "data": 2.6, "num_workers": 0, "usable_cpus": 2, "batch_bytes": 40_000}
    run = graphs | {"batch_tensors": 9, "load_cpu_ms": 2.6, "process_cpu_ms": 8.0}
    predicted = _with_workers(1, **run)
    assert predicted is not None
    assert predicted > 6.5
    found = diagnose(measured(**run))
    assert found.remedies == ()
    assert found.why_not[0].startswith("more workers: no gain predicted: ")
    hidden = measured(**graphs | {"batch_tensors": 0, "load_cpu_ms": 2.6})  # in a class of the user's
    assert diagnose(hidden).remedies == ()


def test_the_time_to_hand_over_counts_as_it_was_timed() -> None:
    run: dict[str, Any] = {"num_workers": 0, "load_cpu_ms": 40.0, "process_cpu_ms": 100.0}
    assert _with_workers(1, **run, found={"hand_over_ms": 12.0}) == pytest.approx(72.0)


def test_new_workers_in_every_epoch_cost_their_start() -> None:
    run: dict[str, Any] = {"num_workers": 0, "load_cpu_ms": 40.0, "process_cpu_ms": 100.0, "batches_per_epoch": 10}
    assert _with_workers(1, **run, may_persist=True) == pytest.approx(60.7)
    assert _with_workers(1, **run, may_persist=False) == pytest.approx(70.7)


def test_ranks_that_share_the_cpus_wait_for_each_other() -> None:
    """Two ranks on two CPUs: 20.3 ms were predicted, and 24.8 achieved of 23.2."""
    run: dict[str, Any] = {"step": 23.2, "data": 5.0, "num_workers": 0, "load_cpu_ms": 5.0, "process_cpu_ms": 16.0}
    assert diagnose(measured(**run, usable_cpus=1, world_size=2)).remedies == ()
    assert (_with_workers(1, **run, usable_cpus=1, world_size=2) or 0.0) >= 23.2
    assert (_with_workers(1, **run, usable_cpus=2, world_size=2) or 0.0) < 20.0


def test_a_first_worker_has_to_gain_more_than_what_others_take() -> None:
    """A notebook, whose front end takes a tenth of two CPUs: 11.7 ms were predicted, and 14.3 achieved of 13.9."""
    run: dict[str, Any] = {"step": 13.9, "data": 6.0, "num_workers": 0, "usable_cpus": 2, "load_cpu_ms": 6.2}
    run |= {"process_cpu_ms": 14.3, "batch_tensors": 2, "batch_bytes": 10_000}
    assert (_with_workers(1, **run, others_cpu_pct=10.6) or 0.0) < 0.9 * 13.9
    assert diagnose(measured(**run, others_cpu_pct=10.6)).remedies == ()
    assert [one.changes for one in diagnose(measured(**run, others_cpu_pct=1.0)).remedies] == ["num_workers=1"]


def test_what_workers_make_in_vain_costs_its_time() -> None:
    """The GAN in epochs of 12 steps, broken off by a limit: 32.8 ms were predicted, and 38.4 achieved of 41.7."""
    run: dict[str, Any] = {"num_workers": 0, "load_cpu_ms": 40.0, "process_cpu_ms": 100.0, "batches_per_epoch": 10}
    # Two batches are made ahead, in 1.2 x 40 + 0.8 ms each.
    run["may_persist"] = True
    assert _with_workers(1, **run, breaks_off=True) == pytest.approx(60.7 + 2 * 48.8 / 10)


def test_loading_that_waits_takes_no_cpu() -> None:
    waits = measured(data=80.0, num_workers=0, usable_cpus=1, load_cpu_ms=1.0, load_queue_ms=0.0, process_cpu_ms=20.0)
    (remedy,) = diagnose(waits).remedies
    assert remedy.changes == "num_workers=4"
    assert "workers that wait need little CPU" in remedy.why
    assert remedy.predicted_step_ms == pytest.approx(20.7 + 1.8 - 1e-9, rel=0.1)


# --- more workers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "loaders", "found", "predicted"),
    [
        # 2 workers, 90 % of 100 ms each, and 60 ms of the step, on 2.7 of 3 CPUs: 89 ms, not worth it
        ({"usable_cpus": 3}, BUSY, None, {}),
        ({"usable_cpus": 3, "host_cpu_ms": 3.0}, BUSY, None, {"num_workers=3": 200 / 3}),
        ({"usable_cpus": 3, "device_type": "cuda"}, BUSY, None, {"num_workers=3": 200 / 3}),
        ({"num_workers": 6, "usable_cpus": 9}, BUSY, None, {"num_workers=9": 600 / 8.7}),
        ({"num_workers": 7}, BUSY | {"workers_on_cpu_pct": 100.0}, None, {}),  # 95 ms: may be none, on shared CPUs
        (
            {"num_workers": 7, "device_type": "cuda"},
            BUSY | {"workers_on_cpu_pct": 100.0},
            None,
            {"num_workers=8": 700 / 7.7},
        ),
        ({"num_workers": 15, "usable_cpus": 16}, BUSY, None, {}),
        ({"num_workers": 15, "usable_cpus": 16, "device_type": "cuda"}, BUSY, None, {"num_workers=16": 93.75}),
        ({"num_workers": 31, "usable_cpus": 32}, BUSY, None, {}),  # 97 ms: not worth it
        ({"usable_cpus": 3, "process_cpu_ms": 170.0}, BUSY, None, {}),  # training itself takes the CPUs
        ({}, {}, {"worker_scaling": ((2, 20.0), (4, 25.0))}, {"num_workers=4": 80}),
        ({}, {}, {"worker_scaling": ((2, 20.0), (4, 60.0), (8, 60.5))}, {"num_workers=4": 60}),
        ({}, {}, {"worker_scaling": ((2, 20.0), (4, 20.3))}, {}),  # tried: no gain
        # tried alone, where training took no CPU: 180 ms of the workers and 60 of the step, on 3.7 of 4 CPUs
        ({"usable_cpus": 3}, BUSY, {"worker_scaling": ((2, 20.0), (3, 30.0))}, {}),
        ({"usable_cpus": 4}, BUSY, {"worker_scaling": ((2, 20.0), (4, 40.0))}, {"num_workers=4": 240 / 3.7}),
        ({}, BUSY, {"model_per_s": 1000 / 70}, {"num_workers=3": 70}),  # the model alone takes 70 ms
        ({}, BUSY, {"taking_ms": 5.0}, {"num_workers=4": 65}),  # 60 ms of the step, and 5 to open a batch
        ({}, BUSY, {"taking_ms": 50.0}, {}),
        ({"usable_cpus": 2}, ASLEEP, None, {"num_workers=4": 60}),  # those that wait need no CPU each
    ],
)
def test_more_workers(facts: Any, loaders: Any, found: Any, predicted: dict[str, float]) -> None:
    made = {
        one.changes: one.predicted_step_ms for one in diagnose(measured(loaders=loaders, found=found, **facts)).remedies
    }
    assert {name: ms for name, ms in made.items() if name.startswith("num_workers")} == pytest.approx(
        predicted, rel=0.02
    )


def test_waiting_workers_are_not_multiplied_without_end() -> None:
    (remedy,) = diagnose(measured(data=90.0, loaders=ASLEEP, usable_cpus=2)).remedies
    assert (remedy.changes, remedy.predicted_step_ms) == ("num_workers=8", pytest.approx(25))


# --- other remedies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "after"),
    [
        ({"loader_per_s": 20.0, "cached_bytes_per_s": 25.0}, 80),
        ({"cached_bytes_per_s": 12.5}, 80),
        ({"loader_per_s": 12.0, "cached_bytes_per_s": 15.0}, 80),  # training slows the loader: the ratio of both
        ({"loader_per_s": 10.8, "cached_bytes_per_s": 12.5}, 80),  # or noise: the rate as it is
        ({"loader_per_s": 20.0, "cached_bytes_per_s": 1000.0}, 60),
        ({"loader_per_s": 20.0, "cached_bytes_per_s": 10.0}, 100),  # never slower than now
    ],
)
def test_another_rate(found: dict[str, float], after: float) -> None:
    run = measured(found=found)
    assert predict.with_rate(
        run, _shares(run), found["cached_bytes_per_s"], found.get("loader_per_s")
    ) == pytest.approx(after)


COSTS = (
    NamedCost(name="read", cpu_ms=0.5, wall_ms=1.0),
    NamedCost(name="decode", cpu_ms=8.0, wall_ms=8.0),
    NamedCost(name="TrainRecipe", cpu_ms=1.0, wall_ms=1.0),
)  # fmt: skip


@pytest.mark.parametrize(
    ("found", "facts", "expected"),
    [
        ({}, {}, 60.0),
        ({"model_per_s": 1000 / 70}, {}, 70.0),  # the model alone takes 70 ms
        ({"device_decode_per_s": 12.5}, {}, 80.0),  # decoding on the device takes 80 ms
        ({"device_decode_per_s": 5.0}, {}, 100.0),  # never slower than now
        ({"costs": (COSTS[0],)}, {"num_workers": 8}, 100.0),  # all of it is reading
        ({"costs": (COSTS[0],)}, {"num_workers": 4}, 60.0),  # with a thread for each of 8 CPUs
    ],
)
def test_decoding_on_the_device(found: Any, facts: Any, expected: float) -> None:
    given = {"costs": COSTS, "device_decode_per_s": 1000.0} | found
    run = measured(found=given, device_type="cuda", **facts)
    assert predict.decoded_on_device(run, _shares(run), given["device_decode_per_s"]) == pytest.approx(expected)


def test_slow_transforms_are_named_with_the_most_that_faster_ones_give() -> None:
    costs = tuple(
        NamedCost(name=name, cpu_ms=ms, wall_ms=ms)
        for name, ms in [("a: read", 9.0), ("a: decode", 9.0), ("Flip", 0.5), ("Blur", 4.0), ("Jitter", 3.5)]
    )
    found = {"loader_per_s": 20.0, "no_transform_per_s": 25.0, "costs": costs}
    said = "the slowest transforms of a sample are Blur (4.0 ms) and Jitter (3.5 ms); "
    said += "without transforms a step takes 80.0 ms"
    assert diagnose(measured(found=found, loaders=BUSY, usable_cpus=2, host_cpu_ms=0.0)).notes == (said,)
    for changed in ({"no_transform_per_s": 20.1}, {"costs": costs[:2]}, {"costs": ()}):  # nothing to gain, or to name
        assert diagnose(measured(found=found | changed, loaders=BUSY, usable_cpus=2, host_cpu_ms=0.0)).notes == ()


def test_images_that_are_decoded_whole_and_then_cropped_are_sent_to_diagnose() -> None:
    def noted(**facts: Any) -> bool:
        return "times decoding only the crops" in str(diagnose(measured(loaders=BUSY, **facts)).notes)

    assert noted(decodes_whole=True)
    assert not noted(decodes_whole=False)
    assert not noted(decodes_whole=True, data=0.0)  # nothing waits for decoding
    assert not noted(decodes_whole=True, loop="plain")  # which diagnose does not train
    assert not noted(decodes_whole=True, found={})  # it was diagnosed


def _crops(whole_ms: float, crop_ms: float) -> dict[str, Any]:
    return {"crops": CropTrial(folder="birds", whole_ms=whole_ms, crop_ms=crop_ms)}


def test_crops_alone_without_workers_save_their_share_of_loading() -> None:
    run: dict[str, Any] = {"data": 80.0, "num_workers": 0, "usable_cpus": 2, "found": _crops(4.0, 2.0)}
    made = measured(**run, load_cpu_ms=80.0, process_cpu_ms=100.0)
    assert predict.with_crops(made, _shares(made)) == {0: 60.0}
    assert predict.with_crops(measured(**run | {"found": {}}), _shares(made)) == {}
    collated = measured(**run | {"found": _crops(4.0, 2.0) | {"samples_ms": 60.0, "collate_ms": 20.0}})
    assert predict.with_crops(collated, _shares(collated)) == {0: 70.0}  # that takes as long as before


def test_crops_alone_and_first_workers_at_once() -> None:
    """From 80 ms of loading and 20 of training in turn, to 40 of loading in two processes beside 20 of training."""
    found = _crops(4.0, 2.0) | {"hand_over_ms": 1.0, "worker_scaling": ((0, 10.0), (2, 19.0))}
    run: dict[str, Any] = {"data": 80.0, "num_workers": 0, "usable_cpus": 8, "load_cpu_ms": 80.0, "may_persist": True}
    made = measured(**run, process_cpu_ms=100.0, found=found)
    assert predict.with_crops(made, _shares(made)) == {0: 60.0, 2: pytest.approx(1e3 / 38.0)}
    limited = measured(**run, process_cpu_ms=100.0, found=found | {"ceiling_per_s": 20.0})
    assert predict.with_crops(limited, _shares(limited))[2] == pytest.approx(50.0)  # constant samples are no faster


def test_crops_alone_and_the_same_workers() -> None:
    made = measured(loaders=BUSY, found=_crops(4.0, 2.0))
    assert predict.with_crops(made, _shares(made)) == {2: 60.0}  # and then the model limits it


def test_files_in_memory_are_named_with_their_step_or_sent_to_diagnose() -> None:
    cold: dict[str, Any] = {"loaders": ASLEEP | {"disk_mb_per_s": 90.0, "page_cache_pct": 10.0}, "usable_cpus": 2}
    cold |= {"every_num_workers": (2, 3)}  # which one number cannot change
    told = diagnose(measured(**cold)).notes
    assert any(one.endswith("times the loader with its files in memory") for one in told)
    found = {"loader_per_s": 10.0, "cached_bytes_per_s": 14.0}
    assert any("a step takes 71.4 ms" in one for one in diagnose(measured(**cold, found=found)).notes)
    for nothing in ({}, found | {"cached_bytes_per_s": 10.1}):
        assert not any("storage" in one for one in diagnose(measured(**cold, found=nothing)).notes)
    assert not any("storage" in one for one in diagnose(measured(**cold, loop="plain")).notes)


def test_pictures_that_stay_uint8_are_a_note_where_that_was_timed() -> None:
    def noted(**facts: Any) -> bool:
        given = {"device_type": "cuda", "found": {"loader_per_s": 20.0, "as_uint8_per_s": 30.0}} | facts
        return any("uint8" in one for one in diagnose(measured(loaders=BUSY, **given)).notes)

    assert noted()
    assert not noted(found={"loader_per_s": 20.0, "as_uint8_per_s": 20.5})  # nothing to gain
    assert not noted(device_transform=True)
    assert not noted(device_type="cpu")  # there the rest takes the CPUs that load
    assert not noted(decoder="turbo", own_transforms=False)  # they are uint8 already
    assert "uint8" not in str(diagnose(measured(loaders=BUSY)))

"""X3 with other numbers of workers: which are tried, and which are not."""

import pytest
import torch
from torch.utils.data import DataLoader
from watch.experiments.made_data import Images

from lightning_feed.load.machine import Machine
from lightning_feed.load.rounds import RoundLimits
from lightning_feed.watch.experiments.loader_alone import measure_scaling, workers_to_try
from lightning_feed.watch.experiments.subject import Part, too_large

FAST = RoundLimits(min_s=0.0, max_s=30)


def _machine(cpus: int = 8, *, shm: int | None = None, memory: int | None = None) -> Machine:
    return Machine(
        usable_cpus=cpus,
        cpu_reason="",
        available_memory_bytes=memory,
        free_shm_bytes=shm,
        start_method="fork",
    )


def _part(workers: int = 0, **options: object) -> Part:
    return Part("", DataLoader(Images(), batch_size=4, num_workers=workers, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("workers", "cpus", "expected"),
    [(0, 8, [8, 1, 4]), (2, 8, [8, 0, 1, 4, 3]), (2, 1, [1, 0]), (0, 1, [1]), (1, 2, [2, 0])],
)
def test_the_numbers_that_are_tried(workers: int, cpus: int, expected: list[int]) -> None:
    assert workers_to_try((_part(workers),), _machine(cpus)) == expected


def test_several_loaders_share_the_cpus() -> None:
    assert workers_to_try((_part(), _part()), _machine(8)) == [4, 1, 2]


def _numbers(part: Part, machine: Machine, sample_bytes: int = 1) -> list[int | str]:
    tried = measure_scaling((part,), [sample_bytes], machine, FAST, go_on=lambda: True)
    return [one if isinstance(one, str) else one[0] for one in tried]


def test_what_does_not_fit_is_not_run_and_told_once() -> None:
    told, *tried = _numbers(_part(), _machine(2, shm=5 * 4 * 1000), 1000)
    assert str(told).startswith("2 workers: its queue would take")
    assert tried == [1, 0] * 3


def test_each_number_is_tried_again_and_the_configured_one_too() -> None:
    assert _numbers(_part(1), _machine(2)) == [2, 0, 1] * 3


class NeedsWorkers(Images):
    def __getitem__(self, index: int) -> object:
        worker = torch.utils.data.get_worker_info()
        assert worker is not None, "no worker"
        return super().__getitem__(index)


def test_a_data_set_that_needs_workers_is_not_tried_without_again() -> None:
    told = _numbers(Part("", DataLoader(NeedsWorkers(), batch_size=4, num_workers=1)), _machine(1))
    assert "no worker" in str(told.pop(0))
    assert told == [2, 1] * 3


def test_it_ends_when_time_is_over() -> None:
    asked = iter([True, False])
    found = list(measure_scaling((_part(1),), [1], _machine(2), FAST, go_on=lambda: next(asked)))
    assert [number for number, _ in found] == [2]  # type: ignore[misc]


def test_memory_of_a_queue() -> None:
    # Two workers, three batches ahead each, and the batch in hand: 7 x 4 samples.
    part = _part(2, prefetch_factor=3)
    assert too_large((part,), [1000], _machine(shm=35_000, memory=56_000)) is None
    assert "/dev/shm" in str(too_large((part,), [1000], _machine(shm=34_999)))
    assert "free memory" in str(too_large((part,), [1000], _machine(memory=55_999)))
    assert too_large((_part(),), [1000], _machine(shm=0, memory=8_000)) is None  # no workers: nothing is handed over
    assert too_large((part, part), [1000, 1000], _machine(shm=69_999)) is not None
    assert too_large((part,), [10**12], _machine()) is None  # nothing is known of the machine

"""The loader alone: numbers of workers, constant samples, and files in memory."""

from itertools import islice
from typing import Any

import pytest
import torch
from diagnosing.made_data import Images, Slow, Stream, machine_of, session_of
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_feed.diagnosing.parts import NotMeasurable
from lightning_feed.diagnosing.rates import (
    ROUNDS,
    NullStream,
    measure_ceiling,
    measure_files_in_memory,
    measure_scaling,
    workers_to_try,
)
from lightning_feed.diagnosing.session import Session
from lightning_feed.load.machine import Machine

# --- other numbers of workers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "cpus", "loaders", "expected"),
    [
        (0, 8, 1, [8, 1, 0, 4]),
        (2, 8, 1, [8, 0, 2, 1, 4, 3]),
        (2, 1, 1, [1, 0, 2]),
        (0, 1, 1, [1, 0]),
        (1, 2, 1, [2, 0, 1]),
        (0, 8, 2, [4, 1, 0, 2]),
    ],
)
def test_the_numbers_that_are_tried(workers: int, cpus: int, loaders: int, expected: list[int]) -> None:
    made = [DataLoader(Images(), batch_size=4, num_workers=workers) for _ in range(loaders)]
    assert workers_to_try(session_of(*made, machine=machine_of(cpus))) == expected


class Rates(Session):
    """Counts what was tried, and is as fast as the number of tries."""

    tried: list[int]

    def rate(self, change: Any, **options: Any) -> float:
        self.tried.append(change(self.parts[0]).num_workers)
        return float(len(self.tried))


def _scaled(loader: Any, machine: Machine, share_s: float = 10.0, kind: type[Rates] = Rates) -> tuple[Rates, str]:
    session = kind(train_loaders=loader, machine=machine, clock=lambda: float(len(session.tried)), share_s=share_s)
    session.tried = []
    session.find_parts()
    try:
        measure_scaling(session)
    except NotMeasurable as reason:
        return session, str(reason)
    return session, ""


def test_each_number_is_tried_three_times_and_the_configured_one_too() -> None:
    session, _ = _scaled(DataLoader(Images(), num_workers=1), machine_of(2))
    assert session.tried == [2, 0, 1] * 3
    assert session.results.worker_scaling == ((0, 5.0), (1, 6.0), (2, 4.0))
    assert session.results.worker_spread == ((0, 2.0, 8.0), (1, 3.0, 9.0), (2, 1.0, 7.0))
    assert session.results.noise_pct == 150
    assert _scaled(DataLoader(Images(), num_workers=1), machine_of(2), share_s=4.4)[0].tried == [2, 0, 1, 2, 0]


def test_what_does_not_fit_is_not_tried_and_told_once() -> None:
    session, told = _scaled(DataLoader(Images(), batch_size=4), machine_of(2, shm=60_000))
    assert session.tried == [1, 0] * 3
    assert told.startswith("2 workers: 5 batches need 0 MiB, more than 80% of the 0 MiB free in /dev/shm")
    assert told.count("2 workers") == 1


# --- constant samples -------------------------------------------------------------------------------------------------


class Dicts(Dataset[Any]):
    scale = 3

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return {"image": torch.full((3, 4), index), "drop": "path"}

    def __getitems__(self, indices: list[int]) -> Any:
        raise AssertionError("the original was asked for a whole batch")


def pop_and_collate(samples: list[Any]) -> Any:
    for sample in samples:
        sample.pop("drop")
    return default_collate(samples)


def wants_the_data_set(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    assert info.dataset.scale == 3


def test_collate_functions_and_worker_inits_get_what_they_are_used_to() -> None:
    session = session_of(
        DataLoader(Dicts(), batch_size=4, num_workers=1, collate_fn=pop_and_collate, worker_init_fn=wants_the_data_set)
    )
    measure_ceiling(session)
    assert session.results.ceiling_per_s is not None
    assert set(session.samples[0]) == {"image", "drop"}


def test_constant_streams_do_not_end_and_have_no_state() -> None:
    class Stateful(Stream):
        def state_dict(self) -> dict[str, int]:
            return {}

    null = NullStream(7, Stateful())
    assert list(islice(null, 100)) == [7] * 100
    assert not hasattr(null, "state_dict")
    assert null.size == 60


def test_the_ceiling_does_without_the_data_sets_own_work() -> None:
    session = session_of(DataLoader(Images(Slow(0.003)), batch_size=4))
    measure_ceiling(session)
    assert (session.results.ceiling_per_s or 0) > 2 / (4 * 0.003)


class Choosy(DataLoader[Any]):
    """As LitData's: it calls what only its own data set has."""

    def __iter__(self) -> Any:
        assert isinstance(self.dataset, Images), "this is no data set of mine"
        return super().__iter__()


def test_a_loader_that_needs_its_own_kind_of_data_set_has_no_ceiling() -> None:
    session = session_of(Choosy(Images(), batch_size=4))
    with pytest.raises(
        NotMeasurable, match="a Choosy does not accept constant samples as its dataset: this is no data"
    ):
        measure_ceiling(session)


# --- files in memory --------------------------------------------------------------------------------------------------

READ: list[int] = []


class Reading(Images):
    """Notes what it reads, in this process."""

    def __getitem__(self, index: int) -> Any:
        READ.append(index)
        return super().__getitem__(index)


def test_the_first_batches_are_read_again_and_again() -> None:
    session = session_of(DataLoader(Reading(size=60), batch_size=2, shuffle=True), rate=1000.0)
    session.share_s = 0.3
    torch.manual_seed(5)
    before = torch.get_rng_state()
    (part,) = session.parts
    samples = {index for batch in part.first_batches(1 + ROUNDS) for index in batch}
    READ.clear()
    measure_files_in_memory(session)
    assert torch.equal(before, torch.get_rng_state())
    assert session.results.cached_bytes_per_s is not None
    assert set(READ) == samples
    assert len(READ) >= len(samples) + 4  # each was read once before the first batch that counts


@pytest.mark.parametrize(
    ("loader", "rate", "why"),
    [
        (DataLoader(Images(), batch_size=2), 1.0, "too little time: 0 batches fit, but a round of the workers has 2"),
        (DataLoader(Stream(), batch_size=2), 1000.0, "an iterable dataset decides itself which samples come"),
    ],
)
def test_what_cannot_be_read_again_is_not_measured(loader: Any, rate: float, why: str) -> None:
    with pytest.raises(NotMeasurable, match=why):
        measure_files_in_memory(session_of(loader, rate=rate))

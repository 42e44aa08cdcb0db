"""The loader alone: numbers of workers, constant samples, and files in memory."""

from itertools import islice
from typing import Any

import pytest
import torch
from diagnosing.made_data import Images, Slow, Stream, machine_of, session_of
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_feed.diagnosing import rates
from lightning_feed.diagnosing.parts import NotMeasurable
from lightning_feed.diagnosing.rates import (
    ROUNDS,
    NullStream,
    measure_ceiling,
    measure_files_in_memory,
    measure_workers,
)
from lightning_feed.load.settings import Setting
from lightning_feed.trials.search import Trial
from lightning_feed.trials.tune_loader import Goal, Tuned

# --- other numbers of workers -----------------------------------------------------------------------------------------


class Tunes:
    """In the place of ``tune_loader``: two workers are twice as fast as the user's one."""

    def __init__(self) -> None:
        self.goals: list[Goal] = []

    def __call__(self, loader: DataLoader[Any], goal: Goal, **_: Any) -> Tuned:
        self.goals.append(goal)
        own = Setting.of(loader)
        chosen = own.with_workers(2)
        trials = (
            Trial(setting=own, steps_s=(0.2, 0.22, 0.19)),
            Trial(setting=own.with_workers(8), infeasible="/dev/shm would be full"),
            Trial(setting=chosen, steps_s=(0.1,)),
        )
        return Tuned(setting=chosen, own=own, reason="the fastest of 3 tried", trials=trials, work=goal.work)


@pytest.fixture
def tunes(monkeypatch: pytest.MonkeyPatch) -> Tunes:
    made = Tunes()
    monkeypatch.setattr(rates, "tune_loader", made)
    return made


def test_trials_of_the_tuner_are_recorded_in_the_results(tunes: Tunes) -> None:
    session = session_of(DataLoader(Images(), num_workers=1), machine=machine_of(2))
    session.share_s = 5.0
    measure_workers(session)
    one, two = session.results.tried
    assert (one.num_workers, one.step_ms, one.shortest_ms, one.longest_ms) == (1, 200.0, 190.0, 220.0)
    assert (two.num_workers, two.step_ms) == (2, 100.0)
    assert session.results.tried_as("own") == one
    assert session.results.tried_as("chosen") == two
    assert session.results.noise_pct == pytest.approx(15.0)
    assert session.results.why_chosen == "the fastest of 3 tried"
    assert tunes.goals[0].work.step_s == 0  # no training was measured


def test_worker_counts_are_not_tried_for_streams_or_several_loaders(tunes: Tunes) -> None:
    with pytest.raises(NotMeasurable, match="is a stream"):
        measure_workers(session_of(DataLoader(Stream(), batch_size=4)))
    with pytest.raises(NotMeasurable, match="several loaders"):
        measure_workers(session_of(DataLoader(Images()), DataLoader(Images())))
    assert tunes.goals == []


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


def test_constant_samples_give_collate_fn_and_worker_init_fn_usual_inputs() -> None:
    session = session_of(
        DataLoader(Dicts(), batch_size=4, num_workers=1, collate_fn=pop_and_collate, worker_init_fn=wants_the_data_set)
    )
    measure_ceiling(session)
    assert session.results.ceiling_per_s is not None
    assert set(session.samples[0]) == {"image", "drop"}


def test_constant_stream_is_endless_and_has_no_state() -> None:
    class Stateful(Stream):
        def state_dict(self) -> dict[str, int]:
            return {}

    null = NullStream(7, Stateful())
    assert list(islice(null, 100)) == [7] * 100
    assert not hasattr(null, "state_dict")
    assert null.size == 60


def test_rate_with_constant_samples_excludes_the_work_of_the_dataset() -> None:
    session = session_of(DataLoader(Images(Slow(0.003)), batch_size=4))
    measure_ceiling(session)
    assert (session.results.ceiling_per_s or 0) > 2 / (4 * 0.003)


class Choosy(DataLoader[Any]):
    """As LitData's: it calls what only its own dataset has."""

    def __iter__(self) -> Any:
        assert isinstance(self.dataset, Images), "this is no dataset of mine"
        return super().__iter__()


def test_loader_that_requires_its_own_dataset_class_gets_no_constant_samples() -> None:
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


def test_files_in_memory_are_measured_by_rereading_the_first_batches() -> None:
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
def test_loaders_that_cannot_be_reread_have_no_files_in_memory_rate(loader: Any, rate: float, why: str) -> None:
    with pytest.raises(NotMeasurable, match=why):
        measure_files_in_memory(session_of(loader, rate=rate))

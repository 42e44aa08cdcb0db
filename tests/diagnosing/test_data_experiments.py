"""The experiments on a loader, one after the other: what they give, what they leave out, and that nothing stays."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diagnosing.made_data import Broken, Files, Images, Slow
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_feed.diagnosing.run import STEPS, measure_loaders
from lightning_feed.diagnosing.session import Session
from lightning_feed.errors import DatasetError
from lightning_feed.machine.limits import Machine, read_machine
from lightning_feed.measure.experiment_results import ExperimentResults


def _measure(
    loader: Any, *, clock: Callable[[], float] = lambda: 0.0, machine: Machine | None = None, **options: Any
) -> ExperimentResults:
    session = Session(train_loaders=loader, clock=clock, machine=machine or read_machine())
    measure_loaders(session, **{"budget_s": 1.0, **options})
    return session.results


def test_all_experiments_run_on_a_slow_dataset() -> None:
    slow = Slow(0.004)
    dataset = Images(slow)
    loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=1)
    before = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
    told: list[tuple[str, float]] = []
    results = _measure(loader, budget_s=2.0, on_progress=lambda name, share: told.append((name, share)))
    assert results.batch_size == 4
    assert results.loader_per_s is not None
    assert results.ceiling_per_s is not None
    assert results.no_transform_per_s is not None
    assert results.loader_start_s is not None
    assert results.loader_per_s <= 1.1 / (4 * 0.004)  # workers had made the first ones before the clock began
    assert results.ceiling_per_s > 1.5 * results.loader_per_s
    assert results.no_transform_per_s > 1.5 * results.loader_per_s
    assert max(results.costs, key=lambda cost: cost.cpu_ms).name == "Slow"
    assert [(key.name, key.bytes_per_batch) for key in results.keys] == [("0", 4 * 3 * 16 * 16 * 4), ("1", 4 * 8)]
    assert {0, 1} <= {setting.num_workers for setting in results.tried}
    own = results.tried_as("own")
    assert own is not None
    assert own.num_workers == 1
    assert all(setting.shortest_ms <= setting.step_ms <= setting.longest_ms for setting in results.tried)
    assert results.noise_pct is not None
    assert None not in (results.samples_ms, results.collate_ms)
    assert (results.functions[0].name, results.functions[0].stage) == ("burn", "samples")
    assert results.left_out == ()
    assert results.cached_bytes_per_s is not None
    assert [name for name, _ in told] == list(STEPS)
    assert [share for _, share in told] == sorted(share for _, share in told)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (str(np.random.get_state()), random.getstate()) == before[1:]
    assert dataset.transform is slow
    assert loader._iterator is None


def test_cached_files_alone_gives_only_loader_and_cached_rates(tmp_path: Path) -> None:
    loader = DataLoader(Files(tmp_path / "data"), batch_size=2, num_workers=1)
    results = _measure(loader, only=["cached-files"])
    assert results.loader_per_s is not None
    assert results.cached_bytes_per_s is not None
    assert (results.ceiling_per_s, results.costs, results.keys) == (None, (), ())


def test_several_loaders_are_measured_together() -> None:
    fast, slow = Images(), Images(Slow(0.005))
    loaders = {"a": DataLoader(fast, batch_size=2), "b": [DataLoader(slow, batch_size=4)]}
    results = _measure(loaders, only=frozenset({"loader", "transforms", "keys"}))
    assert results.loader_per_s is not None
    assert results.loader_per_s <= 1 / (4 * 0.005)
    assert results.batch_size == 6
    assert [key.name for key in results.keys] == ["a.0", "a.1", "b.0.0", "b.0.1"]
    assert [cost.name for cost in results.costs] == ["a: load", "b.0: load", "b.0: Slow"]

    combined = CombinedLoader(loaders, "max_size_cycle")
    assert _measure(combined, only=frozenset({"loader"})).batch_size == 6


class Batches:
    """No DataLoader, but it can be gone through again."""

    def __iter__(self) -> Iterator[Any]:
        return iter([{"x": torch.ones(2, 3)}] * 5)


def test_custom_iterables_get_only_the_loader_and_keys_experiments() -> None:
    results = _measure(Batches())
    assert results.loader_per_s is not None
    assert [(key.name, key.bytes_per_batch) for key in results.keys] == [("x", 24)]
    left_out = dict(results.left_out)
    assert set(left_out) == set(STEPS) - {"loader", "keys"}
    assert (
        left_out["transforms"]
        == "an object of class Batches is not a torch DataLoader, so it cannot be rebuilt with changes"
    )
    used_up = iter(Batches())
    results = _measure(used_up)
    assert "iterated only once" in dict(results.left_out)["loader"]
    assert len(list(used_up)) == 5


@pytest.mark.parametrize("workers", [0, 1])
def test_failing_sample_is_named_in_the_error(workers: int) -> None:
    torch.manual_seed(3)
    loader = DataLoader(Broken(), batch_size=4, shuffle=True, num_workers=workers)
    before = torch.get_rng_state()
    where = "sample 13" if not workers else "worker 0, sample 13"
    with pytest.raises(
        DatasetError, match=rf"\(Broken\) failed in {where}: ValueError: the picture is cut short. Fix or"
    ):
        _measure(loader, only=frozenset({"loader"}))
    assert torch.equal(before, torch.get_rng_state())


def test_interrupt_keeps_earlier_results_and_restores_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Images(Slow(0.0))
    state = torch.get_rng_state()
    session = Session(train_loaders=DataLoader(dataset, batch_size=2))

    def on_progress(name: str, _: float) -> None:
        if name == "transforms":
            monkeypatch.setattr(Slow, "__call__", _interrupting_from(5, Slow.__call__))

    with pytest.raises(KeyboardInterrupt):
        measure_loaders(
            session, budget_s=1.0, only=["loader", "constant-samples", "transforms"], on_progress=on_progress
        )
    assert session.results.loader_per_s is not None
    assert session.results.ceiling_per_s is not None
    assert session.results.costs == ()
    assert torch.equal(torch.get_rng_state(), state)


def _interrupting_from(call: int, original: Any) -> Any:
    calls = 0

    def interrupt(self: Any, image: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > call:
            raise KeyboardInterrupt
        return original(self, image)

    return interrupt


def test_experiments_that_need_too_much_memory_are_left_out() -> None:
    small = Machine(
        usable_cpus=2,
        cpu_reason="",
        available_memory_bytes=10**12,
        free_shm_bytes=100_000,
        start_method="fork",
    )
    iterated: list[int] = []

    class Counting(Images):
        def __getitem__(self, index: int) -> Any:
            iterated.append(index)
            return super().__getitem__(index)

    loader = DataLoader(Counting(), batch_size=16, num_workers=2, prefetch_factor=8)
    results = _measure(loader, machine=small)
    reasons = dict(results.left_out)
    assert "17 batches need 1 MiB, more than 80% of the 0 MiB free in /dev/shm" in reasons["loader"]
    assert {"cached-files", "workers"} <= set(reasons)
    assert results.loader_per_s is None
    assert results.ceiling_per_s is None
    assert results.no_transform_per_s is None


def test_experiments_beyond_the_budget_are_left_out() -> None:
    class Clock:
        now = 0.0

        def __call__(self) -> float:
            self.now += 0.4
            return self.now

    clock = Clock()
    results = _measure(DataLoader(Images(), batch_size=2), budget_s=1.0, clock=clock)
    late = [name for name, reason in results.left_out if reason == "no time was left for it"]
    assert "transforms" in late
    assert results.loader_per_s is not None

"""With PrefetchCallback a run is the run without it: scenario by scenario, and over random configurations."""

from typing import Any

import pytest
import torch
from cells import in_gate
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch.utilities import CombinedLoader
from recording import (
    NullStreamPrefetch,
    Numbers,
    Recording,
    Stream,
    assert_same_run,
    by_hook_and_loader,
)
from torch.utils.data import DataLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:You requested to overfit but enabled"),
    pytest.mark.filterwarnings("ignore:.*shuffling enabled, it is strongly recommended"),
]


def both(train: int = 20, val: int = 8, **kwargs: Any) -> dict[str, Any]:
    return {
        "train_dataloaders": DataLoader(Numbers(train, noise=True), batch_size=4, shuffle=True, **kwargs),
        "val_dataloaders": DataLoader(Numbers(val, noise=True), batch_size=4, **kwargs),
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_steps": 7, "max_epochs": -1},
        {"limit_train_batches": 3, "limit_val_batches": 1},
        {"limit_train_batches": 0.5},
        {"val_check_interval": 2},
        {"val_check_interval": 0.4, "accumulate_grad_batches": 2},
        {"check_val_every_n_epoch": None, "val_check_interval": 3},
        {"num_sanity_val_steps": 0},
        {"num_sanity_val_steps": -1},
        {"accumulate_grad_batches": 3},
        {"overfit_batches": 2},
        {"reload_dataloaders_every_n_epochs": 1},
        {"fast_dev_run": 3},
        {"max_epochs": 0},
        {"limit_train_batches": 0},
        {"precision": "64-true"},
        {"precision": "bf16-mixed"},
        {"gradient_clip_val": 0.5},
        {"min_epochs": 2, "max_epochs": 3},
        {"detect_anomaly": True},
    ],
    ids=str,
)
def test_a_prefetched_run_is_the_same_with_any_trainer_options(options: dict[str, Any]) -> None:
    assert_same_run(both, **options)


@pytest.mark.parametrize("workers", in_gate([0, 2], [2]))
def test_a_prefetched_run_is_the_same_with_and_without_workers(workers: int) -> None:
    callback = assert_same_run(lambda: both(num_workers=workers))
    assert callback.active


@pytest.mark.parametrize("limit", [None, 3])
def test_a_prefetched_run_is_the_same_with_loaders_without_a_length(limit: int | None) -> None:
    def loaders() -> dict[str, Any]:
        return {
            "train_dataloaders": DataLoader(Stream(18, noise=True), batch_size=4),
            "val_dataloaders": DataLoader(Stream(8), batch_size=4),
        }

    assert_same_run(loaders, **({} if limit is None else {"limit_train_batches": limit}))


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size", "max_size"])
def test_a_prefetched_run_is_the_same_with_combined_loaders(mode: Any) -> None:
    def loaders() -> dict[str, Any]:
        parts = {"a": DataLoader(Numbers(12, noise=True), batch_size=2), "b": DataLoader(Numbers(6), batch_size=3)}
        return {"train_dataloaders": CombinedLoader(parts, mode)}

    assert_same_run(loaders)


class StopsEarly(Recording):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        super().on_train_batch_start(batch, batch_idx)
        return -1 if batch_idx == 2 else None


class StopsTrainer(Recording):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class DrawsAtBatchEnd(Recording):
    """Code after our hook that draws random numbers: the look-ahead must come after it."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("on_train_batch_end", batch_idx, torch.rand(1).item())

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note("on_validation_batch_end", batch_idx, torch.rand(1).item())


class ChangesTheNextBatch(Recording):
    """A curriculum: what the step did decides what happens to the next batch on the host."""

    scale = 1.0

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return super().on_before_batch_transfer(batch * self.scale, dataloader_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.scale += 1


@pytest.mark.parametrize("module", [StopsEarly, StopsTrainer, DrawsAtBatchEnd, ChangesTheNextBatch])
@pytest.mark.parametrize("options", [{}, {"val_check_interval": 2}], ids=str)
def test_a_prefetched_run_is_the_same_when_hooks_stop_draw_or_change_data(
    module: type[Recording], options: dict[str, Any]
) -> None:
    assert_same_run(both, module, **options)


@pytest.mark.parametrize("depth", in_gate([2, 5, 50], [5]))
def test_a_run_prefetched_several_batches_deep_is_the_same(depth: int) -> None:
    """Without random draws in the main process any depth is the same run, loader by loader.

    Batches that wait on the device while validation runs have had their hooks before it.
    """

    def loaders() -> dict[str, Any]:
        return {
            "train_dataloaders": DataLoader(Numbers(20), batch_size=2),
            "val_dataloaders": DataLoader(Numbers(6, first=1000), batch_size=2),
        }

    for options in ({}, {"val_check_interval": 3}, {"max_steps": 13, "max_epochs": -1}):
        assert_same_run(loaders, prefetch=lambda: NullStreamPrefetch(depth=depth), group=by_hook_and_loader, **options)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_a_prefetched_run_is_the_same_in_random_configurations(data: st.DataObject) -> None:
    draw = data.draw
    train = draw(st.integers(1, 25))
    val = draw(st.integers(0, 9))
    size = draw(st.integers(1, 6))
    shuffle = draw(st.booleans())
    sized = draw(st.booleans())
    options: dict[str, Any] = {
        "max_epochs": draw(st.integers(1, 3)),
        "max_steps": draw(st.sampled_from([-1, -1, 5, 9])),
        "accumulate_grad_batches": draw(st.integers(1, 3)),
        "num_sanity_val_steps": draw(st.sampled_from([0, 2])),
        "reload_dataloaders_every_n_epochs": draw(st.sampled_from([0, 1])),
        "limit_train_batches": draw(st.sampled_from([1.0, 2, 5])),
        "check_val_every_n_epoch": draw(st.sampled_from([1, 2, None])),
    }
    batches = -(-train // size)
    options["val_check_interval"] = (
        min(
            draw(st.integers(1, 4)),
            batches,
            options["limit_train_batches"] if options["limit_train_batches"] != 1.0 else 99,
        )
        if sized or options["check_val_every_n_epoch"] is None
        else 1.0
    )

    def loaders() -> dict[str, Any]:
        dataset = Numbers(train, noise=True) if sized else Stream(train, noise=True)
        made: dict[str, Any] = {
            "train_dataloaders": DataLoader(dataset, batch_size=size, shuffle=shuffle if sized else None)
        }
        if val:
            made["val_dataloaders"] = DataLoader(Numbers(val, noise=True), batch_size=2)
        return made

    assert_same_run(loaders, lambda: Recording(manual=options["accumulate_grad_batches"] == 1 and shuffle), **options)

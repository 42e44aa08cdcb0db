"""GPUStarvationCallback survives any Trainer, leaves nothing behind, and is in nobody's way."""

import copy
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from cells import covering
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from measure.small_fits import Memory, Slow, assert_clean, make_loader, make_model, make_trainer, run_fit
from torch.utils.data import DataLoader, IterableDataset

from lightning_feed import GPUStarvationCallback, pl
from lightning_feed.errors import SettingsError

pytestmark = [
    # These fits are small on purpose.
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*`max_epochs` was not set"),
    # Lightning's own advice, for runs that are resumed in the middle of an epoch.
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


@pytest.mark.parametrize("value", [0, -1, 2.5, "10", True])
def test_invalid_every_n_steps_is_refused(value: Any) -> None:
    with pytest.raises(SettingsError, match=r"every_n_steps=.*a whole number of 1 or more"):
        GPUStarvationCallback(every_n_steps=value)


KINDS = {
    "lightning": (lightning.pytorch, GPUStarvationCallback),
    "pytorch_lightning": (pytorch_lightning, pl.GPUStarvationCallback),
}
if tuple(map(int, pytorch_lightning.__version__.split(".")[:2])) >= (2, 6):  # before, it takes only its own callbacks
    KINDS["crossing over"] = (pytorch_lightning, GPUStarvationCallback)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"fast_dev_run": True},
    {"fast_dev_run": 3},
    {"limit_val_batches": 2, "val_check_interval": 5},
    {"limit_val_batches": 2, "num_sanity_val_steps": 2},
    {"profiler": "simple"},
    {"max_steps": 7, "max_epochs": -1},
    {"limit_train_batches": 0},
    {"log_every_n_steps": 0},
    {"barebones": True, "logger": None, "enable_checkpointing": None, "limit_val_batches": None}
    | {"enable_progress_bar": None, "enable_model_summary": None},
    {"overfit_batches": 3},
    {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2},
]


@covering(kind=KINDS, options=OPTIONS)
@pytest.mark.filterwarnings(
    "ignore:.*(overfit_batches|barebones|limit_train_batches=0|Override `SequentialSampler)",  # notes on the options
    "ignore:You requested to overfit but enabled train dataloader shuffling",
)
def test_the_default_callback_works_with_any_trainer_options(
    kind: tuple[Any, type[GPUStarvationCallback]], options: dict[str, Any], tmp_path: Path
) -> None:
    package, callback = kind
    starvation = callback()
    trainer = make_trainer(starvation, package=package, **({"default_root_dir": tmp_path} | options))
    for _ in range(2):
        trainer.fit(make_model(package), make_loader(8))
        assert_clean(trainer)
    trainer.validate(make_model(package), make_loader(2), verbose=False)
    assert starvation.report().evidence


@pytest.mark.parametrize("hook", ["training_step", "on_train_start", "on_train_epoch_end", "on_fit_start", "setup"])
def test_no_wrapper_is_left_on_the_trainer_after_an_exception(hook: str, quiet: GPUStarvationCallback) -> None:
    class Broken(BoringModel):
        pass

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken on purpose")

    setattr(Broken, hook, fail)
    trainer = make_trainer(quiet, enable_progress_bar=True)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        trainer.fit(Broken(), make_loader())
    assert_clean(trainer)


def test_an_exception_in_the_dataset_reaches_the_user_unchanged(quiet: GPUStarvationCallback) -> None:
    class Bad(RandomDataset):
        def __getitem__(self, index: int) -> Any:
            if index == 7:
                raise ValueError("sample 7")
            return super().__getitem__(index)

    trainer = make_trainer(quiet)
    with pytest.raises(ValueError, match="sample 7"):
        trainer.fit(BoringModel(), DataLoader(Bad(32, 20)))
    assert_clean(trainer)
    assert quiet.report().stats.steps == 6


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")  # as meant here
def test_a_step_that_takes_dataloader_iter_is_measured(quiet: GPUStarvationCallback) -> None:
    class OwnFetch(BoringModel):
        def training_step(self, dataloader_iter: Iterator[Any]) -> Any:
            batch, _, _ = next(dataloader_iter)
            return self.step(batch)

    trainer = make_trainer(quiet)
    trainer.fit(OwnFetch(), DataLoader(Slow(30, 20)))
    stats = quiet.report().stats
    assert stats.copy_ms == 0.0
    assert stats.starved_pct is not None
    assert stats.starved_pct > 50


def test_a_loader_without_a_length_is_measured(quiet: GPUStarvationCallback) -> None:
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(torch.ones(13, 32))

    trainer = make_trainer(quiet, max_epochs=2)
    trainer.fit(BoringModel(), DataLoader(Endless()))
    assert quiet.report().stats.steps == 24
    assert_clean(trainer)


def test_a_resumed_run_continues_the_step_axis(quiet: GPUStarvationCallback, tmp_path: Path) -> None:
    trainer = make_trainer(quiet, max_steps=12, max_epochs=-1)
    trainer.fit(BoringModel(), make_loader(10))
    trainer.save_checkpoint(tmp_path / "mid.ckpt")
    logger = Memory()
    trainer = make_trainer(quiet, max_steps=20, max_epochs=-1, logger=logger)
    trainer.fit(BoringModel(), make_loader(10), ckpt_path=tmp_path / "mid.ckpt")
    assert logger.steps == [14, 19]


def test_a_second_starvation_callback_does_nothing(
    quiet: GPUStarvationCallback, caplog: pytest.LogCaptureFixture
) -> None:
    second = GPUStarvationCallback(every_n_steps=5)
    logger = Memory()
    trainer = make_trainer(quiet, second, logger=logger, max_epochs=1)
    trainer.fit(BoringModel(), make_loader())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(BoringModel(), make_loader())
    assert len(logger.rows) == 8
    assert second.summary() is None
    lines = [record for record in caplog.records if "does nothing" in record.getMessage()]
    assert [line.levelno for line in lines] == [logging.WARNING]


def test_the_callback_keeps_its_figures_when_pickled_or_copied_mid_fit(quiet: GPUStarvationCallback) -> None:
    copies: list[GPUStarvationCallback] = []

    class Copier(lightning.pytorch.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 15:
                copies.extend([pickle.loads(pickle.dumps(quiet)), copy.deepcopy(quiet)])

    run_fit(quiet, others=(Copier(),))
    for each in copies:
        assert each.report().stats.steps == 15
        run_fit(each)


def test_another_tools_patch_of_the_profiler_keeps_working(quiet: GPUStarvationCallback) -> None:
    """It wrapped ours, and takes its wrap out after we are gone, or never: both work."""
    seen: list[str] = []

    class Patch(lightning.pytorch.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            inner = trainer.profiler.start

            def start(action_name: str) -> None:
                seen.append(action_name)
                inner(action_name)

            trainer.profiler.start = start

    trainer = make_trainer(quiet, Patch())
    trainer.fit(BoringModel(), make_loader())
    assert not {"stop", "profile"} & set(vars(trainer.profiler))
    assert seen.count("run_training_batch") == 20
    assert seen.count("[LightningModule]BoringModel.on_train_batch_start") == 20
    trainer.profiler.start("run_training_batch")  # ours is dead inside it
    assert quiet.report().stats.steps == 19


def test_the_users_simple_profiler_records_every_step_and_fetch(quiet: GPUStarvationCallback) -> None:
    trainer = run_fit(quiet, profiler="simple")
    assert len(trainer.profiler.recorded_durations["run_training_batch"]) == 20
    assert len(trainer.profiler.recorded_durations["[_TrainingEpochLoop].train_dataloader_next"]) == 20

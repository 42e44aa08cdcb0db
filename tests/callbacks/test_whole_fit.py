"""The whole of a run, measured in real fits on a scripted clock: only what is told to take time takes any."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from measure.small_fits import CpuPrefetch, Memory, make_trainer
from measure.test_wall import Clock, told
from torch.utils.data import DataLoader, Dataset

from lightning_feed import GPUStarvationCallback
from lightning_feed.callbacks import starvation as starvation_callback
from lightning_feed.measure.loop import MeasuredLoop
from lightning_feed.report.document import read_document
from lightning_feed.report.report import headline
from lightning_feed.verdict.diagnosis import Diagnosis, Remedy

pytestmark = [
    # These fits are small on purpose.
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:predict returned None"),
]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """In the place of the host's in a run's own meters."""
    clock = Clock()
    monkeypatch.setattr(starvation_callback, "WallClock", partial(starvation_callback.WallClock, clock))
    monkeypatch.setattr("lightning_feed.callbacks.starvation_run.MeasuredLoop", partial(MeasuredLoop, clock=clock))
    monkeypatch.setattr("lightning_feed.callbacks.starvation_run.host_clock", clock)
    return clock


class Takes(Dataset[torch.Tensor]):
    """Samples that take so many seconds each."""

    def __init__(self, clock: Clock, length: int, seconds: float) -> None:
        self.clock = clock
        self.length = length
        self.seconds = seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.clock.sleep(self.seconds)
        return torch.ones(32)


class Model(BoringModel):
    """Its hooks take whole seconds, each another number of them."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.sleep = clock.sleep

    def prepare_data(self) -> None:
        self.sleep(20)

    def setup(self, stage: str) -> None:
        self.sleep(10)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sleep(2)
        return super().training_step(batch, batch_idx)

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        self.sleep(3)
        super().backward(loss, *args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.sleep(4)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.sleep(5)
        return super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.sleep(6)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.sleep(7)

    def on_train_epoch_end(self) -> None:
        self.sleep(100)

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self.sleep(1000)


def loader(clock: Clock, length: int, seconds: float) -> DataLoader[Any]:
    return DataLoader(Takes(clock, length, seconds))


def measured_fit(clock: Clock, *others: Any, callback: Any = None, **options: Any) -> Diagnosis:
    """Two epochs of 6 batches of 1 + 2 + 3 + 4 s, each followed by a validation of 4 batches of 1 + 5 s."""
    starvation = callback or GPUStarvationCallback(report=False)
    trainer = make_trainer(starvation, *others, **({"max_epochs": 2, "limit_val_batches": 1.0} | options))
    trainer.fit(Model(clock), loader(clock, 6, 1), loader(clock, 4, 1))
    return starvation.report()


EXPECTED = {
    "train": (2 * (6 * 10 - 1), 2),
    "validation": (2 * 4 * 6, 2),
    "epoch starts": (2, 2),
    "sanity check": (2 * 6, 1),
    "set-up": (30, 1),
    "rest": (200, 2),
}


@pytest.mark.parametrize("others", [(), (CpuPrefetch(),)], ids=["plain", "prefetched"])
def test_the_parts_of_a_fit_add_up_to_its_wall_time(clock: Clock, others: tuple[Any, ...]) -> None:
    diagnosis = measured_fit(clock, *others)
    wall = diagnosis.measurements.wall
    assert wall is not None
    assert told(wall) == EXPECTED
    assert wall.wall_s == pytest.approx(clock.now * 1e-9)


def test_checkpoint_time_is_not_counted_in_the_part_it_interrupts(clock: Clock, tmp_path: Path) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=4, save_top_k=-1)
    diagnosis = measured_fit(clock, saver, enable_checkpointing=True)
    wall = diagnosis.measurements.wall
    assert wall is not None
    assert told(wall) == EXPECTED | {"checkpoints": (3000, 3)}
    assert "save_checkpoint" not in vars(saver)


def test_validation_during_gradient_accumulation_is_counted_in_full(clock: Clock) -> None:
    diagnosis = measured_fit(clock, accumulate_grad_batches=4, val_check_interval=3)
    wall = diagnosis.measurements.wall
    assert wall is not None
    assert told(wall)["validation"] == (4 * 4 * 6, 4)
    assert wall.wall_s == pytest.approx(clock.now * 1e-9)


def test_a_second_fit_measures_only_its_own_wall_time(clock: Clock) -> None:
    starvation = GPUStarvationCallback(report=False)
    measured_fit(clock, callback=starvation)
    before = clock.now
    diagnosis = measured_fit(clock, callback=starvation)
    assert diagnosis.measurements.wall is not None
    assert diagnosis.measurements.wall.wall_s == pytest.approx((clock.now - before) * 1e-9)


# --- computing, divided -------------------------------------------------------------------------------------------


def test_compute_time_divides_into_forward_backward_and_optimizer(clock: Clock) -> None:
    stats = measured_fit(clock, limit_val_batches=0).stats
    assert (stats.forward_ms, stats.backward_ms, stats.optimizer_ms, stats.compute_ms) == (2000, 3000, 4000, 9000)
    assert stats.data_ms == 1000


# --- validation, test and prediction ------------------------------------------------------------------------------


def test_validation_in_a_fit_is_measured_like_training(clock: Clock) -> None:
    logger = Memory()
    validation = measured_fit(clock, logger=logger).measurements.validation
    assert validation is not None
    stats = (validation.stats.data_ms, validation.stats.compute_ms)
    assert (validation.stats.steps, *stats) == (2 * (4 - 1), pytest.approx(1000), pytest.approx(5000))
    assert (validation.stats.epoch_start_s, validation.waited_s, validation.facts.stage) == (1.0, 8.0, "validate")
    rows = [(step, tags) for step, tags in logger.rows if "feed_val/step_ms" in tags]
    assert [step for step, _ in rows] == [5, 11]
    assert rows[-1][1]["feed_val/starved_pct"] == pytest.approx(100 / 6)


@pytest.mark.parametrize("prefetched", [False, True])
def test_several_validation_loaders_are_reported_by_name(clock: Clock, prefetched: bool) -> None:
    logger = Memory()
    starvation = GPUStarvationCallback(report=False)
    others = (CpuPrefetch(),) if prefetched else ()
    trainer = make_trainer(*others, starvation, limit_val_batches=1.0, logger=logger, num_sanity_val_steps=0)
    trainer.fit(Model(clock), loader(clock, 4, 1), {"clean": loader(clock, 3, 1), "noisy": loader(clock, 5, 4)})
    validation = starvation.report().measurements.validation
    assert validation is not None
    assert [(steps.name, steps.steps, steps.data_ms, steps.step_ms) for steps in validation.by_loader] == [
        ("clean", 2, 1000, 6000),
        ("noisy", 5, 4000, 9000),
    ]
    (tags,) = [tags for _, tags in logger.rows if "feed_val/step_ms" in tags]
    assert tags["feed_val/noisy/data_ms"] == pytest.approx(4000)


@pytest.mark.parametrize(
    ("stage", "section", "compute"),
    [("validate", "feed_val", 5), ("test", "feed_test", 6), ("predict", "feed_predict", 7)],
)
def test_validate_test_and_predict_each_have_their_own_report(
    stage: Any, section: str, compute: int, clock: Clock, tmp_path: Path
) -> None:
    class Logger(Memory):
        log_dir = str(tmp_path)

    logger = Logger()
    starvation = GPUStarvationCallback()
    trainer = make_trainer(starvation, logger=logger, limit_val_batches=1.0)
    method: Callable[..., Any] = getattr(trainer, stage)
    method(Model(clock), loader(clock, 60, 3))
    diagnosis = starvation.report(stage)
    assert (diagnosis.stats.steps, diagnosis.stats.data_ms, diagnosis.stats.compute_ms) == (
        40,
        3000,
        1000 * compute,
    )
    assert diagnosis.bottleneck == "data"
    assert diagnosis.measurements.wall is not None
    part = "validation" if stage == "validate" else stage
    assert told(diagnosis.measurements.wall) == {"set-up": (30, 1), part: (60 * (3 + compute), 1)}
    assert logger.rows[-1][1][f"{section}/step_ms"] == 1000 * (3 + compute)
    written = read_document(tmp_path / stage).diagnosis
    assert written.measurements.facts.stage == stage
    assert "waits for data" in headline(written)
    assert not headline(written).startswith("training")
    assert all("training" not in remedy.where for remedy in diagnosis.remedies)
    assert starvation.report().bottleneck == "unknown"  # nothing was trained


def test_the_report_of_a_fit_is_kept_after_trainer_test(clock: Clock) -> None:
    starvation = GPUStarvationCallback(report=False)
    trainer = make_trainer(starvation)
    model = Model(clock)
    trainer.fit(model, loader(clock, 20, 1))
    fitted = starvation.report()
    summary = starvation.summary()
    trainer.test(model, loader(clock, 20, 1), verbose=False)
    assert starvation.report() == fitted
    assert starvation.summary() is summary
    assert starvation.report("test").stats.steps == 19


# --- the verdict --------------------------------------------------------------------------------------------------


def apply(remedy: Remedy) -> dict[str, Any]:
    """The Trainer's arguments that a remedy's code names, taken literally."""
    assert remedy.form == "trainer"
    made: dict[str, Any] = eval(f"dict({remedy.code})")  # it is our own text
    return made


def run_of(clock: Clock, *others: Any, epochs: int = 10, **options: Any) -> Diagnosis:
    """A run whose validation, of 16 batches of 4 + 5 s, takes more than training, of 12 batches of 10 s."""
    starvation = GPUStarvationCallback(report=False)
    quiet = {"max_epochs": epochs, "limit_val_batches": 1.0, "num_sanity_val_steps": 0}
    trainer = make_trainer(starvation, *others, **(quiet | options))
    model = Model(clock)
    model.on_train_epoch_end = lambda: None  # type: ignore[method-assign]
    trainer.fit(model, loader(clock, 12, 1), loader(clock, 16, 4))
    return starvation.report()


@pytest.mark.parametrize(
    ("options", "where", "code"),
    [
        ({}, "check_val_every_n_epoch: 1 -> 5 in your Trainer", "check_val_every_n_epoch=5"),
        pytest.param(
            {"val_check_interval": 4},
            "val_check_interval: 4 -> 1.0 in your Trainer",
            "val_check_interval=1.0",
            marks=pytest.mark.nightly,
        ),
        (
            {"val_check_interval": 6, "check_val_every_n_epoch": None},
            "val_check_interval: 6 -> 60 in your Trainer",
            "val_check_interval=60",
        ),
    ],
)
def test_a_validation_bound_run_gets_a_remedy_that_gains_what_it_promises(
    options: dict[str, Any], where: str, code: str, clock: Clock
) -> None:
    diagnosis = run_of(clock, **options)
    assert diagnosis.bottleneck == "validation"
    assert headline(diagnosis).startswith("limited by validation: validation takes ")
    assert "of the run, and waits for data 44 % of its time" in headline(diagnosis)
    remedy = diagnosis.remedies[0]
    assert (remedy.where, remedy.code) == (where, code)
    after = run_of(clock, **(options | apply(remedy)))
    assert diagnosis.measurements.wall is not None
    assert after.measurements.wall is not None
    before_s = diagnosis.measurements.wall.wall_s
    after_s = after.measurements.wall.wall_s
    assert remedy.most_gain_pct == pytest.approx(100 * (before_s - after_s) / before_s, rel=0.15)


def test_the_remedy_for_costly_checkpoints_saves_them_less_often(clock: Clock, tmp_path: Path) -> None:
    def saver(steps: int) -> ModelCheckpoint:
        return ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=steps, save_top_k=-1)

    diagnosis = run_of(clock, saver(2), enable_checkpointing=True, limit_val_batches=0)
    assert diagnosis.bottleneck == "checkpoints"
    assert headline(diagnosis) == "limited by checkpoints: checkpoints take 98 % of the run"
    (remedy,) = diagnosis.remedies
    assert (remedy.form, remedy.code) == ("callback", "ModelCheckpoint(every_n_train_steps=60)")  # two of 60 are left


@pytest.mark.parametrize(
    ("scheduler", "options", "code"),
    [
        ({"interval": "epoch"}, {}, None),  # Lightning raises at the end of an epoch without the metric
        ({"interval": "epoch", "strict": False}, {}, "check_val_every_n_epoch=5"),
        ({"interval": "epoch"}, {"val_check_interval": 4}, "val_check_interval=1.0"),
        pytest.param(
            {"interval": "epoch"},
            {"val_check_interval": 6, "check_val_every_n_epoch": None},
            None,
            marks=pytest.mark.nightly,
        ),
        ({"interval": "step", "frequency": 4}, {"val_check_interval": 4}, None),
    ],
)
def test_validation_remedies_respect_a_scheduler_that_monitors_a_metric(
    scheduler: dict[str, Any], options: dict[str, Any], code: str | None, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "metric"} | scheduler}

    monkeypatch.setattr(Model, "configure_optimizers", configure_optimizers)
    monkeypatch.setattr(Model, "on_validation_epoch_end", lambda self: self.log("metric", 1.0))
    diagnosis = run_of(clock, **options)
    assert [remedy.code for remedy in diagnosis.remedies if "val_" in remedy.code] == ([code] if code else [])
    if code is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it was not there
            run_of(clock, **(options | apply(diagnosis.remedies[0])))


# --- the user's profilers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_a_simple_profiler_sees_each_fetch_once(stage: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = SimpleNamespace(perf_counter=lambda: clock.now * 1e-9, monotonic=lambda: clock.now * 1e-9)  # of 2.4
    monkeypatch.setattr("lightning.pytorch.profilers.simple.time", timer)
    seen = []
    for others in ((), (CpuPrefetch(),)):
        trainer = make_trainer(*others, profiler="simple", limit_val_batches=1.0)
        getattr(trainer, stage)(Model(clock), loader(clock, 8, 3))
        fetch = "[_TrainingEpochLoop].train_dataloader_next" if stage == "fit" else "[_EvaluationLoop].val_next"
        seen.append([round(each) for each in trainer.profiler.recorded_durations[fetch]])
    assert seen[0] == seen[1]
    assert sum(seen[0]) == 8 * 3

"""GPUStarvationCallback in real Trainers: what is logged and when, what stays behind, and that it tells the truth."""

import copy
import logging
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger, Logger
from torch.utils.data import DataLoader, Dataset, IterableDataset
from watch.fake_device import FakeDevice

from lightning_feed import GPUStarvationCallback, PrefetchCallback, pl, starvation_callback
from lightning_feed.errors import SettingsError
from lightning_feed.transfer.streams import NullStream
from lightning_feed.watch.clocks import EventRing
from lightning_feed.watch.nvml import GpuStats

pytestmark = [
    # These fits are small on purpose.
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*`max_epochs` was not set"),
    # Lightning's own advice, for runs that are resumed in the middle of an epoch.
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]
PARTS = ("compute", "h2d", "data_idle", "other")
CROSSING = pytest.mark.skipif(
    tuple(map(int, pytorch_lightning.__version__.split(".")[:2])) < (2, 6),
    reason="pytorch_lightning before 2.6 refuses every callback that is not based on its own class",
)


class Memory(Logger):
    """Keeps what is logged under feed tags, and layouts, as TensorBoard's logger would take them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.layouts: list[dict[str, Any]] = []

    name = "memory"
    version = 0

    @property
    def experiment(self) -> "Memory":
        return self

    def add_custom_scalars(self, layout: dict[str, Any]) -> None:
        self.layouts.append(layout)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        mine = {tag: value for tag, value in metrics.items() if tag.startswith("feed")}
        if mine:
            self.rows.append((step, mine))

    @property
    def steps(self) -> list[int | None]:
        return [step for step, _ in self.rows]


def _model(package: Any = lightning.pytorch) -> Any:
    if package is lightning.pytorch:
        return BoringModel()
    from pytorch_lightning.demos.boring_classes import BoringModel as OtherModel

    return OtherModel()


def _loader(batches: int = 20, **options: Any) -> DataLoader[Any]:
    return DataLoader(RandomDataset(32, batches), **options)


def _trainer(*callbacks: Any, package: Any = lightning.pytorch, **options: Any) -> Any:
    quiet = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
    }
    return package.Trainer(callbacks=list(callbacks), **(quiet | options))


def _fit(callback: Any, *, batches: int = 20, model: Any = None, others: tuple[Any, ...] = (), **options: Any) -> Any:
    trainer = _trainer(*others, callback, **options)
    trainer.fit(model or BoringModel(), _loader(batches))
    assert_clean(trainer)
    return trainer


def assert_clean(trainer: Any) -> None:
    """Nothing of ours is left on the Trainer."""
    assert not {"start", "stop", "profile"} & set(vars(trainer.profiler))
    assert trainer.progress_bar_callback is None or "get_metrics" not in vars(trainer.progress_bar_callback)
    mine = [callback for callback in trainer.callbacks if isinstance(callback, GPUStarvationCallback)]
    assert all(callback._fit is None for callback in mine)


@pytest.fixture
def quiet() -> GPUStarvationCallback:
    return GPUStarvationCallback(every_n_steps=5, nvml=False, report=False)


# --- what is logged, and when -------------------------------------------------------------------------------------


def test_windows_are_logged_where_the_trainer_logs(quiet: GPUStarvationCallback) -> None:
    logger = Memory()
    quiet.every_n_steps = None
    _fit(quiet, batches=18, logger=logger, max_epochs=2, log_every_n_steps=4)
    assert logger.steps == [3, 7, 11, 15, 19, 23, 27, 31, 35]


def test_every_n_steps_goes_before_the_trainer(quiet: GPUStarvationCallback) -> None:
    logger = Memory()
    _fit(quiet, batches=12, logger=logger, log_every_n_steps=3)
    assert logger.steps == [4, 9]


def test_tags_of_a_fit(quiet: GPUStarvationCallback) -> None:
    logger = Memory()
    _fit(quiet, batches=10, logger=logger)
    (_, first), (_, second) = logger.rows
    assert set(first) - set(second) == {"feed_epoch/start_s"}
    for tags in (first, second):
        assert sum(tags[f"feed_step/{part}_ms"] for part in PARTS) == pytest.approx(tags["feed_step/step_ms"])
        assert tags["feed_stack/4_plus_other_ms"] == pytest.approx(tags["feed_step/step_ms"])
        assert 0 < tags["feed/starved_pct"] < tags["feed/input_pct"] < 100
        assert tags["feed_host/hidden_wait_ms"] == 0.0
        assert not {tag for tag in tags if tag.startswith(("feed_gpu", "feed/prefetch", "feed/efficiency"))}


def test_all_loggers_get_the_same(quiet: GPUStarvationCallback, tmp_path: Path) -> None:
    first, second = Memory(), Memory()
    _fit(quiet, logger=[first, CSVLogger(tmp_path), second])
    assert first.rows == second.rows
    assert len(first.rows) == 4
    (csv,) = tmp_path.rglob("metrics.csv")
    assert "feed/starved_pct" in csv.read_text().splitlines()[0]
    assert len(csv.read_text().splitlines()) == 1 + 4


def test_the_axis_counts_optimizer_steps(quiet: GPUStarvationCallback) -> None:
    logger = Memory()
    quiet.every_n_steps = 2
    _fit(quiet, batches=16, logger=logger, accumulate_grad_batches=3)
    assert logger.steps == [1, 3, 5]  # 16 batches are 5 steps of 3 and a last one of 1
    assert sorted(set(logger.steps)) == logger.steps


def test_manual_optimisation(quiet: GPUStarvationCallback) -> None:
    class Manual(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.optimizers().step()  # type: ignore[union-attr]

    logger = Memory()
    _fit(quiet, model=Manual(), logger=logger)
    assert logger.steps == [4, 9, 14, 19]


def test_the_layout_is_added_once(quiet: GPUStarvationCallback) -> None:
    logger = Memory()
    trainer = _fit(quiet, logger=logger)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(BoringModel(), _loader())
    assert len(logger.layouts) == 1
    assert "feed_stack/1_compute_ms" in str(logger.layouts)


def test_without_a_logger_it_warns_once_and_measures(
    quiet: GPUStarvationCallback, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = _fit(quiet)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(BoringModel(), _loader())
    (line,) = [record for record in caplog.records if record.name.startswith("lightning_feed")]
    assert line.levelno == logging.WARNING
    assert "no logger" in line.getMessage()
    summary = quiet.summary()
    assert summary is not None
    assert summary.steps == 5


def test_the_first_batch_of_an_epoch_and_a_validation_are_left_out(quiet: GPUStarvationCallback) -> None:
    _fit(quiet, batches=10, max_epochs=2, limit_val_batches=2, val_check_interval=5, num_sanity_val_steps=2)
    # each epoch: not the first, not the one after the validation in its middle
    assert quiet.report().stats.steps == 2 * (10 - 2)


def test_summary_and_report_before_anything(quiet: GPUStarvationCallback) -> None:
    assert quiet.summary() is None
    assert quiet.report().bottleneck == "unknown"


def test_a_fit_shorter_than_a_window_has_a_summary(quiet: GPUStarvationCallback) -> None:
    quiet.every_n_steps = 50
    _fit(quiet, batches=4)
    summary = quiet.summary()
    assert summary is not None
    assert summary.steps == 3


def test_figures_of_the_last_fit_only(quiet: GPUStarvationCallback) -> None:
    _fit(quiet, batches=30)
    _fit(quiet, batches=7)
    assert quiet.report().stats.steps == 6


def test_a_long_run_without_windows_stays_small(quiet: GPUStarvationCallback, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starvation_callback, "UNFOLDED_STEPS", 8)
    held: list[int] = []

    class Watch(lightning.pytorch.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            held.append(len(quiet._ledger.fresh))

    quiet.every_n_steps = None
    _fit(quiet, batches=40, others=(Watch(),), log_every_n_steps=0)
    assert max(held) <= 8
    assert quiet.report().stats.steps == 20  # without the warm-up


def test_facts_of_the_loader(quiet: GPUStarvationCallback) -> None:
    trainer = _trainer(quiet)
    trainer.fit(BoringModel(), _loader(4, num_workers=1, prefetch_factor=3, pin_memory=False))
    assert (quiet._facts.num_workers, quiet._facts.prefetch_factor, quiet._facts.pin_memory) == (1, 3, False)
    assert quiet._facts.usable_cpus is not None
    assert quiet._ledger.queue == 3


# --- beside a prefetcher ------------------------------------------------------------------------------------------


class CpuPrefetch(PrefetchCallback):
    """The whole injection, with no stream."""

    def open_stream(self, device: torch.device) -> NullStream:
        return NullStream()


class Slow(Dataset[torch.Tensor]):
    def __init__(self, batches: int, ms: float) -> None:
        self.batches, self.ms = batches, ms

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.ms / 1e3)
        return torch.ones(32)


def test_what_a_prefetcher_fetches_is_data_and_not_other(quiet: GPUStarvationCallback) -> None:
    logger = Memory()
    trainer = _trainer(CpuPrefetch(), quiet, logger=logger)
    trainer.fit(BoringModel(), DataLoader(Slow(30, 5)))
    stats = quiet.report().stats
    assert stats.prefetch_active is True
    assert stats.starved_pct is not None
    assert stats.starved_pct > 50
    assert logger.rows[-1][1]["feed/prefetch_active"] == 1.0


def test_a_prefetcher_that_stands_aside_is_logged_as_zero(quiet: GPUStarvationCallback) -> None:
    logger = Memory()
    _fit(quiet, logger=logger, others=(PrefetchCallback(),))
    assert {tags["feed/prefetch_active"] for _, tags in logger.rows} == {0.0}


# --- the progress bar and the report ------------------------------------------------------------------------------


class OwnBar(lightning.pytorch.callbacks.ProgressBar):
    """As Lightning's Rich bar, which is there only with an extra: it passes the metrics of its base on."""

    def disable(self) -> None:
        pass

    def get_metrics(self, *args: Any) -> dict[str, Any]:
        return {**super().get_metrics(*args), "own": 1}


@pytest.mark.parametrize("bar", [lightning.pytorch.callbacks.TQDMProgressBar, OwnBar])
def test_the_progress_bar_shows_the_share(bar: Callable[[], Any], quiet: GPUStarvationCallback) -> None:
    shown: list[Any] = []

    class Look(lightning.pytorch.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            shown.append(trainer.progress_bar_callback.get_metrics(trainer, pl_module).get("feed"))

    _fit(quiet, batches=12, others=(bar(), Look()), enable_progress_bar=True)
    assert shown[:5] == [None] * 5
    summary = quiet.summary()
    assert summary is not None
    assert shown[-1] == f"{summary.starved_pct:.0f}%"


@pytest.mark.parametrize("progress_bar", [True, False])
def test_the_report_is_printed_after_the_first_epoch_and_at_the_end(
    progress_bar: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    starvation = GPUStarvationCallback(nvml=False)
    _fit(starvation, max_epochs=3, enable_progress_bar=progress_bar)
    out = capsys.readouterr().out
    assert out.count("FEED  ") == 2
    assert out.count("if data were free") == 2


def test_the_report_of_one_epoch_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    _fit(GPUStarvationCallback(nvml=False))
    assert capsys.readouterr().out.count("FEED  ") == 1


def test_no_report_when_not_wanted(quiet: GPUStarvationCallback, capsys: pytest.CaptureFixture[str]) -> None:
    _fit(quiet)
    assert "FEED" not in capsys.readouterr().out


# --- contract: any Trainer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 2.5, "10", True])
def test_a_bad_interval_is_refused(value: Any) -> None:
    with pytest.raises(SettingsError, match=r"every_n_steps=.*a whole number of 1 or more"):
        GPUStarvationCallback(every_n_steps=value)


@pytest.mark.parametrize(
    ("package", "kind"),
    [
        (lightning.pytorch, GPUStarvationCallback),
        (pytorch_lightning, pl.GPUStarvationCallback),
        pytest.param(pytorch_lightning, GPUStarvationCallback, marks=CROSSING),
    ],
    ids=["lightning", "pytorch_lightning", "crossing over"],
)
@pytest.mark.parametrize(
    "options",
    [
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
    ],
    ids=lambda options: " ".join(f"{key}={value}" for key, value in list(options.items())[:2]) or "plain",
)
@pytest.mark.filterwarnings(
    "ignore:.*(overfit_batches|barebones|limit_train_batches=0|Override `SequentialSampler)",  # notes on the options
    "ignore:You requested to overfit but enabled train dataloader shuffling",
)
def test_default_callback_in_any_trainer(
    package: Any, kind: type[GPUStarvationCallback], options: dict[str, Any], tmp_path: Path
) -> None:
    starvation = kind()
    trainer = _trainer(starvation, package=package, **({"default_root_dir": tmp_path} | options))
    for _ in range(2):
        trainer.fit(_model(package), _loader(8))
        assert_clean(trainer)
    trainer.validate(_model(package), _loader(2), verbose=False)
    assert starvation.report().evidence


@pytest.mark.parametrize("hook", ["training_step", "on_train_start", "on_train_epoch_end", "on_fit_start", "setup"])
def test_nothing_is_left_behind_by_an_exception(hook: str, quiet: GPUStarvationCallback) -> None:
    class Broken(BoringModel):
        pass

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken on purpose")

    setattr(Broken, hook, fail)
    trainer = _trainer(quiet, enable_progress_bar=True)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        trainer.fit(Broken(), _loader())
    assert_clean(trainer)


def test_an_exception_in_the_dataset_is_the_one_that_is_raised(quiet: GPUStarvationCallback) -> None:
    class Bad(RandomDataset):
        def __getitem__(self, index: int) -> Any:
            if index == 7:
                raise ValueError("sample 7")
            return super().__getitem__(index)

    trainer = _trainer(quiet)
    with pytest.raises(ValueError, match="sample 7"):
        trainer.fit(BoringModel(), DataLoader(Bad(32, 20)))
    assert_clean(trainer)
    assert quiet.report().stats.steps == 6


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")  # as meant here
def test_a_step_that_fetches_for_itself(quiet: GPUStarvationCallback) -> None:
    class OwnFetch(BoringModel):
        def training_step(self, dataloader_iter: Iterator[Any]) -> Any:
            batch, _, _ = next(dataloader_iter)
            return self.step(batch)

    trainer = _trainer(quiet)
    trainer.fit(OwnFetch(), DataLoader(Slow(30, 5)))
    stats = quiet.report().stats
    assert stats.h2d_ms == 0.0
    assert stats.starved_pct is not None
    assert stats.starved_pct > 50


def test_a_loader_without_a_length(quiet: GPUStarvationCallback) -> None:
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(torch.ones(13, 32))

    trainer = _trainer(quiet, max_epochs=2)
    trainer.fit(BoringModel(), DataLoader(Endless()))
    assert quiet.report().stats.steps == 24
    assert_clean(trainer)


def test_resuming_goes_on_with_the_step_axis(quiet: GPUStarvationCallback, tmp_path: Path) -> None:
    trainer = _trainer(quiet, max_steps=12, max_epochs=-1)
    trainer.fit(BoringModel(), _loader(10))
    trainer.save_checkpoint(tmp_path / "mid.ckpt")
    logger = Memory()
    trainer = _trainer(quiet, max_steps=20, max_epochs=-1, logger=logger)
    trainer.fit(BoringModel(), _loader(10), ckpt_path=tmp_path / "mid.ckpt")
    assert logger.steps == [14, 19]


def test_a_second_instance_stands_aside(quiet: GPUStarvationCallback, caplog: pytest.LogCaptureFixture) -> None:
    second, logger = GPUStarvationCallback(every_n_steps=5, nvml=False), Memory()
    trainer = _trainer(quiet, second, logger=logger, max_epochs=1)
    trainer.fit(BoringModel(), _loader())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(BoringModel(), _loader())
    assert len(logger.rows) == 8
    assert second.summary() is None
    lines = [record for record in caplog.records if "stands aside" in record.getMessage()]
    assert [line.levelno for line in lines] == [logging.WARNING]


def test_it_pickles_and_copies_during_a_fit_and_keeps_its_figures(quiet: GPUStarvationCallback) -> None:
    copies: list[GPUStarvationCallback] = []

    class Copier(lightning.pytorch.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 15:
                copies.extend([pickle.loads(pickle.dumps(quiet)), copy.deepcopy(quiet)])

    _fit(quiet, others=(Copier(),))
    for each in copies:
        assert each.report().stats.steps == 15
        _fit(each)


def test_another_tool_that_patches_the_profiler_too(quiet: GPUStarvationCallback) -> None:
    """It wrapped ours, and takes its wrap out after we are gone, or never: both work."""
    seen: list[str] = []

    class Patch(lightning.pytorch.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            inner = trainer.profiler.start

            def start(action_name: str) -> None:
                seen.append(action_name)
                inner(action_name)

            trainer.profiler.start = start

    trainer = _trainer(quiet, Patch())
    trainer.fit(BoringModel(), _loader())
    assert not {"stop", "profile"} & set(vars(trainer.profiler))
    assert seen.count("run_training_batch") == 20
    assert seen.count("[LightningModule]BoringModel.on_train_batch_start") == 20
    trainer.profiler.start("run_training_batch")  # ours is dead inside it
    assert quiet.report().stats.steps == 19


def test_a_profiler_of_the_user_sees_what_it_would_see(quiet: GPUStarvationCallback) -> None:
    trainer = _fit(quiet, profiler="simple")
    assert len(trainer.profiler.recorded_durations["run_training_batch"]) == 20
    assert len(trainer.profiler.recorded_durations["[_TrainingEpochLoop].train_dataloader_next"]) == 20


# --- a device that computes on its own ----------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Events of a fake device in the place of the CPU's missing ones; its clock is the host's."""
    fake = FakeDevice()
    monkeypatch.setattr(starvation_callback, "open_ring", lambda _: EventRing(fake.event, 512))
    return fake


def test_nothing_is_waited_for_while_steps_run(
    device: FakeDevice, quiet: GPUStarvationCallback, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(name: str) -> Callable[..., Any]:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError(f"{name} makes the host wait for the device")

        return fail

    class Guard(lightning.pytorch.Callback):
        """From the first hook of the first batch to the last one of the epoch."""

        def on_train_epoch_start(self, *args: Any) -> None:
            self.patch = pytest.MonkeyPatch()
            for owner, name in (
                (torch.cuda, "synchronize"),
                (torch.cuda.Event, "synchronize"),
                (torch.cuda.Stream, "synchronize"),
                (torch.Tensor, "item"),
                (torch.Tensor, "cpu"),
                (torch.Tensor, "tolist"),
                (type(device.event()), "synchronize"),
            ):
                self.patch.setattr(owner, name, forbidden(name))

        def on_train_batch_end(self, *args: Any) -> None:
            device.launch(20)
            device.host(10)

        def on_train_end(self, *args: Any) -> None:
            self.patch.undo()

    logger, guard = Memory(), Guard()
    try:
        _fit(quiet, others=(guard, CpuPrefetch()), logger=logger, batches=60, enable_progress_bar=True)
    finally:
        guard.patch.undo()
    assert len(logger.rows) == 12
    assert device.waited == 1  # at the end of training
    assert quiet.report().stats.steps == 40  # without the warm-up


def test_windows_hold_what_the_device_has_finished(device: FakeDevice, quiet: GPUStarvationCallback) -> None:
    class Work(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            device.launch(20)
            device.host(10)
            return super().training_step(batch, batch_idx)

    logger = Memory()
    _fit(quiet, model=Work(), logger=logger, batches=20)
    assert [tags["feed_step/step_ms"] for _, tags in logger.rows] == [pytest.approx(20)] * 4
    assert [tags["feed/starved_pct"] for _, tags in logger.rows] == [0.0] * 4
    assert quiet.report().stats.steps == 19


# --- NVML beside it -----------------------------------------------------------------------------------------------


class FakeSampler:
    """Stands for the sampling thread."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.started = self.stopped = 0

    def start(self) -> None:
        self.started += 1

    def stop(self) -> None:
        self.stopped += 1

    def take(self) -> GpuStats:
        return GpuStats(util_pct=97.0, mem_used_mib=1024.0)


@pytest.mark.parametrize("broken", [False, True])
def test_gpu_figures_are_logged_and_their_thread_ends(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    samplers: list[FakeSampler] = []

    def make(uuid: str) -> FakeSampler:
        samplers.append(FakeSampler(uuid))
        return samplers[-1]

    class Model(BoringModel):
        def on_train_epoch_end(self) -> None:
            if broken:
                raise RuntimeError("broken on purpose")

    monkeypatch.setattr(starvation_callback, "NvmlSampler", make)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="uuid of torch"))
    monkeypatch.setattr(torch.version, "hip", None)
    starvation, logger = GPUStarvationCallback(every_n_steps=5, report=False), Memory()
    start = starvation._start_nvml
    monkeypatch.setattr(starvation, "_start_nvml", lambda trainer, _: start(trainer, torch.device("cuda", 0)))
    trainer = _trainer(starvation, logger=logger)
    with pytest.raises(RuntimeError, match="on purpose") if broken else nullcontext():
        trainer.fit(Model(), _loader())
    (sampler,) = samplers
    assert (sampler.uuid, sampler.started, sampler.stopped) == ("uuid of torch", 1, 1)
    gpu = {tag: value for tag, value in logger.rows[0][1].items() if tag.startswith("feed_gpu")}
    assert gpu == {"feed_gpu/util_pct": 97.0, "feed_gpu/mem_used_mib": 1024.0}


def test_without_a_gpu_one_info_line(caplog: pytest.LogCaptureFixture) -> None:
    starvation = GPUStarvationCallback(report=False)
    with caplog.at_level(logging.INFO, logger="lightning_feed"):
        for _ in range(2):
            _fit(starvation, logger=Memory())
    lines = [record for record in caplog.records if "NVML" in record.getMessage()]
    assert [line.levelno for line in lines] == [logging.INFO]


# --- the truth ----------------------------------------------------------------------------------------------------


class TimedLoader(DataLoader[Any]):
    """Times its own ``next``: a second clock, which knows nothing of the callback."""

    def __iter__(self) -> Any:
        self.waits: list[float] = []
        inner = super().__iter__()
        while True:
            began = time.monotonic()
            try:
                batch = next(inner)
            except StopIteration:
                return
            self.waits.append(time.monotonic() - began)
            yield batch


@pytest.mark.parametrize(
    ("workers", "data_ms", "compute_ms", "ideal_pct"),
    [
        (0, 20, 20, 50),
        (0, 36, 4, 90),
        (0, 4, 36, 10),
        (2, 80, 20, 50),  # two workers give a batch every 40 ms
        (2, 30, 60, 0),
    ],
)
def test_a_real_run_reads_what_is_true(
    workers: int, data_ms: float, compute_ms: float, ideal_pct: float, quiet: GPUStarvationCallback
) -> None:
    starts: list[float] = []

    class Steady(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            starts.append(time.monotonic())
            time.sleep(compute_ms / 1e3)
            return super().training_step(batch, batch_idx)

    loader = TimedLoader(Slow(48, data_ms), num_workers=workers)
    _trainer(quiet).fit(Steady(), loader)
    stats = quiet.report().stats
    left_out = max(1, 20 + 2 * workers)
    assert stats.steps == 48 - left_out
    truth_pct = 100 * sum(loader.waits[left_out:]) / (starts[-1] - starts[left_out - 1])
    assert stats.starved_pct == pytest.approx(truth_pct, abs=5)
    # What the sleeps alone would give. Lightning's own millisecond or two, and a busy machine, come on top of them.
    assert stats.starved_pct == pytest.approx(ideal_pct, abs=12)

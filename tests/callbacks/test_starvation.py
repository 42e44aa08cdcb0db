"""GPUStarvationCallback in real Trainers: what is logged and when, and what users see."""

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from measure.small_fits import CpuPrefetch, Memory, Slow, make_loader, make_trainer, run_fit
from torch.utils.data import DataLoader, Dataset

from lightning_feed import FastDataModule, GPUStarvationCallback, LoaderSettings
from lightning_feed.callbacks import starvation_reports, starvation_run
from lightning_feed.errors import SettingsError
from lightning_feed.measure import loop
from lightning_feed.report.document import read_document
from lightning_feed.report.report import headline
from lightning_feed.verdict.diagnosis import Note

pytestmark = [
    # These fits are small on purpose.
    pytest.mark.filterwarnings("ignore:.*`max_epochs` was not set"),
    # Lightning's own advice, for runs that are resumed in the middle of an epoch.
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]
PARTS = ("compute", "copy", "data", "other")


@pytest.fixture
def quiet() -> GPUStarvationCallback:
    return GPUStarvationCallback(every_n_steps=5, report=False, tags="all")


# --- what is logged, and when -------------------------------------------------------------------------------------


def test_windows_are_logged_at_the_steps_where_the_trainer_logs(quiet: GPUStarvationCallback) -> None:
    logger = Memory()
    quiet.every_n_steps = None
    run_fit(quiet, batches=18, logger=logger, max_epochs=2, log_every_n_steps=4)
    assert logger.steps == [3, 7, 11, 15, 19, 23, 27, 31, 35]


def test_logged_parts_of_a_step_add_up_to_the_step_time(
    quiet: GPUStarvationCallback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "READ_EVERY_NS", 0)  # of every window, however short
    logger = Memory()
    run_fit(quiet, batches=10, logger=logger)
    (_, first), (_, second) = logger.rows
    assert set(first) - set(second) == {"feed_epoch/start_s"}
    for tags in (first, second):
        assert sum(tags[f"feed_step/{part}_ms"] for part in PARTS) == pytest.approx(tags["feed_step/step_ms"])
        assert 0 < tags["feed/starved_pct"] < 100
        assert tags["feed_host/hidden_wait_ms"] == 0.0
        assert not {tag for tag in tags if tag.startswith(("feed_gpu", "feed/prefetch", "feed/efficiency"))}


def test_the_step_axis_of_logs_counts_optimizer_steps(quiet: GPUStarvationCallback) -> None:
    logger = Memory()
    quiet.every_n_steps = 2
    run_fit(quiet, batches=16, logger=logger, accumulate_grad_batches=3)
    assert logger.steps == [1, 3, 5]  # 16 batches are 5 steps of 3 and a last one of 1
    assert sorted(set(logger.steps)) == logger.steps


def test_a_fit_without_a_logger_warns_once_and_is_still_measured(
    quiet: GPUStarvationCallback, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = run_fit(quiet)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(BoringModel(), make_loader())
    (line,) = [record for record in caplog.records if record.name.startswith("lightning_feed")]
    assert line.levelno == logging.WARNING
    assert "no logger" in line.getMessage()
    summary = quiet.summary()
    assert summary is not None
    assert summary.steps == 5


def test_reported_facts_follow_loaders_that_change_between_epochs(quiet: GPUStarvationCallback) -> None:
    class Data(LightningDataModule):
        workers = 0

        def train_dataloader(self) -> Any:
            self.workers += 1
            return make_loader(4, num_workers=self.workers)

        def val_dataloader(self) -> Any:
            return make_loader(1)

    limits = {"limit_train_batches": 3, "limit_val_batches": 0}
    trainer = make_trainer(quiet, max_epochs=2, reload_dataloaders_every_n_epochs=1, **limits)
    trainer.fit(BoringModel(), datamodule=Data())
    facts = quiet.report().measurements.facts
    assert (facts.batches_per_epoch, facts.trainer.breaks_off) == (3, True)
    assert facts.loader.num_workers == trainer.datamodule.workers == 2
    assert (facts.batch.size_bytes, facts.batch.tensors) == (128, 1)


# --- the progress bar and the report ------------------------------------------------------------------------------


class OwnBar(lightning.pytorch.callbacks.ProgressBar):
    """As Lightning's Rich bar, which is there only with an extra: it passes the metrics of its base on."""

    def disable(self) -> None:
        pass

    def get_metrics(self, *args: Any) -> dict[str, Any]:
        return {**super().get_metrics(*args), "own": 1}


@pytest.mark.parametrize("bar", [lightning.pytorch.callbacks.TQDMProgressBar, OwnBar])
def test_the_progress_bar_shows_the_starved_percentage(bar: Callable[[], Any], quiet: GPUStarvationCallback) -> None:
    shown: list[Any] = []
    summaries: list[Any] = []

    class Look(lightning.pytorch.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            shown.append(trainer.progress_bar_callback.get_metrics(trainer, pl_module).get("feed"))
            summaries.append(quiet.summary())

    run_fit(quiet, batches=12, others=(bar(), Look()), enable_progress_bar=True)
    assert shown[:5] == [None] * 5
    summary = summaries[-1]
    assert summary is not None
    assert shown[-1] == f"{summary.starved_pct:.0f}%"


def test_the_end_of_a_fit_logs_the_steps_since_the_last_window() -> None:
    logger = Memory()
    make_trainer(GPUStarvationCallback(every_n_steps=8), logger=logger, max_epochs=1).fit(
        BoringModel(), DataLoader(RandomDataset(32, 12), 1)
    )
    assert [step for step, row in logger.rows if "feed/starved_pct" in row] == [7, 11]


# --- beside a prefetcher ------------------------------------------------------------------------------------------


def test_waiting_inside_the_prefetcher_counts_as_data_and_not_as_other(quiet: GPUStarvationCallback) -> None:
    logger = Memory()
    trainer = make_trainer(CpuPrefetch(), quiet, logger=logger)
    trainer.fit(BoringModel(), DataLoader(Slow(30, 20)))
    stats = quiet.report().stats
    assert stats.prefetch_active is True
    assert stats.starved_pct is not None
    assert stats.starved_pct > 50
    assert logger.rows[-1][1]["feed/prefetch_active"] == 1.0


# --- what users bring ---------------------------------------------------------------------------------------------


class Foreign:
    """A loader that is not torch's: it has workers, and no dataset."""

    def __init__(self, workers: int | None) -> None:
        self.num_workers = workers

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.ones(1, 32)] * 8)


def test_loaders_of_other_libraries_are_measured(quiet: GPUStarvationCallback) -> None:
    class Both(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch[0], batch_idx)

    make_trainer(quiet).fit(Both(), [Foreign(None), Foreign(2)])
    measured = quiet.report().measurements
    assert measured.stats.steps == 7
    assert measured.facts.loader.num_workers is None  # it may be the other one that is waited for


def test_calling_report_mid_fit_withholds_no_steps_from_other_ranks(
    quiet: GPUStarvationCallback, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []

    class Exchange:
        def add(self, steps: list[Any]) -> None:
            told.extend(step.number for step in steps)

        send = add
        take = total = finish = lambda self: None

    class Asks(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            quiet.report()

    monkeypatch.setattr(starvation_run, "open_rank_exchange", lambda warm_up: Exchange())
    run_fit(quiet, batches=12, others=(Asks(),))
    assert told == list(range(1, 13))


# --- reports for loggers ---------------------------------------------------------------------------------------------


@pytest.fixture
def starvation() -> GPUStarvationCallback:
    return GPUStarvationCallback(every_n_steps=5)


def test_the_report_is_shown_in_tensorboard_and_saved_in_its_log_folder(
    starvation: GPUStarvationCallback, tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    run_fit(starvation, batches=40, logger=logger)
    folder = Path(logger.log_dir)
    assert {path.name for path in folder.glob("feed_report.*")} == {
        "feed_report.html",
        "feed_report.json",
        "feed_report.md",
    }
    assert read_document(tmp_path).diagnosis == starvation.report()
    logger.experiment.flush()
    events = EventAccumulator(str(folder))
    events.Reload()
    (text,) = events.Tensors("feed/report/text_summary")
    assert text.step == 40
    *shown, last = text.tensor_proto.string_val[0].decode().splitlines()
    written = (folder / "feed_report.md").read_text().splitlines()
    assert shown == written[: len(shown)]
    assert last == written[-1]
    assert last.startswith("next: ")


def test_reports_go_beside_the_checkpoints_if_the_logger_has_no_folder(
    starvation: GPUStarvationCallback, tmp_path: Path
) -> None:
    run_fit(starvation, logger=Memory(), default_root_dir=tmp_path, enable_checkpointing=True)
    (report,) = tmp_path.rglob("feed_report.json")
    assert list(report.parent.glob("*.ckpt"))


def _reports(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("feed_report*.json"))


@pytest.mark.parametrize("logger", [False, "bucket"])
def test_reports_go_to_default_root_dir_without_any_other_folder(
    logger: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Bucket(Memory):
        save_dir = log_dir = "s3://bucket/runs"

    monkeypatch.setattr(starvation_reports, "IN_ROOT", "feed_reports")
    monkeypatch.chdir(tmp_path)
    given = Bucket() if logger else False
    run_fit(GPUStarvationCallback(), batches=40, logger=given, default_root_dir=tmp_path)
    assert _reports(tmp_path) == ["feed_reports/feed_report.json"]
    assert f"files {tmp_path}/feed_reports/feed_report.html, .json, .md\n" in capsys.readouterr().out
    assert read_document(tmp_path).run.folder == ""
    run_fit(GPUStarvationCallback(), fast_dev_run=True, default_root_dir=tmp_path / "other")
    assert _reports(tmp_path) == ["feed_reports/feed_report.json"]


def test_the_report_folder_comes_from_the_argument_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_FEED_DIR", str(tmp_path / "variable"))
    logger = CSVLogger(tmp_path / "logger")
    run_fit(GPUStarvationCallback(), batches=40, logger=logger)
    run_fit(GPUStarvationCallback(folder=tmp_path / "argument"), batches=40, logger=logger)
    assert _reports(tmp_path) == ["argument/feed_report.json", "variable/feed_report.json"]
    assert read_document(tmp_path / "argument").run.folder == "argument"
    monkeypatch.setenv("LIGHTNING_FEED_DIR", "s3://bucket/runs")
    with pytest.raises(SettingsError, match="LIGHTNING_FEED_DIR=s3://bucket/runs is not on this machine"):
        GPUStarvationCallback()
    with pytest.raises(SettingsError, match="folder='s3://bucket/other' is not on this machine"):
        GPUStarvationCallback(folder="s3://bucket/other")


def test_a_second_run_does_not_overwrite_the_report_of_the_first(tmp_path: Path) -> None:
    both = GPUStarvationCallback(folder=tmp_path)
    run_fit(both, batches=205)  # reports twice
    first = (tmp_path / "feed_report.json").read_text()
    run_fit(both, batches=40)
    assert _reports(tmp_path) == ["feed_report-2.json", "feed_report.json"]
    assert (tmp_path / "feed_report.json").read_text() == first
    assert read_document(tmp_path).diagnosis == both.report()


def test_a_report_that_cannot_be_written_does_not_end_the_run(
    starvation: GPUStarvationCallback, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    trainer = run_fit(starvation, logger=CSVLogger(tmp_path))
    assert trainer.state.finished
    assert "No space left" in caplog.text
    assert list(tmp_path.rglob("feed_report*")) == []


def test_weights_and_biases_gets_the_report_page_and_the_run_summary(
    starvation: GPUStarvationCallback, tmp_path: Path
) -> None:
    from lightning.pytorch.loggers import WandbLogger

    logger = WandbLogger(save_dir=tmp_path, offline=True, project="birds")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of wandb about its own settings
        run_fit(starvation, batches=60, logger=logger)
        summary = dict(logger.experiment.summary)
        logger.experiment.finish()
    stats = starvation.report().stats
    assert summary["feed/starved_pct"] == stats.starved_pct
    assert summary["feed_step/step_ms"] == stats.step_ms
    assert summary["feed/verdict"] == headline(starvation.report())
    assert not [tag for tag in summary if tag.startswith(("feed_host", "feed_workers"))]
    (page,) = tmp_path.rglob("media/html/feed/*.html")
    assert "lightning_feed report" in page.read_text()
    assert len(list(tmp_path.rglob("feed_report.html"))) == 1


def test_mlflow_gets_the_report_as_artifacts_and_as_files(
    starvation: GPUStarvationCallback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning.pytorch.loggers import MLFlowLogger

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of MLflow about its file store
        logger = MLFlowLogger(tracking_uri=f"file:{tmp_path}/mlruns")
        run_fit(starvation, logger=logger)
    found = sorted(path.relative_to(tmp_path).parts[3:] for path in tmp_path.rglob("feed_report.*"))
    assert found == [
        ("artifacts", "feed_report.json"),
        ("artifacts", "feed_report.md"),
        ("feed_report.html",),
        ("feed_report.json",),
        ("feed_report.md",),
    ]
    assert read_document(next(tmp_path.rglob("artifacts/*.json"))).diagnosis == starvation.report()


def test_a_logger_that_fails_on_the_report_text_does_not_end_the_run(
    starvation: GPUStarvationCallback, caplog: pytest.LogCaptureFixture
) -> None:
    class Offline(Memory):
        def add_text(self, *_: Any) -> None:
            raise ConnectionError("no server")

    trainer = run_fit(starvation, logger=Offline())
    assert trainer.state.finished
    assert "could not give its report to Offline (trainer.loggers[0]) (ConnectionError: no server)" in caplog.text


# --- epochs that end too early ------------------------------------------------------------------------------------


class Ends(Dataset[torch.Tensor]):
    """Promises more samples than it has, and raises StopIteration for the rest."""

    def __init__(self, promised: int, has: int) -> None:
        self.promised = promised
        self.has = has

    def __len__(self) -> int:
        return self.promised

    def __getitem__(self, index: int) -> torch.Tensor:
        return next(iter([torch.ones(32)] if index < self.has else []))


class EndsEarly(LightningDataModule):
    def __init__(self, promised: int, has: int) -> None:
        super().__init__()
        self.data = Ends(promised, has)

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=2)

    def val_dataloader(self) -> Any:
        return DataLoader(Ends(4, 4), batch_size=2)


class Thinks(BoringModel):
    """Its steps are long enough for advice."""

    def train_dataloader(self) -> Any: ...

    val_dataloader = train_dataloader

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.005)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("how", ["plain", pytest.param("wrap", marks=pytest.mark.nightly), "wrap, workers"])
def test_epoch_that_ends_early_is_reported(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], quiet: GPUStarvationCallback
) -> None:
    def fitted(callback: GPUStarvationCallback, promised: int, has: int, **options: Any) -> Any:
        data: Any = EndsEarly(promised, has)
        if how != "plain":
            data = FastDataModule.wrap(data, LoaderSettings(num_workers=1 if "workers" in how else 0))
        trainer = make_trainer(callback, **{"max_epochs": 2, "num_sanity_val_steps": 0, **options})
        trainer.fit(Thinks(), datamodule=data)
        return callback.report().measurements.facts.cut_short

    starvation = GPUStarvationCallback(folder=tmp_path)
    assert fitted(starvation, promised=80, has=60) == (30, 40)
    cut_short = Note.of("epoch cut short", batches=30, length=40)
    assert starvation.report().notes[0] == cut_short
    said = "the loader ended after 30 of 40 batches, so Lightning ran no validation"
    assert said in " ".join(capsys.readouterr().out.split())
    assert cut_short in read_document(tmp_path).diagnosis.notes
    ends_as_promised = ({}, {"limit_train_batches": 10}, {"max_steps": 7, "max_epochs": -1})
    for options in ends_as_promised if how == "plain" else ends_as_promised[:1]:
        assert fitted(quiet, promised=24, has=24, **options) is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_run_stopped_in_mid_epoch_is_not_reported_as_ending_early(
    error: type[BaseException], quiet: GPUStarvationCallback
) -> None:
    class Stopped(Thinks):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 20:
                raise error
            return super().training_step(batch, batch_idx)

    trainer = make_trainer(quiet, max_epochs=1, num_sanity_val_steps=0)
    with pytest.raises((SystemExit, ValueError)):
        trainer.fit(Stopped(), datamodule=EndsEarly(80, 80))
    assert quiet.report().measurements.facts.cut_short is None


class Keeps(Dataset[Any]):
    """Its samples take long the first time."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.kept: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index not in self.kept:
            time.sleep(0.005)
            self.kept[index] = torch.ones(32)
        return self.kept[index]


def test_figures_for_a_caching_dataset_leave_out_its_first_epoch(quiet: GPUStarvationCallback) -> None:
    trainer = make_trainer(quiet, max_epochs=2)
    trainer.fit(BoringModel(), DataLoader(Keeps(80)))
    measured = quiet.report().measurements
    assert measured.stats.steps == 79
    assert measured.facts.waited_ms is not None
    before_ms, now_ms = measured.facts.waited_ms
    assert before_ms > 5 > now_ms

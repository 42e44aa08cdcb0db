"""The report of a fit is found where users look for it: in their logger, and in the folder of the run."""

import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from measure.small_fits import Memory, run_fit

from lightning_feed import GPUStarvationCallback
from lightning_feed.report.document import read_document
from lightning_feed.report.report import headline


@pytest.fixture
def starvation() -> GPUStarvationCallback:
    return GPUStarvationCallback(every_n_steps=5, nvml=False)


def test_tensorboard_shows_the_report_and_its_folder_holds_it(
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
    assert text.tensor_proto.string_val[0].decode() in (folder / "feed_report.md").read_text()


def test_without_a_folder_of_a_logger_reports_lie_beside_the_checkpoints(
    starvation: GPUStarvationCallback, tmp_path: Path
) -> None:
    run_fit(starvation, logger=Memory(), default_root_dir=tmp_path, enable_checkpointing=True)
    (report,) = tmp_path.rglob("feed_report.json")
    assert list(report.parent.glob("*.ckpt"))


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


def test_weights_and_biases_shows_the_page_and_the_whole_run(starvation: GPUStarvationCallback, tmp_path: Path) -> None:
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


def test_mlflow_keeps_the_report_as_artifacts_and_beside_the_run(
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


def test_a_logger_that_refuses_the_text_does_not_end_the_run(
    starvation: GPUStarvationCallback, caplog: pytest.LogCaptureFixture
) -> None:
    class Offline(Memory):
        def add_text(self, *_: Any) -> None:
            raise ConnectionError("no server")

    trainer = run_fit(starvation, logger=Offline())
    assert trainer.state.finished
    assert "could not give its report to Offline (trainer.loggers[0]) (ConnectionError: no server)" in caplog.text

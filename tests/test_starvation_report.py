"""The report of a fit is found where users look for it: in their logger, and in the folder of the run."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from watch.reports.sample_reports import sample, sample_report
from watch.small_fits import Memory, run_fit

from lightning_feed import GPUStarvationCallback
from lightning_feed.callbacks.starvation_report import give_report, run_folder
from lightning_feed.watch.reports.document import read_document
from lightning_feed.watch.reports.files import diagnosis_markdown
from lightning_feed.watch.reports.report import headline

pytestmark = [
    # These fits are small on purpose.
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval"),
]


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


def test_loggers_that_keep_runs_elsewhere_have_a_folder_beside_their_checkpoints(tmp_path: Path) -> None:
    wandb = SimpleNamespace(save_dir=str(tmp_path), name="project", version="a1b2", log_dir=None)
    assert run_folder(SimpleNamespace(loggers=[wandb], fast_dev_run=0)) == tmp_path / "project" / "a1b2"
    numbered = SimpleNamespace(save_dir=str(tmp_path), name="project", version=3)
    assert run_folder(SimpleNamespace(loggers=[numbered], fast_dev_run=0)) == tmp_path / "project" / "version_3"


class Calls:
    """A method that remembers what it was called with."""

    def __init__(self) -> None:
        self.made: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.made.append((args, kwargs))


def test_each_kind_of_logger_gets_the_report_in_its_own_way() -> None:
    tensorboard, mlflow, comet = Calls(), Calls(), Calls()
    for logger in (
        SimpleNamespace(experiment=SimpleNamespace(add_text=tensorboard)),
        SimpleNamespace(experiment=SimpleNamespace(log_text=mlflow), run_id="r1"),
        SimpleNamespace(experiment=SimpleNamespace(log_text=comet)),
        SimpleNamespace(),  # takes no text
    ):
        give_report(logger, sample_report(), 7)
    markdown = diagnosis_markdown(sample())
    assert tensorboard.made == [(("feed/report", markdown, 7), {})]
    assert [args[2] for args, _ in mlflow.made] == ["feed_report.md", "feed_report.json"]
    assert comet.made == [((markdown,), {"step": 7})]


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


@pytest.mark.parametrize("folder", [{"log_dir": "s3://bucket/runs"}, {"log_dir": None, "save_dir": "gs://bucket"}])
def test_an_address_is_not_taken_for_a_folder(folder: dict[str, Any]) -> None:
    remote = SimpleNamespace(name="project", version=3, **folder)
    assert run_folder(SimpleNamespace(loggers=[remote], fast_dev_run=0, checkpoint_callback=None)) is None


def test_a_logger_that_refuses_the_text_does_not_end_the_run(
    starvation: GPUStarvationCallback, caplog: pytest.LogCaptureFixture
) -> None:
    class Offline(Memory):
        def add_text(self, *_: Any) -> None:
            raise ConnectionError("no server")

    trainer = run_fit(starvation, logger=Offline())
    assert trainer.state.finished
    assert "could not give its report to Offline (trainer.loggers[0]) (ConnectionError: no server)" in caplog.text

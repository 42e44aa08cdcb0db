"""The report of a fit is found where users look for it: in their logger, and in the folder of the run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from watch.small_fits import Memory, run_fit

from lightning_feed import GPUStarvationCallback
from lightning_feed.starvation_report import log_text, run_folder
from lightning_feed.watch.reports.document import read_document

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
    assert {path.name for path in folder.glob("feed_report.*")} == {"feed_report.json", "feed_report.md"}
    assert read_document(tmp_path).diagnosis == starvation.report()
    logger.experiment.flush()
    events = EventAccumulator(str(folder))
    events.Reload()
    (text,) = events.Tensors("feed/report/text_summary")
    assert text.step == 40
    assert text.tensor_proto.string_val[0].decode() in (folder / "feed_report.md").read_text()


def test_any_logger_with_a_folder_gets_the_files(starvation: GPUStarvationCallback, tmp_path: Path) -> None:
    run_fit(starvation, logger=CSVLogger(tmp_path, name="birds"))
    assert (tmp_path / "birds" / "version_0" / "feed_report.json").is_file()


@pytest.mark.parametrize("options", [{"logger": False}, {"logger": Memory()}, {"fast_dev_run": 3}])
def test_nothing_is_written_where_nothing_is_kept(
    options: dict[str, Any], starvation: GPUStarvationCallback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_fit(starvation, **options)
    assert list(tmp_path.rglob("feed_report*")) == []


def test_without_report_nothing_is_written(tmp_path: Path) -> None:
    run_fit(GPUStarvationCallback(report=False, nvml=False), logger=CSVLogger(tmp_path))
    assert list(tmp_path.rglob("feed_report*")) == []


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


def test_each_kind_of_logger_gets_text_in_its_own_way() -> None:
    tensorboard, wandb, mlflow, comet = Calls(), Calls(), Calls(), Calls()
    for logger in (
        SimpleNamespace(experiment=SimpleNamespace(add_text=tensorboard)),
        SimpleNamespace(experiment=object(), log_text=wandb),
        SimpleNamespace(experiment=SimpleNamespace(log_text=mlflow), run_id="r1"),
        SimpleNamespace(experiment=SimpleNamespace(log_text=comet)),
        SimpleNamespace(),  # takes no text
    ):
        log_text(logger, "# report", 7)
    assert tensorboard.made == [(("feed/report", "# report", 7), {})]
    assert wandb.made == [((), {"key": "feed/report", "columns": ["report"], "data": [["# report"]], "step": 7})]
    assert mlflow.made == [(("r1", "# report", "feed_report.md"), {})]
    assert comet.made == [(("# report",), {"step": 7})]


@pytest.mark.parametrize("folder", [{"log_dir": "s3://bucket/runs"}, {"log_dir": None, "save_dir": "gs://bucket"}])
def test_an_address_is_not_taken_for_a_folder(folder: dict[str, Any]) -> None:
    remote = SimpleNamespace(name="project", version=3, **folder)
    assert run_folder(SimpleNamespace(loggers=[remote], fast_dev_run=0)) is None


def test_a_logger_that_refuses_the_text_does_not_end_the_run(
    starvation: GPUStarvationCallback, caplog: pytest.LogCaptureFixture
) -> None:
    class Offline(Memory):
        def log_text(self, **_: Any) -> None:
            raise ConnectionError("no server")

    trainer = run_fit(starvation, logger=Offline())
    assert trainer.state.finished
    assert "could not give its report to Offline (trainer.loggers[0]) (ConnectionError: no server)" in caplog.text

"""A report that cannot be printed, logged or written, and ranks of which one fails: training goes on."""

import io
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from measure.small_fits import Memory, make_trainer, run_fit
from measure.test_ranks_gloo import in_ranks
from torch.utils.data import DataLoader

from lightning_feed import FastDataModule, GPUStarvationCallback, LoaderSettings
from lightning_feed.callbacks.autotune import AutotuneCallback


class Data(FastDataModule):
    def make_dataset(self, split: str) -> Any:
        return RandomDataset(32, 20) if split == "train" else None


class Last(Callback):
    """A callback after ours."""

    ended = False

    def on_train_end(self, *_: Any) -> None:
        self.ended = True


def fit_with(*loggers: Any, before: tuple[Any, ...] = ()) -> GPUStarvationCallback:
    """A fit with settings to log, that ends as it should."""
    starvation, last = GPUStarvationCallback(), Last()
    trainer = make_trainer(*before, starvation, last, logger=list(loggers) or False)
    trainer.fit(BoringModel(), datamodule=Data(1, loader=LoaderSettings(num_workers=0)))
    assert trainer.state.finished
    assert last.ended
    return starvation


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "lightning_feed.measure.guard"]


# --- printing -----------------------------------------------------------------------------------------------------


def full() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def closed_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def gone_terminal() -> int:
    master, terminal = os.openpty()
    os.close(master)
    return terminal


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
@pytest.mark.parametrize("unbuffered", [True, False])
@pytest.mark.parametrize("make", [full, closed_pipe, gone_terminal])
def test_a_report_that_cannot_be_printed_does_not_end_the_fit(
    make: Any, unbuffered: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    out = io.TextIOWrapper(open(make(), "wb"), write_through=unbuffered)  # noqa: PTH123, SIM115  # of a number
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "__stdout__", out)
    fit_with()
    (line,) = said(caplog)
    assert line.startswith("GPUStarvationCallback could not print its report (")
    assert line.endswith("Training goes on without it.")
    out.close()  # as Python does at its end: what is left in the buffer would make the exit code 120


def test_a_report_on_an_ascii_stream_escapes_other_characters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Wächter(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            time.sleep(0.002)

    file = (tmp_path / "out").open("w", encoding="ascii")
    monkeypatch.setattr(sys, "stdout", file)
    monkeypatch.setattr(sys, "__stdout__", file)
    run_fit(GPUStarvationCallback(), batches=40, others=(Wächter(),))
    file.close()
    assert r"W\xe4chter.on_train_batch_end" in (tmp_path / "out").read_text()


@pytest.mark.parametrize("closed", [True, False])
def test_a_fit_ends_normally_without_a_stderr_to_log_to(closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's logging itself raises then, where it would tell of the error."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    stream.close()
    logging.getLogger("lightning_feed").addHandler(handler)
    try:
        monkeypatch.setattr(sys, "stderr", stream if closed else None)
        starvation = fit_with()  # says that there is no logger
    finally:
        logging.getLogger("lightning_feed").removeHandler(handler)
    assert starvation.report().stats.steps


# --- loggers ------------------------------------------------------------------------------------------------------


class Refuses(Memory):
    """As MLflow refuses parameters of a run that has others by these names."""

    def __init__(self) -> None:
        super().__init__()
        self.params: dict[str, Any] = {}
        self.texts = 0

    @property
    def experiment(self) -> Any:
        return SimpleNamespace(log_text=self.log_text)

    def log_hyperparams(self, params: Any, *_: Any) -> None:
        if self.params:
            raise ValueError("Changing param values is not allowed")
        self.params = dict(params)

    def log_text(self, *_: Any, **__: Any) -> None:
        self.texts += 1


def test_a_logger_that_refuses_changed_parameters_does_not_end_the_fit(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    logger, other = Refuses(), CSVLogger(tmp_path)
    fit_with(logger, other)
    assert not said(caplog)
    fit_with(logger, other)
    (line,) = said(caplog)
    assert "could not pass the loader's settings to Refuses (trainer.loggers[0]) (ValueError: Changing" in line
    assert other.experiment.hparams["feed/num_workers"] == 0  # the others get theirs
    assert logger.texts == 2


@pytest.fixture
def few_files(tmp_path: Path) -> Iterator[Path]:
    """A file system on which few files can be made."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=12,mode=700", "none", tmp_path], check=False)
    if mount.returncode:
        pytest.skip("nothing can be mounted here")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_file_system_without_free_inodes_does_not_end_the_fit(
    few_files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Fill(Callback):
        def on_train_end(self, *_: Any) -> None:
            for number in range(12):
                try:
                    (few_files / str(number)).touch()
                except OSError:
                    return

    logger = TensorBoardLogger(few_files)
    fit_with(logger, before=(Fill(),))
    (written,) = said(caplog)
    assert "write its report" in written
    assert "No space left on device" in written


# --- ranks --------------------------------------------------------------------------------------------------------


def fit_with_a_broken_rank(rank: int, broken: int) -> Any:
    import warnings

    warnings.simplefilter("ignore")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_feed.measure.guard").addHandler(handler)
    starvation, autotune = GPUStarvationCallback(every_n_steps=2, report=False), AutotuneCallback()

    class Breaks(Callback):
        """In the second epoch: measuring, and what the ranks agree on before the third."""

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if rank == broken and trainer.current_epoch == 1 and starvation.measured_fit is not None:
                starvation.measured_fit.main.meter.finished = None  # type: ignore[assignment]
                assert autotune._tuning is not None
                autotune._tuning.loader.epoch_begins = None  # type: ignore[method-assign, assignment]

    torch.manual_seed(0)
    model = BoringModel()
    trainer = make_trainer(Breaks(), starvation, autotune, devices=2, strategy="ddp", max_epochs=4, logger=Memory())
    trainer.fit(model, DataLoader(RandomDataset(32, 16), 2, num_workers=1, shuffle=True))
    return {"said": lines, "steps": trainer.global_step, "weights": model.layer.bias.tolist()}


@pytest.mark.parametrize("broken", [0, 1])
def test_ranks_do_not_wait_for_one_whose_observers_failed(broken: int, tmp_path: Path) -> None:
    told = in_ranks(2, fit_with_a_broken_rank, tmp_path, broken)
    assert [one["steps"] for one in told] == [16, 16]
    assert told[0]["weights"] == told[1]["weights"]
    assert not told[1 - broken]["said"]
    first, second = told[broken]["said"]
    assert first.startswith("GPUStarvationCallback stopped measuring (TypeError")
    assert second.startswith("AutotuneCallback stopped measuring (TypeError")

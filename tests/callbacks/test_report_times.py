"""When the report of a fit comes: the clock is a fake, the Trainer is real."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from measure.small_fits import Memory, make_loader, make_trainer
from report.sample_reports import sample
from torch.utils.data import DataLoader, IterableDataset

from lightning_feed import GPUStarvationCallback
from lightning_feed.callbacks import starvation_reports
from lightning_feed.callbacks.starvation_run import RunFigures
from lightning_feed.measure import loop
from lightning_feed.report.document import read_document


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that reports are due by."""
    mine = Clock()
    monkeypatch.setattr(loop, "clock", mine)
    return mine


class At(lightning.pytorch.Callback):
    """Does something once so many batches of a fit are over."""

    def __init__(self, does: dict[int, Callable[[], object]]) -> None:
        self.does = does

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.does.get(batch_idx + 1, lambda: None)()


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(32)


def _fit(does: dict[int, Callable[[], object]], loader: Any, **options: Any) -> Any:
    trainer = make_trainer(At(does), GPUStarvationCallback(), **options)
    trainer.fit(BoringModel(), loader)
    return trainer


def _reports(capsys: pytest.CaptureFixture[str]) -> int:
    return capsys.readouterr().out.count("FEED  ")


@pytest.mark.parametrize(("batches", "times"), [(8, 0), (199, 1), (200, 2), (210, 2)])
@pytest.mark.usefixtures("clock")
def test_reports_are_printed_after_200_steps_and_at_the_end_of_a_fit(
    batches: int, times: int, capsys: pytest.CaptureFixture[str]
) -> None:
    _fit({}, make_loader(batches))
    assert _reports(capsys) == times


@pytest.mark.usefixtures("clock")
def test_a_repeated_verdict_is_printed_in_short(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starvation_reports, "decide", lambda _: sample())
    _fit({}, make_loader(210))
    first, second = capsys.readouterr().out.split("FEED  ")[1:]
    assert [line.split()[0] for line in second.splitlines()] == ["highly", "files", "next:"]
    assert first.splitlines()[0] == second.splitlines()[0]
    assert len(first.splitlines()) > 10


@pytest.mark.usefixtures("clock")
def test_short_and_later_fits_print_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starvation_reports, "decide", lambda _: sample())
    lines = []
    for batches in (29, 30, 210, 29):
        _fit({}, make_loader(batches))
        lines.append(len(capsys.readouterr().out.splitlines()))
    assert lines[1] > 10
    assert [*lines[:1], *lines[2:]] == [1, 1, 1]


@pytest.mark.parametrize(("endless", "shown"), [(True, 4), (False, 2)])
def test_report_is_written_every_ten_minutes_and_shown_for_endless_streams(
    endless: bool, shown: int, clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[float] = []

    def pass_time() -> None:
        clock.now += 601

    def look() -> None:
        (report,) = tmp_path.rglob("feed_report.json")
        written.append(report.stat().st_mtime_ns)

    does = {30: pass_time, 32: look, 40: pass_time, 42: look, 50: pass_time, 52: look}
    loader: Any = DataLoader(Endless()) if endless else make_loader(70)
    _fit(does, loader, max_steps=60, logger=CSVLogger(tmp_path))
    assert written == sorted(set(written))
    assert len(written) == 3
    out = capsys.readouterr().out
    assert out.count("FEED  ") == shown
    assert out.count(f"files {tmp_path}") == shown


def _ctrl_c() -> None:
    raise KeyboardInterrupt


def _error() -> None:
    raise ValueError("the user's own")


def _sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("end", "error"), [(_ctrl_c, SystemExit), (_sigterm, SystemExit), (_error, ValueError)])
def test_interrupted_run_reports_without_waiting(
    end: Callable[[], None],
    error: type[BaseException],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def waits(self: Any) -> None:
        raise AssertionError("this waits for the device and for other ranks")

    monkeypatch.setattr(RunFigures, "end", waits)
    with pytest.raises(error):
        _fit({40: end}, make_loader(90), logger=CSVLogger(tmp_path))
    assert _reports(capsys) == 1
    assert len(list(tmp_path.rglob("feed_report.*"))) == 3


@pytest.mark.usefixtures("clock")
def test_run_stopped_after_its_report_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The callback measures before At runs, so the report after 200 steps is out."""
    trainer = make_trainer(GPUStarvationCallback(), At({200: _ctrl_c}))
    with pytest.raises(SystemExit):
        trainer.fit(BoringModel(), make_loader(210))
    assert _reports(capsys) == 1


@pytest.mark.usefixtures("clock")
def test_report_files_include_the_validation_after_the_last_step(tmp_path: Path) -> None:
    _fit({}, make_loader(200), logger=CSVLogger(tmp_path), limit_val_batches=1.0)
    (document,) = tmp_path.rglob("feed_report.json")
    wall = read_document(document).diagnosis.measurements.wall
    assert wall is not None
    assert wall.times("validation") == 1


# --- what it costs ------------------------------------------------------------------------------------------------


class SlowLogger(Memory):
    """Each call takes 6 ms of the fake clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.calls = 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls += 1
        self.clock.now += 0.006
        super().log_metrics(metrics, step)


class Logs(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", 0.5)
        return super().training_step(batch, batch_idx)


@pytest.fixture
def no_slow_logger() -> None:
    """Here loggers are slow."""


@pytest.mark.parametrize("model", [Logs, BoringModel])
def test_a_slow_logger_gets_few_extra_calls_from_the_callback(model: type[BoringModel], clock: Clock) -> None:
    logger = SlowLogger(clock)

    class Steps(lightning.pytorch.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            clock.now += 0.020

    starvation = GPUStarvationCallback(report=False)
    trainer = make_trainer(Steps(), starvation, logger=logger, log_every_n_steps=1)
    trainer.fit(model(), make_loader(150))
    ours = len(logger.rows)
    assert logger.calls - ours == (150 if model is Logs else 0)
    assert 5 < ours <= 3 + clock.now / 0.6  # three to see that it is slow, then 6 ms in 600

"""Eight ranks: measured in each step, reported once, and resumed in mid-epoch."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.test_resume_changed import Data, StopAfter, flat
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from recording import WritesPerRank
from resuming import run

from lightning_feed import GPUStarvationCallback

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*using the device under current context"),
]
SAMPLES, SIZE, RANKS = 140, 2, 8


def go(folder: Path, ranks: int, extra: list[Callback], **options: Any) -> list[list[int]]:
    """Train two epochs, measured, and return the samples of each rank."""
    folder.mkdir()
    run(
        lambda: {"datamodule": Data(SAMPLES, SIZE)},
        [GPUStarvationCallback(every_n_steps=1, tags="all"), *extra, WritesPerRank(str(folder))],
        strategy="ddp_fork",
        devices=ranks,
        logger=CSVLogger(folder, name=None, version=""),
        log_every_n_steps=1,
        limit_val_batches=0,
        **options,
    )
    return [flat(torch.load(folder / f"rank{rank}.pt")["seen"]) for rank in range(ranks)]


def compared(folder: Path, ranks: int) -> tuple[int, int]:
    """The steps that all ranks measured: by the report, and by the rows of the logger."""
    (report,) = folder.rglob("feed_report.json")
    found = json.loads(report.read_text())["ranks"]
    assert (found["world_size"], len(found["data_ms_by_rank"])) == (ranks, ranks)
    with (folder / "metrics.csv").open() as file:
        return found["steps"], sum(bool(row.get("feed_dist/starved_pct")) for row in csv.DictReader(file))


def test_eight_ranks_are_measured_reported_once_and_resumed_exactly(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.ckpt"
    whole = go(tmp_path / "whole", RANKS, [])
    before = go(tmp_path / "before", RANKS, [StopAfter("on_train_batch_end", 3, path)])
    after = go(tmp_path / "after", RANKS, [], ckpt_path=path)
    # All but the first step of each epoch; the last row of the logger would come with the step after it.
    assert compared(tmp_path / "whole", RANKS) == (16, 15)
    assert compared(tmp_path / "after", RANKS) == (12, 11)
    assert capfd.readouterr().out.count("FEED") == 2  # the run that was broken off was too short for a report
    assert [trained + resumed for trained, resumed in zip(before, after, strict=True)] == whole

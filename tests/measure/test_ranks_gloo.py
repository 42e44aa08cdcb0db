"""Two and three real ranks, of which one waits for its data: it is named, and ranks that are alike are not."""

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from measure.small_fits import Memory
from torch.utils.data import DataLoader, Dataset

from lightning_feed import GPUStarvationCallback
from lightning_feed.measure.ranks import RankExchange, open_rank_exchange
from lightning_feed.measure.stats import RankStats
from lightning_feed.measure.step_meter import StepMeter, StepTimes
from lightning_feed.report.words import words

pytestmark = [
    # The ranks of these tests are forked, as with strategy="ddp_fork".
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval"),
]
EVERY = 5
WAIT_MS = 30
"""Slept by the slow rank in each fetch, and by no other: a whole step of these fits."""


class WaitsOnRank(Dataset[torch.Tensor]):
    def __init__(self, slow_rank: int | None, samples: int) -> None:
        self.slow_rank, self.samples = slow_rank, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        if torch.distributed.get_rank() == self.slow_rank:
            time.sleep(WAIT_MS / 1e3)
        return torch.ones(32)


class SlowStep(BoringModel):
    """Takes long enough for what the machine does besides not to be a tenth of a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(WAIT_MS / 1e3)
        return super().training_step(batch, batch_idx)


class Compares(Callback):
    """Measures steps by the hooks alone, which is exact enough without validation, and compares the ranks."""

    def __init__(self, every: int = EVERY) -> None:
        self.every = every
        self.windows: list[RankStats | None] = []
        self.total: RankStats | None = None
        self.exchange: RankExchange | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.windows, self.steps = [], list[StepTimes]()
        self.meter = StepMeter(self.steps.append)
        self.exchange = open_rank_exchange()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.meter.begin(epoch=True)
        self.meter.fetch_began()

    def on_train_batch_start(self, *args: Any) -> None:
        self.meter.fetch_ended()
        self.meter.step_began()

    def on_train_batch_end(self, *args: Any) -> None:
        self.meter.step_ended()
        if self.meter.finished % self.every == 0 and self.exchange is not None:
            self.exchange.send(self.steps)
            self.steps.clear()
            self.windows.append(self.exchange.take())
        self.meter.fetch_began()

    def on_train_end(self, *args: Any) -> None:
        self.total = self.exchange.finish(self.steps) if self.exchange is not None else None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def in_ranks(
    world_size: int, work: Callable[..., Any], folder: Path, *arguments: Any, nodes: bool = False
) -> list[Any]:
    """What ``work(rank, *arguments)`` returns in each rank of a run as torchrun starts it; each on a node of its own
    with ``nodes``."""
    torch.multiprocessing.start_processes(
        _one_rank, (world_size, free_port(), work, folder, arguments, nodes), nprocs=world_size, start_method="fork"
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


def _one_rank(rank: int, world_size: int, port: int, work: Any, folder: Path, arguments: Any, nodes: Any) -> None:
    torch.set_num_threads(1)
    node, local, of_node = (rank, 0, 1) if nodes else (0, rank, world_size)
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(node), "TORCHELASTIC_RUN_ID": "test"},
        **{"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(of_node)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    }
    result = work(rank, *arguments)
    (folder / f"{rank}.json").write_text(json.dumps(result))


def make_trainer(compares: Callback | None, world_size: int, **options: Any) -> Trainer:
    quiet: dict[str, Any] = {
        **{"accelerator": "cpu", "devices": world_size, "strategy": "ddp", "max_epochs": 2, "logger": False},
        **{"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False},
        **{"limit_val_batches": 0, "callbacks": [compares] if compares is not None else []},
    }
    return Trainer(**(quiet | options))


def fit_slow(rank: int, world_size: int, slow_rank: int | None, fits: int = 1) -> Any:
    compares = Compares()
    for _ in range(fits):
        trainer = make_trainer(compares, world_size)
        model = BoringModel() if slow_rank is not None else SlowStep()
        trainer.fit(model, DataLoader(WaitsOnRank(slow_rank, 11 * world_size)))
    return _told(compares)


def _told(compares: Compares) -> Any:
    return [each and vars(each) for each in (*compares.windows, compares.total)]


def test_ranks_are_compared_in_two_fits_of_one_process_group(tmp_path: Path) -> None:
    told, _ = in_ranks(2, fit_slow, tmp_path, 2, 1, 2)
    assert [each and each["steps"] for each in told] == [None, 4, 5, 4, 20]
    assert told[-1]["slow_rank"] == 1


# --- GPUStarvationCallback --------------------------------------------------------------------------------------------


class Watches(GPUStarvationCallback):
    """Started by Lightning, a rank has to write its result itself."""

    def __init__(self, folder: str) -> None:
        super().__init__(every_n_steps=EVERY, tags="all")
        self.folder = folder

    def on_train_end(self, trainer: Any, *args: Any) -> None:
        super().on_train_end(trainer, *args)
        diagnosis = self.report()
        evidence = " ".join(words(note, diagnosis.measurements) for note in diagnosis.evidence)
        told = [diagnosis.bottleneck, evidence, trainer.loggers[0].rows]
        Path(self.folder, f"{trainer.global_rank}.json").write_text(json.dumps(told))


def fit_watched(rank: int, world_size: int, slow_rank: int | None, folder: str, strategy: str = "ddp") -> Any:
    trainer = make_trainer(Watches(folder), world_size, strategy=strategy, logger=Memory(), default_root_dir=folder)
    model = BoringModel() if slow_rank is not None else SlowStep()
    trainer.fit(model, DataLoader(WaitsOnRank(slow_rank, 30 * world_size)))
    told = Path(folder, f"{rank}.json")
    return json.loads(told.read_text()) if told.exists() else None


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_the_callback_names_the_slow_rank(world_size: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    slow = world_size - 1
    first, *others = in_ranks(world_size, fit_watched, tmp_path, world_size, slow, str(tmp_path))
    _check_slow(first, slow, world_size)
    for _, _, rows in others:
        assert rows == []  # one rank logs
    assert capfd.readouterr().out.count("FEED") == 1  # and prints, at the end of so short a fit


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.alone
def test_the_callback_names_the_slow_rank_under_ddp_spawn(tmp_path: Path) -> None:
    _check_slow(fit_watched(0, 2, 1, str(tmp_path), "ddp_spawn"), 1, 2)


def _check_slow(told: Any, slow_rank: int, world_size: int) -> None:
    bottleneck, evidence, rows = told
    assert bottleneck == "data"
    assert f"rank {slow_rank} of {world_size}" in evidence
    assert "feed_dist/starved_pct" not in rows[0][1]  # known one window later
    for _, row in rows[1:]:
        assert row["feed_dist/slow_rank"] == slow_rank
        assert row["feed_dist/max_data_ms"] >= WAIT_MS
        assert row["feed/starved_pct"] < row["feed_dist/starved_pct"]


# --- what goes wrong --------------------------------------------------------------------------------------------------


def fit_raising(rank: int, raising_rank: int) -> Any:
    class Raises(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if rank == raising_rank and batch_idx == 8:
                raise RuntimeError("broken on purpose")
            return super().training_step(batch, batch_idx)

    make_trainer(Compares(), 2).fit(Raises(), DataLoader(WaitsOnRank(None, 40)))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_does_not_hang_the_others(rank: int, tmp_path: Path) -> None:
    """The error that is told may be the other rank's, which lost its peer."""
    began = time.monotonic()
    with pytest.raises((torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException)):
        in_ranks(2, fit_raising, tmp_path, rank)
    assert time.monotonic() - began < 60  # gloo itself would wait for half an hour


def fit_on_one(rank: int) -> Any:
    compares = Compares() if rank == 0 else None
    make_trainer(compares, 2).fit(BoringModel(), DataLoader(WaitsOnRank(None, 60)))
    return _told(compares) if compares is not None else None


def test_a_callback_on_only_one_rank_does_not_hang_the_fit(tmp_path: Path) -> None:
    told, _ = in_ranks(2, fit_on_one, tmp_path)
    assert told == [None] * 13


def leave_early(rank: int, leaving_rank: int) -> Any:
    """Windows without any training, whose gradients would end with the rank that leaves."""
    torch.distributed.init_process_group("gloo")
    exchange = open_rank_exchange()
    assert exchange is not None
    step = StepTimes(1e6, 1e6, 1e6, 1e6, 1, True)
    for number in range(1, 4):
        exchange.send([step._replace(number=number)])
        exchange.take()
        if rank:  # to read it back is to know that it is there: a real step takes long enough
            exchange._store.get(exchange._key(rank, str((number - 1) % 2)))
        torch.distributed.barrier()
    if rank == leaving_rank:
        return None  # without a word, and with the store, if that is rank 0
    while rank and exchange._works:
        exchange.send([step])
    for number in range(4, 20):
        exchange.send([step._replace(number=number)])
        exchange.take()
    total = exchange.finish()
    return total and vars(total)


@pytest.mark.parametrize("leaving_rank", [0, 1])
def test_a_rank_that_leaves_early_is_left_out(leaving_rank: int, tmp_path: Path) -> None:
    told = in_ranks(2, leave_early, tmp_path, leaving_rank)
    if leaving_rank:
        assert told[0]["steps"] == 3
    else:
        assert told == [None, None]

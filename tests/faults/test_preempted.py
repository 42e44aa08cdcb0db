"""SIGUSR1 and SIGTERM sent to the ranks of a fit: what a second run goes on with."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import in_gate
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from measure.test_ranks_gloo import free_port
from recording import Numbers
from resuming import run

from lightning_feed import FastDataModule, GPUStarvationCallback, LoaderSettings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of Lightning, in processes that end in the middle
]
SAMPLES, SIZE, AT = 42, 3, 3
KILLED = 7
PLACES = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end")


class Data(FastDataModule):
    def make_dataset(self, split: str) -> Any:
        return Numbers(SAMPLES) if split == "train" else None


class Signalled(Callback):
    """Notes the batches that are trained, and sends this process a signal at one place of the fourth step."""

    def __init__(self, notes: Path, number: int | None, place: str) -> None:
        self.notes, self.number, self.place, self.seen = notes, number, place, 0

    def _reach(self, place: str) -> None:
        if self.number is not None and (place, self.seen) == (self.place, AT):
            os.kill(os.getpid(), self.number)

    def on_train_batch_start(self, *args: Any) -> None:
        if self.number is not None and self.seen == AT + 2:
            os._exit(KILLED)  # as by SIGKILL, which comes some time after the first signal
        self._reach("on_train_batch_start")

    def on_before_optimizer_step(self, *args: Any) -> None:
        self._reach("on_before_optimizer_step")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with self.notes.open("a") as file:
            file.write(json.dumps([trainer.current_epoch, batch_idx, batch[:, 0].tolist()]) + "\n")
        self._reach("on_train_batch_end")
        self.seen += 1


def in_processes(ranks: int, work: Callable[[int], object], *, most_s: float = 60) -> list[int | None]:
    """Run ``work(rank)`` in processes that meet, and return their exit codes; None for one that had to be killed."""
    port = str(free_port())

    def of_rank(rank: int) -> None:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        slurm = {"JOB_ID": 4242, "JOB_NAME": "train", "NTASKS": ranks, "NTASKS_PER_NODE": ranks, "PROCID": rank}
        slurm |= {"LOCALID": rank, "NODEID": 0}
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not that of Ray, where its tests ran in this process before
        os.environ |= meeting | {f"SLURM_{name}": str(value) for name, value in slurm.items()}
        work(rank)

    context: Any = multiprocessing.get_context("fork")
    processes = [context.Process(target=of_rank, args=(rank,)) for rank in range(ranks)]
    until = time.monotonic() + most_s
    for process in processes:
        process.start()
    codes = []
    for process in processes:
        process.join(max(0, until - time.monotonic()))
        codes.append(process.exitcode)
    for process in processes:
        process.kill()
    return codes


def go(
    name: str,
    ranks: int,
    folder: Path,
    number: int | None = None,
    place: str = "",
    *,
    requeue: bool = True,
    **options: Any,
) -> list[int | None]:
    """Train two epochs on all ranks; the exit codes."""
    (folder / name).mkdir()

    def work(rank: int) -> None:
        saving = [] if requeue else [OnExceptionCheckpoint(folder, "ended")]
        run(
            lambda: {"datamodule": Data(SIZE, loader=LoaderSettings(num_workers=0, seed=4))},
            [GPUStarvationCallback(), Signalled(folder / name / str(rank), number, place), *saving],
            strategy="ddp" if ranks > 1 else "auto",
            devices=ranks,
            enable_checkpointing=bool(saving),
            default_root_dir=folder,
            plugins=[SLURMEnvironment(auto_requeue=requeue)],
            **options,
        )

    return in_processes(ranks, work)


def trained(folder: Path, ranks: int) -> list[list[Any]]:
    return [[json.loads(line) for line in (folder / str(rank)).read_text().splitlines()] for rank in range(ranks)]


def saved_batches(path: Path) -> int:
    """The trained batches that a checkpoint counts."""
    loops = torch.load(path, weights_only=False)["loops"]
    return int(loops["fit_loop"]["epoch_loop.batch_progress"]["total"]["processed"])


@pytest.mark.parametrize("ranks", in_gate([1, 2], [1]))
def test_a_run_requeued_by_slurm_resumes_exactly(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/calls"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}{os.pathsep}{os.environ['PATH']}")
    assert go("whole", ranks, tmp_path) == [0] * ranks
    whole = trained(tmp_path / "whole", ranks)
    for place in PLACES:
        folder = tmp_path / place
        folder.mkdir()
        assert go("before", ranks, folder, signal.SIGUSR1, place) == [KILLED] * ranks
        count = saved_batches(folder / "hpc_ckpt_1.ckpt")
        assert count == AT + (place == "on_train_batch_end")
        assert go("after", ranks, folder) == [0] * ranks
        assert trained(folder / "after", ranks) == [batches[count:] for batches in whole], place
    assert (tmp_path / "calls").read_text().split() == ["requeue", "4242"] * len(PLACES)


def test_two_ranks_ended_by_sigterm_resume_exactly(tmp_path: Path) -> None:
    assert go("whole", 2, tmp_path) == [0, 0]
    whole = trained(tmp_path / "whole", 2)
    for place in PLACES:
        folder = tmp_path / place
        folder.mkdir()
        assert go("before", 2, folder, signal.SIGTERM, place, requeue=False) == [0, 0]
        count = saved_batches(folder / "ended.ckpt")
        assert go("after", 2, folder, ckpt_path=folder / "ended.ckpt") == [0, 0]
        assert trained(folder / "after", 2) == [batches[count:] for batches in whole], place

"""Two ranks on the CPU that train on DALI's readers, from a process without DALI, which does not survive a fork."""

import json
import os
import socket
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from dali_numbers import DaliNumbers
from lightning.pytorch import Callback
from recording import Recording, quiet_trainer
from resuming import Killed, SaveThenDie


def in_two_ranks(folder: Path, *, train: int, val: int) -> list[Any]:
    """What each rank trained and validated: unbroken, killed after four steps of nine, and resumed after that."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    torch.multiprocessing.start_processes(
        _one_rank, (port, str(folder), train, val), nprocs=2, start_method="forkserver"
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def _one_rank(rank: int, port: int, folder: str, train: int, val: int) -> None:
    warnings.simplefilter("ignore")  # what there is to hear is heard in the tests of one rank
    torch.set_num_threads(1)
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"},
        **{"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    }
    path = Path(folder) / "run.ckpt"

    def fit(callbacks: list[Callback], checkpoint: Path | None = None, val: int = 0) -> Recording:
        model = Recording()
        trainer = quiet_trainer(callbacks, devices=2, strategy="ddp", max_epochs=3, num_sanity_val_steps=0)
        module = DaliNumbers(Path(folder) / f"files{rank}", 2, train=train, val=val, noise=True, seed=5)
        with suppress(Killed):
            trainer.fit(model, datamodule=module, ckpt_path=checkpoint)
        return model

    whole = fit([], val=val)
    before = fit([SaveThenDie("on_train_batch_end", 3, path)])
    after = fit([], path)
    found = {
        "whole": _steps(whole, "training_step"),
        "validated": _steps(whole, "validation_step"),
        "before": _steps(before, "training_step"),
        "after": _steps(after, "training_step"),
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))


def _steps(model: Recording, hook: str) -> list[Any]:
    return [event[-1] for event in model.events if event[0] == hook]

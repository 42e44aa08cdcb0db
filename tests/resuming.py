"""A fit that is killed after a checkpoint and resumed in a new Trainer, beside the fit that was never broken."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from recording import Recording, end_workers, quiet_trainer
from torch.utils.data import IterableDataset, get_worker_info


class Killed(Exception):
    """Stands for the end of the process."""


class SaveThenDie(Callback):
    """Saves and dies when ``moment`` comes for the ``count``-th time (from 0). Without ``moment``: never."""

    def __init__(self, moment: str | None, count: int, path: Path) -> None:
        self.moment, self.left, self.path = moment, count, path

    def _reach(self, moment: str, trainer: Trainer) -> None:
        if moment != self.moment or trainer.sanity_checking:
            return
        if self.left == 0:
            trainer.save_checkpoint(self.path)
            raise Killed
        self.left -= 1

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._reach("on_train_batch_start", trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._reach("on_train_batch_end", trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reach("on_validation_end", trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reach("on_train_epoch_end", trainer)


class Counting(IterableDataset[torch.Tensor]):
    """Numbers below ``size``, shared out among ranks and workers, with a state as torchdata's contract has it."""

    def __init__(self, size: int, rank: int = 0, ranks: int = 1) -> None:
        self.size, self.rank, self.ranks = size, rank, ranks
        self.position, self.resumed = 0, False

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        if not self.resumed:
            self.position = 0
        self.resumed = False
        numbers = range(self.rank * workers + worker, self.size, self.ranks * workers)
        while self.position < len(numbers):
            self.position += 1
            yield torch.full((4,), float(numbers[self.position - 1]))

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.resumed = state["position"], True


def trained(model: Recording) -> list[Any]:
    return [event[2] for event in model.events if event[0] == "training_step"]


def run(data: Callable[[], dict[str, Any]], callbacks: list[Callback], seed: int = 7, **options: Any) -> list[Any]:
    """Train and tell what was trained, up to the death if there is one."""
    checkpoint = options.pop("ckpt_path", None)
    seed_everything(seed, workers=True, verbose=False)
    model, trainer = Recording(), quiet_trainer(callbacks, **options)
    try:
        trainer.fit(model, **data(), ckpt_path=checkpoint)
    except Killed:
        end_workers()
    return trained(model)


def assert_resumes_exactly(
    data: Callable[[], dict[str, Any]],
    callbacks: Callable[[], list[Callback]],
    path: Path,
    *,
    moment: str = "on_train_batch_end",
    count: int | Iterable[int],
    **options: Any,
) -> None:
    """Killed at each of these moments and resumed, the run trains the batches of the unbroken one, in its order."""
    whole = run(data, callbacks(), **options)
    for number in [count] if isinstance(count, int) else count:
        before = run(data, [*callbacks(), SaveThenDie(moment, number, path)], **options)
        after = run(data, callbacks(), ckpt_path=path, **options)
        assert before == whole[: len(before)], f"before {moment} {number}"
        assert after == whole[len(before) :], f"after {moment} {number}"

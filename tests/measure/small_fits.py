"""Small fits in which GPUStarvationCallback is tried, and what must be true after each of them."""

import time
from typing import Any

import lightning.pytorch
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader, Dataset

from lightning_feed import GPUStarvationCallback, PrefetchCallback
from lightning_feed.transfer.prefetcher import SideStream


class Memory(Logger):
    """Keeps what is logged under feed tags, and layouts, as TensorBoard's logger would take them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.layouts: list[dict[str, Any]] = []

    name = "memory"
    version = 0

    @property
    def experiment(self) -> "Memory":
        return self

    def add_custom_scalars(self, layout: dict[str, Any]) -> None:
        self.layouts.append(layout)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        mine = {tag: value for tag, value in metrics.items() if tag.startswith("feed")}
        if mine:
            self.rows.append((step, mine))

    @property
    def steps(self) -> list[int | None]:
        return [step for step, _ in self.rows]


def make_model(package: Any = lightning.pytorch) -> Any:
    if package is lightning.pytorch:
        return BoringModel()
    from pytorch_lightning.demos.boring_classes import BoringModel as OtherModel

    return OtherModel()


def make_loader(batches: int = 20, **options: Any) -> DataLoader[Any]:
    return DataLoader(RandomDataset(32, batches), **options)


def make_trainer(*callbacks: Any, package: Any = lightning.pytorch, **options: Any) -> Any:
    quiet = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
    }
    return package.Trainer(callbacks=list(callbacks), **(quiet | options))


def run_fit(
    callback: Any, *, batches: int = 20, model: Any = None, others: tuple[Any, ...] = (), **options: Any
) -> Any:
    trainer = make_trainer(*others, callback, **options)
    trainer.fit(model or BoringModel(), make_loader(batches))
    assert_clean(trainer)
    return trainer


def assert_clean(trainer: Any) -> None:
    """Nothing of ours is left on the Trainer."""
    assert not {"start", "stop", "profile"} & set(vars(trainer.profiler))
    assert trainer.progress_bar_callback is None or "get_metrics" not in vars(trainer.progress_bar_callback)
    mine = [callback for callback in trainer.callbacks if isinstance(callback, GPUStarvationCallback)]
    assert all(callback._measured_run is None for callback in mine)


class CpuPrefetch(PrefetchCallback):
    """The whole injection, with no stream."""

    def open_stream(self, device: torch.device) -> SideStream:
        return SideStream()


class Slow(Dataset[torch.Tensor]):
    def __init__(self, batches: int, ms: float) -> None:
        self.batches, self.ms = batches, ms

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.ms / 1e3)
        return torch.ones(32)

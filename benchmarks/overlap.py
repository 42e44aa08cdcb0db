"""Does a step take longer than its slowest part? On CUDA: plain Lightning beside PrefetchCallback, in the same run.

For each model and batch size, in milliseconds a step (median over rounds, [min, max] behind it):

* ``compute``  the training step alone, the same device batch every time
* ``loader``   the loader alone, drained
* ``copy``     the host-to-device copy alone, pinned, by device events
* ``plain``    a fit without the callback
* ``ours``     the same fit with PrefetchCallback

``ratio`` is the step over ``max(compute, loader, copy)``: 1.00 means that all but the slowest part is hidden. Goal:
ours <= 1.02. Rounds are interleaved. Without an accelerator it says so and exits with 0.

    python benchmarks/overlap.py [--rounds 2] [--steps 40] [--json FILE]
"""

import argparse
import json
import logging
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
import torchvision
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_feed import PrefetchCallback

WARM_UP = 10


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Batches of uint8 or float32 pictures that cost ``work`` multiplications of a small matrix to make."""

    def __init__(self, batches: int, shape: tuple[int, ...], dtype: torch.dtype, work: int) -> None:
        self.batches, self.work = batches, work
        self.source = (torch.rand(shape) * 255).to(dtype)
        self.targets = torch.arange(shape[0]) % 10

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        scratch = torch.rand(64, 64)
        for _ in range(self.work):
            scratch = (scratch @ scratch).tanh()
        return self.source.clone(), self.targets.clone()


class Classifier(LightningModule):
    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        pictures, targets = batch
        return torch.nn.functional.cross_entropy(self.net(pictures.float() / 255), targets)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class StepClock(Callback):
    """Time per step between two points at which the device was waited for: after the warm-up, and at the end."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARM_UP:
            torch.cuda.synchronize()
            self.began, self.first = time.perf_counter(), batch_idx

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.cuda.synchronize()
        steps = trainer.num_training_batches - self.first
        self.ms = 1e3 * (time.perf_counter() - self.began) / steps


def fit_ms(make_net: Callable[[], torch.nn.Module], loader: DataLoader[Any], callbacks: list[Callback]) -> float:
    clock = StepClock()
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, clock],
        precision="bf16-mixed",
    )
    trainer.fit(Classifier(make_net()), loader)
    return clock.ms


def compute_ms(make_net: Callable[[], torch.nn.Module], batch: Any, steps: int) -> float:
    return fit_ms(make_net, _Replay([tensor.cuda() for tensor in batch], steps), [])  # type: ignore[arg-type]


class _Replay:
    """The same device batch, ``steps`` times."""

    def __init__(self, batch: list[Tensor], steps: int) -> None:
        self.batch, self.steps = batch, steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Any:
        return iter([self.batch] * self.steps)


def loader_ms(loader: DataLoader[Any]) -> float:
    """Whole rounds of all workers, after two rounds for warming up."""
    skip = 2 * max(1, loader.num_workers)
    began = 0.0
    for index, _ in enumerate(loader):
        if index == skip:
            began = time.perf_counter()
    return 1e3 * (time.perf_counter() - began) / (len(loader) - 1 - skip)


def copy_ms(batch: Any, repeats: int = 20) -> float:
    pinned = [tensor.pin_memory() for tensor in batch]
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for tensor in pinned:
        tensor.cuda(non_blocking=True)
    start.record()
    for _ in range(repeats):
        for tensor in pinned:
            tensor.cuda(non_blocking=True)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):8.2f} [{min(values):.2f}, {max(values):.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no accelerator")
        return
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    machine = (
        f"{torch.cuda.get_device_name()}, {platform.processor() or platform.machine()}, torch {torch.__version__}, "
        f"lightning {lightning.__version__}, Python {platform.python_version()}, {options.workers} workers"
    )
    print(machine)
    nets: dict[str, Callable[[], torch.nn.Module]] = {
        "shufflenet_v2_x0_5": lambda: torchvision.models.shufflenet_v2_x0_5(num_classes=10),
        "resnet18": lambda: torchvision.models.resnet18(num_classes=10),
        "resnet50": lambda: torchvision.models.resnet50(num_classes=10),
    }
    rows = []
    print(f"{'model':20} {'batch':>11} {'compute':>8} {'loader':>8} {'copy':>8}   {'plain':28} {'ours':28} plain  ours")
    for name, make_net in nets.items():
        for size, dtype in ((64, torch.float32), (256, torch.float32), (256, torch.uint8)):
            dataset = Pictures(options.steps + WARM_UP, (size, 3, 224, 224), dtype, work=50)

            def loader(dataset: Pictures = dataset) -> DataLoader[Any]:
                return DataLoader(dataset, batch_size=None, num_workers=options.workers, pin_memory=True)

            batch = dataset[0]
            figures: dict[str, list[float]] = {key: [] for key in ("compute", "loader", "copy", "plain", "ours")}
            for _ in range(options.rounds):
                figures["compute"].append(compute_ms(make_net, batch, options.steps + WARM_UP))
                figures["loader"].append(loader_ms(loader()))
                figures["copy"].append(copy_ms(batch))
                figures["plain"].append(fit_ms(make_net, loader(), []))
                figures["ours"].append(fit_ms(make_net, loader(), [PrefetchCallback()]))
            median = {key: statistics.median(values) for key, values in figures.items()}
            floor = max(median["compute"], median["loader"], median["copy"])
            print(
                f"{name:20} {size:>4} {str(dtype)[6:]:>6} {median['compute']:8.2f} {median['loader']:8.2f} "
                f"{median['copy']:8.2f}   {spread(figures['plain']):28} {spread(figures['ours']):28} "
                f"{median['plain'] / floor:5.2f} {median['ours'] / floor:5.2f}",
                flush=True,
            )
            rows.append({"model": name, "batch": size, "dtype": str(dtype), **figures})
            if options.json is not None:  # after each row: a time limit may end it before the last
                options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

"""A slow dataset before and after: each sample takes 5 ms to load (a sleep), as from a slow disk or network.

Before: no workers and no pinned memory. After: what FastDataModule recommends for this machine. The model is tiny, so
that loading is all there is to wait for. Prints seconds per epoch of both: whole fits divided by their epochs, so that
the start of the workers is counted.
"""

import argparse
import os
import platform
import time

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import Dataset

from lightning_feed import FastDataModule, LoaderSettings


class SlowDataset(Dataset[torch.Tensor]):
    def __init__(self, samples: int, delay_ms: float) -> None:
        self.samples, self.delay_ms = samples, delay_ms

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.delay_ms / 1000)
        return torch.full((32,), index / self.samples)


class Slow(FastDataModule):
    def __init__(self, dataset: SlowDataset, loader: LoaderSettings) -> None:
        super().__init__(batch_size=32, loader=loader)
        self.dataset = dataset

    def make_dataset(self, split: str) -> SlowDataset | None:
        return self.dataset if split == "train" else None


def seconds_per_epoch(datamodule: Slow, epochs: int) -> float:
    seed_everything(0, verbose=False)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(max_epochs=epochs, **quiet)
    began = time.perf_counter()
    trainer.fit(BoringModel(), datamodule=datamodule)
    return (time.perf_counter() - began) / epochs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--delay-ms", type=float, default=5.0)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()

    dataset = SlowDataset(options.samples, options.delay_ms)
    before = seconds_per_epoch(Slow(dataset, LoaderSettings(num_workers=0, pin_memory=False)), options.epochs)
    fed = Slow(dataset, LoaderSettings())
    after = seconds_per_epoch(fed, options.epochs)

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    cpus = len(os.sched_getaffinity(0))
    print(f"machine   {cpus} CPUs, {device}, Python {platform.python_version()}, torch {torch.__version__}")
    print(f"samples   {options.samples} of {options.delay_ms:g} ms, {options.epochs} epochs")
    print(f"before    {before:6.2f} s per epoch   0 workers, no pinned memory")
    print(f"after     {after:6.2f} s per epoch   recommended settings")
    print(f"ratio     {before / after:6.2f} x")

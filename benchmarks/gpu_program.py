"""A training program as a user writes it: what gpu_programs.py runs and diagnoses.

All kinds but ``folder``, which trains with ImageFolderDataModule, do without lightning_feed.

Its last line tells the mean time of its last steps, by its own clock.

    python benchmarks/gpu_program.py jpegs --data DIR [--workers 8] [--batch 64] [--steps 60]
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import models
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from lightning_feed import ImageFolderDataModule

LAST_STEPS = 24
"""Steps at the end that are timed."""


class Numbers(Dataset[tuple[Tensor, int]]):
    """Samples that cost nothing to make, of some thousand numbers each."""

    def __init__(self, numbers: int) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((self.numbers,), float(index % 7)), index % 2


class Pixels(Dataset[tuple[Tensor, int]]):
    """Images of one colour, as uint8: they cost little to make and to move."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((3, 224, 224), index % 256, dtype=torch.uint8), index % 2


class Classifier(LightningModule):
    """Any network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.stamps_s: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.stamps_s.append(time.perf_counter())
        samples, labels = batch
        return nn.functional.cross_entropy(self.net(samples.float()), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Reader(Classifier):
    """Reads its loss in each step."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.last_loss = loss.item()
        return loss


class Loads(LightningDataModule):
    """A data module of a user's own."""

    def __init__(self, make: Callable[[], DataLoader[Any]]) -> None:
        super().__init__()
        self.make = make

    def train_dataloader(self) -> DataLoader[Any]:
        return self.make()


def jpegs(folder: str, size: int) -> tuple[nn.Module, Dataset[Any]]:
    """A small network on photos: decoding takes the time."""
    crop = v2.Compose([v2.RandomResizedCrop(size), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    return models.shufflenet_v2_x0_5(num_classes=2), ImageFolder(folder, crop)


def huge(_: str, __: int) -> tuple[nn.Module, Dataset[Any]]:
    """A small network on samples of 4 MB: moving them takes the time."""
    return nn.Sequential(nn.AdaptiveAvgPool1d(64), nn.Linear(64, 2)), Numbers(1_000_000)


def reads(_: str, __: int) -> tuple[nn.Module, Dataset[Any]]:
    """A large network whose loss is read in each step: the device is busy all the time."""
    return models.resnet50(num_classes=2), Pixels()


def launches(_: str, __: int) -> tuple[nn.Module, Dataset[Any]]:
    """Hundreds of tiny kernels: the host launches them more slowly than the device runs them."""
    layers = [layer for _ in range(200) for layer in (nn.Linear(16, 16), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(16, 2)), Numbers(16)


KINDS = {"jpegs": jpegs, "huge": huge, "reads": reads, "launches": launches}


def main() -> None:
    """Train for some steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=[*KINDS, "folder"])
    parser.add_argument("--data", default="", help="folder of class folders of photos")
    parser.add_argument("--size", type=int, default=224, help="of the crops of photos")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--pageable", action="store_true", help="do not pin batches")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    data: LightningDataModule
    if options.kind == "folder":
        net: nn.Module = models.resnet18(num_classes=2)
        data = ImageFolderDataModule(options.data, options.batch, image_size=options.size, val_fraction=0)
    else:
        net, dataset = KINDS[options.kind](options.data, options.size)

        def load() -> DataLoader[Any]:
            return DataLoader(
                dataset,
                batch_size=options.batch,
                shuffle=True,
                num_workers=options.workers,
                pin_memory=not options.pageable and torch.cuda.is_available(),
                persistent_workers=options.workers > 0,
            )

        data = Loads(load)
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        max_steps=options.steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    model = Reader(net) if options.kind == "reads" else Classifier(net)
    trainer.fit(model, datamodule=data)
    last_s = model.stamps_s[-LAST_STEPS - 1 :]
    print(f"{1e3 * (last_s[-1] - last_s[0]) / (len(last_s) - 1):.4g} ms a step")


if __name__ == "__main__":
    main()

"""Satellite tiles with several bands, in a FastDataModule."""

from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from lightning_feed import FastDataModule, LoaderSettings

BANDS, KINDS = 6, 5


def download(folder: Path, count: int = 600) -> None:
    rng = np.random.default_rng(41)
    folder.mkdir()
    for i in range(count):
        tile = rng.normal(1000 + 200 * (i % KINDS), 150, (BANDS, 72, 72)).clip(0, 10_000).astype(np.uint16)
        np.savez_compressed(folder / f"tile_{i:05d}.npz", tile=tile, kind=i % KINDS)


class Tiles(Dataset):
    def __init__(self, files):
        self.files = files

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        with np.load(self.files[i]) as stored:
            tile, kind = stored["tile"].astype(np.float32), int(stored["kind"])
        low, high = np.percentile(tile, (2, 98), axis=(1, 2), keepdims=True)
        tile = torch.from_numpy(((tile - low) / (high - low + 1)).clip(0, 1).astype(np.float32))
        return {"tile": tile, "kind": kind, "name": self.files[i].name}


class TileData(FastDataModule):
    def make_dataset(self, split):
        files = sorted(Path("tiles").glob("*.npz"))
        held_back = len(files) // 10
        return {"train": Tiles(files[held_back:]), "val": Tiles(files[:held_back])}.get(split)


class LandCover(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(BANDS, 24, 3, stride=2), nn.GroupNorm(4, 24), nn.GELU(), nn.Conv2d(24, 32, 3, stride=2), nn.GELU()
        )
        self.classify = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, KINDS))

    def step(self, batch, name):
        loss = nn.functional.cross_entropy(self.classify(self.features(batch["tile"])), batch["kind"])
        self.log(name, loss, batch_size=len(batch["kind"]))
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train_loss")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val_loss")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


if __name__ == "__main__":
    L.seed_everything(10)
    if not Path("tiles").exists():
        download(Path("tiles"))
    data = TileData(batch_size=16, loader=LoaderSettings(num_workers=1))
    L.Trainer(max_epochs=6, accelerator="cpu").fit(LandCover(), datamodule=data)

"""Load forecasting: windows of many series that lie in one memory map."""

import argparse
from pathlib import Path

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.data import DataLoader, Dataset

HISTORY, HORIZON = 336, 48


def simulate(path, series, hours):
    rng = np.random.default_rng(31)
    array = np.lib.format.open_memmap(path, "w+", np.float32, (series, hours))
    t = np.arange(hours)
    for row in array:
        row[:] = 50 + 20 * np.sin(t / 24 * 2 * np.pi + rng.random()) + 8 * np.sin(t / 168 * 2 * np.pi)
        row += rng.normal(0, 3, hours).cumsum() * 0.01
    array.flush()


class Windows(Dataset):
    def __init__(self, path, first, last, stride=6):
        self.path, self.data = path, np.load(path, mmap_mode="r")
        self.starts = [(s, t) for s in range(len(self.data)) for t in range(first, last - HISTORY - HORIZON, stride)]

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, i):
        s, t = self.starts[i]
        window = np.asarray(self.data[s, t : t + HISTORY + HORIZON])
        mean, std = window[:HISTORY].mean(), window[:HISTORY].std() + 1e-3
        window = (window - mean) / std
        return {
            "history": torch.from_numpy(window[:HISTORY]),
            "future": torch.from_numpy(window[HISTORY:]),
            "mean": torch.tensor(mean),
            "std": torch.tensor(std),
            "series": s,
        }


class Forecaster(L.LightningModule):
    def __init__(self, series, width=96):
        super().__init__()
        self.embedding = nn.Embedding(series, 8)
        self.trend = nn.Linear(HISTORY, HORIZON)
        self.mlp = nn.Sequential(nn.Linear(HISTORY + 8, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, HORIZON))

    def forward(self, batch):
        history = batch["history"]
        return self.trend(history) + self.mlp(torch.cat([history, self.embedding(batch["series"])], dim=1))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.huber_loss(self(batch), batch["future"])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        error = (self(batch) - batch["future"]).abs() * batch["std"].unsqueeze(1)
        self.log("val_mae", error.mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--file", type=Path, default=Path("load.npy"))
    p.add_argument("--series", type=int, default=40)
    p.add_argument("--hours", type=int, default=4000)
    p.add_argument("--num_workers", type=int, default=4)
    a = p.parse_args()
    L.seed_everything(12)
    if not a.file.exists():
        simulate(a.file, a.series, a.hours)
    cut = int(a.hours * 0.8)
    train_ds, val_ds = Windows(a.file, 0, cut), Windows(a.file, cut, a.hours)
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", callbacks=[EarlyStopping("val_mae", patience=5)])
    trainer.fit(
        Forecaster(a.series),
        DataLoader(train_ds, batch_size=64, shuffle=True, num_workers=a.num_workers),
        DataLoader(val_ds, batch_size=256, num_workers=a.num_workers),
    )


if __name__ == "__main__":
    main()

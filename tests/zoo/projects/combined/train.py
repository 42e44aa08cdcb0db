"""Semi-supervised training: a few labelled spectra and many unlabelled ones, a batch of each in every step."""

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, Dataset

WIDTH, CLASSES = 1024, 5


class Spectra(Dataset):
    """Simulated when asked for, as from the instrument's driver."""

    def __init__(self, count, labelled, seed):
        self.count, self.labelled, self.seed = count, labelled, seed
        self.grid = np.linspace(0, 1, WIDTH)

    def __len__(self):
        return self.count

    def __getitem__(self, idx):
        rng = np.random.default_rng([self.seed, idx])
        label = idx % CLASSES
        signal = rng.normal(0, 0.05, WIDTH)
        for centre in rng.random(6 + 4 * label):
            signal += rng.random() * np.exp(-(((self.grid - centre) / 0.01) ** 2))
        baseline = np.polynomial.Polynomial.fit(self.grid, signal, 5)(self.grid)
        signal = torch.from_numpy((signal - baseline).astype(np.float32))
        return (signal, label) if self.labelled else signal


class SpectraData(L.LightningDataModule):
    def __init__(self, labelled=2000, unlabelled=6000, workers=1):
        super().__init__()
        self.labelled, self.unlabelled, self.workers = labelled, unlabelled, workers

    def train_dataloader(self):
        loaders = {
            "labelled": DataLoader(
                Spectra(self.labelled, True, 0), batch_size=8, shuffle=True, num_workers=self.workers
            ),
            "unlabelled": DataLoader(
                Spectra(self.unlabelled, False, 1), batch_size=24, shuffle=True, num_workers=self.workers
            ),
        }
        return CombinedLoader(loaders, mode="max_size_cycle")

    def val_dataloader(self):
        return DataLoader(Spectra(160, True, 2), batch_size=16)


class SemiSupervised(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(1, 16, 9, stride=4), nn.ReLU(), nn.Conv1d(16, 32, 9, stride=4), nn.ReLU(), nn.AdaptiveAvgPool1d(8)
        )
        self.head = nn.Linear(256, CLASSES)
        self.decoder = nn.Linear(256, WIDTH)

    def forward(self, x):
        return self.encoder(x.unsqueeze(1)).flatten(1)

    def training_step(self, batch, batch_idx):
        x, y = batch["labelled"]
        u = batch["unlabelled"]
        supervised = F.cross_entropy(self.head(self(x)), y)
        reconstruction = F.mse_loss(self.decoder(self(u + 0.05 * torch.randn_like(u))), u)
        self.log_dict({"sup": supervised, "rec": reconstruction}, batch_size=len(x))
        return supervised + reconstruction

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.head(self(x)), y))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


def main():
    L.seed_everything(0)
    trainer = L.Trainer(max_epochs=2, accelerator="cpu")
    trainer.fit(SemiSupervised(), SpectraData())


if __name__ == "__main__":
    main()

"""Cells against background, with pytorch_lightning."""

import glob
import os
from argparse import ArgumentParser

import numpy as np
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFilter
from torch import nn
from torch.utils.data import DataLoader, Dataset


def make_microscopy(root, n):
    os.makedirs(os.path.join(root, "images"))
    os.makedirs(os.path.join(root, "masks"))
    rng = np.random.RandomState(77)
    for i in range(n):
        mask = Image.new("L", (160, 160))
        draw = ImageDraw.Draw(mask)
        for _ in range(rng.randint(3, 9)):
            x, y, r = rng.randint(10, 150), rng.randint(10, 150), rng.randint(6, 18)
            draw.ellipse((x - r, y - r, x + r, y + r), fill=255)
        noise = rng.normal(60, 20, (160, 160))
        image = np.asarray(mask.filter(ImageFilter.GaussianBlur(2)), dtype=float) * 0.5 + noise
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(os.path.join(root, "images", "%04d.png" % i))
        mask.save(os.path.join(root, "masks", "%04d.png" % i))


class CellDataset(Dataset):
    def __init__(self, root, split):
        names = sorted(glob.glob(os.path.join(root, "images", "*.png")))
        n = int(len(names) * 0.9)
        self.names = names[:n] if split == "train" else names[n:]

    def __len__(self):
        return len(self.names)

    def __getitem__(self, idx):
        image = Image.open(self.names[idx])
        mask = Image.open(self.names[idx].replace("images", "masks"))
        image = image.resize((128, 128), Image.LANCZOS).filter(ImageFilter.MedianFilter(5))
        mask = mask.resize((128, 128), Image.NEAREST)
        x = torch.from_numpy(np.array(image, dtype=np.float32) / 255.0).unsqueeze(0)
        y = torch.from_numpy((np.array(mask) > 0).astype(np.int64))
        return x, y


class UNetMini(pl.LightningModule):
    def __init__(self, lr=1e-3, width=8):
        super().__init__()
        self.save_hyperparameters()
        self.down1 = self._block(1, width)
        self.down2 = self._block(width, 2 * width)
        self.up = self._block(3 * width, width)
        self.head = nn.Conv2d(width, 2, 1)

    def _block(self, i, o):
        return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())

    def forward(self, x):
        a = self.down1(x)
        b = F.interpolate(self.down2(F.max_pool2d(a, 2)), scale_factor=2)
        return self.head(self.up(torch.cat([a, b], 1)))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        pred = self(x).argmax(1)
        self.log("val/iou", ((pred & y).sum() / (pred | y).sum().clamp(min=1)).float())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class CellData(pl.LightningDataModule):
    def __init__(self, root="cells", n=500, batch_size=8):
        super().__init__()
        self.root, self.n, self.batch_size = root, n, batch_size

    def prepare_data(self):
        if not os.path.exists(self.root):
            make_microscopy(self.root, self.n)

    def train_dataloader(self):
        return DataLoader(CellDataset(self.root, "train"), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(CellDataset(self.root, "val"), batch_size=self.batch_size)


def main():
    parser = ArgumentParser()
    parser.add_argument("--n", type=int, default=500)
    parser.add_argument("--max_epochs", type=int, default=5)
    args = parser.parse_args()
    pl.seed_everything(1234)
    trainer = pl.Trainer(max_epochs=args.max_epochs, accelerator="cpu")
    trainer.fit(UNetMini(), datamodule=CellData(n=args.n))


if __name__ == "__main__":
    main()

"""Training from tar shards with webdataset."""

import io
import os
from pathlib import Path

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
import webdataset as wds
from PIL import Image
from torch import nn
from torchvision import transforms

SHARDS = Path(os.environ.get("SHARDS", "shards"))
PER_SHARD = int(os.environ.get("PER_SHARD", "320"))
NUM_SHARDS, CLASSES, BATCH = 8, 4, 16


def write_shards():
    rng = np.random.default_rng(5)
    SHARDS.mkdir(parents=True)
    for shard in range(NUM_SHARDS):
        with wds.TarWriter(str(SHARDS / f"train-{shard:04d}.tar")) as sink:
            for i in range(PER_SHARD):
                label = int(rng.integers(CLASSES))
                pixels = rng.integers(0, 200, (9, 9, 3), dtype=np.uint8)
                pixels[..., 0] = 60 * label
                jpeg = io.BytesIO()
                Image.fromarray(pixels).resize((128, 128), Image.Resampling.BICUBIC).save(jpeg, "JPEG")
                sink.write({"__key__": f"{shard}_{i:05d}", "jpg": jpeg.getvalue(), "cls": label})


def make_loader(num_workers=2):
    augment = transforms.Compose(
        [
            transforms.RandomResizedCrop(64),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize([0.5] * 3, [0.25] * 3),
        ]
    )
    urls = sorted(str(path) for path in SHARDS.glob("train-*.tar"))
    dataset = (
        wds.WebDataset(urls, shardshuffle=False)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(augment, lambda label: label)
        .batched(BATCH, partial=False)
    )
    return wds.WebLoader(dataset, batch_size=None, num_workers=num_workers)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
            nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 15 * 15, CLASSES),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.net(images), torch.as_tensor(labels))
        self.log("loss", loss, batch_size=len(images))
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-4)


if __name__ == "__main__":
    L.seed_everything(2, workers=True)
    if not SHARDS.exists():
        write_shards()
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", enable_checkpointing=False)
    trainer.fit(Net(), train_dataloaders=make_loader())

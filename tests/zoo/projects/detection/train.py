"""Object detection in the form of torchvision's references: targets are dicts, images have sizes of their own."""

import argparse
import random
from pathlib import Path

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.functional import hflip, to_tensor

GRID = 8


def draw_scenes(folder: Path, count: int) -> None:
    rng = random.Random(3)
    folder.mkdir(parents=True)
    lines = []
    for i in range(count):
        width, height = rng.randrange(160, 256, 16), rng.randrange(160, 256, 16)
        image = Image.effect_noise((width, height), 40).convert("RGB")
        pen = ImageDraw.Draw(image)
        for _ in range(rng.randrange(1, 5)):
            x, y, w, h = (
                rng.randrange(width - 60),
                rng.randrange(height - 60),
                rng.randrange(20, 60),
                rng.randrange(20, 60),
            )
            kind = rng.randrange(2)
            (pen.rectangle if kind else pen.ellipse)((x, y, x + w, y + h), fill=(200, 40 + 150 * kind, 60))
            lines.append(f"{i:04d}.jpg,{kind},{x},{y},{x + w},{y + h}")
        image.save(folder / f"{i:04d}.jpg", quality=92)
    (folder / "boxes.csv").write_text("\n".join(lines))


class Scenes(Dataset):
    def __init__(self, folder, train):
        rows = [line.split(",") for line in (folder / "boxes.csv").read_text().splitlines()]
        self.folder, self.train = folder, train
        self.boxes = {}
        for name, *numbers in rows:
            self.boxes.setdefault(name, []).append([int(n) for n in numbers])
        names = sorted(self.boxes)
        self.names = names[: len(names) * 9 // 10] if train else names[len(names) * 9 // 10 :]

    def __len__(self):
        return len(self.names)

    def __getitem__(self, idx):
        name = self.names[idx]
        image = Image.open(self.folder / name).convert("RGB")
        found = torch.tensor(self.boxes[name])
        labels, boxes = found[:, 0], found[:, 1:].float()
        if self.train and torch.rand(()) < 0.5:
            image = hflip(image)
            boxes[:, [0, 2]] = image.width - boxes[:, [2, 0]]
        target = {
            "boxes": boxes,
            "labels": labels,
            "image_id": torch.tensor(idx),
            "area": (boxes[:, 2:] - boxes[:, :2]).prod(1),
        }
        return to_tensor(image), target


def collate_fn(batch):
    return tuple(zip(*batch, strict=True))


class TinyDetector(L.LightningModule):
    """A grid of cells, each says what is in it: FCOS in small."""

    def __init__(self):
        super().__init__()
        layers, width = [], 3
        for out in (12, 24, 32):
            layers += [nn.Conv2d(width, out, 3, stride=2, padding=1), nn.BatchNorm2d(out), nn.ReLU()]
            width = out
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(GRID))
        self.head = nn.Conv2d(width, 3 + 4, 1)

    def loss(self, images, targets):
        total = 0.0
        for image, target in zip(images, targets, strict=True):
            out = self.head(self.body(image[None] * 2 - 1))[0]
            scale = torch.tensor([image.shape[2], image.shape[1]] * 2)
            boxes = target["boxes"] / scale
            cells = ((boxes[:, :2] + boxes[:, 2:]) / 2 * GRID).long().clamp(0, GRID - 1)
            wanted = torch.full((GRID, GRID), 2)
            wanted[cells[:, 1], cells[:, 0]] = target["labels"]
            at = out[3:, cells[:, 1], cells[:, 0]].T
            total = total + F.cross_entropy(out[None, :3], wanted[None]) + F.l1_loss(at, boxes)
        return total / len(images)

    def training_step(self, batch, batch_idx):
        loss = self.loss(*batch)
        self.log("loss", loss, prog_bar=True, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(*batch), batch_size=len(batch[0]))

    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        plateau = ReduceLROnPlateau(opt, patience=3)
        return {
            "optimizer": opt,
            "lr_scheduler": {
                "scheduler": plateau,
                "interval": "step",
                "frequency": 50,
                "monitor": "val_loss",
                "strict": False,
            },
        }


def main(args):
    L.seed_everything(args.seed)
    random.seed(args.seed)
    np.random.seed(args.seed)
    root = Path(args.data_path)
    if not root.exists():
        draw_scenes(root, args.images)
    train_loader = DataLoader(
        Scenes(root, train=True),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        collate_fn=collate_fn,
    )
    val_loader = DataLoader(Scenes(root, train=False), batch_size=1, num_workers=args.workers, collate_fn=collate_fn)
    trainer = L.Trainer(
        max_epochs=args.epochs, accelerator="cpu", val_check_interval=args.val_every, check_val_every_n_epoch=None
    )
    trainer.fit(TinyDetector(), train_loader, val_loader)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-path", default="scenes")
    parser.add_argument("--images", default=600, type=int)
    parser.add_argument("-b", "--batch-size", default=4, type=int)
    parser.add_argument("-j", "--workers", default=4, type=int)
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("--val-every", default=50, type=int)
    parser.add_argument("--seed", default=1, type=int)
    main(parser.parse_args())

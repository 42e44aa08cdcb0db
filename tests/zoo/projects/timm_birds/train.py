"""Fine-grained image classification with timm and albumentations."""

import argparse
from pathlib import Path

import albumentations as A
import cv2
import lightning as L
import numpy as np
import timm
import torch
import torch.nn.functional as F
from albumentations.pytorch import ToTensorV2
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

CLASSES = 8


def make_images(folder: Path, count: int) -> None:
    """A stand-in for the download: smooth colour blobs, a class each."""
    rng = np.random.default_rng(0)
    for i in range(count):
        label = i % CLASSES
        place = folder / f"species_{label:02d}"
        place.mkdir(parents=True, exist_ok=True)
        small = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
        small[..., label % 3] = 30 * label
        cv2.imwrite(str(place / f"{i:05d}.jpg"), cv2.resize(small, (256, 256), interpolation=cv2.INTER_CUBIC))


class BirdDataset(Dataset):
    def __init__(self, files, transform):
        self.files = files
        self.transform = transform

    def __len__(self):
        return len(self.files)

    def __getitem__(self, idx):
        path = self.files[idx]
        image = cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2RGB)
        image = self.transform(image=image)["image"]
        return image, int(path.parent.name.split("_")[1])


class BirdData(L.LightningDataModule):
    def __init__(self, root: Path, batch_size: int = 16, num_workers: int = 2):
        super().__init__()
        self.root, self.batch_size, self.num_workers = root, batch_size, num_workers

    def setup(self, stage=None):
        files = sorted(self.root.rglob("*.jpg"))
        cut = len(files) * 9 // 10
        norm = [A.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)), ToTensorV2()]
        train_tf = A.Compose(
            [
                A.RandomResizedCrop(size=(96, 96), scale=(0.5, 1.0)),
                A.HorizontalFlip(p=0.5),
                A.ColorJitter(brightness=0.2, contrast=0.2, saturation=0.2, hue=0.05, p=0.8),
                *norm,
            ],
            seed=42,
        )
        val_tf = A.Compose([A.Resize(96, 96), *norm])
        order = np.random.default_rng(1).permutation(len(files))
        self.train_set = BirdDataset([files[i] for i in order[:cut]], train_tf)
        self.val_set = BirdDataset([files[i] for i in order[cut:]], val_tf)

    def train_dataloader(self):
        return DataLoader(
            self.train_set,
            batch_size=self.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
        )

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.batch_size, num_workers=self.num_workers)


class BirdClassifier(L.LightningModule):
    def __init__(self, backbone: str = "mobilenetv3_small_050", lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.model = timm.create_model(backbone, pretrained=False, num_classes=CLASSES)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.model(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.model(images)
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_acc", (logits.argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [opt], [torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=10)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--images", type=int, default=1600)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    L.seed_everything(7)
    if not args.data.exists():
        make_images(args.data, args.images)
    trainer = L.Trainer(
        max_epochs=args.epochs,
        accelerator="cpu",
        log_every_n_steps=10,
        callbacks=[ModelCheckpoint(monitor="val_acc", mode="max"), LearningRateMonitor()],
    )
    trainer.fit(BirdClassifier(), datamodule=BirdData(args.data))


if __name__ == "__main__":
    main()

"""Two runs on a folder of images, with a plain DataLoader and with this package: how long does each wait for data?"""

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.models import resnet18
from torchvision.transforms import v2

from lightning_feed import FastDataModule, GPUStarvationCallback, PrefetchCallback
from lightning_feed.demo_images import make_images

SMALL = [v2.RandomResizedCrop(32), v2.RandomHorizontalFlip()]
NORMALISED = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]


class Images(FastDataModule):
    def __init__(self, root):
        super().__init__(batch_size=16)
        self.root = root

    def make_dataset(self, split):  # uint8 until the batch is on the device
        return ImageFolder(self.root, v2.Compose([*SMALL, v2.PILToTensor()])) if split == "train" else None

    def device_transform(self, batch, split):
        images, labels = batch
        return images.float().div(127.5).sub(1), labels


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = resnet18(num_classes=1000)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="a folder of class folders (default: 512 images are made)")
    parser.add_argument("--fast", action="store_true", help="eight steps of each epoch")
    options = parser.parse_args()
    root = options.data or make_images(Path("feed_demo"), 512)
    plain = DataLoader(ImageFolder(root, v2.Compose([*SMALL, *NORMALISED])), batch_size=16, shuffle=True)
    for name, data, callbacks in (("plain", plain, []), ("fed", Images(root), [PrefetchCallback()])):
        seed_everything(0)
        callbacks.append(GPUStarvationCallback())  # prints its report
        logger = TensorBoardLogger("lightning_logs", name=name)  # tensorboard --logdir lightning_logs
        steps = 8 if options.fast else 1.0
        Trainer(max_epochs=2, limit_train_batches=steps, callbacks=callbacks, logger=logger).fit(Classifier(), data)

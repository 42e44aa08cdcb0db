"""What the demo trains: one model, and the same pictures fed to it in the usual way and in ours."""

from collections.abc import Callable

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import models, transforms
from torchvision.transforms import v2

from lightning_feed.datamodule import FastDataModule
from lightning_feed.demo_pictures import PictureFolder
from lightning_feed.errors import DatasetError

PIXELS = 32
"""Side of the model's input: small, so that the demo ends soon on two CPU cores."""
BATCH_SIZE = 64


class SmallResNet(LightningModule):
    """torchvision's ResNet-18, untrained, with SGD."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.network = models.resnet18(num_classes=classes)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross entropy of (batch, 3, PIXELS, PIXELS) float32 pictures against (batch,) int64 classes."""
        pictures, classes = batch
        loss = nn.functional.cross_entropy(self.network(pictures), classes)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


class PlainPictures(LightningDataModule):
    """As most people write it first: float32 in the loader, no workers."""

    def __init__(self, folder: PictureFolder) -> None:
        super().__init__()
        self._folder = folder

    def train_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        """Batches of normalised float32 pictures."""
        recipe = transforms.Compose(
            [
                transforms.RandomResizedCrop(PIXELS),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
            ]
        )
        return DataLoader(_Pictures(self._folder, recipe), batch_size=BATCH_SIZE, shuffle=True)


class FedPictures(FastDataModule):
    """The same pictures and the same recipe, in uint8 until they are on the device."""

    def __init__(self, folder: PictureFolder) -> None:
        super().__init__(batch_size=BATCH_SIZE)
        self._folder = folder

    def make_dataset(self, split: str) -> Dataset[tuple[Tensor, int]] | None:
        """The training pictures; there are no other splits."""
        recipe = v2.Compose([v2.RandomResizedCrop(PIXELS), v2.RandomHorizontalFlip(), v2.PILToTensor()])
        return _Pictures(self._folder, recipe) if split == "train" else None

    def device_transform(self, batch: tuple[Tensor, Tensor], split: str) -> tuple[Tensor, Tensor]:
        """Make (batch, 3, PIXELS, PIXELS) uint8 pictures float32 from -1 to 1, on the device.

        What ``ToTensor`` and ``Normalize(0.5, 0.5)`` do in the plain loader, without a constant to copy to the device:
        such a copy in each step would make the host wait.
        """
        pictures, classes = batch
        return pictures.float().div_(127.5).sub_(1), classes


class _Pictures(Dataset[tuple[Tensor, int]]):
    """(picture, class) for each file; the recipe takes a Pillow image to a tensor of (3, PIXELS, PIXELS)."""

    def __init__(self, folder: PictureFolder, recipe: Callable[[Image.Image], Tensor]) -> None:
        self._samples, self._recipe = folder.samples, recipe

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self._samples[index]
        try:
            with Image.open(path) as file:
                picture = file.convert("RGB")
        except OSError as error:  # Pillow's own errors are OSErrors too
            raise DatasetError(
                f"{path} cannot be read as a picture ({error}). Delete it or replace it, then start again."
            ) from error
        return self._recipe(picture), label

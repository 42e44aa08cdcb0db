"""Image batches as a model on a CUDA device gets them."""

from typing import Any

from lightning.pytorch import LightningModule
from recording import quiet_trainer
from torch import Tensor, nn, optim


class Seen(LightningModule):
    """Keeps what it was given, and waits for nothing: copies stay on the device until they are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.given: dict[str, list[tuple[Tensor, Tensor]]] = {"train": [], "val": []}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.see("train", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.see("val", batch)

    def see(self, split: str, batch: Any) -> Tensor:
        images, labels = batch
        assert images.is_cuda
        assert labels.is_cuda
        self.given[split].append((images.clone(), labels.clone()))
        return nn.functional.cross_entropy(self.layer(images.float().mean((2, 3))), labels)

    def batches(self, split: str = "train") -> list[tuple[Tensor, Tensor]]:
        """What was given, in host memory: images as float32, and labels."""
        return [(images.float().cpu(), labels.cpu()) for images, labels in self.given[split]]

    def configure_optimizers(self) -> Any:
        return optim.SGD(self.parameters(), lr=0.1)


def fitted(model: LightningModule, data: Any, *callbacks: Any, **options: Any) -> Any:
    """The model after a fit on one CUDA device.

    Args:
        model: to train.
        data: a data module, or a loader.
        callbacks: of the Trainer.
        options: of the Trainer, in place of ``quiet_trainer``'s.
    """
    given = {"datamodule" if hasattr(data, "train_dataloader") else "train_dataloaders": data}
    quiet_trainer(list(callbacks), accelerator="cuda", **options).fit(model, **given)
    return model

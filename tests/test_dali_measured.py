"""``diagnose`` on a data module whose batches DALI decodes: they are decoded in all experiments, and remembered."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from recording import quiet_trainer
from torch import Tensor, nn

from lightning_feed import ImageFolderDataModule, LoaderSettings, diagnose
from lightning_feed.load.image_findings import ImageFindings

pytest.importorskip("nvidia.dali")


class Small(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0].mean((2, 3))), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_diagnose_with_dali(class_folders: Path) -> None:
    birds = ImageFolderDataModule(
        class_folders,
        batch_size=1,
        val_fraction=0.01,  # an epoch of 11 steps or more, so that as many as a verdict needs count in any case
        image_size=16,
        decoder="pillow",
        backend="dali-cpu",
        loader=LoaderSettings(num_workers=1, workers="thread"),
    )
    found = diagnose(quiet_trainer([], max_epochs=50), Small(), birds, budget_s=3, only=("X3", "X5", "X7"))
    results = found.measurements.experiments
    assert results is not None
    assert [key.name for key in results.keys] == ["0", "1"]  # images and labels, so the decoder is behind the loader
    assert results.keys[0].bytes_per_batch == 3 * 16 * 16
    assert [cost.name for cost in results.costs] == ["read"]  # what the workers do
    assert results.left_out == (("handing batches over", "worker threads hand nothing over"),)
    (kept,) = ImageFindings().load(birds._images_key(torch.device("cpu")))
    assert (kept.backend, kept.batch_size) == ("dali-cpu", 1)
    assert birds.backend_choice is None

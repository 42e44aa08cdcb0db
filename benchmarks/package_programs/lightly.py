from pathlib import Path

import numpy as np
import torch
from lightly.data import LightlyDataset
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from lightly.transforms import SimCLRTransform
from lightning.pytorch import LightningModule, Trainer, seed_everything
from PIL import Image
from torch import nn


class SimCLR(LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 32, 7, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head, self.loss = SimCLRProjectionHead(32, 64, 32), NTXentLoss()

    def training_step(self, batch, batch_idx):
        (left, right), _, _ = batch
        return self.loss(self.head(self.backbone(left)), self.head(self.backbone(right)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


seed_everything(1)
folder = Path("images")
folder.mkdir(exist_ok=True)
for number in range(128):
    pixels = np.random.default_rng(number).integers(0, 255, (300, 400, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / f"{number}.jpg")
dataset = LightlyDataset("images", transform=SimCLRTransform(input_size=64))
loader = torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True)  # settings
model = SimCLR()
Trainer(max_epochs=6, accelerator="cpu").fit(model, loader)
torch.save(model.state_dict(), "weights.pt")

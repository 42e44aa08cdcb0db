"""A DCGAN on small pictures, with manual optimisation."""

from pathlib import Path

import lightning as L
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision.transforms as T
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

LATENT = 32


def paint(root, count=3000):
    rng = np.random.default_rng(8)
    for i in range(count):
        folder = root / ("dark" if i % 2 else "bright")
        folder.mkdir(parents=True, exist_ok=True)
        coarse = rng.integers(0, 128, (5, 5, 3)) + 127 * (i % 2 == 0)
        Image.fromarray(coarse.astype(np.uint8)).resize((48, 48), Image.Resampling.BILINEAR).save(folder / f"{i}.png")


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(LATENT, 64 * 8 * 8)
        self.up = nn.Sequential(
            nn.BatchNorm2d(64),
            nn.ConvTranspose2d(64, 32, 4, 2, 1),
            nn.BatchNorm2d(32),
            nn.ReLU(True),
            nn.ConvTranspose2d(32, 3, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.up(self.fc(z).view(-1, 64, 8, 8))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(32, 64, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(64 * 8 * 8, 1),
        )

    def forward(self, x):
        return self.net(x)


class GAN(L.LightningModule):
    def __init__(self, lr=2e-4):
        super().__init__()
        self.automatic_optimization = False
        self.discriminator, self.generator, self.lr = Discriminator(), Generator(), lr

    def training_step(self, batch, batch_idx):
        real, _ = batch
        opt_d, opt_g = self.optimizers()
        fake = self.generator(torch.randn(len(real), LATENT, device=self.device))
        on_real, on_fake = self.discriminator(real), self.discriminator(fake.detach())
        d_loss = F.softplus(-on_real).mean() + F.softplus(on_fake).mean()
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()

        g_loss = F.softplus(-self.discriminator(fake)).mean()
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.log_dict({"d_loss": d_loss, "g_loss": g_loss}, prog_bar=True)

    def configure_optimizers(self):
        betas = (0.5, 0.999)
        return [
            torch.optim.Adam(self.discriminator.parameters(), self.lr, betas),
            torch.optim.Adam(self.generator.parameters(), self.lr, betas),
        ]


L.seed_everything(99)
root = Path("pictures")
if not root.exists():
    paint(root)
transform = T.Compose([T.Resize(32), T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize((0.5,) * 3, (0.5,) * 3)])
dataset = ImageFolder(str(root), transform)
dataloader = DataLoader(dataset, batch_size=32, shuffle=True, drop_last=True, num_workers=0)
trainer = L.Trainer(max_epochs=2, accelerator="cpu")
trainer.fit(GAN(), dataloader)

"""Digits in noise, configured with Hydra."""

import hydra
import lightning as L
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn
from torch.utils.data import Dataset
from torchvision.transforms import v2


class NoisyDigits(Dataset):
    def __init__(self, size: int, pixels: int, blur: int):
        g = torch.Generator().manual_seed(0)
        self.labels = torch.randint(0, 10, (size,), generator=g).tolist()
        self.shapes = (torch.rand(10, 3, 12, 12, generator=g) * 255).to(torch.uint8)
        self.transform = v2.Compose(
            [
                v2.Resize(pixels, antialias=True),
                v2.RandomAffine(15, translate=(0.1, 0.1)),
                v2.GaussianBlur(blur),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize([0.5], [0.25]),
            ]
        )

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        label = self.labels[i]
        return {"image": self.transform(self.shapes[label]), "label": label, "index": i}


class Classifier(L.LightningModule):
    def __init__(self, net: nn.Module, lr: float):
        super().__init__()
        self.net, self.lr = net, lr

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch["image"]), batch["label"])
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)


def make_net(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.Linear(32 * width, 10),
    )  # fmt: skip


class DigitData(L.LightningDataModule):
    def __init__(self, dataset: DictConfig, loader: DictConfig):
        super().__init__()
        self.dataset_cfg, self.loader_cfg = dataset, loader

    def setup(self, stage: str) -> None:
        self.train = NoisyDigits(**self.dataset_cfg)

    def train_dataloader(self):
        return instantiate(self.loader_cfg, dataset=self.train, shuffle=True)


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    L.seed_everything(cfg.seed)
    trainer = L.Trainer(**cfg.trainer)
    trainer.fit(Classifier(make_net(cfg.width), cfg.lr), DigitData(cfg.data.dataset, cfg.data.loader))


if __name__ == "__main__":
    main()

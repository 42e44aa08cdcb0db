"""Two ranks on the CPU."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Physics(Dataset):
    """Trajectories of a double pendulum, integrated on the fly."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        state = torch.tensor([(i * 0.618) % 3.14, (i * 0.414) % 3.14, 0.0, 0.0])
        path = []
        for _ in range(24):
            a, b, va, vb = state.tolist()
            force = torch.tensor([-9.8 * torch.sin(torch.tensor(a)), -9.8 * torch.sin(torch.tensor(b - a))])
            state = state + 0.05 * torch.tensor([va, vb, float(force[0]), float(force[1])])
            path.append(state)
        return torch.stack(path[:-1]), path[-1], i


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 64, num_layers=2, batch_first=True)
        self.out = nn.Linear(64, 4)

    def training_step(self, batch, batch_idx):
        x, y, _ = batch
        h, _ = self.rnn(x)
        loss = nn.functional.mse_loss(self.out(h[:, -1]), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Physics(8000), batch_size=16, shuffle=True, num_workers=1)


if __name__ == "__main__":
    L.seed_everything(0)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, enable_progress_bar=False)
    trainer.fit(Model(), datamodule=Data())

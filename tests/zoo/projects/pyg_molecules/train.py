"""A property of small molecules, from their graphs."""

import lightning as L
import torch
import torch.nn.functional as F
from torch.nn import Linear, ReLU, Sequential
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv, global_add_pool

ATOMS = 6


def random_molecule(generator):
    n = int(torch.randint(6, 24, (), generator=generator))
    parents = torch.tensor([int(torch.randint(0, i, (), generator=generator)) for i in range(1, n)])
    bonds = torch.stack([torch.arange(1, n), parents])
    x = F.one_hot(torch.randint(0, ATOMS, (n,), generator=generator), ATOMS).float()
    y = (x[:, 0].sum() - x[:, 1].sum()).reshape(1)
    return Data(x=x, edge_index=torch.cat([bonds, bonds.flip(0)], dim=1), y=y)


class GIN(L.LightningModule):
    def __init__(self, hidden=32):
        super().__init__()
        self.conv1 = GINConv(Sequential(Linear(ATOMS, hidden), ReLU(), Linear(hidden, hidden)))
        self.conv2 = GINConv(Sequential(Linear(hidden, hidden), ReLU(), Linear(hidden, hidden)))
        self.readout = Linear(hidden, 1)

    def forward(self, data):
        h = self.conv1(data.x, data.edge_index).relu()
        h = self.conv2(h, data.edge_index).relu()
        return self.readout(global_add_pool(F.dropout(h, 0.1, self.training), data.batch)).squeeze(-1)

    def training_step(self, data, batch_idx):
        loss = F.mse_loss(self(data), data.y)
        self.log("train_mse", loss, batch_size=data.num_graphs)
        return loss

    def validation_step(self, data, batch_idx):
        self.log("val_mse", F.mse_loss(self(data), data.y), batch_size=data.num_graphs)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    L.seed_everything(21)
    generator = torch.Generator().manual_seed(0)
    molecules = [random_molecule(generator) for _ in range(4000)]
    train_loader = DataLoader(molecules[:3600], batch_size=32, shuffle=True)
    val_loader = DataLoader(molecules[3600:], batch_size=64)
    trainer = L.Trainer(max_epochs=4, accelerator="cpu", enable_progress_bar=False)
    trainer.fit(GIN(), train_loader, val_loader)


if __name__ == "__main__":
    main()

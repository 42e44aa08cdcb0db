import numpy as np
import torch
from ase import Atoms
from ase.calculators.lj import LennardJones
from ase.io import write
from lightning.pytorch import LightningModule, Trainer, seed_everything
from nequip.data.datamodule import ASEDataModule
from torch import nn


class Energy(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        return 1e-12 * (self.net(batch["pos"].float()).sum() - batch["total_energy"].sum()) ** 2

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


seed_everything(1)
frames = [Atoms("H32", np.random.default_rng(number).normal(scale=3, size=(32, 3))) for number in range(100)]
for atoms in frames:
    atoms.calc = LennardJones()
    atoms.get_forces()
write("frames.xyz", frames)
transforms = [
    {"_target_": "nequip.data.transforms.ChemicalSpeciesToAtomTypeMapper", "model_type_names": ["H"]},
    {"_target_": "nequip.data.transforms.NeighborListTransform", "r_max": 5.0},
]
split = {"file_path": "frames.xyz", "train": 80, "val": 20}
data = ASEDataModule(seed=1, split_dataset=split, transforms=transforms)  # settings
model = Energy()
Trainer(max_epochs=1, accelerator="cpu", limit_val_batches=0).fit(model, data)
torch.save(model.state_dict(), "weights.pt")

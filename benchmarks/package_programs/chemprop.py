import torch
from chemprop import data, featurizers, models, nn
from lightning.pytorch import Trainer, seed_everything

seed_everything(1)
smiles = ["C" * left + "O" + "N" * right for left in range(1, 21) for right in range(1, 21)]
points = [data.MoleculeDatapoint.from_smi(one, [float(len(one))]) for one in smiles]
dataset = data.MoleculeDataset(points, featurizers.SimpleMoleculeMolGraphFeaturizer())
loader = data.build_dataloader(dataset, batch_size=8)  # settings
model = models.MPNN(nn.BondMessagePassing(d_h=64), nn.MeanAggregation(), nn.RegressionFFN(input_dim=64))
Trainer(max_epochs=1, accelerator="cpu").fit(model, loader)
torch.save(model.state_dict(), "weights.pt")

import scvi
import torch

scvi.settings.seed = 1
cells = scvi.data.synthetic_iid(batch_size=2000, n_genes=200)
scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
model = scvi.model.SCVI(cells)
model.train(max_epochs=2, accelerator="cpu")  # settings
torch.save(model.module.state_dict(), "weights.pt")

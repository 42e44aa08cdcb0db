"""A data module loads the files of the package that it uses, and no others."""

import warm

FIT = """
import sys, warnings
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_feed import FastDataModule, LoaderSettings

class Rows(FastDataModule):
    def make_dataset(self, split):
        return torch.utils.data.TensorDataset(torch.rand(16, 4)) if split == "train" else None

class Linear(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    quiet = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")}
    rows = Rows(batch_size=4, loader=LoaderSettings(num_workers=2))
    Trainer(max_epochs=1, accelerator="cpu", **quiet).fit(Linear(), datamodule=rows)
    print(*sorted(name for name in sys.modules if name.startswith("lightning_feed")))
"""


def test_a_fit_on_data_in_memory_imports_few_modules_and_nothing_remote() -> None:
    done = warm.run(["-c", FIT])
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split("\n")[-2].split()
    assert len(loaded) <= 50, loaded
    assert [name for name in loaded if any(word in name for word in ("dali", "ray", "remote"))] == []

"""Training on the CPU of a machine with a GPU: the callbacks and the loaders leave the GPU alone."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, traceback, warnings
import torch
first_use = []
initialise = torch.cuda._lazy_init
def noted():
    if not torch.cuda.is_initialized():
        first_use.extend(frame.filename for frame in traceback.extract_stack())
    initialise()
torch.cuda._lazy_init = noted
from lightning.pytorch import LightningModule, Trainer
from lightning_feed import GPUStarvationCallback, ImageFolderDataModule, LoaderSettings, PrefetchCallback

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        assert images.device.type == "cpu"
        return torch.nn.functional.cross_entropy(self.layer(images.float().mean((2, 3))), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

warnings.simplefilter("error")
for said in (".*GPU available but not used", ".*does not have many workers", ".*smaller than the logging interval",
             ".*multi-threaded, use of fork", ".*LeafSpec", ".*no `val_dataloader`"):
    warnings.filterwarnings("ignore", message=said)
prefetch = PrefetchCallback()
data = ImageFolderDataModule(sys.argv[1], batch_size=4, image_size=32, val_fraction=0.0, decoder="pillow",
                             loader=LoaderSettings(num_workers=2))
Trainer(accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[prefetch, GPUStarvationCallback()]).fit(Model(), datamodule=data)
assert torch.cuda.is_available()
assert not prefetch.active and not data.recommendations["train"].setting.pin_memory
# Lightning 2.6 initialises CUDA itself, to save its random state, wherever there is a GPU.
print("by lightning_feed:", [name for name in first_use if "lightning_feed" in name])
"""


@pytest.mark.gpu(no_twin="only where there is a driver can anything initialise it")
def test_cpu_training_does_not_use_the_gpu(class_folders: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(class_folders)],
        capture_output=True, text=True, cwd=tmp_path, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "by lightning_feed: []" in done.stdout

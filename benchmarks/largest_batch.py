"""The largest batch of ResNet-18 that fits on a GPU, by image backend: what decoding there takes of the memory.

    python benchmarks/largest_batch.py [--backends torch,dali-gpu] [--pictures 2048]

Trains for a few steps of bf16 at 224 x 224 in a process of its own for each size: doubled while it fits, then halved in
between, to within 3 %.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from pictures import make_picture

CLOSE = 0.03
"""Share of the size that is not worth another attempt."""
FIRST = 256
STEPS = 4


def largest(folder: Path, backend: str) -> int:
    """Double from FIRST on while it fits (halve while it does not), then halve in between."""
    size, fits, fails = FIRST, 0, 0
    while not fails or fails - fits > max(16, CLOSE * fits):
        if attempt(folder, backend, size):
            fits = size
        else:
            fails = size
        size = 2 * size if not fails else (fits + fails) // 2
    return fits


def attempt(folder: Path, backend: str, size: int) -> bool:
    """Whether training with this size ends without an error, in a process of its own."""
    command = [sys.executable, __file__, "--one", f"{folder}", backend, f"{size}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "memory" not in done.stderr.lower():
        raise SystemExit(done.stderr[-2000:])
    print(f"{backend}: {size} {'does not fit' if done.returncode else 'fits'}", flush=True)
    return done.returncode == 0


def train(folder: Path, backend: str, size: int) -> None:
    """Some steps."""
    from lightning.pytorch import LightningModule, Trainer
    from torchvision.models import resnet18

    from lightning_feed import ImageFolderDataModule

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = resnet18(num_classes=2)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="gpu", devices=1, max_steps=STEPS, precision="bf16-mixed", **quiet)
    trainer.fit(Model(), ImageFolderDataModule(folder, size, backend=backend, val_fraction=0))


def main() -> None:
    """Print the largest size of each backend."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="torch,dali-gpu")
    parser.add_argument("--pictures", type=int, default=2048)
    parser.add_argument("--one", nargs=3, metavar=("FOLDER", "BACKEND", "SIZE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        train(Path(options.one[0]), options.one[1], int(options.one[2]))
        return
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.pictures):
            file = Path(folder) / f"class_{number % 2}" / f"{number:05}.jpg"
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(make_picture(number % 64))
        for backend in options.backends.split(","):
            print(f"{backend}: {largest(Path(folder), backend)} images in the largest batch")


if __name__ == "__main__":
    main()

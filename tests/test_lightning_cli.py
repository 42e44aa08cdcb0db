"""LightningCLI of both packages builds all three classes from one YAML file, and fits."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import lightning_feed
import lightning_feed.pl
from lightning_feed import GPUStarvationCallback, LoaderSettings, PrefetchCallback

# Lightning's CLI calls jsonargparse by names that it has retired.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:[\s\S]*JSONARGPARSE_DEPRECATION_WARNINGS:DeprecationWarning",
    r"ignore:[\s\S]*was deprecated in v4\.\d+\.0 and will be removed in v5:DeprecationWarning",
)

CONFIG = """
seed_everything: 1
trainer:
  max_epochs: 1
  accelerator: cpu
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: lightning_feed.PrefetchCallback
      init_args:
        depth: 2
        host_keys: [meta]
    - class_path: lightning_feed.GPUStarvationCallback
      init_args:
        every_n_steps: 3
        report: false
data:
  size: 24
  batch_size: 4
  loader:
    num_workers: 0
    pin_memory: false
    background: 2
"""


def _rows(split: str, size: int) -> Dataset[Any] | None:
    return TensorDataset(torch.arange(float(size * 32)).reshape(size, 32)) if split == "train" else None


class Rows(lightning_feed.FastDataModule):
    def __init__(self, size: int, batch_size: int = 2, loader: LoaderSettings | None = None) -> None:
        super().__init__(batch_size, loader=loader)
        self.size = size

    def make_dataset(self, split: str) -> Dataset[Any] | None:
        return _rows(split, self.size)


class RowsOfTheOtherPackage(lightning_feed.pl.FastDataModule):
    def __init__(self, size: int, batch_size: int = 2, loader: LoaderSettings | None = None) -> None:
        super().__init__(batch_size, loader=loader)
        self.size = size

    def make_dataset(self, split: str) -> Dataset[Any] | None:
        return _rows(split, self.size)


@pytest.mark.parametrize(
    ("package", "data"), [("lightning.pytorch", Rows), ("pytorch_lightning", RowsOfTheOtherPackage)]
)
def test_one_yaml_file_configures_data_module_and_callbacks(
    package: str, data: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli_class = importlib.import_module(f"{package}.cli").LightningCLI
    boring = importlib.import_module(f"{package}.demos.boring_classes").BoringModel
    seen = []

    class Model(boring):  # type: ignore[misc, valid-type]
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> Any:
            seen.append(batch[0].shape)
            return super().training_step(batch[0] / 1000, batch_idx)

        def val_dataloader(self) -> list[Any]:
            return []

    config = CONFIG if package == "lightning.pytorch" else CONFIG.replace("lightning_feed.", "lightning_feed.pl.")
    (tmp_path / "config.yaml").write_text(config)
    monkeypatch.setattr(sys, "argv", ["train.py", "fit", "--config", str(tmp_path / "config.yaml")])
    cli = cli_class(Model, data, save_config_callback=None)

    assert seen == [(4, 32)] * 6
    (prefetch,) = (c for c in cli.trainer.callbacks if isinstance(c, PrefetchCallback))
    assert (prefetch.depth, tuple(prefetch.host_keys)) == (2, ("meta",))
    assert sum(isinstance(c, GPUStarvationCallback) for c in cli.trainer.callbacks) == 1
    assert isinstance(cli.datamodule, data)


def test_an_impossible_setting_in_yaml_raises_our_error_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    (tmp_path / "config.yaml").write_text(CONFIG.replace("depth: 2", "depth: 0"))
    monkeypatch.setattr(sys, "argv", ["train.py", "fit", "--config", str(tmp_path / "config.yaml")])
    with pytest.raises(ValueError, match=r"PrefetchCallback\(depth=0\): depth is the number of batches"):
        LightningCLI(BoringModel, Rows)

"""FastDataModule's storage: staged once, kept on the device; the batches are those without any of it."""

import copy
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from lightning_feed import (
    FastDataModule,
    LoaderSettings,
)
from lightning_feed.errors import SettingsError

HERE = LoaderSettings(num_workers=0, seed=1)

pytestmark = pytest.mark.filterwarnings(
    "ignore:You have overridden .* in `LightningModule`:UserWarning"
)  # Recording has


class Squares(Dataset[Any]):
    """Sample i is i squared, four times; it counts how often it was asked."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.reads: Counter[int] = Counter()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads[index] += 1
        return torch.full((4,), float(index) ** 2)


class Module(FastDataModule):
    """Squares for training and validation."""

    def make_dataset(self, split: str) -> Any:
        return {"train": Squares(12), "val": Squares(6)}.get(split)


def batches(module: FastDataModule, epochs: int = 2) -> list[list[list[float]]]:
    return [[batch.tolist() for batch in module.train_dataloader()] for _ in range(epochs)]


# --- on the device ----------------------------------------------------------------------------------------------------


def test_a_dataset_kept_on_the_device_gives_equal_batches_and_is_read_once() -> None:
    kept = Module(4, loader=HERE, on_device=True)
    assert batches(kept) == batches(Module(4, loader=HERE))
    reads = dict(kept.dataset("train").reads)  # some were looked at first, to know the size of the whole
    batches(kept)
    assert dict(kept.dataset("train").reads) == reads


def test_a_copy_of_the_module_loads_its_own_data() -> None:
    module = Module(4, loader=HERE, on_device=True)
    expected = batches(module)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert batches(other) == expected


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"stage_to": "/dev/shm/x"}, "Set data_dir"),
        ({"data_dir": "s3://bucket/birds"}, "data_dir='s3://bucket/birds' is a URL.* Set stage_to"),
        ({"drop_keys": "meta"}, "list of letters"),
    ],
)
def test_invalid_storage_arguments_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        Module(4, **given)


# --- staging ----------------------------------------------------------------------------------------------------------


class Files(FastDataModule):
    """Reads numbers from the files in its folder."""

    def make_dataset(self, split: str) -> Any:
        if split != "train":
            return None
        return TensorDataset(torch.tensor([float(path.read_text()) for path in sorted(self.staged_dir.iterdir())]))


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    folder = tmp_path / "numbers"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.txt").write_text(str(number))
    return folder


def test_data_are_read_from_the_staged_copy(numbers: Path, tmp_path: Path) -> None:
    module = Files(4, loader=HERE, data_dir=numbers, stage_to=tmp_path / "fast")
    assert batches_of_pairs(module) == batches_of_pairs(Files(4, loader=HERE, data_dir=numbers))
    assert module.staged_dir == tmp_path / "fast" / "numbers"
    assert Files(4, data_dir=numbers).staged_dir == numbers


def batches_of_pairs(module: FastDataModule) -> list[list[float]]:
    return [batch[0].tolist() for batch in module.train_dataloader()]


# --- keys that nobody reads -------------------------------------------------------------------------------------------


class Dicts(torch.utils.data.Dataset[Any]):
    """A tensor and a path."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.ones(2), "path": f"{index}.jpg"}


def test_dropped_keys_do_not_leave_the_workers() -> None:
    class WithPath(FastDataModule):
        def make_dataset(self, split: str) -> Any:
            return Dicts()

    for workers in ("process", "thread"):
        loader = LoaderSettings(num_workers=1, workers=workers)  # type: ignore[arg-type]
        (first, *_) = WithPath(4, loader=loader, drop_keys=("path",)).train_dataloader()
        assert list(first) == ["x"]

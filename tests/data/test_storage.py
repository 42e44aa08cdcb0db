"""FastDataModule's storage: staged once, cached once, kept on the device; the batches are those without any of it."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from squares import Squares
from torch.utils.data import TensorDataset

from lightning_feed import (
    FastDataModule,
    LoaderSettings,
)
from lightning_feed.errors import DatasetError, SettingsError

HERE = LoaderSettings(num_workers=0, seed=1)

pytestmark = pytest.mark.filterwarnings(
    "ignore:You have overridden .* in `LightningModule`:UserWarning"
)  # Recording has


class Module(FastDataModule):
    """Squares for training and validation."""

    def make_dataset(self, split: str) -> Any:
        return {"train": Squares(12), "val": Squares(6)}.get(split)


def batches(module: FastDataModule, epochs: int = 2) -> list[list[list[float]]]:
    return [[batch.tolist() for batch in module.train_dataloader()] for _ in range(epochs)]


# --- caches -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["bytes", "decoded", "device"])
@pytest.mark.parametrize(
    "loader",
    [
        HERE,
        LoaderSettings(num_workers=2, seed=1),
        LoaderSettings(num_workers=2, seed=1, workers="thread"),
        pytest.param(LoaderSettings(num_workers=1, seed=1, start_method="forkserver"), marks=pytest.mark.slow),
    ],
    ids=["here", "processes", "threads", "spawned"],
)
def test_a_cache_changes_no_batch_and_reads_each_sample_once(cache: Any, loader: LoaderSettings) -> None:
    plain, cached = Module(4, loader=loader), Module(4, loader=loader, cache=cache)
    assert batches(cached) == batches(plain)
    assert plain.dataset("train").reads.tolist() == [2] * 12
    reads = cached.dataset("train").reads.tolist()
    if cache == "device":  # some were looked at first, to know the size of the whole
        batches(cached)
        assert cached.dataset("train").reads.tolist() == reads
    else:
        assert reads == [1] * 12


def test_all_splits_of_a_fit_share_one_limit() -> None:
    module = Module(4, loader=HERE, cache="decoded", cache_limit="4MiB")
    module.setup("fit")
    stats = module.cache_stats()
    assert stats is not None
    assert stats.limit_bytes <= (4 << 20) + 2 * 4096  # whole pages
    assert module.dataset("train").cache is not None
    assert module.dataset("val").cache is not None


def test_a_dataset_that_does_not_tell_its_steps_is_refused() -> None:
    class Plain(FastDataModule):
        def make_dataset(self, split: str) -> Any:
            return TensorDataset(torch.arange(4)) if split == "train" else None

    with pytest.raises(DatasetError, match=r"Derive it from lightning_feed.CacheableDataset"):
        Plain(2, cache="bytes", loader=HERE).train_dataloader()
    assert len(Plain(2, cache="device", loader=HERE).train_dataloader()) == 2


def test_a_copy_of_the_module_has_caches_of_its_own() -> None:
    module = Module(4, loader=HERE, cache="decoded")
    module.setup("fit")
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.cache_stats() is None
        assert batches(other) == batches(Module(4, loader=HERE))
        assert other.cache_stats() is not None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cache": "ram"}, "cache='ram'"),
        ({"cache": "bytes", "cache_limit": "half"}, "limit 'half'"),
        ({"cache": "bytes", "cache_shard": True}, "cache_shard"),
        ({"stage_to": "/dev/shm/x"}, "Set data_dir"),
        ({"stage_wait": False}, "stage_wait=False is not possible: training begins when the copy is complete"),
        ({"stage_remove": True}, "stage_remove=True"),
        ({"drop_keys": "meta"}, "letter by letter"),
    ],
)
def test_what_is_impossible_is_refused(given: dict[str, Any], words: str) -> None:
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

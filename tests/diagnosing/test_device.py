"""Copies to the device, and the images that it decodes. Here the device is the CPU, where the same code runs."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from lightning_feed import ImageFolderDataModule, LoaderSettings
from lightning_feed.diagnosing import rates
from lightning_feed.diagnosing.rates import (
    BUFFER_BYTES,
    MOST_IMAGES,
    decode_rate,
    measure_copies,
)
from lightning_feed.diagnosing.run import run_data_experiments
from lightning_feed.diagnosing.session import LoaderPart, NotMeasurable, Session
from lightning_feed.errors import DatasetError
from lightning_feed.measure.experiment_results import ExperimentResults

CPU = torch.device("cpu")


class Clock:
    """A second for each round."""

    def __init__(self) -> None:
        self.now, self.waits = 0.0, 0

    def __call__(self) -> float:
        return self.now

    def wait(self, device: torch.device) -> None:
        self.now += 1.0
        self.waits += 1


def _loader(root: Path, **options: Any) -> Any:
    settings = {"batch_size": 4, "image_size": 32, "decoder": "pillow", "loader": LoaderSettings(num_workers=0, seed=1)}
    return ImageFolderDataModule(root, **(settings | options)).train_dataloader()


def _measure(loader: Any, clock: Clock | None = None, max_s: float = 5.0) -> float | None:
    clock = clock or Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rates, "time", SimpleNamespace(perf_counter=clock))
        patch.setattr(torch.cuda, "synchronize", clock.wait)
        return decode_rate(LoaderPart("", loader), CPU, max_s)


@pytest.mark.parametrize("batch_size", [4, 10])
def test_rounds_are_counted_until_the_time_is_over(batch_size: int, class_folders: Path) -> None:
    clock = Clock()
    loader = _loader(class_folders, batch_size=batch_size, val_fraction=0.25)
    images = len(loader.dataset)
    # Each round of all images takes a second; the first, which makes the decoder, does not count.
    assert _measure(loader, clock) == pytest.approx(images / batch_size)
    assert clock.waits == 1 + 5


def test_the_files_are_decoded_as_the_loader_would_crop_them(
    class_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    decode = rates.decode_batch
    monkeypatch.setattr(rates, "decode_batch", lambda batch, dataset: seen.append(decode(batch, dataset)))
    _measure(_loader(class_folders), max_s=0.0)
    pictures, labels = seen[0]
    assert (pictures.dtype, pictures.shape[1:]) == (torch.uint8, (3, 32, 32))
    assert set(labels.tolist()) == {0, 1}


def test_as_many_images_as_a_device_can_hold_before_they_are_cropped(
    class_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(rates, "decode_batch", lambda batch, dataset: sizes.append(len(batch)))
    monkeypatch.setattr(rates, "MOST_IMAGES", 3)
    _measure(_loader(class_folders), max_s=0.0)
    assert set(sizes) == {3}
    assert MOST_IMAGES >= 32


def test_images_that_are_encoded_already_and_subsets_too(class_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_feed.data.image_backends.GPU_BACKENDS", ())
    assert _measure(_loader(class_folders, backend="nvjpeg")) is not None
    dataset = _loader(class_folders).dataset
    assert _measure(DataLoader(Subset(dataset, [3, 1]), batch_size=2)) is not None


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(3)


def test_a_broken_image_is_named(class_folders: Path) -> None:
    (class_folders / "dogs" / "3.jpg").write_bytes(b"\xff\xd8\xff")
    with pytest.raises(DatasetError, match=r"3\.jpg"):
        _measure(_loader(class_folders, val_fraction=0.01))


def _why_no_copies(kind: torch.device | None) -> str:
    with pytest.raises(NotMeasurable) as reason:
        measure_copies(Session(None, kind, first=[torch.ones(5)]))
    return str(reason.value)


def test_why_no_copies_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is the CPU" in _why_no_copies(None)
    assert "is the CPU" in _why_no_copies(CPU)
    assert "type 'mps'" in _why_no_copies(torch.device("mps"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (BUFFER_BYTES, 10**12))
    assert "more than half of the free device memory" in _why_no_copies(torch.device("cuda", 0))


@pytest.mark.gpu
def test_copies_on_a_device() -> None:
    batch = {"image": torch.ones(64, 3, 224, 224).pin_memory(), "label": torch.ones(64)}
    session = Session(None, torch.device("cuda", 0), first=[batch])
    measure_copies(session)
    found = session.results
    assert (found.pinned_gb_per_s or 0) >= 0.8 * (found.pageable_gb_per_s or 0) > 0
    assert (found.copy_ms or 0) > 0


# --- among the experiments ------------------------------------------------------------------------------------------


def _results(loader: Any, kind: str) -> ExperimentResults:
    only = frozenset({"transforms", "no-transforms", "device-decode"})
    found = list(run_data_experiments(loader, device=kind, budget_s=1, only=only))
    return found[-1]


def test_costs_of_workers_that_only_read(class_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_feed.data.image_backends.GPU_BACKENDS", ())
    loader = _loader(class_folders, backend="nvjpeg")
    assert loader.dataset.encoded
    found = _results(loader, "cpu")
    assert [cost.name for cost in found.costs] == ["read"]
    assert found.no_transform_per_s is None
    assert found.left_out == ()


@pytest.mark.gpu
def test_on_a_gpu(class_folders: Path) -> None:
    part = LoaderPart("", _loader(class_folders))
    rate = decode_rate(part, torch.device("cuda", 0), 0.2)
    assert rate is not None
    assert rate > 0

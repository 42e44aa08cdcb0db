"""Data sets of a subclass's own: torch takes them, and the other backends refuse them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recording import quiet_trainer
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from lightning_feed import ImageFolderDataModule, LoaderSettings
from lightning_feed.data import images
from lightning_feed.errors import ArchiveError, SettingsError
from lightning_feed.images import backends
from lightning_feed.images.image_dataset import ImageDataset
from lightning_feed.storage.packing import pack

pytestmark = pytest.mark.usefixtures("gpu")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "device_of", lambda trainer: torch.device("cuda"))
    monkeypatch.setattr(backends, "require_nvjpeg", lambda device: None)


class Labelled(Dataset[Any]):
    """Around another, of which it reads the samples at once."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.labels = [label for _, label, *_ in map(dataset.__getitem__, range(len(dataset)))]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        image, label = self.dataset[index]
        assert label == self.labels[index]
        return image, label


class Cropped(Subset[Any]):
    """Changes the samples of its part."""

    def __getitem__(self, index: Any) -> Any:
        image, label = super().__getitem__(index)
        return image[:, :16, :16], label

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Stacked(ImageDataset):
    """Another kind of ours, that a subclass makes of it."""


def stacked(made: ImageDataset) -> Stacked:
    return Stacked(made.source, made.decoder, made.recipe)


WRAPPED: dict[str, Any] = {
    "dict": lambda made: {"one": made, "other": made},
    "list": lambda made: [made],
    "StackDataset": lambda made: StackDataset(made, range(len(made))),
    "ConcatDataset": lambda made: ConcatDataset([made, made]),
    "Labelled": Labelled,
    "Cropped": lambda made: Cropped(made, range(len(made))),
    "Stacked": stacked,
    "TensorDataset": lambda made: TensorDataset(torch.zeros(5, 3, 32, 32, dtype=torch.uint8), torch.zeros(5)),
}


def birds(root: Path, wrap: Any, *splits: str, backend: Any = "torch", **options: Any) -> ImageFolderDataModule:
    """With ``wrap`` around the datasets of these splits."""

    class Wrapping(ImageFolderDataModule):
        def make_dataset(self, split: str) -> Any:
            made = super().make_dataset(split)
            return wrap(made) if made is not None and split in splits else made

    return Wrapping(root, 4, image_size=32, backend=backend, decoder="pillow", val_fraction=0.5, **options)


def first(loaders: Any) -> Any:
    """The first image tensor that loaders give."""
    while not isinstance(loaders, torch.Tensor):
        loaders = next(iter(loaders.values() if isinstance(loaders, dict) else loaders))
    return loaders


@pytest.mark.parametrize("name", WRAPPED)
def test_the_torch_backend_accepts_custom_datasets(name: str, class_folders: Path) -> None:
    module = birds(class_folders, WRAPPED[name], "train", loader=LoaderSettings(num_workers=0))
    for loaders in (module.train_dataloader(), module.val_dataloader()):
        assert first(loaders).dtype == torch.uint8


def test_a_dataset_of_the_users_own_needs_no_image_folder(tmp_path: Path) -> None:
    class Own(ImageFolderDataModule):
        def make_dataset(self, split: str) -> Any:
            return WRAPPED["TensorDataset"](None)

    module = Own(tmp_path / "nothing", 4, loader=LoaderSettings(num_workers=0))
    assert first(module.train_dataloader()).shape == (4, 3, 32, 32)


@pytest.mark.parametrize("name", ["dict", "ConcatDataset"])
def test_a_fit_runs_on_custom_datasets(name: str, class_folders: Path) -> None:
    from lightning.pytorch.demos.boring_classes import BoringModel

    seen: list[torch.Tensor] = []

    class Model(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(first(batch))
            return super().training_step(torch.ones(1, 32), batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(first(batch))

    module = birds(class_folders, WRAPPED[name], "train", loader=LoaderSettings(num_workers=0))
    module.device_transform = lambda batch, split: batch  # type: ignore[method-assign]
    quiet_trainer([], max_epochs=1, log_every_n_steps=1).fit(Model(), datamodule=module)
    assert len(seen) >= 4


@pytest.mark.parametrize("name", WRAPPED)
def test_the_nvjpeg_backend_refuses_custom_datasets(name: str, class_folders: Path) -> None:
    module = birds(class_folders, WRAPPED[name], "train", backend="nvjpeg", loader=LoaderSettings(num_workers=0))
    with pytest.raises(
        SettingsError, match=rf"make_dataset\('train'\) returned a {name}, but this backend decodes only .* Subset"
    ):
        module.train_dataloader()


def test_a_subset_of_images_is_left_encoded_for_the_nvjpeg_backend(class_folders: Path) -> None:
    subset = birds(
        class_folders, lambda made: Subset(Subset(made, range(6)), range(0, 6, 2)), "train", backend="nvjpeg"
    )
    dataset = subset.train_dataloader().dataset
    assert [sample.data[:2] for sample in dataset] == [b"\xff\xd8"] * 3


@pytest.mark.parametrize(
    ("labels", "backend"),
    [
        (np.array(["cats", "1"] * 6), "torch"),
        (np.linspace(0, 1, 12), "nvjpeg"),
        (np.zeros((12, 2), np.int64), "torch"),
        (np.zeros(3, np.int64), "torch"),
    ],
    ids=["texts", "fractions", "pairs", "too few"],
)
def test_invalid_labels_in_a_pack_are_reported_before_training(
    labels: Any, backend: Any, class_folders: Path, tmp_path: Path
) -> None:
    pack(class_folders, tmp_path / "pack")
    index = tmp_path / "pack" / "all" / "index.npz"
    with np.load(index) as stored:
        kept = {**stored, "labels": labels}
    np.savez(index, **kept)
    module = ImageFolderDataModule(tmp_path / "pack", 4, backend=backend)
    with pytest.raises(ArchiveError, match=r"its numbers are not integers|do not hold one value for each sample"):
        module.setup("fit")


def test_decode_failures_in_a_subset_are_counted(class_folders: Path) -> None:
    for path in class_folders.glob("*/*.jpg"):
        path.write_bytes(path.read_bytes()[:200] if path.name == "0.jpg" else path.read_bytes())
    settings = LoaderSettings(num_workers=0)
    module = birds(class_folders, lambda made: Subset(made, range(6)), "train", "val", on_error="skip", loader=settings)
    assert [batch for loader in (module.train_dataloader(), module.val_dataloader()) for batch in loader]
    assert module.failures() == 2

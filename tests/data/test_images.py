"""ImageFolderDataModule on real folders and real Trainers: pixels, labels, splits, broken files, several ranks."""

import importlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from recording import quiet_trainer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import SequentialSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import lightning_feed
from lightning_feed import ImageFolderDataModule, LoaderSettings
from lightning_feed.errors import DatasetError, SettingsError
from lightning_feed.images.image_dataset import collate_encoded, collate_images
from lightning_feed.load.loader import FeedLoader

HERE = LoaderSettings(num_workers=0)
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three classes of eight smooth JPEGs each, in folders for training and validation."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 4)):
        for label, name in enumerate("abc"):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                coarse = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
                coarse[..., label] //= 3
                Image.fromarray(coarse).resize((80, 60), Image.Resampling.BICUBIC).save(
                    folder / f"{index}.jpg", quality=95
                )
    return tmp_path / "photos"


class Classifier:
    """A small classifier for either package, which keeps what it saw."""

    @staticmethod
    def of(package: str = "lightning.pytorch", classes: int = 3) -> Any:
        module = importlib.import_module(package).LightningModule

        class Small(module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Linear(3, classes)
                self.seen: list[tuple[Tensor, Tensor]] = []

            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                self.seen.append(batch)
                return nn.functional.cross_entropy(self.net(batch[0].float().mean((2, 3))), batch[1])

            def validation_step(self, batch: Any, batch_idx: int) -> None:
                self.training_step(batch, batch_idx)

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        return Small()


# --- what the model sees ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder", ["pillow", "opencv", "turbo", "turbo-region", "torchvision", "auto"])
def test_validation_images_nearly_equal_those_of_torchvisions_image_folder(photos: Path, decoder: str) -> None:
    recipe = v2.Compose(
        [
            v2.PILToTensor(),
            v2.Resize(37, antialias=True),
            v2.CenterCrop(32),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
    standard = ImageFolder(str(photos / "val"), recipe)
    ours = ImageFolderDataModule(photos, batch_size=12, image_size=32, decoder=decoder, loader=HERE)
    (batch,) = ours.val_dataloader()
    assert (batch[0].dtype, batch[0].shape) == (torch.uint8, (12, 3, 32, 32))
    assert batch[0].is_contiguous(memory_format=torch.channels_last)
    images, labels = ours.device_transform(batch, "val")
    expected = torch.stack([image for image, _ in standard])
    assert labels.tolist() == [label for _, label in standard]
    assert images.dtype == torch.float32
    # Within one step of uint8: after Normalize a step is 1 / 255 / std. Decoders other than the reference may be
    # further off in a few pixels, which the tests of decoders bound.
    steps = ((images - expected) * STD * 255).abs()
    assert steps.max() <= (1.01 if decoder == "pillow" else 12)
    assert steps.mean() <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_device_normalization_equals_that_of_torchvision(photos: Path, dtype: torch.dtype) -> None:
    module = ImageFolderDataModule(photos, dtype=dtype, image_size=16, loader=HERE)
    images = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    normalised, _ = module.device_transform((images, None), "train")
    expected = (images.float() / 255 - MEAN) / STD
    torch.testing.assert_close(normalised, expected.to(dtype), atol=1e-5 if dtype == torch.float32 else 0.02, rtol=0)
    kept, _ = module.device_transform((expected, None), "train")
    assert kept is expected


@pytest.mark.parametrize("with_aspects", [False, True], ids=["cut on the host", "whole, kept on the device"])
def test_a_batch_is_converted_to_float_once(photos: Path, with_aspects: bool) -> None:
    made: list[tuple[int, ...]] = []

    class Conversions(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten._to_copy.default and args[0].dtype == torch.uint8:
                made.append(tuple(args[0].shape))
            return function(*args, **(kwargs or {}))

    module = ImageFolderDataModule(photos, image_size=16, loader=HERE)
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    with Conversions():
        module.device_transform((images, torch.zeros(4), *([torch.ones(4)] if with_aspects else [])), "train")
    assert [sorted(shape) for shape in made] == [[3, 4, 32, 32]]


@pytest.mark.parametrize("encoded", [False, True])
def test_batches_of_workers_lie_in_slots_and_not_in_shared_memory_of_torch(encoded: bool, photos: Path) -> None:
    module = ImageFolderDataModule(photos, 4, image_size=32, loader=HERE)
    module.prepare_data()
    module.setup("fit")
    dataset = module.dataset("train")
    dataset.encoded = encoded
    collate = collate_encoded if encoded else collate_images
    for batch in FeedLoader(dataset, batch_size=4, num_workers=1, collate_fn=collate):
        tensors = [batch.files, batch.labels] if encoded else batch
        assert not any(tensor.is_shared() for tensor in tensors)


def test_a_user_transform_is_applied_and_its_floats_are_not_normalized(photos: Path) -> None:
    transform = v2.Compose([v2.Resize((20, 24)), v2.ToDtype(torch.float32, scale=True)])
    module = ImageFolderDataModule(photos, batch_size=4, eval_transform=transform, decoder="pillow", loader=HERE)
    batch = next(iter(module.val_dataloader()))
    normalised, _ = module.device_transform(batch, "val")
    picture = torch.from_numpy(np.array(Image.open(photos / "val" / "a" / "0.jpg"))).permute(2, 0, 1)
    assert torch.equal(normalised[0], transform(picture))


# --- in a Trainer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("package", "workers"), [("lightning.pytorch", "process"), ("pytorch_lightning", "thread")])
def test_image_folders_train_and_validate_in_both_packages(package: str, workers: Any, photos: Path) -> None:
    home = lightning_feed if package == "lightning.pytorch" else importlib.import_module("lightning_feed.pl")
    module = home.ImageFolderDataModule(
        photos, batch_size=6, image_size=32, loader=LoaderSettings(num_workers=2, workers=workers)
    )
    model = Classifier.of(package)
    trainer = importlib.import_module(package).Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=module)
    assert len(model.seen) == 2 + 4 + 2  # sanity check, training, validation
    assert all(images.dtype == torch.float32 and images.shape[1:] == (3, 32, 32) for images, _ in model.seen)
    assert module.classes == ("a", "b", "c")
    assert module.num_classes == 3


def test_a_dataset_on_the_device_gets_new_crops_in_each_epoch(photos: Path) -> None:
    module = ImageFolderDataModule(photos, 12, image_size=16, decoder="pillow", loader=HERE, on_device=True)
    loader = module.train_dataloader()
    kept = next(iter(loader))
    assert kept[0].dtype == torch.uint8
    first, second = (module.device_transform(kept, "train") for _ in range(2))
    assert first[0].shape == (len(kept[0]), 3, 16, 16)
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[0], second[0])
    with pytest.raises(SettingsError, match="a transform cannot run on the host"):
        ImageFolderDataModule(photos, transform=v2.Resize(8), on_device=True)


def test_a_folder_without_splits_is_divided_by_val_fraction(photos: Path) -> None:
    module = ImageFolderDataModule(photos / "train", val_fraction=0.25, image_size=16, loader=HERE)
    assert (len(module.dataset("train")), len(module.dataset("val"))) == (18, 6)
    assert module.dataset("test") is None
    assert module.test_dataloader() == []


# --- the decoder ------------------------------------------------------------------------------------------------------


def test_the_choice_of_decoder_auto_is_logged_once_with_its_reason(
    photos: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = ImageFolderDataModule(photos, image_size=16, loader=HERE)
    assert module.decoder_choice is None
    with caplog.at_level(logging.INFO):
        module.dataset("train")
        module.dataset("val")
    assert module.decoder_choice is not None
    messages = [record.getMessage() for record in caplog.records if module.decoder_choice.reason in record.getMessage()]
    assert len(messages) == 1  # one decoder for all splits


# --- broken files -----------------------------------------------------------------------------------------------------


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


BREAK = {
    "cut short": _truncate,
    "a text": lambda path: path.write_text("not an image"),
    "empty": lambda path: path.write_bytes(b""),
    "deleted": lambda path: path.unlink(),
}


@pytest.mark.parametrize(
    ("name", "workers"), [(name, LoaderSettings(num_workers=place % 2)) for place, name in enumerate(BREAK)]
)
def test_a_broken_file_ends_the_fit_with_an_error_naming_path_and_index(
    name: str, workers: LoaderSettings, photos: Path
) -> None:
    module = ImageFolderDataModule(photos, batch_size=4, image_size=16, loader=workers)
    module.dataset("train")
    BREAK[name](photos / "train" / "b" / "3.jpg")
    with pytest.raises(DatasetError, match=r"b/3\.jpg \(sample 11\)"):
        quiet_trainer([], max_epochs=1).fit(Classifier.of(), datamodule=module)


class Unshuffled(ImageFolderDataModule):
    """Images in the order of their names."""

    def sampler(self, dataset: Any, split: str) -> Any:
        return SequentialSampler(dataset)


@pytest.mark.parametrize(("on_error", "workers"), [("skip", "process"), ("substitute", "thread")])
def test_broken_files_are_replaced_and_counted(on_error: Any, workers: Any, photos: Path) -> None:
    module = Unshuffled(
        photos,
        batch_size=8,
        image_size=16,
        on_error=on_error,
        loader=LoaderSettings(num_workers=2, workers=workers),
    )
    module.dataset("train")
    for index, breaking in enumerate(BREAK.values()):
        breaking(photos / "train" / "b" / f"{2 * index}.jpg")
    batches = list(module.train_dataloader())
    assert [len(labels) for _, labels in batches] == [8, 8, 8]
    assert module.failures() >= 4 if on_error == "substitute" else module.failures() == 4
    if on_error == "skip":
        assert batches[1][1].tolist() == [1] * 8  # the places were filled from the same batch


def test_decoder_auto_still_chooses_when_some_files_are_unreadable(photos: Path) -> None:
    for path in (photos / "train" / "a").iterdir():
        path.write_bytes(b"")
    module = ImageFolderDataModule(photos, image_size=16, loader=HERE)
    module.dataset("train")
    assert module.decoder_choice is not None


def test_decoder_auto_falls_back_to_the_reference_if_no_file_is_readable(
    photos: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in (photos / "train").rglob("*.jpg"):
        path.write_bytes(b"no image")
    module = ImageFolderDataModule(photos, image_size=16, loader=HERE)
    with caplog.at_level(logging.INFO):
        module.dataset("train")
    assert module.decoder_choice is not None
    assert module.decoder_choice.reason.startswith('decoder="auto" took the reference: ')
    assert module.decoder_choice.reason in caplog.text


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"quality": "best"},
        {"image_size": 0},
        {"dtype": torch.uint8},
        {"mean": (0.5,)},
        {"std": (0.0, 1, 1)},
        {"val_fraction": 1.5},
        {"on_error": "ignore"},
        {"transform": 3},
    ],
    ids=lambda given: next(iter(given)),
)
def test_invalid_arguments_are_refused_by_name(given: dict[str, Any], photos: Path) -> None:
    with pytest.raises(SettingsError, match=next(iter(given))):
        ImageFolderDataModule(photos, **given).dataset("train")


def test_a_misspelled_argument_is_refused_with_the_one_that_was_meant(photos: Path) -> None:
    with pytest.raises(SettingsError, match=r"has no argument img_size\. Did you mean image_size\?"):
        ImageFolderDataModule(photos, img_size=32)


def test_an_unknown_decoder_is_refused_at_construction(photos: Path) -> None:
    with pytest.raises(SettingsError, match=r"decoder='jpegli' is not valid\. Use one of 'auto'"):
        ImageFolderDataModule(photos, decoder="jpegli")

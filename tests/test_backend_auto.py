"""``ImageFolderDataModule(backend="auto")``: what it takes by what was measured, and what goes with it."""

import logging
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decode_bound import BOUND, CUDA, pretend_gpu, remember
from lightning.pytorch import Trainer

from lightning_feed import ImageFolderDataModule, LoaderSettings
from lightning_feed.archive.packing import pack
from lightning_feed.data import image_backends, images
from lightning_feed.data.image_backends import (
    NOT_MEASURED,
    BackendChoice,
    BackendFacts,
    choose_backend,
    first_holds_pixels,
    once_for_all_ranks,
    require_nvjpeg,
    why_missing,
)
from lightning_feed.errors import DatasetError, LoaderError, MissingExtraError, SettingsError
from lightning_feed.load.image_dataset import EncodedBatch


def _refuse(*args: Any, **options: Any) -> Any:
    raise AssertionError("this need not be looked for")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that says that it has a GPU, with nvJPEG and without DALI."""
    pretend_gpu(monkeypatch)


def _birds(root: Path, **options: Any) -> ImageFolderDataModule:
    return ImageFolderDataModule(root, batch_size=4, image_size=32, backend="auto", **options)


# --- by what was measured -----------------------------------------------------------------------------------------


def test_without_a_measurement_it_is_torch_and_says_what_to_run(
    class_folders: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_backends, "why_missing", _refuse)
    birds = _birds(class_folders)
    assert birds.backend_choice is None
    with caplog.at_level(logging.INFO):
        assert not birds.dataset("train").encoded
    assert birds.backend_choice == BackendChoice("torch", NOT_MEASURED)
    assert sum(NOT_MEASURED in line for line in caplog.messages) == 1
    birds.dataset("val")
    assert birds.backend == "auto"


@pytest.mark.usefixtures("gpu")
def test_measured_decode_bound_it_is_the_gpu_and_workers_become_threads(class_folders: Path) -> None:
    remember(class_folders)
    birds = _birds(class_folders)
    loader = birds.train_dataloader()
    choice = birds.backend_choice
    assert choice is not None
    assert choice.name == "nvjpeg"
    assert "60 %" in choice.reason
    assert "DALI is not installed" in choice.reason
    assert birds.dataset("train").encoded
    assert birds.recommendations["train"].workers == "thread"
    assert loader.workers == "thread"
    assert isinstance(next(iter(loader)), EncodedBatch)


class Mixed(ImageFolderDataModule):
    def collate(self, samples: list[Any], split: str) -> Any:
        images, labels = super().collate(samples, split)
        return [images, labels, labels.flip(0)]


@pytest.mark.usefixtures("gpu")
def test_a_collate_of_the_user_s_goes_on_getting_images(class_folders: Path) -> None:
    remember(class_folders)
    birds = Mixed(class_folders, batch_size=4, image_size=32, backend="auto", loader=LoaderSettings(num_workers=0))
    images, labels, flipped = next(iter(birds.train_dataloader()))
    assert images.dtype == torch.uint8
    assert labels.flip(0).equal(flipped)
    assert birds.backend_choice == BackendChoice(
        "torch", "collate was overridden, which is written for samples that are decoded"
    )
    assert birds._feed_facts()["own_transforms"] is True


@pytest.mark.usefixtures("gpu")
def test_dropped_parts_are_left_out_of_decoded_batches(class_folders: Path) -> None:
    remember(class_folders)
    birds = _birds(class_folders, drop_keys=["1"])
    birds.dataset("train")
    assert birds.backend_choice == BackendChoice("torch", "drop_keys leaves parts of decoded batches out")
    assert birds._feed_facts()["own_transforms"] is True


@pytest.mark.usefixtures("gpu")
def test_settings_that_were_given_stay(class_folders: Path) -> None:
    remember(class_folders)
    given = LoaderSettings(num_workers=0)
    birds = _birds(class_folders, loader=given)
    birds.train_dataloader()
    assert birds._feed.loaders.settings == given


def test_with_torch_the_settings_left_out_stay_those_of_every_data_module(class_folders: Path) -> None:
    birds = _birds(class_folders)
    birds.train_dataloader()
    assert birds._feed.loaders.settings == LoaderSettings()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("other", [{"image_size": 64}, {"quality": "fast"}])
def test_what_was_measured_of_other_images_does_not_count(other: dict[str, Any], class_folders: Path) -> None:
    remember(class_folders, **other)
    birds = _birds(class_folders)
    birds.dataset("train")
    assert birds.backend_choice == BackendChoice("torch", NOT_MEASURED)


@pytest.mark.usefixtures("gpu")
def test_what_was_measured_on_another_gpu_does_not_count(class_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(class_folders)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Another Board")
    birds = _birds(class_folders)
    birds.dataset("train")
    assert birds.backend_choice == BackendChoice("torch", NOT_MEASURED)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("quality", "name"), [("exact", "dali-gpu"), ("fast", "nvjpeg")])
def test_dali_is_taken_where_it_is_and_the_quality_is_its_own(
    quality: Any, name: str, class_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_backends, "why_missing", lambda backend, device: "")
    monkeypatch.setattr(images, "require_dali", lambda **options: None)
    remember(class_folders, quality=quality)
    birds = _birds(class_folders, quality=quality, decoder="pillow")
    birds.dataset("train")
    assert birds.backend_choice is not None
    assert birds.backend_choice.name == name


def test_what_was_measured_on_a_gpu_does_not_count_on_the_cpu(
    class_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A Board")
    remember(class_folders)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    birds = _birds(class_folders)
    birds.dataset("train")
    assert birds.backend_choice == BackendChoice("torch", NOT_MEASURED)


# --- what only torch does -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"transform": lambda image: image[:, :32, :32]}, "a transform was given"),
        ({"eval_transform": lambda image: image[:, :32, :32]}, "a transform was given"),
        ({"cache": "decoded"}, "keeps decoded images"),
        ({"cache": "device"}, "keeps decoded images"),
    ],
)
def test_what_only_torch_does_is_no_error(options: dict[str, Any], words: str, class_folders: Path) -> None:
    remember(class_folders)
    birds = _birds(class_folders, **options, transform_input="tensor")
    batch = next(iter(birds.train_dataloader()))
    choice = birds.backend_choice
    assert choice is not None
    assert choice.name == "torch"
    assert words in choice.reason
    assert len(batch[0]) == 4
    for backend in ("nvjpeg", "dali-gpu", "dali-cpu"):
        with pytest.raises(SettingsError):
            ImageFolderDataModule(class_folders, backend=backend, **options)


@pytest.mark.usefixtures("gpu")
def test_a_pack_of_pixels_is_not_decoded_at_all(class_folders: Path, tmp_path: Path) -> None:
    pack(class_folders, tmp_path / "pixels", short_side=40, decoded=True, workers=1)
    remember(tmp_path / "pixels")
    birds = _birds(tmp_path / "pixels", loader=LoaderSettings(num_workers=0))
    pictures, _ = next(iter(birds.train_dataloader()))
    choice = birds.backend_choice
    assert choice is not None
    assert choice.name == "torch"
    assert "holds pixels" in choice.reason
    assert pictures.shape == (4, 3, 32, 32)


def test_an_image_that_cannot_be_read_is_taken_for_encoded() -> None:
    class Broken:
        def __len__(self) -> int:
            return 1

        def read(self, index: int) -> Any:
            raise DatasetError("it is gone")

    assert first_holds_pixels(Broken()) is False  # type: ignore[arg-type]
    assert first_holds_pixels([]) is False  # type: ignore[arg-type]


@pytest.mark.usefixtures("gpu")
def test_an_image_that_cannot_be_decoded_is_not_the_choice_s_business(class_folders: Path) -> None:
    (class_folders / "cats" / "0.jpg").write_bytes(b"")
    remember(class_folders)
    birds = _birds(class_folders)
    birds.dataset("train")
    choice = birds.backend_choice
    assert choice is not None
    assert choice.name == "nvjpeg"


# --- ranks, processes, reports ------------------------------------------------------------------------------------


def _rank(number: int, sent: list[Any]) -> Any:
    def broadcast(value: Any) -> Any:
        sent.append(value)
        return pickle.loads(pickle.dumps(sent[0]))

    return SimpleNamespace(world_size=2, is_global_zero=number == 0, strategy=SimpleNamespace(broadcast=broadcast))


def test_rank_0_decides_for_all() -> None:
    sent: list[Any] = []
    choice = BackendChoice("nvjpeg", "measured")
    assert once_for_all_ranks(_rank(0, sent), lambda: choice) == choice
    assert once_for_all_ranks(_rank(1, sent), _refuse) == choice


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (DatasetError("it is gone"), (DatasetError, "Rank 0, .*: it is gone")),
        (KeyError("x"), (LoaderError, "Rank 0, .*: KeyError: 'x'")),
    ],
    ids=["ours", "another"],
)
def test_what_fails_on_rank_0_is_told_to_all(error: Exception, told: Any) -> None:
    sent: list[Any] = []

    def fails() -> BackendChoice:
        raise error

    with pytest.raises(type(error)) as raised:
        once_for_all_ranks(_rank(0, sent), fails)
    assert raised.value is error
    kind, words = told
    with pytest.raises(kind, match=words):
        once_for_all_ranks(_rank(1, sent), _refuse)


@pytest.mark.usefixtures("gpu")
def test_images_that_rank_0_does_not_have_are_told(class_folders: Path) -> None:
    birds = _birds(class_folders)
    birds.trainer = _rank(1, [(None, None)])
    with pytest.raises(DatasetError, match="Rank 0 finds no images for 'train', and another rank does"):
        birds.make_dataset("train")


def test_alone_nothing_is_sent() -> None:
    trainer = SimpleNamespace(world_size=1, strategy=SimpleNamespace(broadcast=_refuse))
    choice = BackendChoice("torch", "")
    assert once_for_all_ranks(trainer, lambda: choice) is choice
    assert once_for_all_ranks(None, lambda: choice) is choice


@pytest.mark.usefixtures("gpu")
def test_workers_and_ranks_that_get_a_copy_do_not_choose_again(
    class_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(class_folders)
    birds = _birds(class_folders)
    birds.dataset("train")
    copied = pickle.loads(pickle.dumps(birds))
    monkeypatch.setattr(image_backends, "choose_backend", _refuse)
    assert copied.backend_choice == birds.backend_choice
    assert copied.dataset("train").encoded


@pytest.mark.usefixtures("gpu")
def test_reports_say_which_backend_ran(class_folders: Path) -> None:
    birds = _birds(class_folders)
    assert birds._feed_facts()["backend"] is None
    remember(class_folders)
    birds.dataset("train")
    facts = birds._feed_facts()
    assert (facts["backend"], facts["own_transforms"]) == ("nvjpeg", False)
    assert _birds(class_folders, transform=lambda image: image)._feed_facts()["own_transforms"] is True


# --- what is there ------------------------------------------------------------------------------------------------


def test_an_explicit_backend_is_not_looked_up(class_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_backends, "choose_backend", _refuse)
    birds = ImageFolderDataModule(class_folders, backend="torch")
    birds.dataset("train")
    assert birds.backend_choice == BackendChoice("torch", "backend='torch', as asked for")


@pytest.mark.parametrize(
    ("device", "findings", "looked"),
    [
        (CUDA, (BOUND,), ["dali-gpu"]),
        (CUDA, (replace(BOUND, cpu_bound=False),), []),
        (torch.device("cpu"), (BOUND,), []),
        (torch.device("cpu"), (BOUND, replace(BOUND, backend="dali-cpu", samples_per_s=9e9)), ["dali-cpu"]),
        (torch.device("cpu"), (replace(BOUND, backend="nvjpeg"),), []),
    ],
)
def test_a_backend_is_looked_for_only_where_it_might_be_taken(
    device: torch.device, findings: Any, looked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(image_backends, "why_missing", lambda backend, device: asked.append(backend) or "")
    choose_backend(BackendFacts(device=device, findings=findings))
    assert asked == looked


def test_why_there_is_no_dali_is_the_error_that_asking_for_it_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*, gpu: bool) -> Any:
        raise MissingExtraError(f"needs DALI, gpu={gpu}")

    monkeypatch.setattr(image_backends, "require_dali", missing)
    assert why_missing("dali-gpu", CUDA) == "needs DALI, gpu=True"
    assert why_missing("dali-cpu", CUDA) == "needs DALI, gpu=False"
    monkeypatch.setattr(image_backends, "require_dali", lambda *, gpu: None)
    assert why_missing("dali-gpu", CUDA) == ""


def test_why_there_is_no_nvjpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []
    monkeypatch.setattr(image_backends, "nvjpeg", lambda device: given.extend)
    assert why_missing("nvjpeg", CUDA) == ""
    (file,) = given
    assert file.dtype == torch.uint8
    assert bytes(file[:2]) == b"\xff\xd8"

    def missing(device: torch.device) -> Any:
        raise MissingExtraError("this torchvision has none")

    monkeypatch.setattr(image_backends, "nvjpeg", missing)
    assert why_missing("nvjpeg", CUDA) == "this torchvision has none"


# --- nvJPEG by name ------------------------------------------------------------------------------------------------


def _setting_up(root: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> ImageFolderDataModule:
    """As a Trainer sets it up that says that it has a GPU."""
    birds = ImageFolderDataModule(root, batch_size=4, image_size=32, decoder="pillow", **options)
    birds.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    monkeypatch.setattr(images, "device_of", lambda trainer: CUDA)
    return birds


def test_a_torchvision_without_nvjpeg_is_told_before_the_first_batch(
    class_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(device: torch.device) -> Any:
        raise MissingExtraError("this torchvision has none")

    monkeypatch.setattr(image_backends, "nvjpeg", missing)
    birds = _setting_up(class_folders, monkeypatch, backend="nvjpeg")
    with pytest.raises(MissingExtraError, match="this torchvision has none"):
        birds.train_dataloader()


def test_a_device_that_fails_is_told_before_the_first_batch(
    class_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(files: Any) -> Any:
        raise RuntimeError("CUDA driver version is insufficient\nwith a stack trace")

    monkeypatch.setattr(image_backends, "nvjpeg", lambda device: fails)
    birds = _setting_up(class_folders, monkeypatch, backend="nvjpeg")
    words = 'cannot decode on cuda.*driver version is insufficient. Look at.*use backend="torch"'
    with pytest.raises(LoaderError, match=words) as raised:
        birds.train_dataloader()
    assert "stack trace" not in str(raised.value)


def test_a_device_that_decodes_is_tried_on_one_small_jpeg(class_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []
    monkeypatch.setattr(image_backends, "nvjpeg", lambda device: given.extend)
    _setting_up(class_folders, monkeypatch, backend="nvjpeg").train_dataloader()
    (file,) = given
    assert bytes(file[:2]) == b"\xff\xd8"


@pytest.mark.parametrize("backend", ["torch", "nvjpeg"])
def test_it_is_not_tried_where_it_is_not_used(
    backend: Any, class_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not without a Trainer: CUDA that is in use does not outlive the fork of a ddp_fork."""
    monkeypatch.setattr(image_backends, "nvjpeg", _refuse)
    birds = _setting_up(class_folders, monkeypatch, backend=backend)
    if backend == "nvjpeg":
        birds.trainer = None
    birds.train_dataloader()


def test_without_a_gpu_there_is_no_nvjpeg() -> None:
    assert why_missing("nvjpeg", CUDA) != ""


@pytest.mark.gpu
def test_with_a_gpu_there_is() -> None:
    assert why_missing("nvjpeg", torch.device("cuda", 0)) == ""
    require_nvjpeg(torch.device("cuda", 0))

"""Changes of an ImageFolderDataModule with less work for a sample: which are tried, on which samples, and failures."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchvision.transforms as v1
from diagnosing.made_data import machine_of, session_of, shuffled_part
from torch.utils.data import ConcatDataset, Subset

from lightning_feed import ImageFolderDataModule, LoaderSettings
from lightning_feed.diagnosing import lighter_samples
from lightning_feed.diagnosing.lighter_samples import measure_lighter_samples
from lightning_feed.diagnosing.parts import NotMeasurable
from lightning_feed.diagnosing.session import Session
from lightning_feed.errors import DecodeError, MissingExtraError
from lightning_feed.images import backends
from lightning_feed.images.crop import TrainRecipe
from lightning_feed.images.decoders import PillowDecoder
from lightning_feed.images.image_dataset import ImageDataset
from lightning_feed.machine.limits import Machine, MemoryLimit
from lightning_feed.storage import pack
from lightning_feed.verdict.lighter_samples import name_of_change

SIDE = 37
"""Shorter side of stored images for crops of 32 pixels."""
PACKS = ["pack --decoded", f"pack --decoded --size {SIDE}", f"pack --size {SIDE}"]


def _session(
    root: Path,
    *,
    machine: Machine | None = None,
    device: str = "cpu",
    kind: Any = ImageFolderDataModule,
    **options: Any,
) -> Session:
    """A session over the training loader of an ImageFolderDataModule."""
    settings = {"image_size": 32, "val_fraction": 0, "loader": LoaderSettings(num_workers=0), **options}
    data = kind(root, 4, **settings)
    data.setup("fit")
    session = session_of(data.train_dataloader(), machine=machine)
    session.datamodule = data
    session.trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device)))
    return session


def _tried(session: Session) -> list[str]:
    measure_lighter_samples(session)
    return [name_of_change(trial) for trial in session.results.lighter]


def test_changes_of_a_folder_are_timed_beside_its_own_samples(class_folders: Path) -> None:
    session = _session(class_folders)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert _tried(session) == ['quality="fast"', *PACKS]
    assert torch.equal(torch.get_rng_state(), before)
    assert session.results.left_out == ()
    assert len({trial.now_ms for trial in session.results.lighter}) == 1
    assert all(trial.now_ms > 0 < trial.then_ms for trial in session.results.lighter)
    packs = [trial.pack for trial in session.results.lighter if trial.pack is not None]
    assert [Path(found.path).name for found in packs] == ["photos.pixels", "photos-37.pixels", "photos-37.pack"]
    assert {found.root for found in packs} == {str(class_folders)}
    total_bytes = sum(file.stat().st_size for file in class_folders.rglob("*.jpg"))
    # Estimated from some of the files.
    assert [found.folder_bytes for found in packs] == [pytest.approx(total_bytes, rel=0.2)] * 3
    assert packs[0].pack_bytes == 12 * (8 + 3 * 48 * 64)


def test_time_of_the_experiment_ends_it_after_two_samples(class_folders: Path, monkeypatch: Any) -> None:
    session = _session(class_folders)
    images = session.parts[0].loader.dataset
    indices: list[int] = []
    read = images.source.read
    monkeypatch.setattr(images.source, "read", lambda index: indices.append(index) or read(index))
    session.share_s = 0.0
    measure_lighter_samples(session)
    assert len(set(indices)) == 2


@pytest.mark.parametrize("options", [{}, {"transform": v1.Compose([v1.RandomResizedCrop(32), v1.PILToTensor()])}])
@pytest.mark.parametrize("name", PACKS)
def test_samples_of_a_stored_image_are_those_of_the_pack(
    class_folders: Path, name: str, options: dict[str, Any]
) -> None:
    session = _session(class_folders, **options)
    trial = lighter_samples._Trial(session, session.parts[0].loader.dataset)
    trial.find_changes()
    (change,) = [change for change in trial.changes if change.code == name]
    size = SIDE if "--size" in name else None
    pack(class_folders, class_folders.parent / "made", short_side=size, decoded="--decoded" in name)
    expected = _session(class_folders.parent / "made", **options).parts[0].loader.dataset
    for index in (3, 10):
        assert trial._prepare(index)
        torch.manual_seed(index)
        image, label = expected[index]
        torch.manual_seed(index)
        stored, same = change.dataset[index]
        assert torch.equal(image, stored)
        assert label == same


def test_fast_samples_are_those_of_the_fast_recipe(class_folders: Path) -> None:
    images = _session(class_folders).parts[0].loader.dataset
    trial = lighter_samples._Trial(_session(class_folders), images)
    trial.find_changes()
    fast = ImageDataset(images.source, images.decoder, TrainRecipe(size=32, quality="fast"))
    torch.manual_seed(1)
    expected, _ = fast[5]
    torch.manual_seed(1)
    assert torch.equal(trial.changes[0].dataset[5][0], expected)


def test_a_decoder_set_by_hand_is_compared_with_the_others(class_folders: Path) -> None:
    session = _session(class_folders, decoder="pillow")
    (name,) = [name for name in _tried(session) if name.startswith("decoder")]
    assert name != 'decoder="pillow"'
    measured = [trial for trial in session.results.lighter if trial.setting == "decoder"]
    assert [trial.value for trial in measured] == [name.split('"')[1]]


def test_own_transform_without_a_crop_gives_no_smaller_images(class_folders: Path) -> None:
    transform = v1.Compose([v1.Resize((32, 32)), v1.PILToTensor()])
    assert _tried(_session(class_folders, transform=transform)) == ["pack --decoded"]


def test_small_images_are_not_resized_by_a_pack(class_folders: Path) -> None:
    session = _session(class_folders, image_size=42)  # stored with 48 pixels, as the images have
    assert _tried(session) == ['quality="fast"', "pack --decoded", "pack --decoded --size 48"]
    assert session.results.left_out == (("pack --size 48", "no image of those looked at is larger than 48 pixels"),)


@pytest.mark.parametrize("decoded", [False, True])
def test_only_resizing_is_changed_for_a_pack(class_folders: Path, decoded: bool) -> None:
    pack(class_folders, class_folders.parent / "made", decoded=decoded)
    assert _tried(_session(class_folders.parent / "made")) == ['quality="fast"']


# --- nvJPEG -----------------------------------------------------------------------------------------------------------


def test_nvjpeg_leaves_reading_and_the_header_to_the_cpu(class_folders: Path, monkeypatch: Any) -> None:
    checked: list[torch.device] = []
    decoded: list[int] = []

    def stand_in(samples: Any, dataset: ImageDataset, device: torch.device) -> float:
        decoded.append(len(samples))
        assert dataset.encoded
        assert device.type == "cuda"
        return 0.25

    monkeypatch.setattr(lighter_samples, "require_nvjpeg", checked.append)
    monkeypatch.setattr(lighter_samples, "decoding_ms", stand_in)
    session = _session(class_folders, device="cuda")
    assert 'backend="nvjpeg"' in _tried(session)
    (trial,) = [trial for trial in session.results.lighter if trial.setting == "backend"]
    assert trial.device_ms == 0.25
    assert checked == [torch.device("cuda")]
    assert decoded[0] >= 2


def test_decoding_on_a_device_is_timed_after_a_first_batch(class_folders: Path, monkeypatch: Any) -> None:
    images = _session(class_folders).parts[0].loader.dataset
    batches: list[Any] = []
    monkeypatch.setattr(backends, "decode_batch", lambda batch, *_: batches.append(batch))
    samples = [images.encoded_sample(index) for index in range(3)]
    assert backends.decoding_ms(samples, images, torch.device("cpu")) > 0
    assert [len(batch) for batch in batches] == [3, 3]


def test_nvjpeg_is_not_tried_without_a_cuda_device(class_folders: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(lighter_samples, "require_nvjpeg", pytest.fail)
    session = _session(class_folders)
    assert 'backend="nvjpeg"' not in _tried(session)
    assert session.results.left_out == ()


def test_nvjpeg_is_left_out_with_the_reason(class_folders: Path, monkeypatch: Any) -> None:
    def missing(_: torch.device) -> None:
        raise MissingExtraError("this torchvision has no nvJPEG")

    monkeypatch.setattr(lighter_samples, "require_nvjpeg", missing)
    session = _session(class_folders, device="cuda")
    assert _tried(session) == ['quality="fast"', *PACKS]
    assert session.results.left_out == (('backend="nvjpeg"', "this torchvision has no nvJPEG"),)
    session = _session(class_folders, device="cuda", transform=v1.PILToTensor())
    measure_lighter_samples(session)
    ((name, why),) = session.results.left_out
    assert name == 'backend="nvjpeg"'
    assert "cannot call your transform" in why


# --- failures ---------------------------------------------------------------------------------------------------------


def test_fast_resizing_is_left_out_without_opencv(class_folders: Path, monkeypatch: Any) -> None:
    def missing(*_: object, **__: object) -> None:
        raise MissingExtraError('quality="fast" needs cv2')

    monkeypatch.setattr(lighter_samples, "require", missing)
    session = _session(class_folders)
    assert _tried(session) == PACKS
    assert session.results.left_out == (('quality="fast"', 'quality="fast" needs cv2'),)


def test_a_change_that_fails_is_left_out_and_the_others_go_on(class_folders: Path, monkeypatch: Any) -> None:
    class Failing(PillowDecoder):
        def decode(self, data: Any) -> Any:
            raise RuntimeError("out of order")

    monkeypatch.setattr(lighter_samples, "make_decoder", lambda _: SimpleNamespace(decoder=Failing()))
    session = _session(class_folders, decoder="turbo")
    assert _tried(session) == ['quality="fast"', *PACKS]
    assert [name for name, _ in session.results.left_out] == [
        f'decoder="{name}"' for name in ("turbo-region", "opencv", "torchvision", "pillow")
    ]
    assert all(why.startswith("it failed: RuntimeError: out of order") for _, why in session.results.left_out)


@pytest.mark.parametrize("unreadable", [1, 11, 12])
def test_unreadable_images_are_passed_over(class_folders: Path, unreadable: int) -> None:
    session = _session(class_folders, on_error="skip", decoder="pillow")
    for file in sorted(class_folders.rglob("*.jpg"))[:unreadable]:
        file.write_bytes(file.read_bytes()[:200])
    session.share_s = 60.0  # all images are read
    if unreadable > 10:  # the first readable sample does not count
        with pytest.raises(NotMeasurable, match="too few of the first images can be read"):
            measure_lighter_samples(session)
        return
    assert set(PACKS) < set(_tried(session))
    assert session.datamodule.failures() == 0  # those of training are counted, not these


def test_packs_without_room_are_left_out_with_their_size(class_folders: Path, monkeypatch: Any) -> None:
    size = 12 * (8 + 3 * 48 * 64)
    session = _session(class_folders, machine=machine_of(memory=size))
    assert _tried(session) == ['quality="fast"', f"pack --size {SIDE}"]
    assert session.results.left_out[0] == (
        "pack --decoded",
        "it would take 108.1 KiB, and 108.1 KiB of memory are free: it would be read from storage in each epoch",
    )
    monkeypatch.setattr(lighter_samples, "find_room", lambda _: MemoryLimit(10, "a full disk"))
    session = _session(class_folders)
    assert _tried(session) == ['quality="fast"']
    assert session.results.left_out[0] == (
        "pack --decoded",
        f"it would take 108.1 KiB, and 10 bytes are free beside {class_folders}",
    )


# --- loaders that are of another kind ---------------------------------------------------------------------------------


class _Wrapped(ImageFolderDataModule):
    """The user's own dataset around ours."""

    def make_dataset(self, split: str) -> Any:
        images = super().make_dataset(split)
        return None if images is None else ConcatDataset([images])


class _Part(ImageFolderDataModule):
    """A part of our dataset."""

    def make_dataset(self, split: str) -> Any:
        images = super().make_dataset(split)
        return None if images is None else Subset(images, range(3, 9))


def _own_loader(session: Session) -> None:
    session.loaders = session.train_loaders


def _other_module(session: Session) -> None:
    session.datamodule = object()


@pytest.mark.parametrize("change", [_own_loader, _other_module])
def test_other_loaders_are_not_tried(class_folders: Path, change: Callable[[Session], None]) -> None:
    session = _session(class_folders)
    change(session)
    assert _tried(session) == []
    assert session.results.left_out == ()


def test_a_dataset_of_the_user_is_not_tried_and_a_subset_is(class_folders: Path) -> None:
    assert _tried(_session(class_folders, kind=_Wrapped)) == []
    assert _tried(_session(class_folders, kind=_Part)) == ['quality="fast"', *PACKS]
    session = session_of(shuffled_part([(torch.zeros(3), 0)] * 8).loader)
    assert _tried(session) == []


def test_a_sample_that_cannot_be_made_as_configured_is_named(class_folders: Path) -> None:
    def broken(_: object) -> object:
        raise ValueError("a bug of the user's")

    session = _session(class_folders)
    session.parts[0].loader.dataset.recipe = broken
    with pytest.raises(Exception, match=r"failed to return sample .*a bug of the user's") as raised:
        measure_lighter_samples(session)
    assert not isinstance(raised.value, DecodeError)

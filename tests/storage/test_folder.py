"""A folder of class folders: the order of ImageFolder, compact, and clear about what is wrong with it."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import ImageFolder

from lightning_feed.errors import DatasetError, SettingsError
from lightning_feed.storage.folder import FolderSource, SampleSource, scan_classes
from lightning_feed.storage.splits import Splits


def put(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode("utf-8", "surrogateescape"))
    return root


AWKWARD = (
    "b/2.jpg",
    "b/10.JPEG",
    "a/x/1.png",
    "a/x-1/1.png",
    "a/x/y/1.webp",
    "a/name with spaces.jpg",
    "c/ünïcödé 日本.jpg",
    "c/notes.txt",
    "c/no_suffix",
    "a/.hidden.jpg",
)


def test_files_labels_and_order_equal_those_of_image_folder(tmp_path: Path) -> None:
    root = put(tmp_path, *AWKWARD)
    source = FolderSource(root, scan_classes(root))
    theirs = ImageFolder(str(root), allow_empty=False)
    assert [source.name(i) for i in range(len(source))] == [path for path, _ in theirs.samples]
    assert source.labels.tolist() == [label for _, label in theirs.samples]
    assert list(source.classes) == theirs.classes
    assert isinstance(source, SampleSource)


def test_files_with_names_that_are_not_unicode_are_read(tmp_path: Path) -> None:
    folder = put(tmp_path, "a/1.jpg") / "a"
    odd = os.fsencode(folder) + b"/\xff\xfe.jpg"
    Path(os.fsdecode(odd)).write_bytes(b"odd")
    source = FolderSource(tmp_path, scan_classes(tmp_path))
    assert [source.read(i) for i in range(len(source))] == [b"a/1.jpg", b"odd"]


def test_hidden_folders_are_not_classes(tmp_path: Path) -> None:
    root = put(tmp_path, "a/1.jpg", ".ipynb_checkpoints/1.jpg")
    assert scan_classes(root).classes == ("a",)


def test_links_to_folders_are_followed_and_link_cycles_are_reported(tmp_path: Path) -> None:
    root = put(tmp_path / "root", "a/1.jpg")
    put(tmp_path / "elsewhere", "2.jpg")
    (root / "a" / "linked").symlink_to(tmp_path / "elsewhere")
    assert [scan_classes(root).path(i) for i in range(2)] == ["a/1.jpg", "a/linked/2.jpg"]
    (root / "a" / "round").symlink_to(root / "a")
    with pytest.raises(DatasetError, match=r"round cannot be read: it is a symbolic link to a folder above it"):
        scan_classes(root)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((), "has no folders in it"),
        (("1.jpg",), "has no folders in it"),
        (("a/1.txt",), r"No images in 'a'"),
        (("a/1.jpg", "b/1.txt", "c/2.txt"), r"No images in 'b', 'c'"),
    ],
)
def test_folders_without_images_are_refused(tmp_path: Path, names: tuple[str, ...], words: str) -> None:
    with pytest.raises(DatasetError, match=words):
        scan_classes(put(tmp_path, *names))


def test_a_missing_folder_or_a_file_as_root_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="does not exist"):
        scan_classes(tmp_path / "absent")
    with pytest.raises(DatasetError, match="Not a directory"):
        scan_classes(put(tmp_path, "file") / "file")


def test_a_class_without_images_is_allowed_outside_of_training(tmp_path: Path) -> None:
    put(tmp_path, "train/a/1.jpg", "train/b/1.jpg", "val/a/2.jpg", "val/b/notes.txt")
    source = Splits().source(tmp_path, "val")
    assert source is not None
    assert source.labels.tolist() == [0]
    (tmp_path / "val" / "a" / "2.jpg").unlink()
    with pytest.raises(DatasetError, match="No images in 'a', 'b'"):
        Splits().source(tmp_path, "val")


def test_the_index_can_be_pickled_and_stores_files_in_arrays(tmp_path: Path) -> None:
    index = scan_classes(put(tmp_path, *AWKWARD))
    copy = pickle.loads(pickle.dumps(index))
    assert [copy.path(i) for i in range(len(copy))] == [index.path(i) for i in range(len(index))]
    per_file = [value for value in vars(index).values() if len(value) >= len(index)]
    assert all(isinstance(value, np.ndarray) for value in per_file)


# --- splits -----------------------------------------------------------------------------------------------------------


def names_of(source: SampleSource | None) -> list[str]:
    return [] if source is None else [source.read(i).decode() for i in range(len(source))]  # type: ignore[union-attr]


def test_split_folders_are_used_and_share_the_labels_of_training(tmp_path: Path) -> None:
    root = put(tmp_path, "train/a/1.jpg", "train/b/2.jpg", "valid/b/3.jpg", "test/a/4.jpg")
    splits = Splits()
    found = {split: splits.source(root, split) for split in ("train", "val", "test", "predict")}
    assert {split: names_of(source) for split, source in found.items()} == {
        "train": ["train/a/1.jpg", "train/b/2.jpg"],
        "val": ["valid/b/3.jpg"],
        "test": ["test/a/4.jpg"],
        "predict": [],
    }
    assert found["val"] is not None
    assert found["val"].labels.tolist() == [1]  # ImageFolder would say 0, which is class a to the model
    assert splits.classes(root) == ("a", "b")


def test_a_validation_class_that_training_lacks_is_refused(tmp_path: Path) -> None:
    root = put(tmp_path, "train/a/1.jpg", "val/z/3.jpg")
    with pytest.raises(DatasetError, match="that training does not have: 'z'"):
        Splits().source(root, "val")


def test_the_validation_share_depends_only_on_the_seed(tmp_path: Path) -> None:
    root = put(tmp_path, *(f"{label}/{i}.jpg" for label in "ab" for i in range(20)))
    train, val = (Splits(0.25, seed=1).source(root, split) for split in ("train", "val"))
    assert train is not None
    assert val is not None
    assert (len(train), len(val)) == (30, 10)
    assert not set(names_of(train)) & set(names_of(val))
    assert names_of(val) == names_of(Splits(0.25, seed=1).source(root, "val"))
    assert names_of(val) != names_of(Splits(0.25, seed=2).source(root, "val"))
    for source in (train, val):
        assert [source.classes[label] for label in source.labels] == [name[0] for name in names_of(source)]
        assert source.name(0).startswith(str(root))
        assert isinstance(source, SampleSource)


def test_the_validation_share_of_a_seed_never_changes(tmp_path: Path) -> None:
    root = put(tmp_path, *(f"a/{i}.jpg" for i in range(10)))
    val = Splits(0.3, seed=0).source(root, "val")
    # Recorded: another set means that samples wander from val to train between versions.
    assert names_of(val) == ["a/2.jpg", "a/4.jpg", "a/8.jpg"]


def test_val_fraction_zero_gives_no_validation_split(tmp_path: Path) -> None:
    root = put(tmp_path, "a/1.jpg")
    assert Splits(0.0).source(root, "val") is None
    assert Splits(0.0).source(root, "test") is None


@pytest.mark.parametrize("fraction", [1, -0.1, True, "half"])
def test_invalid_val_fractions_are_refused(fraction: object) -> None:
    with pytest.raises(SettingsError, match="val_fraction"):
        Splits(fraction)  # type: ignore[arg-type]

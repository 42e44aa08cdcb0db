"""Special files listed as images, and folders in folders without end: nothing hangs, all is reported."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lightning_feed.errors import DatasetError
from lightning_feed.storage.folder import FolderSource, scan_classes


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("cats/1.jpg", "cats/3.jpg", "dogs/2.jpg"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(name.encode())
    return tmp_path / "data"


@pytest.mark.parametrize("special", ["fifo", "/dev/zero", "/dev/tty"])
def test_special_files_are_not_samples_and_are_reported(
    root: Path, special: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = scan_classes(root)
    os.mkfifo(root / "fifo")
    (root / "cats/2.jpg").symlink_to((root / special).resolve())
    os.mkfifo(root / "cats/notes.txt")  # nobody would read it
    index = scan_classes(root)
    assert [index.path(number) for number in range(len(index))] == ["cats/1.jpg", "cats/3.jpg", "dogs/2.jpg"]
    assert np.array_equal(index.labels, plain.labels)
    assert [record.getMessage() for record in caplog.records] == [
        f"{root}/cats/2.jpg is neither a file nor a folder, so it is not a sample. Move it away."
    ]


def test_a_dead_link_is_reported_by_name_when_it_is_read(root: Path) -> None:
    (root / "cats/2.jpg").symlink_to("gone")
    source = FolderSource(root, scan_classes(root))
    with pytest.raises(DatasetError, match=r"cats/2\.jpg \(sample 1\) cannot be read: No such file"):
        source.read(1)
    assert source.read(2) == b"cats/3.jpg"


@pytest.mark.parametrize("special", ["fifo", "/dev/zero"])
def test_a_file_replaced_by_a_special_file_is_reported_when_read(root: Path, special: str) -> None:
    source = FolderSource(root, scan_classes(root))  # as remembered by an earlier run
    assert source.read(0) == b"cats/1.jpg"
    os.mkfifo(root / "fifo")
    (root / "cats/1.jpg").unlink()
    (root / "cats/1.jpg").symlink_to((root / special).resolve())
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(DatasetError, match=r"cats/1\.jpg \(sample 0\) cannot be read: it is not a file"):
        source.read(0)
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208


def test_folders_deeper_than_pythons_stack_are_listed(root: Path) -> None:
    deep, before = str(root / "cats"), sys.getrecursionlimit()
    try:
        for _ in range(400):
            deep += "/d"
            os.mkdir(deep)  # noqa: PTH102
        Path(f"{deep}/4.jpg").write_bytes(b"deep")
        sys.setrecursionlimit(len(inspect.stack()) + 100)
        source = FolderSource(root, scan_classes(root))
        assert [source.read(number) for number in range(len(source))] == [
            b"cats/1.jpg", b"cats/3.jpg", b"deep", b"dogs/2.jpg",
        ]  # fmt: skip
    finally:
        sys.setrecursionlimit(before)
        subprocess.run(["rm", "-rf", f"{root}/cats/d"], check=True)  # what pytest could not remove

"""The files that samples are made of, the loader with them in and out of the page cache, and where they lie."""

import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diagnosing.made_data import Broken, Files, Images, Stream, machine_of, part_of, session_of
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision.datasets import ImageFolder

from lightning_feed.decode.decoders import PillowDecoder
from lightning_feed.diagnosing import disk
from lightning_feed.diagnosing.disk import (
    ROUNDS,
    FirstBatches,
    choose,
    files_of_samples,
    forget_files,
    innermost,
    measure_cached,
    measure_cold,
    measure_disk,
    opened_by,
)
from lightning_feed.diagnosing.session import NotMeasurable, Session
from lightning_feed.errors import DatasetError
from lightning_feed.images.crop import TrainRecipe
from lightning_feed.images.image_dataset import ImageDataset
from lightning_feed.storage.file_system import file_system
from lightning_feed.storage.folder import FolderSource, scan_classes


def _session(*datasets: Any, rate: float = 1000.0, memory: int | None = None, **options: Any) -> Session:
    loaders = [DataLoader(dataset, **{"batch_size": 2, **options}) for dataset in datasets]
    session = session_of(*loaders, machine=machine_of(memory=memory), rate=rate)
    session.share_s = 60.0
    return session


class Opening(Files):
    """Notes what it reads, in this process."""

    def __getitem__(self, index: int) -> Any:
        OPENED.append(index)
        return super().__getitem__(index)


OPENED: list[int] = []


def _hurry(session: Session, first: FirstBatches) -> None:
    session.subset, session.share_s = first, 0.0


def test_both_go_through_the_same_first_batches_of_the_users_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = _session(Opening(tmp_path, size=60), shuffle=True)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = choose(session)
    assert torch.equal(before, torch.get_rng_state())
    (batches,) = first.batches.values()
    assert len(batches) == 1 + ROUNDS
    samples = {index for batch in batches for index in batch}
    assert len(samples) == 2 * (1 + ROUNDS)
    assert {Path(path).name: size for path, size in first.files.items()} == {f"{index}.bin": 3000 for index in samples}

    _hurry(session, first)
    OPENED.clear()
    measure_cached(session)
    assert set(OPENED) == samples
    assert len(OPENED) >= len(samples) + 4  # each was read once before the first batch that counts

    forgotten: list[tuple[int, Iterable[str]]] = []
    monkeypatch.setattr(disk, "forget_files", lambda files: forgotten.append((len(OPENED), list(files))))
    monkeypatch.setattr(disk, "file_system", lambda path: ("ext4", "local"))
    OPENED.clear()
    measure_cold(session)
    assert session.results.cold_per_s is not None
    # Whole passes follow each other, each without files that were read before.
    assert forgotten == [(number * len(samples), list(first.files)) for number in range(len(forgotten))]
    assert set(OPENED) <= samples


def test_files_are_really_asked_to_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Files(tmp_path, size=3)
    asked: list[tuple[str, int, int, int]] = []

    def advise(file: int, start: int, length: int, advice: int) -> None:
        asked.append((str(Path(f"/proc/self/fd/{file}").readlink()), start, length, advice))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    paths = [str(path) for path in dataset.paths]
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    forget_files([*paths, str(tmp_path / "gone")])
    assert asked == [(path, 0, 0, os.POSIX_FADV_DONTNEED) for path in paths]
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before


def _taken(session: Session) -> list[int]:
    return [len(batches) for batches in choose(session).batches.values()]


def test_the_first_batches_are_bounded_in_time_and_memory(tmp_path: Path) -> None:
    files = Files(tmp_path / "a", size=60)
    assert _taken(_session(files, memory=40 * 3000)) == [5]
    assert _taken(_session(files, rate=0.2)) == [4]
    session = _session(files)
    ticks = iter(range(0, 100, 5))
    session.clock = lambda: next(ticks)
    assert _taken(session) == [4]
    assert _taken(_session(files, Files(tmp_path / "b", size=60), memory=96 * 3000)) == [6, 6]
    with pytest.raises(
        NotMeasurable, match="too little time or memory: 0 batches fit, but a round of the workers has 2"
    ):
        choose(_session(files, memory=12_400))
    with pytest.raises(NotMeasurable, match="0 batches fit"):
        choose(_session(files, rate=0.01))
    with pytest.raises(NotMeasurable, match="iterable"):
        choose(_session(Stream()))


# --- which files ------------------------------------------------------------------------------------------------------


def test_listed_files_are_found_without_making_samples(class_folders: Path) -> None:
    folder = ImageFolder(class_folders)
    paths = [path for path, _ in folder.samples]
    ours = ImageDataset(FolderSource(class_folders, scan_classes(class_folders)), PillowDecoder(), TrainRecipe())
    both = ConcatDataset([Images(size=4), folder])
    for dataset, indices, expected in (
        (folder, [3], [paths[3]]),
        (Subset(folder, [5, 3]), [1], [paths[3]]),
        (both, [6, -1, 3], [paths[2], paths[-1]]),
        (ours, [3], [paths[3]]),
    ):
        assert files_of_samples(part_of(dataset), indices) == expected
    assert innermost(Subset(ConcatDataset([folder, folder]), [15]), 0) == (folder, 3)


def test_other_files_are_found_by_listening(tmp_path: Path) -> None:
    dataset = Files(tmp_path / "data")
    assert files_of_samples(part_of(dataset), [4, 2]) == [str(dataset.paths[4]), str(dataset.paths[2])]
    with pytest.raises(DatasetError, match="failed to return sample 13"):
        files_of_samples(part_of(Broken()), [13])


def test_listening_hears_one_thread_and_ends(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("mine", "theirs", "later")]
    for path in paths:
        path.write_text("x")

    def work() -> None:
        other = threading.Thread(target=paths[1].read_text)
        other.start()
        other.join()
        paths[0].read_text()

    opened_by(lambda: None)
    hooks: list[Any] = []
    original = sys.addaudithook
    sys.addaudithook = hooks.append
    try:
        assert opened_by(work) == [str(paths[0])]
        assert opened_by(lambda: None) == []
        assert hooks == []  # one was installed for all times
    finally:
        sys.addaudithook = original
    paths[2].read_text()
    with pytest.raises(ZeroDivisionError):
        opened_by(lambda: 1 / 0)
    assert opened_by(paths[2].read_text) == [str(paths[2])]
    assert disk._opened == {}  # the hook that stays has nothing to do


# --- where they lie ---------------------------------------------------------------------------------------------------

MOUNTS = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:5 / /dev/shm rw - tmpfs shm rw
24 22 0:44 / /far rw shared:3 master:4 - nfs4 server:/data rw,vers=4.2
25 22 253:0 / /data rw - xfs /dev/mapper/vg-data rw
26 22 259:2 / /fast rw - xfs /dev/nvme0n1p2 rw
27 22 0:60 / /bucket rw - fuse.gcsfuse bucket rw
28 22 0:61 / /share/with\040space rw - lustre 10.0.0.1@tcp:/fs rw
29 22 0:62 / /layers rw - overlay overlay rw
30 22 0:63 / /pool rw - btrfs /dev/sdb1 rw
31 26 0:64 / /fast rw - cifs //server/share rw
32 22 7:0 / /loop rw - ext4 /dev/loop0 rw
33 22 0:70 / /ntfs rw - fuseblk /dev/sda1 rw
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine with a rotating disk sda (and sdb), an NVMe disk, and a volume over both."""
    root = tmp_path / "machine"
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(MOUNTS.strip() + "\nbroken line\n")
    devices = root / "sys/devices"
    for device, partition, rotational in (("sda", "sda1", 1), ("sdb", "sdb1", 1), ("nvme0n1", "nvme0n1p2", 0)):
        (devices / device / "queue").mkdir(parents=True)
        (devices / device / "queue/rotational").write_text(f"{rotational}\n")
        (devices / device / partition).mkdir()
    (devices / "dm-0/queue").mkdir(parents=True)
    (devices / "dm-0/queue/rotational").write_text("0\n")
    (devices / "dm-0/slaves").mkdir()
    (devices / "dm-0/slaves/sda1").symlink_to(devices / "sda/sda1")
    for folder, links in (
        ("dev/block", {"8:1": "sda/sda1", "259:2": "nvme0n1/nvme0n1p2", "253:0": "dm-0"}),
        ("class/block", {"sda1": "sda/sda1", "sdb1": "sdb/sdb1"}),
    ):
        (root / "sys" / folder).mkdir(parents=True)
        for name, target in links.items():
            (root / "sys" / folder / name).symlink_to(devices / target)
    return root


@pytest.mark.parametrize(
    ("path", "system", "kind"),
    [
        ("/pictures/a.jpg", "ext4", "rotational"),
        ("/dev/shm/a.jpg", "tmpfs", "memory"),
        ("/far/a.jpg", "nfs4", "network"),
        ("/far-not/a.jpg", "ext4", "rotational"),
        ("/data/a.jpg", "xfs", "rotational"),  # a volume of which one disk rotates
        ("/bucket/a.jpg", "fuse.gcsfuse", "network"),
        ("/share/with space/a.jpg", "lustre", "network"),
        ("/layers/a.jpg", "overlay", "overlay"),
        ("/pool/a.jpg", "btrfs", "rotational"),  # by the name of its device: its number is made up
        ("/fast/a.jpg", "cifs", "network"),  # mounted over the other
        ("/loop/a.jpg", "ext4", "local"),
        ("/ntfs/a.jpg", "fuseblk", "rotational"),
    ],
)
def test_file_systems(machine: Path, path: str, system: str, kind: str) -> None:
    assert file_system(path, machine) == (system, kind)


def test_facts_of_a_disk(tmp_path: Path) -> None:
    session = _session(Files(tmp_path, size=60))
    measure_disk(session)
    disk = session.results.disk
    assert disk is not None
    assert (disk.mean_file_bytes, disk.files_per_s, disk.read_mb_per_s) == (3000, 2000, 6.0)
    assert (disk.file_system, disk.kind) == file_system(tmp_path)


def test_a_list_of_samples_that_is_an_array_is_no_list_of_files() -> None:
    dataset = Images()
    dataset.samples = np.zeros(3)  # type: ignore[attr-defined]
    assert files_of_samples(part_of(dataset), [0]) == []

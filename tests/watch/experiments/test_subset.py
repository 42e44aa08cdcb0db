"""X4 and X6: the same samples, once from the page cache, once not; and which files they are."""

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision.datasets import ImageFolder
from watch.experiments.made_data import Broken, Files, Images, Stream

from lightning_feed.archive.folder_index import scan_classes
from lightning_feed.archive.folder_source import FolderSource
from lightning_feed.decode.pillow_decoder import PillowDecoder
from lightning_feed.errors import DatasetError
from lightning_feed.load.image_dataset import ImageDataset
from lightning_feed.load.image_recipe import TrainRecipe
from lightning_feed.load.rounds import RoundLimits
from lightning_feed.watch.experiments import sample_files
from lightning_feed.watch.experiments.cached_bytes import measure_cached
from lightning_feed.watch.experiments.cold import forget_files, measure_cold, why_not_cold
from lightning_feed.watch.experiments.sample_files import innermost, listed_file, opened_by, sizes_of
from lightning_feed.watch.experiments.subject import Part
from lightning_feed.watch.experiments.subset import ROUNDS, choose, files_of_samples
from lightning_feed.watch.experiments.subset import Subset as Chosen

FAST = RoundLimits(min_s=0.0, max_s=20)


def _part(dataset: Any, **options: Any) -> Part:
    return Part("", DataLoader(dataset, **{"batch_size": 2, **options}))


def _chosen(part: Part, **options: Any) -> Chosen:
    found = choose((part,), **{"batches_per_s": 1000.0, "max_s": 20.0, "max_bytes": None, **options})
    assert isinstance(found, Chosen), found
    return found


class Opening(Files):
    """Notes what it reads, in this process."""

    def __getitem__(self, index: int) -> Any:
        OPENED.append(index)
        return super().__getitem__(index)


OPENED: list[int] = []


def test_both_go_through_the_same_first_batches_of_the_users_order(tmp_path: Path) -> None:
    dataset = Opening(tmp_path, size=60)
    part = _part(dataset, shuffle=True)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    subset = _chosen(part)
    assert torch.equal(before, torch.get_rng_state())
    assert len(subset.batches[part]) == 1 + ROUNDS
    samples = {index for batch in subset.batches[part] for index in batch}
    assert len(samples) == 2 * (1 + ROUNDS)
    assert {Path(path).name for path in subset.files} == {f"{index}.bin" for index in samples}
    assert subset.bytes == 3000 * len(samples)

    OPENED.clear()
    measure_cached((part,), subset, FAST)
    assert set(OPENED) == samples
    # Each sample was read once before the first batch that counts.
    assert len(OPENED) >= len(samples) + 4

    forgotten: list[tuple[int, Sequence[str]]] = []
    OPENED.clear()
    measure_cold((part,), subset, FAST, forget=lambda files: forgotten.append((len(OPENED), files)))
    assert forgotten == [(0, subset.files)]
    assert set(OPENED) <= samples
    assert len(OPENED) == len(set(OPENED))  # nothing is read a second time, when it would be cached


def test_cold_passes_follow_each_other_with_the_files_forgotten_again(tmp_path: Path) -> None:
    part = _part(Opening(tmp_path, size=60))
    subset = _chosen(part)
    forgotten: list[int] = []
    OPENED.clear()
    limits = RoundLimits(min_s=0.0, min_rounds=8, max_s=20)
    measure_cold((part,), subset, limits, forget=lambda files: forgotten.append(len(OPENED)))
    assert forgotten == [0, 18]


def test_files_are_really_asked_to_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Files(tmp_path, size=3)
    asked: list[tuple[str, int, int, int]] = []

    def advise(file: int, start: int, length: int, advice: int) -> None:
        asked.append((str(Path(f"/proc/self/fd/{file}").readlink()), start, length, advice))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    paths = [str(path) for path in dataset.paths]
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    assert forget_files([*paths, str(tmp_path / "gone")]) == 3
    assert asked == [(path, 0, 0, os.POSIX_FADV_DONTNEED) for path in paths]
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before


def test_why_files_cannot_be_read_cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no file was seen" in str(why_not_cold([]))
    mounts = tmp_path / "proc/self"
    mounts.mkdir(parents=True)
    (mounts / "mountinfo").write_text("1 0 0:5 / / rw - tmpfs tmpfs rw\n")
    assert why_not_cold(["/x"], tmp_path) == "the files lie in memory (tmpfs)"
    (mounts / "mountinfo").write_text("1 0 8:1 / / rw - ext4 /dev/sda1 rw\n")
    assert why_not_cold(["/x"], tmp_path) is None
    monkeypatch.delattr(os, "posix_fadvise")
    assert "posix_fadvise" in str(why_not_cold(["/x"], tmp_path))


def test_a_subset_is_bounded_in_time_and_memory(tmp_path: Path) -> None:
    part = _part(Files(tmp_path, size=60))
    assert len(_chosen(part, max_bytes=10 * 3000).batches[part]) == 5
    assert len(_chosen(part, batches_per_s=2.0, max_s=2.0).batches[part]) == 4
    ticks = iter(range(100))
    assert len(_chosen(part, max_s=3.0, clock=lambda: next(ticks)).batches[part]) == 4
    refused = choose((part,), batches_per_s=1000, max_s=9, max_bytes=3000)
    assert refused == "only 0 batches could be looked through in time and memory, and a round has 1"
    refused = choose((part,), batches_per_s=0.1, max_s=9, max_bytes=None)
    assert refused == "a round of 1 batches takes longer than the 9.0 s that there are for it"
    assert "iterable" in str(choose((_part(Stream()),), batches_per_s=9, max_s=9, max_bytes=None))


def test_two_loaders_share_the_bound(tmp_path: Path) -> None:
    parts = (_part(Files(tmp_path / "a", size=60)), _part(Files(tmp_path / "b", size=60)))
    found = choose(parts, batches_per_s=1000, max_s=9, max_bytes=24 * 3000)
    assert isinstance(found, Chosen)
    assert [len(batches) for batches in found.batches.values()] == [6, 6]


# --- which files ------------------------------------------------------------------------------------------------------


def test_listed_files_are_found_without_making_samples(class_folders: Path) -> None:
    folder = ImageFolder(class_folders)
    assert listed_file(folder, 3) == folder.samples[3][0]
    assert listed_file(Subset(folder, [5, 3]), 1) == folder.samples[3][0]
    assert listed_file(ConcatDataset([Images(size=4), folder]), 6) == folder.samples[2][0]
    assert listed_file(ConcatDataset([Images(size=4), folder]), -1) == folder.samples[-1][0]
    assert listed_file(Images(), 3) is None
    ours = ImageDataset(FolderSource(class_folders, scan_classes(class_folders)), PillowDecoder(), TrainRecipe())
    assert listed_file(ours, 3) == folder.samples[3][0]
    assert innermost(Subset(ConcatDataset([folder, folder]), [15]), 0) == (folder, 3)


def test_other_files_are_found_by_listening(tmp_path: Path, class_folders: Path) -> None:
    dataset = Files(tmp_path / "data")
    assert files_of_samples(_part(dataset), [4, 2]) == [str(dataset.paths[4]), str(dataset.paths[2])]
    assert files_of_samples(_part(Images()), [4, 2]) == []
    with pytest.raises(DatasetError, match="cannot give sample 13"):
        files_of_samples(_part(Broken()), [13])


def test_what_is_no_data_is_not_heard(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(b"")
    np.save(tmp_path / "a.npy", np.zeros(3))
    (tmp_path / "code.py").write_text("")

    def work() -> None:
        np.load(tmp_path / "a.npy")
        (tmp_path / "code.py").read_text()
        Path("/proc/self/stat").read_text()
        Path(torch.__file__).read_bytes()
        (tmp_path / "written").write_text("x")
        file = os.open(tmp_path / "written", os.O_RDWR)
        os.close(file)
        with pytest.raises(FileNotFoundError):
            (tmp_path / "gone").read_text()
        (tmp_path / "a.npy").read_bytes()

    assert opened_by(work) == [str(tmp_path / "a.npy")]


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
    assert sample_files._listener.heard == {}  # the hook that stays has nothing to do


def test_sizes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert sizes_of([str(tmp_path / "a"), str(tmp_path / "gone")]) == {str(tmp_path / "a"): 5}

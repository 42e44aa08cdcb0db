"""One setting, tried on loaders of many kinds; faults planted in them; and nothing changed afterwards."""

import math
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_feed.errors import DatasetError, LoaderError
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.settings import Setting
from lightning_feed.load.slot_loaders import uses_slots
from lightning_feed.machine.limits import Machine
from lightning_feed.trials import trial as trial_module
from lightning_feed.trials.search import Trial
from lightning_feed.trials.training_work import ImitatedTraining, TrainingWork
from lightning_feed.trials.trial import SettingLimits, TrialLimits, run_trial, worker_memory

# torchdata 0.11 calls a function that torch 2.15 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

QUICK = TrialLimits(min_s=0.0, max_s=20.0)
NO_WORK = TrainingWork()
NONE = Setting(num_workers=0, prefetch_factor=None)
TWO = Setting(num_workers=2, prefetch_factor=2)
THREADS = Setting(num_workers=2, prefetch_factor=2, workers="thread")


class Numbers(Dataset[Any]):
    def __init__(self, length: int = 40) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.full((25,), index), np.float32(index)


class Dies(Numbers):
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        if info is not None and index > 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Raises(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 17:
            raise OSError("the file is cut short")
        return super().__getitem__(index)


class Hangs(Numbers):
    def __getitem__(self, index: int) -> Any:
        if get_worker_info() is not None:
            threading.Event().wait(60)
        return super().__getitem__(index)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        yield from range(40) if info is None else range(info.id, 40, info.num_workers)


LOADERS = {
    "plain": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True),
    "generator": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "persistent": lambda: DataLoader(Numbers(), batch_size=4, num_workers=1, persistent_workers=True),
    "unbatched": lambda: DataLoader(Numbers(), batch_size=None),
    "six samples": lambda: DataLoader(Numbers(6), batch_size=2, shuffle=True),
    "one sample": lambda: DataLoader(Numbers(1), batch_size=2),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "stateful": lambda: StatefulDataLoader(Numbers(), batch_size=4, shuffle=True),
    "ours": lambda: FeedLoader(Numbers(), batch_size=4, shuffle=True),
}


@pytest.mark.parametrize("setting", [NONE, TWO], ids=["none", "two"])
@pytest.mark.parametrize("name", LOADERS)
def test_trial_measures_every_kind_of_loader_and_leaves_it_unchanged(name: str, setting: Setting) -> None:
    loader: Any = LOADERS[name]()
    own_state = loader.generator.get_state() if loader.generator is not None else None
    before = {key: value for key, value in vars(loader).items() if not key.startswith("_")}
    trial = run_trial(loader, setting, NO_WORK, QUICK)
    assert trial.infeasible is None
    (step_s,) = trial.steps_s
    assert step_s > 0
    assert trial.start_s is not None
    assert trial.batch_tensors == (1 if name == "stream" else 2) or name == "unbatched"
    assert own_state is None or torch.equal(loader.generator.get_state(), own_state)
    assert {key: value for key, value in vars(loader).items() if not key.startswith("_")} == before
    assert torch.multiprocessing.active_children() == []


def test_trial_with_thread_workers_leaves_the_loader_unchanged() -> None:
    loader = FeedLoader(Numbers(), batch_size=4, shuffle=True)
    trial = run_trial(loader, THREADS, NO_WORK, QUICK)
    assert trial.steps_s
    assert loader.workers == "process"


def test_trial_measures_batch_bytes_worker_memory_and_unevenness() -> None:
    trial = run_trial(DataLoader(Numbers(), batch_size=4), TWO, NO_WORK, TrialLimits(min_s=0.3, max_s=20.0))
    assert trial.batch_bytes == 4 * 25 * 8 + 4 * 4
    assert trial.memory_bytes is not None
    assert 2**20 < trial.memory_bytes < 2**31
    assert trial.unevenness is not None
    assert trial.unevenness > 0


def test_measured_step_takes_at_least_as_long_as_the_training_step() -> None:
    work = TrainingWork(step_s=0.05, cpu_s=0.01)
    for setting in (NONE, TWO):
        trial = run_trial(DataLoader(Numbers(), batch_size=4), setting, work, QUICK)
        assert trial.step_s >= 0.05


def test_trial_of_several_ranks_gives_a_single_step_time() -> None:
    trial = run_trial(DataLoader(Numbers(), batch_size=4), TWO, NO_WORK, QUICK, ranks=3)
    assert len(trial.steps_s) == 1


def test_killed_worker_makes_the_setting_infeasible() -> None:
    trial = run_trial(DataLoader(Dies(), batch_size=4), TWO, NO_WORK, QUICK)
    assert trial.steps_s == ()
    assert trial.infeasible is not None
    assert "was killed by SIGKILL" in trial.infeasible
    assert torch.multiprocessing.active_children() == []


def test_dataset_error_is_raised_without_workers_and_a_reason_with_workers() -> None:
    loader = DataLoader(Raises(), batch_size=4)
    limits = TrialLimits(min_s=1.0, max_s=20.0)
    with pytest.raises(DatasetError, match=r"\(Raises\) failed: OSError: the file is cut short"):
        run_trial(loader, NONE, NO_WORK, limits)
    trial = run_trial(loader, TWO, NO_WORK, limits)
    assert "(Raises) failed: OSError: the file is cut short" in str(trial.infeasible)


class OfAFile(Numbers):
    """Reads from a file that was open before the workers began, as C libraries hold files."""

    def __init__(self, file: int) -> None:
        super().__init__()
        self.file = file

    def __getitem__(self, index: int) -> Any:
        return torch.frombuffer(bytearray(os.read(self.file, 8)), dtype=torch.uint8)


def test_trials_move_no_file_of_the_training_process(tmp_path: Path) -> None:
    path = tmp_path / "raster"
    path.write_bytes(bytes(8 * 10_000))
    file = os.open(path, os.O_RDONLY)
    try:
        loader = DataLoader(OfAFile(file), batch_size=4)
        assert run_trial(loader, NONE, NO_WORK, QUICK).infeasible is None
        assert run_trial(loader, TWO, NO_WORK, QUICK).infeasible is None
        assert os.lseek(file, 0, os.SEEK_CUR) == 0
    finally:
        os.close(file)


def test_hanging_loader_makes_the_setting_infeasible() -> None:
    trial = run_trial(DataLoader(Hangs(), batch_size=4), TWO, NO_WORK, TrialLimits(max_s=0.5, patience_s=0.5))
    assert trial.infeasible == "it gave nothing within 1 s"
    assert torch.multiprocessing.active_children() == []


def test_loader_without_batches_raises_a_loader_error() -> None:
    with pytest.raises(LoaderError, match="yielded 0 batches"):
        run_trial(DataLoader(Numbers(0), batch_size=4), NONE, NO_WORK, QUICK)


def test_worker_memory_is_read_from_smaps_rollup(tmp_path: Path) -> None:
    folder = tmp_path / "proc/7"
    folder.mkdir(parents=True)
    (folder / "smaps_rollup").write_text("00-ff ---p 0 0 0 [rollup]\nRss: 900 kB\nPss: 500 kB\nPss_Shmem: 100 kB\n")
    assert worker_memory([7], tmp_path) == 400 * 1024
    assert worker_memory([7, 8], tmp_path) is None


MIB = 2**20
MACHINE = Machine(
    usable_cpus=8,
    cpu_reason="CPUs by decree",
    available_memory_bytes=64 * 1024 * MIB,
    free_shm_bytes=64 * MIB,
    start_method="fork",
)
LIMITS = SettingLimits(machine=MACHINE, open_files=1196)
PROBE = Trial(
    setting=Setting(num_workers=0, prefetch_factor=None), steps_s=(1.0,), batch_bytes=10 * MIB, batch_tensors=2
)


def setting(workers: int, prefetch: int = 2, kind: str = "process", *, in_place: bool = False) -> Setting:
    return Setting(
        num_workers=workers,
        prefetch_factor=prefetch,
        workers=kind,  # type: ignore[arg-type]
        in_place=in_place,
    )


def test_small_dev_shm_limits_workers_and_prefetch_factor() -> None:
    # 0.8 x 64 MiB hold 5 batches of 10 MiB: (workers x prefetch + 1).
    assert LIMITS.broken(setting(2), [PROBE]) == ""
    assert LIMITS.broken(setting(4, 1), [PROBE]) == ""
    why = LIMITS.broken(setting(5, 1), [PROBE])
    assert "6 batches of 10.5 MB" in why
    assert "80% of the 64 MiB free in /dev/shm" in why
    assert "--shm-size" in why
    assert LIMITS.broken(setting(5, 8, "thread"), [PROBE]) == ""
    assert "for each of 2 loaders" in replace(LIMITS, local_ranks=2).broken(setting(2), [PROBE])
    assert replace(LIMITS, background=1).broken(setting(2), [PROBE])


def test_slots_are_not_limited_by_dev_shm_or_open_files() -> None:
    many = replace(PROBE, batch_tensors=100)
    assert LIMITS.broken(setting(5), [many])
    assert LIMITS.broken(setting(5, in_place=True), [many]) == ""


def test_a_setting_says_whether_batches_are_in_slots() -> None:
    options = {"num_workers": 2, "batch_size": 4}
    assert Setting.of(FeedLoader(Numbers(), **options)).in_place
    assert not Setting.of(FeedLoader(Numbers(), hand_over="torch", **options)).in_place
    assert not Setting.of(FeedLoader(Numbers(), workers="thread", **options)).in_place
    assert not Setting.of(DataLoader(Numbers(), **options)).in_place
    assert not Setting.of(FeedLoader(Numbers(), batch_size=4)).in_place  # nothing is handed over


class Noted(ImitatedTraining):
    """Notes its work, and does none."""

    works: ClassVar[list[TrainingWork]] = []

    def __init__(self, work: TrainingWork) -> None:
        self.works.append(work)
        super().__init__(NO_WORK)


@pytest.mark.parametrize("in_place", [True, False])
def test_batches_in_place_are_tried_in_slots_and_without_the_wait_for_their_copy(
    *, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, where the test sees the loader."""
    monkeypatch.setattr(trial_module, "run_in_children", lambda works, **_: [work() for work in works])
    monkeypatch.setattr(trial_module, "ImitatedTraining", Noted)
    monkeypatch.setattr(Noted, "works", [])
    copies: list[DataLoader[Any]] = []
    clone = trial_module.clone_loader
    monkeypatch.setattr(trial_module, "clone_loader", lambda *args: copies.append(clone(*args)) or copies[-1])
    work = TrainingWork(step_s=0.03, cpu_s=0.025, copy_s=0.02, on_device=True)
    wanted = setting(1, in_place=in_place)
    loader = DataLoader(Numbers(), batch_size=4)
    assert run_trial(loader, wanted, work, QUICK).steps_s
    assert uses_slots(copies[0]) is in_place
    assert not uses_slots(loader)
    expected = TrainingWork(step_s=pytest.approx(0.01), cpu_s=pytest.approx(0.01), on_device=True)
    assert Noted.works == [expected if in_place else work]


def test_memory_limit_uses_measured_or_else_estimated_worker_memory() -> None:
    tight = replace(LIMITS, machine=replace(MACHINE, available_memory_bytes=1024 * MIB))
    small = replace(PROBE, batch_bytes=0)
    assert tight.broken(setting(2), [small]) == ""  # 256 MiB each, in half of 1 GiB
    assert "50% of the 1,024 MiB of free memory" in tight.broken(setting(3), [small])
    light = Trial(setting=setting(2), steps_s=(1.0,), memory_bytes=20 * MIB)
    assert tight.broken(setting(16), [small, light]) == ""
    heavy = Trial(setting=setting(2), steps_s=(1.0,), memory_bytes=800 * MIB)
    assert "2 workers at 400 MiB" in tight.broken(setting(2), [small, heavy])
    assert replace(tight, start_method="spawn").broken(setting(2), [small])


def test_open_file_limit_bounds_the_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(PROBE, batch_bytes=1, batch_tensors=100)
    assert LIMITS.broken(setting(4), [small]) == ""  # 4 x 4 + 9 x 100 = 916
    why = LIMITS.broken(setting(5), [small])
    assert "5 workers and 11 batches of 100 tensors would keep 1120 files open, but this process may have 1196" in why
    assert replace(LIMITS, open_files=math.inf).broken(setting(5), [small]) == ""
    assert LIMITS.broken(setting(5, 2, "thread"), [small]) == ""
    monkeypatch.setattr(torch.multiprocessing, "get_sharing_strategy", lambda: "file_system")
    assert LIMITS.broken(setting(5), [small]) == ""


@pytest.mark.parametrize("known", [None, 0])
def test_unknown_limits_allow_every_setting(known: int | None) -> None:
    machine = replace(MACHINE, available_memory_bytes=None, free_shm_bytes=None)
    trials = [replace(PROBE, batch_bytes=known, batch_tensors=known)]
    assert SettingLimits(machine=machine).broken(setting(512, 64), trials) == ""

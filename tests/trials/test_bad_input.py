"""Trials of loaders, in programs and on machines, that break what is usually true: faults are injected for real."""

import contextlib
import gc
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from machine.test_limits import put
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, SequentialSampler
from trials.machines import FakeMachine, workers

from lightning_feed.errors import DatasetError, LoaderError
from lightning_feed.load.child import run_in_children
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.settings import Setting
from lightning_feed.machine.limits import read_machine
from lightning_feed.trials import tune_loader as tune_module
from lightning_feed.trials.training_work import TrainingWork
from lightning_feed.trials.trial import TrialLimits, run_trial
from lightning_feed.trials.tune_loader import Goal, Tuned, tune_loader

QUICK = TrialLimits(min_s=0.0, max_s=20.0)
NONE = workers(0)
ONE = workers(1)
either = pytest.mark.parametrize("setting", [NONE, ONE], ids=["none", "one"])


@pytest.fixture(autouse=True, scope="module")
def no_workers_of_other_tests() -> None:
    """Loaders that keep their workers live until they are collected, with all that refers to them."""
    gc.collect()
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index >= 12:
            raise IndexError("there are 12")
        return torch.full((3,), index)


def tried(loader: DataLoader[Any], setting: Setting) -> None:
    """A trial finds a speed, and leaves nothing behind."""
    trial = run_trial(loader, setting, TrainingWork(), QUICK)
    assert trial.infeasible is None
    assert trial.step_s > 0
    assert multiprocessing.active_children() == []


# --- lengths and samplers ---------------------------------------------------------------------------------------------


class SaysMore(Numbers):
    def __len__(self) -> int:
        return 1000


class SaysLess(Numbers):
    def __len__(self) -> int:
        return 2


class EndsEarly(SaysMore):
    def __getitem__(self, index: int) -> Any:
        if index >= 12:
            raise StopIteration
        return super().__getitem__(index)


class LoaderSaysMore(DataLoader[Any]):
    def __len__(self) -> int:
        return 1000


class LoaderSaysNothing(DataLoader[Any]):
    def __len__(self) -> int:
        raise TypeError("no length")


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(12))


class SamplerSays(SequentialSampler):
    """Gives 12 indices."""

    def __init__(self, length: int) -> None:
        super().__init__(range(12))
        self.length = length

    def __len__(self) -> int:
        return self.length


LOADERS: dict[str, Any] = {
    "dataset with too few": lambda: DataLoader(SaysLess(), 2),
    "dataset that ends early": lambda: DataLoader(EndsEarly(), 2),
    "loader with too many": lambda: LoaderSaysMore(Numbers(), 2),
    "loader without a length": lambda: LoaderSaysNothing(Numbers(), 2),
    "sampler with too many": lambda: DataLoader(Numbers(), 2, sampler=SamplerSays(1000)),
    "sampler with too few": lambda: DataLoader(Numbers(), 2, sampler=SamplerSays(1)),
    "sampler that says 0": lambda: DataLoader(Numbers(), 2, sampler=SamplerSays(0)),
    "endless sampler": lambda: DataLoader(Numbers(), 2, sampler=Endless()),
    "endless batch sampler": lambda: DataLoader(Numbers(), batch_sampler=BatchSampler(Endless(), 2, drop_last=False)),
    "endless sampler, ours": lambda: FeedLoader(Numbers(), batch_size=2, sampler=Endless()),
}


@either
@pytest.mark.parametrize("name", LOADERS)
def test_trial_works_with_wrong_or_missing_lengths(name: str, setting: Setting) -> None:
    tried(LOADERS[name](), setting)


def test_dataset_that_overstates_its_length_is_named_in_the_error() -> None:
    loader = DataLoader(SaysMore(), 2)
    limits = TrialLimits(min_s=60.0, max_s=20.0)  # goes on until sample 12
    with pytest.raises(DatasetError, match=r"Loading from the dataset \(SaysMore\) failed: IndexError: there are 12"):
        run_trial(loader, NONE, TrainingWork(), limits)
    assert "IndexError: there are 12" in str(run_trial(loader, ONE, TrainingWork(), limits).infeasible)


# --- time -------------------------------------------------------------------------------------------------------------


class Sleeps(Numbers):
    """Sample 6 sleeps far longer than any budget, in workers only if so asked."""

    def __init__(self, *, only_in_workers: bool) -> None:
        self.only_in_workers = only_in_workers

    def __getitem__(self, index: int) -> Any:
        if index == 6 and (torch.utils.data.get_worker_info() is not None or not self.only_in_workers):
            time.sleep(3600)
        return super().__getitem__(index)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_module, "_FIRST_PATIENCE_S", 1.0)
    monkeypatch.setattr(tune_module, "_LEAST_PATIENCE_S", 1.0)


@pytest.mark.usefixtures("impatient")
def test_sample_that_hangs_beyond_the_budget_ends_the_tuning() -> None:
    with pytest.raises(LoaderError, match=r"(no trial ended|it gave nothing) within [12] s"):
        tune_loader(DataLoader(Sleeps(only_in_workers=False), 2), Goal(budget_s=1.0))
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("impatient")
def test_settings_with_hanging_workers_are_not_chosen() -> None:
    tuned = tune_loader(DataLoader(Sleeps(only_in_workers=True), 2), Goal(budget_s=12.0))
    assert tuned.setting.num_workers == 0
    assert "num_workers=1 could not run: it gave nothing within 4 s" in tuned.reason


# --- memory -----------------------------------------------------------------------------------------------------------

MIB = 2**20


def private_bytes() -> int:
    """Memory that this process does not share with the one that forked it."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


class Large(Dataset[Any]):
    """An array of 96 MiB, and as much in lists that the garbage collector would write to."""

    def __init__(self) -> None:
        self.array = np.ones(96 * MIB, np.uint8)
        self.rows = [[index] for index in range(96 * MIB // 96)]
        self.most = multiprocessing.Value("q", 0)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        gc.collect()
        self.most.value = max(self.most.value, private_bytes())
        return self.array[index], self.rows[index][0]


@either
def test_large_dataset_is_not_copied_by_a_fork(setting: Setting) -> None:
    data = Large()
    tried(DataLoader(data, 2), setting)
    assert 0 < data.most.value < 64 * MIB


# --- programs that fork -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
@either
def test_trial_leaves_other_child_processes_of_the_program_running(setting: Setting) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            os.close(writing)
            os.read(reading, 1)  # until the test has closed the other end
        os._exit(7)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        before = pool.apply(os.getpid)
        assert run_trial(DataLoader(Numbers(), 2), setting, TrainingWork(), QUICK).infeasible is None
        assert pool.apply(os.getpid) == before
    os.close(writing)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    os.close(reading)


@either
def test_trial_works_in_a_program_that_ignores_sigchld(setting: Setting) -> None:
    def program() -> Any:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        return run_trial(DataLoader(Numbers(), 2), setting, TrainingWork(), QUICK)

    (trial,) = run_in_children([program], timeout_s=60)
    assert trial.infeasible is None


def test_tuning_works_in_a_forked_process() -> None:
    loader = DataLoader(Numbers(), 2)
    goal = Goal(budget_s=1.0, most_workers=1)
    (tuned,) = run_in_children([lambda: tune_loader(loader, goal)], timeout_s=60)
    assert isinstance(tuned, Tuned)


def _tune_and_tell(there: Any) -> None:
    try:
        tune_loader(DataLoader(Numbers(), 2), Goal(budget_s=1.0))
    except Exception as error:  # noqa: BLE001  # told to the test
        there.send(f"{type(error).__name__}: {error}")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
def test_tuning_in_a_daemon_process_raises_a_loader_error() -> None:
    here, there = multiprocessing.Pipe(duplex=False)
    daemon = multiprocessing.get_context("fork").Process(target=_tune_and_tell, args=(there,), daemon=True)
    daemon.start()
    assert here.poll(30)
    said = here.recv()
    daemon.join()
    assert said.startswith("LoaderError: Nothing can be tried here, because this process is a daemon")


# --- devices, start methods, CPUs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Numbers(), 2, shuffle=True, pin_memory=True),
        lambda: FeedLoader(Numbers(), batch_size=2, background=2, pin_memory=True),
    ],
    ids=["plain", "ours"],
)
@pytest.mark.parametrize("setting", [NONE, ONE, Setting(num_workers=0, pin_memory=True)], ids=["none", "one", "pinned"])
def test_trial_does_not_touch_an_initialized_cuda_device(
    make: Any, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a process with CUDA: it is initialised here, and may not be used in what is forked."""
    parent = os.getpid()

    def refuse(*_: Any, **__: Any) -> Any:
        if os.getpid() != parent:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return 0

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: os.getpid() == parent)
    names = ("_lazy_init", "current_device", "set_device", "synchronize", "current_stream", "empty_cache", "Stream")
    for name in (*names, "Event", "device_count", "mem_get_info", "get_rng_state_all", "set_rng_state_all"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    tried(make(), setting)


@pytest.mark.slow
def test_trial_works_with_spawned_workers() -> None:
    tried(DataLoader(Numbers(), 2, multiprocessing_context="spawn", num_workers=1), ONE)


def test_tuning_respects_a_cgroup_quota_of_one_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(os, "process_cpu_count", lambda: 16, raising=False)
    put(tmp_path, "proc/self/cgroup", "0::/job")
    put(tmp_path, "sys/fs/cgroup/job/cpu.max", "100000 100000")
    machine = read_machine(tmp_path)
    assert (machine.usable_cpus, machine.cpu_time) == (1, 1.0)
    fake = FakeMachine("linear", cpus=1, model_s=0.05)
    monkeypatch.setattr(tune_module, "run_trial", lambda loader, setting, *_, **__: fake.run(setting))
    goal = Goal(work=TrainingWork(step_s=0.05))
    tuned = tune_loader(DataLoader(Numbers(), 2), goal, machine=machine, clock=lambda: 0.0)
    assert tuned.setting.num_workers == 1
    assert max(setting.num_workers for setting in fake.tried) == 2

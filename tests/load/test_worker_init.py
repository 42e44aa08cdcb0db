"""What a worker process does before its first sample."""

import os
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_feed.load.worker_init import ONE_THREAD, WorkerInit


class Environment(Dataset[tuple[int, int]]):
    """Each sample tells how the worker was set up."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[int, int]:
        return torch.get_num_threads(), sum(os.environ.get(name) == "1" for name in ONE_THREAD)


def note(worker_id: int) -> None:
    os.environ["NOTED"] = f"user {worker_id}, {os.environ.get('NOTED')}"


def seed(worker_id: int, rank: int) -> None:
    os.environ["NOTED"] = f"seed {worker_id} of rank {rank}"


@pytest.fixture(autouse=True)
def _same_process(monkeypatch: pytest.MonkeyPatch) -> object:
    """The tests call in this process what is meant for a worker; put its state back."""
    threads = torch.get_num_threads()
    for name in (*ONE_THREAD, "PL_SEED_WORKERS", "NOTED"):
        monkeypatch.setenv(name, "put back")
        monkeypatch.delenv(name)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_workers_have_one_thread_each(start_method: str, recwarn: pytest.WarningsRecorder) -> None:
    loader = DataLoader(
        Environment(), num_workers=1, worker_init_fn=WorkerInit(), multiprocessing_context=start_method, batch_size=2
    )
    [(threads, variables)] = list(loader)
    assert threads.tolist() == [1, 1]
    assert variables.tolist() == [len(ONE_THREAD)] * 2


def test_a_number_of_threads_that_was_set_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    WorkerInit()(0)
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert os.environ["MKL_NUM_THREADS"] == "1"


def test_opencv_gets_no_pool_when_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setitem(sys.modules, "cv2", SimpleNamespace(setNumThreads=asked.append))
    WorkerInit()(0)
    assert asked == [0]


def test_seeding_comes_before_the_users_function_and_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    init = WorkerInit(rank=5, seed_worker=seed, then=note)
    init(2)
    assert os.environ["NOTED"] == "user 2, None"
    monkeypatch.delenv("NOTED")
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    init(2)
    assert os.environ["NOTED"] == "user 2, seed 2 of rank 5"


def test_it_can_be_pickled() -> None:
    init = WorkerInit(rank=1, seed_worker=seed, then=note)
    assert pickle.loads(pickle.dumps(init)) == init

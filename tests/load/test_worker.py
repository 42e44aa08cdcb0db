"""What a worker process does before its first sample, and what can be sent to it."""

import gc
import multiprocessing
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.worker import ONE_THREAD, WorkerInit, why_not_picklable


class Environment(Dataset[tuple[int, int]]):
    """Each sample tells how the worker was set up."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[int, int]:
        return torch.get_num_threads(), sum(os.environ.get(name) == "1" for name in ONE_THREAD)


def seed(worker_id: int, rank: int) -> None:
    os.environ["NOTED"] = f"seed {worker_id} of rank {rank}"


@pytest.fixture(autouse=True)
def _same_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests call in this process what is meant for a worker; put its state back."""
    torch.set_num_threads(2)
    for name in (*ONE_THREAD, "PL_SEED_WORKERS", "NOTED"):
        monkeypatch.setenv(name, "put back")
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True, scope="module")
def _the_garbage_collector_is_as_before() -> Iterator[None]:
    """What is frozen in this process besides the imports is not kept; without them, each collection of the tests that
    follow would take half a second."""
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_have_one_thread_each(start_method: str, recwarn: pytest.WarningsRecorder) -> None:
    loader = DataLoader(
        Environment(), num_workers=1, worker_init_fn=WorkerInit(), multiprocessing_context=start_method, batch_size=2
    )
    [(threads, variables)] = list(loader)
    assert threads.tolist() == [1, 1]
    assert variables.tolist() == [len(ONE_THREAD)] * 2


class Codes(Exception):
    """An error that can be pickled, but not made anew from its pickle."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text}, code {code}")


class Group(Dataset[int]):
    """Raises an ExceptionGroup, as tasks in ``asyncio.TaskGroup`` do."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        inner = ExceptionGroup("of the disk", [OSError(5, "disk"), Codes(7, "header")])  # noqa: F821
        raise self.outer("two reads failed", [TimeoutError("net"), inner])

    outer: Any = None


@pytest.mark.skipif(sys.version_info < (3, 11), reason="ExceptionGroup is new in Python 3.11")
@pytest.mark.parametrize("options", [{}, {"hand_over": "torch"}, {"workers": "thread"}])
def test_an_exception_group_keeps_its_exceptions_and_its_text(options: Any) -> None:
    dataset = Group()
    dataset.outer = ExceptionGroup  # noqa: F821
    if "workers" not in options:
        options = {**options, "worker_init_fn": WorkerInit()}
    with pytest.raises(ExceptionGroup) as caught:  # noqa: F821
        list(FeedLoader(dataset, num_workers=1, **options))
    net, inner = caught.value.exceptions
    disk, header = inner.exceptions
    assert type(net) is TimeoutError
    assert (type(disk), disk.errno) == (OSError, 5)
    assert (type(header), str(header)) == (RuntimeError, f"{__name__}.Codes: header, code 7")
    for words in ("two reads failed", "TimeoutError: net", "in __getitem__", "worker"):
        assert words in str(caught.value)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="ExceptionGroup is new in Python 3.11")
def test_a_group_that_cannot_be_made_anew_is_raised_as_its_text() -> None:
    class Own(ExceptionGroup[Exception]):  # noqa: F821
        def __new__(cls, text: str, parts: Any, *code: int) -> Any:
            if not code:
                raise ValueError("a code is needed")
            return super().__new__(cls, text, parts)

        def __init__(self, *_: Any) -> None:
            pass

    dataset = Group()
    dataset.outer = lambda text, parts: Own(text, parts, 3)
    with pytest.raises(RuntimeError, match=r"(?s)Caught Own in thread worker .*two reads failed.*TimeoutError: net"):
        list(FeedLoader(dataset, num_workers=1, workers="thread"))


class Deadly:
    """Garbage that ends a worker in which it is collected, as CUDA events do; it is in a cycle."""

    def __init__(self) -> None:
        self.me = self
        self.parent = os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.parent:
            os._exit(3)


class Collects(Dataset[int]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        gc.collect()
        return index


def test_garbage_of_the_parent_is_not_collected_in_a_worker() -> None:
    gc.collect()
    gc.disable()
    try:
        Deadly()
        loader = DataLoader(
            Collects(), num_workers=1, worker_init_fn=WorkerInit(), multiprocessing_context="fork", batch_size=2
        )
        assert [batch.tolist() for batch in loader] == [[0, 1]]
    finally:
        gc.enable()
        gc.collect()


def test_omp_num_threads_set_by_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    WorkerInit()(0)
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert os.environ["MKL_NUM_THREADS"] == "1"


def test_workers_are_seeded_only_when_pl_seed_workers_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    init = pickle.loads(pickle.dumps(WorkerInit(rank=5, seed_worker=seed)))
    init(2)
    assert "NOTED" not in os.environ
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    init(2)
    assert os.environ["NOTED"] == "seed 2 of rank 5"


# --- what can be sent to a worker, found out without sending it ------------------------------------------------------


class NotTwice(torch.Tensor):
    """A tensor that fails the test when it is looked into."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AssertionError("the data was copied")


@pytest.mark.parametrize(
    "thing",
    [
        None,
        range(3),
        TensorDataset(torch.zeros(2)),
        [torch.zeros(1).as_subclass(NotTwice)],
        np.zeros(3),
        np.array([None, "text"], dtype=object),
        torch.nn.Linear(2, 2),
        multiprocessing.get_context("spawn").Lock(),
        multiprocessing.get_context("spawn").Value("i", 3),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_picklable_objects_are_accepted_without_copying_tensors(thing: Any) -> None:
    assert why_not_picklable(thing) is None


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (lambda: 0, "lambda"),
        ([threading.Lock()], "lock"),
        ((number for number in ()), "generator"),
        (np.array([lambda: 0], dtype=object), "lambda"),
    ],
    ids=["lambda", "lock", "generator", "array of objects"],
)
def test_unpicklable_objects_are_refused_with_a_reason(thing: Any, words: str) -> None:
    problem = why_not_picklable(thing)
    assert problem is not None
    assert words in problem


@pytest.mark.parametrize(("file", "is_refused"), [(None, True), ("<stdin>", True), (__file__, False)])
def test_classes_defined_in_a_program_without_a_file_are_refused(
    file: str | None, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``python -c``, ``python -`` and notebooks have no file that a spawned worker could run."""
    main: Any = ModuleType("__main__")
    main.Birds = type("Birds", (), {"__module__": "__main__"})
    if file is not None:
        main.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", main)
    problem = why_not_picklable(main.Birds())
    assert problem == ("Birds is defined in a program that has no file to import" if is_refused else None)

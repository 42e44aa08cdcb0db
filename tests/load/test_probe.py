"""The probe sees that a program has changed its dataset, and nothing else; a probed loader follows the change."""

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_feed import FastDataModule
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.probe import Probe

SAMPLES = 64
LEVEL = {"of the module": 0}


class Inner:
    level = 0

    def __init__(self, inner: Any = None) -> None:
        self.inner = inner
        self.value = 0


class Data(Dataset[Any]):
    def __init__(self, read: Callable[["Data", int], Any]) -> None:
        self.read = read
        self.array = np.zeros(SAMPLES)
        self.tensor = torch.zeros(SAMPLES)
        self.names = {"a"}
        self.deep = Inner(Inner(Inner(Inner(Inner(Inner())))))
        self.function = lambda: 0
        self.is_rehearsed = False

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index, self.read(self, index)


def _deepest(inner: Inner) -> Inner:
    return inner if inner.inner is None else _deepest(inner.inner)


def _replace(name: str, value: Callable[[Data], Any]) -> Callable[[Data], None]:
    return lambda data: setattr(data, name, value(data))


CHANGES: dict[str, tuple[Callable[[Data, int], Any], Callable[[Data], Any]]] = {
    "array, in place": (lambda data, index: data.array[index], lambda data: data.array.fill(1)),
    "array, replaced": (lambda data, index: data.array[index], _replace("array", lambda data: data.array + 1)),
    "tensor, in place": (lambda data, index: data.tensor[index], lambda data: data.tensor.fill_(1)),
    "set": (lambda data, _: len(data.names), lambda data: data.names.add("b")),
    "six levels down": (
        lambda data, _: _deepest(data.deep).value,
        lambda data: setattr(_deepest(data.deep), "value", 1),
    ),
    "class attribute": (lambda data, _: data.deep.level, lambda _: setattr(Inner, "level", Inner.level + 1)),
    "function": (lambda data, _: data.function(), _replace("function", lambda _: lambda: 1)),
    "global": (lambda *_: LEVEL["of the module"], lambda _: LEVEL.update({"of the module": 1})),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_probe_sees_each_way_to_change_a_dataset(name: str) -> None:
    read, change = CHANGES[name]
    data = Data(read)
    probe = Probe(DataLoader(data, batch_size=4, shuffle=True))
    assert not probe.changed()
    change(data)
    assert probe.changed()


@pytest.mark.parametrize(
    "read",
    [lambda *_: os.urandom(3), lambda *_: torch.rand(2), lambda data, _: data.array.sum(), lambda *_: next(COUNT)],
    ids=["random by itself", "torch's numbers", "constant", "a counter"],
)
def test_a_probe_of_an_unchanged_dataset_sees_no_change(read: Any) -> None:
    probe = Probe(DataLoader(Data(read), batch_size=4, shuffle=True))
    assert [probe.changed() for _ in range(3)] == [False] * 3


COUNT = iter(range(10**9))


def test_a_change_of_the_collate_function_is_seen() -> None:
    class Scales:
        by = 1.0

        def __call__(self, samples: list[Any]) -> Any:
            return self.by

    collate = Scales()
    probe = Probe(DataLoader(Data(lambda *_: 0), batch_size=4, collate_fn=collate))
    collate.by = 2.0
    assert probe.changed()


def test_a_dataset_that_refers_to_what_processes_share_is_not_probed() -> None:
    data = Data(lambda *_: 0)
    data.function = multiprocessing.Queue  # type: ignore[assignment]
    queue = multiprocessing.Queue()
    data.names = queue  # type: ignore[assignment]
    assert not Probe(DataLoader(data, batch_size=4)).changed()


def test_a_collate_function_that_takes_only_whole_batches_is_probed_with_one() -> None:
    def whole(samples: list[Any]) -> Any:
        return torch.tensor([value for _, value in samples]).view(4, 1)

    data = Data(lambda data, index: float(data.array[index]))
    probe = Probe(DataLoader(data, batch_size=4, collate_fn=whole))
    assert not probe.changed()
    data.array.fill(1)
    assert probe.changed()


def test_samples_that_can_no_longer_be_read_count_as_changed() -> None:
    data = Data(lambda data, index: data.array[index])
    probe = Probe(DataLoader(data, batch_size=4))
    assert not probe.changed()
    data.array = None  # type: ignore[assignment]
    assert probe.changed()


def test_samples_that_could_never_be_read_are_unknown_and_so_count_as_changed() -> None:
    assert Probe(DataLoader(Data(lambda *_: [][0]), batch_size=4)).changed()


def test_a_probe_that_was_never_asked_leaves_no_process() -> None:
    probe = Probe(DataLoader(Data(lambda *_: 0), batch_size=4))
    child = probe._child
    assert child is not None
    del probe
    child._process.join(20)
    assert child._process.exitcode is not None


# --- a loader that is probed ------------------------------------------------------------------------------------------


class Fast(FastDataModule):
    def __init__(self, data: Data) -> None:
        super().__init__(4)
        self.data = data

    def make_dataset(self, split: str) -> Any:
        return self.data if split == "train" else None


def seen(batches: Any) -> list[int]:
    return sorted({int(value) for _, values in batches for value in values})


def test_chosen_workers_start_anew_when_the_dataset_has_changed() -> None:
    data = Data(lambda data, index: data.array[index])
    loader = Fast(data).train_dataloader()
    assert loader.probed
    assert loader.num_workers
    batches = iter(loader)  # Lightning begins the first pass before the hooks of the first epoch
    data.array.fill(1)
    assert seen(batches) == [1]
    assert seen(loader) == [1]
    data.array.fill(2)
    assert seen(loader) == [2]
    loader._iterator = None  # ends the workers


def test_a_dataset_that_changes_within_an_epoch_is_loaded_without_workers(caplog: pytest.LogCaptureFixture) -> None:
    data = Data(lambda data, index: data.array[index])
    loader = Fast(data).train_dataloader()
    newest = []
    indices = []
    for step, (index, values) in enumerate(loader, 1):
        newest.append(int(values.max()))
        indices += index.tolist()
        data.array.fill(step)
    assert newest[10:] == list(range(10, 16))
    assert sorted(indices) == list(range(SAMPLES))
    assert "The program changes the dataset (Data) within an epoch" in caplog.text
    assert loader.num_workers == 0
    assert seen(loader) == [16]


def test_workers_that_the_user_asked_for_hold_copies() -> None:
    data = Data(lambda data, index: data.array[index])
    loader = FeedLoader(data, batch_size=4, num_workers=1, persistent_workers=True)
    assert seen(loader) == [0]
    data.array.fill(1)
    assert seen(loader) == [0]
    loader._iterator = None


def test_a_dataset_that_fails_only_in_chosen_workers_is_loaded_without_them(caplog: pytest.LogCaptureFixture) -> None:
    def read(data: Data, index: int) -> int:
        if index == 40 and data.is_rehearsed and torch.utils.data.get_worker_info() is not None:
            raise AssertionError("daemonic processes are not allowed to have children")
        return index

    data = Data(read)
    loader = Fast(data).train_dataloader()
    assert loader.num_workers
    data.is_rehearsed = True  # the rehearsal reads only some samples
    trained = [int(value) for _, values in loader for value in values]
    assert sorted(trained) == list(range(SAMPLES))
    assert loader.num_workers == 0
    assert "fails in worker processes (AssertionError: daemonic processes" in caplog.text
    assert sorted(seen(loader)) == list(range(SAMPLES))


def test_an_error_that_is_no_fault_of_the_workers_is_raised() -> None:
    def read(data: Data, index: int) -> int:
        if index == 40 and data.is_rehearsed:
            raise ValueError("a bad sample")
        return index

    data = Data(read)
    loader = Fast(data).train_dataloader()
    data.is_rehearsed = True
    with pytest.raises(ValueError, match="a bad sample"):
        list(loader)
    assert loader.num_workers == 0

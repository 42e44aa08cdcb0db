"""The loaders under experiment: a sample of each, the memory of their queues, the parts of a batch."""

import dataclasses
import sqlite3
import threading
from collections import OrderedDict, namedtuple
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from diagnosing.made_data import Images, machine_of, session_of
from PIL import Image
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset

from lightning_feed.diagnosing.parts import LoaderPart, NotMeasurable, key_bytes, make_sample, size_of_leaf
from lightning_feed.diagnosing.session import open_session
from lightning_feed.errors import DatasetError, LoaderError

Pair = namedtuple("Pair", "image label")


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    path: list[str]


IMAGE = torch.zeros(2, 3, 4, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (IMAGE, {"batch": 24}),
        ([IMAGE, torch.zeros(2)], {"0": 24, "1": 8}),
        ({"image": IMAGE, "meta": {"path": ["a.jpg", "ü"], "id": 7}}, {"image": 24, "meta.path": 7, "meta.id": 8}),
        (Pair(IMAGE, (IMAGE, IMAGE)), {"image": 24, "label.0": 24, "label.1": 24}),
        (OrderedDict(x=Sample(IMAGE, ["abc"])), {"x.image": 24, "x.path": 3}),
        ([Sample(IMAGE, []), Sample(IMAGE, [])], {"0.image": 24, "0.path": 0, "1.image": 24, "1.path": 0}),
        ({"array": np.zeros((2, 2)), "raw": b"12345", 3: None}, {"array": 32, "raw": 5, "3": 0}),
        ({"labels": [1, 2, 3], "name": "cat"}, {"labels": 24, "name": 3}),
        ({}, {}),
    ],
)
def test_key_bytes_gives_the_size_of_every_leaf_by_its_path(batch: Any, expected: dict[str, int]) -> None:
    assert key_bytes(batch) == expected


def test_sizes_of_objects_include_the_tensors_in_them() -> None:
    packed = pack_sequence([torch.zeros(3), torch.zeros(2)])

    class Graph:
        def __init__(self) -> None:
            self.nodes = torch.zeros(5, dtype=torch.float64)

    assert key_bytes({"graph": Graph()}) == {"graph": 40}
    assert sum(key_bytes(packed).values()) >= 20
    assert size_of_leaf(Image.new("RGB", (5, 4))) == 60
    assert size_of_leaf({"a": [IMAGE, "xy"], "b": (1.5, {2})}) == 24 + 2 + 8 + 8


def _fits(*loaders: Any, **limits: int) -> bool:
    session = session_of(*loaders, machine=machine_of(**limits))
    session.samples = [torch.zeros(1000, dtype=torch.uint8)] * len(loaders)
    try:
        session.check_memory()
    except NotMeasurable:
        return False
    return True


def test_loader_queues_that_exceed_free_memory_are_not_measured() -> None:
    # Two workers, three batches ahead each, and the batch in hand: 7 x 4 samples.
    loader = DataLoader(Images(), batch_size=4, num_workers=2, prefetch_factor=3)
    assert _fits(loader)  # nothing is known of the machine
    assert _fits(loader, shm=35_000, memory=56_000)
    assert not _fits(loader, shm=34_999)
    assert not _fits(loader, memory=55_999)
    assert not _fits(loader, loader, shm=69_999)
    assert _fits(DataLoader(Images(), batch_size=4), shm=0, memory=8_000)  # no workers: nothing is handed over


def test_hanging_sample_is_named_in_the_error() -> None:
    never = threading.Event()

    class Hanging(Images):
        def __getitem__(self, index: int) -> Any:
            never.wait(30)

    try:
        with pytest.raises(LoaderError, match=r"Sample 0 of the dataset \(Hanging\) took longer than 0.2 s"):
            make_sample(LoaderPart("", DataLoader(Hanging())), max_s=0.2)
    finally:
        never.set()


class InOneThread(Dataset[int]):
    """As sqlite3's connections: of use to the thread that made them."""

    def __init__(self) -> None:
        self._connection = sqlite3.connect(":memory:")

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return int(self._connection.execute("SELECT ?", (index,)).fetchone()[0])


def test_thread_bound_dataset_gets_its_own_error_message() -> None:
    dataset = InOneThread()
    with closing(dataset._connection), pytest.raises(DatasetError, match=r"works only in the thread.*ProgrammingError"):
        make_sample(LoaderPart("", DataLoader(dataset, batch_size=2)))


def test_loader_is_accepted_in_place_of_a_data_module() -> None:
    """As it may in ``trainer.fit(model, loader)``."""
    loader = DataLoader(IMAGE)
    session = open_session(None, None, loader)
    assert session.datamodule is None
    assert session.loaders is loader

"""What does not survive a fork is found, named, and renewed where that is possible."""

import io
import logging
import random
import socket
import sqlite3
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from lightning_feed.load.fork_safety import (
    find_hazards,
    growing,
    kept_items,
    plain_values,
    renew,
    why_no_workers,
    why_not_renewed,
)


class Holder(Dataset[Any]):
    """A dataset with one attribute."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing
        self.size = 3

    def __len__(self) -> int:
        return self.size

    @property
    def asked(self) -> Any:
        raise AssertionError("code of the user was called")


class Transform:
    def __init__(self, thing: Any) -> None:
        self.steps = [print, thing]

    def __call__(self, sample: Any) -> Any:
        raise AssertionError("code of the user was called")


def held_lock() -> Any:
    lock = threading.Lock()
    lock.acquire()
    return lock


SOUND: dict[str, Callable[[], Any]] = {
    "numbers": lambda: [1, 2.5, None, "text", b"bytes"],
    "arrays": lambda: (np.zeros(3), torch.zeros(3)),
    "a file in memory": lambda: io.BytesIO(b"x"),
    "a free lock": threading.Lock,
    "a logger": lambda: logging.getLogger("x"),
    "a module": lambda: random,
    "a function": lambda: max,
}
GENERATORS: dict[str, Callable[[], Any]] = {
    "numpy.random.Generator": lambda: np.random.default_rng(0),
    "numpy.random.mtrand.RandomState": lambda: np.random.RandomState(0),
    "random.Random": lambda: random.Random(0),
    "torch.Generator": lambda: torch.Generator().manual_seed(0),
}
OF_A_PROCESS: dict[str, Callable[[], Any]] = {
    "a pool": lambda: ThreadPoolExecutor(1),
    "a thread": lambda: threading.Thread(target=print),
    "a held lock": held_lock,
    "a tensor on a device": lambda: torch.zeros(1, device="meta"),
}


@pytest.mark.parametrize("name", SOUND)
def test_fork_safe_attributes_give_no_reason_against_workers(name: str) -> None:
    assert why_no_workers(Holder(SOUND[name]())) == ""


@pytest.mark.parametrize("name", GENERATORS)
def test_random_generators_in_a_dataset_are_named_with_a_remedy(name: str) -> None:
    reason = why_no_workers(Holder(GENERATORS[name]()))
    assert reason.startswith("dataset.thing (")
    assert "each worker would draw the same" in reason
    assert "worker_init_fn" in reason


@pytest.mark.parametrize("name", OF_A_PROCESS)
def test_process_bound_attributes_are_reported_and_cannot_be_renewed(name: str) -> None:
    dataset = Holder(OF_A_PROCESS[name]())
    assert "belongs to this process" in why_no_workers(dataset)
    assert why_not_renewed(dataset) == why_no_workers(dataset)


def test_open_sockets_and_databases_are_reported_as_fork_hazards() -> None:
    with socket.socket() as connection:
        assert "(socket.socket) belongs to this process" in why_no_workers(Holder(connection))
    database = sqlite3.connect(":memory:")
    assert "(sqlite3.Connection) is open" in why_no_workers(Holder(database))
    assert why_not_renewed(Holder(database))
    database.close()


@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda thing: Subset(Holder(thing), [0]), "dataset.dataset.thing"),
        (lambda thing: Holder(Transform(thing)), "dataset.thing.steps[1]"),
        (lambda thing: Holder({"a": [Transform(thing)]}), "dataset.thing['a'][0].steps[1]"),
        (lambda thing: Subset(Holder(Transform(Transform(thing))), [0]), "dataset.dataset.thing.steps[1].steps[1]"),
    ],
)
def test_nested_fork_hazards_are_reported_with_their_attribute_path(wrap: Any, path: str) -> None:
    (hazard,) = find_hazards(wrap(np.random.default_rng(0)))
    assert hazard.path == path


def test_hazard_search_is_bounded_in_depth_and_handles_cycles() -> None:
    deep: Any = np.random.default_rng(0)
    for _ in range(9):
        deep = Holder(deep)
    assert find_hazards(deep) == []
    wide = Holder([[Holder(number) for number in range(100)] for _ in range(100)])
    wide.last = np.random.default_rng(0)  # type: ignore[attr-defined]
    assert len(find_hazards(wide)) == 1
    circle = Holder(None)
    circle.thing = circle
    assert find_hazards(circle) == []


def draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand(1, generator=generator))
    return float(generator.random())


@pytest.mark.parametrize("name", GENERATORS)
def test_renewed_generators_draw_different_numbers_per_seed(name: str) -> None:
    def first(seed: int) -> float:
        dataset = Holder(GENERATORS[name]())
        renew(dataset, seed)
        return draw(dataset.thing)

    assert len({first(0), first(1), first(2)}) == 3
    assert first(1) == first(1)


def test_renewing_keeps_a_shared_generator_shared() -> None:
    generator = np.random.default_rng(0)
    dataset = Holder([Transform(generator), Transform(generator)])
    renew(dataset, 3)
    first, second = (transform.steps[1] for transform in dataset.thing)
    assert first is second
    assert first.random() != np.random.default_rng(0).random()


def test_renewing_reopens_files_opened_for_reading(tmp_path: Path) -> None:
    path = tmp_path / "records.bin"
    path.write_bytes(b"abcdef")
    with path.open("rb") as file:
        dataset = Holder(file)
        assert "is open, and workers would share its position" in why_no_workers(dataset)
        assert why_not_renewed(dataset) == ""
        renew(dataset, 0)
        dataset.thing.seek(3)
        assert file.tell() == 0
        assert dataset.thing.read() == b"def"
        dataset.thing.close()


def test_renewing_reopens_zip_archives(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", "text")
    with zipfile.ZipFile(path) as archive:
        dataset = Holder(archive)
        assert why_not_renewed(dataset) == ""
        renew(dataset, 0)
        assert dataset.thing is not archive
        assert dataset.thing.read("x") == b"text"
        dataset.thing.close()


def test_files_open_for_writing_cannot_be_renewed(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        assert why_not_renewed(Holder(file))


class Staged(Holder):
    level = 0

    @property
    def dataset(self) -> Any:
        raise AssertionError("code of the user was called")


@pytest.mark.parametrize("wrapped", [True, False])
def test_plain_values_change_with_the_attributes_of_a_dataset(*, wrapped: bool) -> None:
    inner = Staged([Transform(3)])
    dataset: Any = Subset(inner, [0, 1]) if wrapped else inner
    before = plain_values(dataset)
    inner.level = 0
    assert plain_values(dataset) == before  # the same value, though now of the object and no longer of its class
    inner.level = 1
    assert plain_values(dataset) != before
    inner.level = 0
    inner.thing[0].steps[1] = 4
    assert plain_values(dataset) != before
    inner.thing[0].steps[1] = 3
    assert plain_values(dataset) == before


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ({}, {at: torch.ones(2) for at in range(40)}, "dataset.thing"),
        ({"a": "text"}, dict.fromkeys(range(40), "text"), "dataset.thing"),
        ([None] * 40, [*[torch.ones(2)] * 20, *[None] * 20], "dataset.thing"),
        ([], [b"bytes"] * 20, "dataset.thing"),
        (Holder({}), Holder(dict.fromkeys(range(40), b"")), "dataset.thing.thing"),
        ([], list(range(40)), ""),  # what it counts, not what it read
        ({}, dict.fromkeys(range(40), 1.5), ""),
        ([b"x"] * 20, [b"x"] * 20, ""),
        ([b"x"] * 20, [b"x"] * 25, ""),
        (torch.ones(3), torch.ones(40), ""),
    ],
)
def test_growing_names_the_attribute_that_caches_samples(before: Any, after: Any, found: str) -> None:
    assert growing(kept_items(Holder(before)), Holder(after)) == found


def test_kept_items_estimates_long_lists_within_two_percent() -> None:
    assert kept_items(Holder([b"x"] * 100_000))["dataset.thing"] == pytest.approx(100_000, rel=0.02)

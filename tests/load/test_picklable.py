"""What can be sent to a worker process, found out without sending it."""

import multiprocessing
import socket
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_feed.load.picklable import why_not_picklable


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
def test_what_can_be_sent(thing: Any) -> None:
    assert why_not_picklable(thing) is None


def test_open_connections_can_be_sent() -> None:
    left, right = socket.socketpair()
    ours, theirs = multiprocessing.Pipe()
    with left, right, ours, theirs:
        assert why_not_picklable([left, ours]) is None


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
def test_what_cannot_be_sent(thing: Any, words: str) -> None:
    problem = why_not_picklable(thing)
    assert problem is not None
    assert words in problem

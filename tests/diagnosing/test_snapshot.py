"""Snapshots: what is put back, into the same objects; and what is left alone."""

import threading
from collections import OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_feed.diagnosing.globals import ProcessState
from lightning_feed.diagnosing.snapshot import Snapshot


class Holder:
    """Holds one of each."""

    __slots__ = ("__dict__", "slot")

    def __init__(self) -> None:
        self.list: list[Any] = [1, [2, 3]]
        self.dict = {"a": {"b": 1}}
        self.ordered = OrderedDict(a=1, b=2)
        self.default: Any = defaultdict(list, {1: [1]})
        self.queue = deque([1, 2], maxlen=3)
        self.set = {1, 2}
        self.array = np.arange(4.0)
        self.tensor = torch.arange(4.0)
        self.expanded = torch.ones(1, 3).expand(5, 3)
        self.generator = torch.Generator().manual_seed(1)
        self.numpy_random = np.random.RandomState(1)
        self.lock = threading.Lock()
        self.inner = (frozenset({1}), [self.list])
        self.slot = "before"


def as_text(holder: Holder) -> str:
    return repr(
        {name: value for name, value in vars(holder).items() if name not in ("generator", "numpy_random", "lock")}
    )


def test_everything_is_put_back_into_the_same_objects() -> None:
    holder = Holder()
    before, ids = as_text(holder), {name: id(value) for name, value in vars(holder).items()}
    drawn = (holder.generator.get_state(), holder.numpy_random.get_state()[1].tolist())
    snapshot = Snapshot(holder)
    for _ in range(2):  # it can be used again
        holder.list[1].append(4)
        holder.list.clear()
        holder.dict["a"]["b"] = 2
        del holder.dict["a"]
        holder.ordered.move_to_end("a")
        holder.default[2].append(1)
        holder.default[1].append(5)
        holder.queue.append(3)
        holder.queue.append(4)
        holder.set.add(9)
        holder.array += 1
        holder.tensor.zero_()
        holder.generator.manual_seed(2)
        holder.numpy_random.rand()
        holder.slot = "after"
        holder.new = 1  # type: ignore[attr-defined]
        holder.lock = threading.Lock()
        snapshot.restore()
        assert as_text(holder) == before
        assert {name: id(value) for name, value in vars(holder).items()} == ids
        assert torch.equal(holder.generator.get_state(), drawn[0])
        assert holder.numpy_random.get_state()[1].tolist() == drawn[1]
        assert holder.slot == "before"


def test_a_module_that_was_cast_and_moved() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model(torch.ones(3, 2)).sum().backward()
    weight, grad = model[0].weight, model[0].weight.grad
    values, memory = weight.detach().clone(), weight.data_ptr()
    assert grad is not None
    held, grad_values = grad, grad.clone()
    snapshot = Snapshot(model)
    model.double()  # casts parameters, gradients and buffers, as moving to a device moves them
    weight.grad = None
    weight.requires_grad_(False)
    model[1].running_mean.fill_(7)
    model.register_buffer("more", torch.ones(1))
    model.eval()
    snapshot.restore()
    assert model[0].weight is weight
    assert weight.data_ptr() == memory
    assert torch.equal(weight, values)
    assert weight.grad is held
    assert torch.equal(held, grad_values)
    assert weight.requires_grad
    assert model.training
    assert model[1].training
    assert not torch.equal(model[1].running_mean, torch.full((2,), 7.0))
    assert "more" not in dict(model.named_buffers())


def test_compiled_parts_are_looked_into() -> None:
    inner = nn.Linear(2, 2)
    model = nn.Sequential(torch.compile(inner, backend="eager"))
    before = inner.weight.detach().clone()
    snapshot = Snapshot(model)
    nn.init.zeros_(inner.weight)
    snapshot.restore()
    assert torch.equal(inner.weight, before)


def test_special_values_come_back_bit_for_bit() -> None:
    tensor = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    bits = tensor.view(torch.int32).clone()
    snapshot = Snapshot(tensor)
    tensor.fill_(0.0)
    snapshot.restore()
    assert torch.equal(tensor.view(torch.int32), bits)


def test_large_arrays_are_not_copied_where_a_limit_is_given() -> None:
    large, small = torch.zeros(100), np.zeros(2)
    snapshot = Snapshot([large, small], array_limit=100)
    large += 1
    small += 1
    snapshot.restore()
    assert large.sum() == 100
    assert small.sum() == 0


def test_what_is_to_be_left_is_left() -> None:
    inner = [1]
    snapshot = Snapshot({"inner": inner}, leave=(inner,))
    inner.append(2)
    snapshot.restore()
    assert inner == [1, 2]


def test_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import random
    import signal
    import warnings

    monkeypatch.setenv("FEED_GONE", "1")
    random.seed(1)
    before = ProcessState()
    expected = torch.rand(1), np.random.rand(), random.random()
    handler = signal.getsignal(signal.SIGINT)
    filters = list(warnings.filters)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    monkeypatch.delenv("FEED_GONE")
    os.environ["FEED_NEW"] = "1"
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = True
    torch.set_grad_enabled(False)
    before.restore()
    assert (torch.rand(1), np.random.rand(), random.random()) == expected
    assert signal.getsignal(signal.SIGINT) is handler
    assert os.environ["FEED_GONE"] == "1"
    assert "FEED_NEW" not in os.environ
    assert list(warnings.filters) == filters
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
    assert torch.is_grad_enabled()

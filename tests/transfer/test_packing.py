"""A packed batch equals the batch: values, dtypes, shapes, and tensors that do not touch each other."""

from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_feed.transfer.batch_tree import hold, tensors
from lightning_feed.transfer.transfer_filter import ALIGN_BYTES, DTYPES, SMALL_BYTES, pack, small_tensors

Pair = namedtuple("Pair", ["a", "b"])


class Sends:
    """Stands for the copy to the device: counts, and copies on the host."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        self.sent.append(tensor)
        return tensor.clone()


def packed(batch: Any) -> tuple[Any, Sends]:
    sends = Sends()
    return pack(batch, small_tensors(batch), sends, pin=False), sends


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
        return alike and torch.equal(one, other)
    if isinstance(one, dict):
        return type(one) is type(other) and all(same(one[key], other[key]) for key in one | other)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and all(map(same, one, other))
    return bool(one == other)


shapes = st.lists(st.integers(1, 5), max_size=3)
leaves = st.builds(
    lambda dtype, shape, seed: torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.sampled_from(sorted(DTYPES, key=str)),
    shapes,
    st.integers(0, 99),
)
batches = st.recursive(
    leaves | st.text(max_size=3) | st.none(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner) | st.builds(Pair, inner, inner)
    ),
    max_leaves=20,
)


@given(batches.map(lambda batch: {"batch": batch, "one": torch.ones(2)}))
def test_it_equals_the_batch(batch: Any) -> None:
    made, sends = packed(batch)
    assert same(made, batch)
    assert len(sends.sent) == 1
    for tensor in tensors(made):
        assert tensor.data_ptr() % min(ALIGN_BYTES, 64) == 0  # torch's own allocations begin at 64 bytes on the host
        assert tensor._base is None


def test_a_write_to_one_is_no_write_to_another() -> None:
    (a, b), _ = packed([torch.ones(3), torch.ones(3)])
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * a).sum()
    b.add_(5)  # views of one tensor would make autograd refuse what follows
    loss.backward()
    assert a.tolist() == [1, 1, 1]
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 1, 1]
    assert (a._version, b._version) == (0, 1)


def test_the_host_batch_is_not_written_to() -> None:
    batch = {"x": torch.ones(2), "y": torch.zeros(1)}
    made, _ = packed(batch)
    made["x"].fill_(7)
    assert batch["x"].tolist() == [1, 1]
    assert made["x"] is not batch["x"]


def test_the_same_tensor_twice_becomes_two_as_in_a_plain_transfer() -> None:
    x = torch.ones(2)
    (a, b), _ = packed([x, x])
    a.add_(1)
    assert b.tolist() == [1, 1]


class Marked(Tensor):
    pass


@pytest.mark.parametrize(
    "left",
    [
        torch.ones(SMALL_BYTES // 4 + 1),
        torch.ones(4, 3).t(),
        torch.ones(3)[::2],
        torch.ones(0),
        torch.ones(2, requires_grad=True),
        torch.ones(2, device="meta"),
        torch.ones(2).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2).as_subclass(Marked),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
    ],
    ids=["large", "transposed", "strided", "empty", "grad", "off host", "sparse", "conj", "subclass", "parameter"],
)
def test_what_is_not_packed_is_left_as_it_is(left: Tensor) -> None:
    batch = [torch.ones(2), left]
    assert [tensor is batch[0] for tensor in small_tensors(batch)] == [True]
    made, sends = packed(batch)
    assert made[1] is left
    assert sends.sent[0].numel() == ALIGN_BYTES


def test_held_values_and_objects_that_move_themselves_are_not_entered() -> None:
    class Own:
        def __init__(self) -> None:
            self.x = torch.ones(2)

        def to(self, device: Any) -> "Own":
            return self

    assert small_tensors(hold({"x": torch.ones(1), "meta": torch.ones(1)}, frozenset({"meta"})))[0].shape == (1,)
    assert len(small_tensors(hold({"x": torch.ones(1), "meta": torch.ones(1)}, frozenset({"meta"})))) == 1
    assert small_tensors([Own()]) == []


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_under_evaluation_modes(mode: Any) -> None:
    batch = [torch.ones(2), torch.arange(3)]
    with mode():
        made, _ = packed(batch)
        expected = [tensor.clone() for tensor in batch]
    assert same(made, batch)
    assert [tensor.is_inference() for tensor in made] == [tensor.is_inference() for tensor in expected]

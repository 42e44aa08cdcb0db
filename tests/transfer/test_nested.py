"""The walk over batches: every tensor is found, once; held values never move."""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated.device import DEVICE, SimulatedDevice, simulated
from torch.nn.utils.rnn import pack_sequence

from lightning_feed.transfer.batch_tree import hold, off_host, record_stream, release, tensors

Pair = namedtuple("Pair", ["a", "b"])


@dataclasses.dataclass
class Sample:
    x: Any
    skipped: Any = dataclasses.field(init=False)


class Plain:
    def __init__(self, x: Any) -> None:
        self.x = x


class Slotted:
    __slots__ = ("unset", "x")

    def __init__(self, x: Any) -> None:
        self.x = x


class SlottedToo(Slotted):
    """Slots of a base class, a private one, and one that is not in a tuple."""

    __slots__ = ("__y",)

    def __init__(self, x: Any, y: Any) -> None:
        super().__init__(x)
        self.__y = y


class OneSlot:
    __slots__ = "x"  # allowed by Python, so it is met

    def __init__(self, x: Any) -> None:
        self.x = x


class Called(Plain):
    """As PyTorch Geometric's batches are."""

    def __call__(self) -> None: ...


class Masked(dict[str, Any]):
    """A container with an attribute of its own."""

    def __init__(self, mask: Any, **values: Any) -> None:
        super().__init__(**values)
        self.mask = mask


@dataclasses.dataclass
class Computed:
    """Has an attribute that is no field."""

    x: Any

    def __post_init__(self) -> None:
        self.y = Y


X = torch.ones(2)
Y = torch.zeros(3)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (X, [X]),
        ([X, (Y, None, "text", 3)], [X, Y]),
        ({"a": X, "b": {"c": [Y]}}, [X, Y]),
        (Pair(X, Pair(Y, 1)), [X, Y]),
        (Sample(X), [X]),
        (Plain({"deep": X}), [X]),
        (Slotted(X), [X]),
        (SlottedToo(X, Y), [X, Y]),
        (OneSlot(X), [X]),
        (Called(X), [X]),
        (Masked(X, y=Y), [X, Y]),
        (Computed(X), [X, Y]),
        (deque([X]), [X]),
        (UserDict(a=X), [X]),
        (defaultdict(list, a=[X]), [X]),
        ([X, X], [X]),
        ({X, Y}, [X, Y]),
        (None, []),
        ("text", []),
        (Sample, []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tensors_in_any_container_are_each_found_once(batch: Any, expected: list[torch.Tensor]) -> None:
    assert sorted(map(id, tensors(batch))) == sorted(map(id, expected))


def test_all_tensors_of_a_packed_sequence_are_found() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)], enforce_sorted=False)
    assert {id(packed.data), id(packed.batch_sizes), id(packed.sorted_indices)} <= set(map(id, tensors(packed)))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensors_yield_their_underlying_buffers(layout: torch.layout) -> None:
    rows = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=layout)
    found = [tensor.tolist() for tensor in tensors({"rows": rows})]
    assert found == [[1, 1, 0, 0, 0], *([[0, 2, 5]] if layout is torch.jagged else [])]


def test_a_batch_that_contains_itself_is_walked_once() -> None:
    batch: dict[str, Any] = {"x": X}
    batch["self"] = batch
    assert list(tensors(batch)) == [X]


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC) tensor support is in beta")
def test_sparse_tensors_yield_their_strided_components(layout: torch.layout) -> None:
    found = list(tensors(torch.eye(3).to_sparse(layout=layout)))
    assert found
    assert all(tensor.layout is torch.strided for tensor in found)


class Recorder:
    """Has a ``record_stream`` of its own that passes the call on to each tensor, as PyTorch Geometric's batches."""

    def __init__(self, *tensors: Any) -> None:
        self.tensors = tensors
        self.asked = 0

    def record_stream(self, stream: Any) -> None:
        self.asked += 1
        for tensor in self.tensors:
            tensor.record_stream(stream)


def test_every_tensor_on_the_device_is_recorded_and_none_on_the_host() -> None:
    with simulated(SimulatedDevice()) as device:
        there = [torch.ones(4, device=DEVICE) for _ in range(4)]
        side = device.Stream()
        here = torch.ones(4)
        whole = Recorder(there[0])
        mixed = Recorder(here, there[1])
        on_host = Recorder(here)
        hidden = Recorder()
        record_stream({"plain": [there[2], here], "graphs": (whole, mixed, on_host, hidden)}, side)
        assert [device._block(tensor).recorded for tensor in there] == [{side}, {side}, {side}, set()]
        # One that shows no tensor may hold memory that only it can find.
        assert [each.asked for each in (whole, mixed, on_host, hidden)] == [1, 1, 0, 1]


def test_an_error_in_an_objects_own_record_stream_is_raised() -> None:
    class Fails:
        def record_stream(self, stream: Any) -> None:
            raise RuntimeError("CUDA error")

    with pytest.raises(RuntimeError, match="CUDA error"):
        record_stream([Fails()], "stream")


def test_off_host_is_true_if_any_tensor_is_off_the_host() -> None:
    assert not off_host({"x": X, "n": 1})
    assert off_host([X, {"y": torch.empty(1, device="meta")}])


leaves = st.one_of(st.integers(), st.text(max_size=3), st.none())
batches = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from(["x", "meta", "y"]), inner),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
        st.dictionaries(st.sampled_from(["x", "meta"]), inner).map(OrderedDict),
        st.dictionaries(st.sampled_from(["x", "meta"]), inner).map(lambda items: defaultdict(list, items)),
    ),
    max_leaves=12,
)


def keys_with_plain_values(batch: Any) -> set[str]:
    if isinstance(batch, dict):
        own = {key for key, value in batch.items() if not type(value).__name__.startswith("_Held")}
        return own.union(*(keys_with_plain_values(value) for value in batch.values()))
    if isinstance(batch, (list, tuple)):
        return set().union(*map(keys_with_plain_values, batch))
    return set()


@given(batches)
def test_hold_hides_the_given_keys_and_release_restores_the_batch(batch: Any) -> None:
    before = repr(batch)
    held = hold(batch, frozenset(["meta"]))
    assert "meta" not in keys_with_plain_values(held)
    back = release(held)
    assert back == batch
    assert type(back) is type(batch)
    assert repr(batch) == before

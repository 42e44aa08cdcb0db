"""Keys leave the batch, and nothing else changes: neither the user's objects nor the types."""

import copy
import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

from lightning_feed.errors import SettingsError
from lightning_feed.load.collate import DroppingCollate, drop, missing_keys

Pair = namedtuple("Pair", ["x", "meta"])
META = frozenset({"meta"})


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    meta: Any = "path"
    later: Any = dataclasses.field(init=False, repr=False, compare=False)


@dataclasses.dataclass
class Movable:
    x: Any
    meta: Any

    def to(self, device: Any) -> "Movable":
        return self


class Encoding(UserDict[str, Any]):
    """As tokenizers give: a mapping with more than its values, and a way of its own to the device."""

    def __init__(self, data: dict[str, Any], length: int) -> None:
        super().__init__(data)
        self.length = length

    def to(self, device: Any) -> "Encoding":
        return self


@pytest.mark.parametrize(
    ("batch", "left"),
    [
        ({"x": 1, "meta": 2}, {"x": 1}),
        ({"x": {"y": [{"meta": 1, "z": 2}]}}, {"x": {"y": [{"z": 2}]}}),
        ([{"x": 1, "meta": 2}, 3], [{"x": 1}, 3]),
        (({"x": 1, "meta": 2}, 3), ({"x": 1}, 3)),
        (OrderedDict(meta=1, x=2), OrderedDict(x=2)),
        (Pair(1, 2), Pair(1, None)),
        (Pair({"meta": 1, "z": 2}, 2), Pair({"z": 2}, None)),
        (Frozen(1), Frozen(1, None)),
        (Movable(1, 2), Movable(1, None)),
        ({"x": Frozen({"meta": 1, "y": 2})}, {"x": Frozen({"y": 2}, None)}),
    ],
    ids=str,
)
def test_drop_removes_only_the_given_keys_and_keeps_the_type(batch: Any, left: Any) -> None:
    before = copy.deepcopy(batch)
    made = drop(batch, META)
    assert made == left
    assert type(made) is type(left)
    assert batch == before


def test_dropping_keys_keeps_attributes_of_custom_mappings() -> None:
    batch = Encoding({"x": 1, "meta": 2}, length=7)
    made = drop(batch, META)
    assert (dict(made), made.length, type(made)) == ({"x": 1}, 7, Encoding)
    assert dict(batch) == {"x": 1, "meta": 2}
    assert drop(defaultdict(list, x=1, meta=2), META).default_factory is list


def test_dropping_keys_leaves_packed_sequences_unchanged() -> None:
    packed = pack_sequence([torch.ones(2)])
    assert drop({"x": packed}, frozenset({"data"}))["x"] is packed


def test_dropping_every_key_raises_an_error_naming_the_keys() -> None:
    with pytest.raises(SettingsError, match=r"would drop every key of the batch: 'x', 'meta'"):
        drop({"x": 1, "meta": 2}, frozenset({"x", "meta"}))
    assert drop({}, META) == {}


def test_message_for_a_missing_key_lists_the_known_keys() -> None:
    batch = {"x": Pair(1, {"deep": 1}), "y": Frozen(2)}
    said = missing_keys(batch, frozenset({"mta", "meta"}))
    assert said is not None
    assert "has no 'mta'" in said
    for key in ("x", "meta", "deep", "y"):
        assert repr(key) in said
    assert missing_keys(batch, frozenset({"deep", "meta"})) is None
    assert "not a dict" in str(missing_keys([1, 2], META))


# --- in the workers ---------------------------------------------------------------------------------------------------


class Samples:
    """Sample i, with a path object that torch's collate function does not know."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": index, "meta": object(), "deep": {"y": index, "meta": index}}


def collate_pairs(samples: list[Any]) -> Any:
    return Pair(torch.tensor([sample["x"] for sample in samples]), len(samples))


@pytest.mark.parametrize("workers", [0, 2])
def test_dropping_collate_removes_keys_inside_the_workers(workers: int) -> None:
    loader = DataLoader(Samples(), batch_size=3, num_workers=workers, collate_fn=DroppingCollate(None, ("meta",)))  # type: ignore[arg-type]
    found = [{"x": batch["x"].tolist(), "deep": list(batch["deep"])} for batch in loader]
    assert found == [{"x": [0, 1, 2], "deep": ["y"]}, {"x": [3, 4, 5], "deep": ["y"]}]


def test_user_collate_fn_is_called_once_with_complete_samples() -> None:
    calls = []

    def collate(samples: Any) -> Any:
        calls.append(samples)
        return collate_pairs(samples)

    dropping = DroppingCollate(collate, ("meta",))
    made = dropping([{"x": 1, "meta": 0}, {"x": 2, "meta": 0}])
    assert made.x.tolist() == [1, 2]
    assert made.meta is None
    assert len(calls) == 1
    assert "meta" in calls[0][0]

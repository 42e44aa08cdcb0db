"""Names and bytes of the parts of a batch."""

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.utils.rnn import pack_sequence

from lightning_feed.watch.experiments.keys import key_bytes, size_of_leaf

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
def test_every_leaf_by_its_place(batch: Any, expected: dict[str, int]) -> None:
    assert key_bytes(batch) == expected


def test_objects_count_with_the_tensors_in_them() -> None:
    packed = pack_sequence([torch.zeros(3), torch.zeros(2)])

    class Graph:
        def __init__(self) -> None:
            self.nodes = torch.zeros(5, dtype=torch.float64)

    assert key_bytes({"graph": Graph()}) == {"graph": 40}
    assert sum(key_bytes(packed).values()) >= 20
    assert size_of_leaf(Image.new("RGB", (5, 4))) == 60
    assert size_of_leaf({"a": [IMAGE, "xy"], "b": (1.5, {2})}) == 24 + 2 + 8 + 8

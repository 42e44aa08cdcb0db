"""Which parts of a batch the step reads: never called unused when it was read."""

import copy
import dataclasses
from collections import OrderedDict, UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from diagnosing.small_runs import make_parts, make_trainer, short_diagnosis
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_feed.diagnosing.keys import KeyWatch, is_opaque
from lightning_feed.watch.experiments.session import key_bytes


class Pair(NamedTuple):
    image: Tensor
    label: Tensor
    path: Any = None


@dataclasses.dataclass
class Record:
    image: Tensor
    label: Tensor


@dataclasses.dataclass(frozen=True)
class Slotted:
    __slots__ = ("image", "label")
    image: Tensor
    label: Tensor


def ones() -> Tensor:
    return torch.ones(2)


def three() -> dict[str, Any]:
    return {"image": ones(), "label": ones(), "path": ["a", "b"]}


def named(image: Tensor, **_: Any) -> Tensor:
    return image + 1


def unpack(batch: Any) -> Tensor:
    image, _ = batch
    return image + 1


def pop(batch: Any) -> Tensor:
    return batch.pop("image") + 1


def loop(batch: Any) -> None:
    for key, value in batch.items():
        if key == "label":
            value.sum()


def look_only(batch: Any) -> Any:
    return len(batch), "image" in batch, list(batch), batch.keys() & {"image"}, isinstance(batch, dict)


class Submodule(nn.Module):
    def forward(self, batch: Any) -> Tensor:
        return batch["nested"]["image"] * 2


TAKEN, NO, UNCLEAR = True, False, None
CASES: list[tuple[str, Callable[[], Any], Callable[[Any], Any], dict[str, bool | None]]] = [
    ("by key", three, lambda b: b["image"], {"image": TAKEN, "label": NO, "path": NO}),
    ("get", three, lambda b: b.get("path"), {"image": NO, "label": NO, "path": TAKEN}),
    ("pop", three, pop, {"image": TAKEN, "label": NO, "path": NO}),
    ("**batch", three, lambda b: named(**b), {"image": TAKEN, "label": UNCLEAR, "path": UNCLEAR}),
    ("dict(batch)", three, lambda b: dict(b)["image"] + 1, {"image": TAKEN, "label": UNCLEAR, "path": UNCLEAR}),
    ("items", three, loop, {"image": UNCLEAR, "label": TAKEN, "path": UNCLEAR}),
    ("keys, then read", three, lambda b: [b[k] for k in b], dict.fromkeys(three(), UNCLEAR)),
    ("looked at", three, look_only, dict.fromkeys(three(), NO)),
    ("deepcopy", three, copy.deepcopy, {"image": TAKEN, "label": TAKEN, "path": UNCLEAR}),
    ("merged", three, lambda b: (b | {"more": 1})["image"] + 1, {"image": TAKEN, "label": UNCLEAR, "path": UNCLEAR}),
    ("ordered", lambda: OrderedDict(three()), lambda b: named(**b),
     {"image": TAKEN, "label": UNCLEAR, "path": UNCLEAR}),
    ("tuple", lambda: (ones(), ones()), unpack, {"0": TAKEN, "1": UNCLEAR}),
    ("list", lambda: [ones(), ones()], unpack, {"0": TAKEN, "1": UNCLEAR}),
    ("index", lambda: [ones(), ones(), ones()], lambda b: (b[0], b[-1]), {"0": TAKEN, "1": NO, "2": TAKEN}),
    ("slice", lambda: (ones(), ones(), ones()), lambda b: b[:2], {"0": UNCLEAR, "1": UNCLEAR, "2": NO}),
    ("*batch", lambda: (ones(), ones()), lambda b: named(*b[:1]), {"0": TAKEN, "1": NO}),
    ("stack", lambda: [ones(), ones()], torch.stack, {"0": TAKEN, "1": TAKEN}),
    ("fields", lambda: Pair(ones(), ones()), lambda b: b.image, {"image": TAKEN, "label": NO, "path": NO}),
    ("named tuple", lambda: Pair(ones(), ones()), lambda b: b[1], {"image": NO, "label": TAKEN, "path": NO}),
    ("attributes", lambda: Record(ones(), ones()), lambda b: b.image, {"image": TAKEN, "label": NO}),
    ("frozen, slots", lambda: Slotted(ones(), ones()), lambda b: b.label, {"image": NO, "label": TAKEN}),
    ("submodule", lambda: {"nested": three(), "id": ones()}, Submodule(),
     {"nested.image": TAKEN, "nested.label": NO, "nested.path": NO, "id": NO}),
    ("foreign", lambda: UserDict(three()), lambda b: b["image"] + 1,
     {"image": TAKEN, "label": UNCLEAR, "path": UNCLEAR}),
    ("bare, read", ones, lambda b: b + 1, {"batch": TAKEN}),
    ("bare, not seen", ones, lambda b: 0, {"batch": UNCLEAR}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "make", "read", "uses"), CASES, ids=[name for name, *_ in CASES])
def test_reads(name: str, make: Callable[[], Any], read: Callable[[Any], Any], uses: dict[str, bool | None]) -> None:
    batch = make()
    watch = KeyWatch(batch)
    with watch.seeing_torch():
        read(watch.batch)
    assert watch.uses() == uses
    assert set(uses) == set(key_bytes(make())), "the names are those under which the bytes are given"
    assert isinstance(watch.batch, type(batch))


def test_the_batch_itself_is_not_written_to() -> None:
    batch = {"image": ones(), "rest": [ones(), ones()]}
    watch = KeyWatch(batch)
    watch.batch.pop("image")
    watch.batch["rest"].pop(0)
    watch.batch["new"] = 1
    assert list(batch) == ["image", "rest"]
    assert len(batch["rest"]) == 2


def test_compiled_code_is_opaque() -> None:
    assert not is_opaque(nn.Sequential(nn.Linear(2, 2)))
    compiled = nn.Linear(2, 2)
    compiled.compile(backend="eager")
    assert is_opaque(nn.Sequential(compiled))


# --- in a fit -----------------------------------------------------------------------------------------------------

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),  # the fits are small on purpose
]


def dict_batches(**more: Any) -> DataLoader[Any]:
    samples = [{"x": torch.randn(4), "y": torch.tensor(i % 2), "mask": torch.ones(50), **more} for i in range(16)]
    return DataLoader(samples, batch_size=4)  # type: ignore[arg-type]  # a list is a data set


def used(model: Any, loader: Any, **options: Any) -> dict[str, bool | None]:
    found = short_diagnosis(make_trainer(**options), model, train_dataloaders=loader, only="X1")
    return {key.name: key.used for key in found.measurements.experiments.keys}


def test_an_ignored_key_is_told() -> None:
    Module, _ = make_parts()

    class Reads(Module):  # type: ignore[misc,valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch["x"]), batch["y"])

    assert used(Reads(), dict_batches()) == {"x": True, "y": True, "mask": False}


def test_what_other_hooks_are_given_may_be_read_there() -> None:
    Module, _ = make_parts()

    class Reads(Module):  # type: ignore[misc,valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch["x"]), batch["y"])

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            batch["mask"].sum()

    assert used(Reads(), dict_batches()) == {"x": True, "y": True, "mask": None}


def test_a_step_that_minds_the_containers_is_left_alone() -> None:
    Module, _ = make_parts()

    class Strict(Module):  # type: ignore[misc,valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert type(batch) is dict
            return nn.functional.cross_entropy(self.net(batch["x"]), batch["y"])

    assert used(Strict(), dict_batches()) == {"x": None, "y": None, "mask": None}


def test_scripted_parts_may_read_anything() -> None:
    Module, _ = make_parts()

    class Scripted(Module):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.compiled = nn.Linear(4, 4)
            self.compiled.compile(backend="eager")

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch["x"]), batch["y"])

    assert used(Scripted(), dict_batches()) == {"x": None, "y": None, "mask": None}

"""Batches: which parts a step reads (never called unused when it was read), and those that are replayed."""

import copy
import dataclasses
from collections import OrderedDict, UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from diagnosing.small_runs import Numbers, make_parts, make_trainer, short_diagnosis
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_feed.diagnosing import batches
from lightning_feed.diagnosing.batches import KeyWatch, Replay, Sample, is_opaque, own_loaders
from lightning_feed.diagnosing.session import key_bytes


class Pair(NamedTuple):
    image: Tensor
    label: Tensor
    path: Any = None


@dataclasses.dataclass
class Record:
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
    ("dicts of several loaders", lambda: [three(), three()], lambda b: b[1]["image"] + b[0].get("label"),
     {"0.image": NO, "0.label": TAKEN, "0.path": NO, "1.image": TAKEN, "1.label": NO, "1.path": NO}),
    ("a tuple in a dict, taken", lambda: {"views": (ones(), ones())}, lambda b: b["views"][0] + 1,
     {"views.0": TAKEN, "views.1": UNCLEAR}),
    ("a tuple in a dict, not taken", lambda: {"views": (ones(), ones()), "y": ones()}, lambda b: b["y"],
     {"views.0": NO, "views.1": NO, "y": TAKEN}),
    ("stack", lambda: [ones(), ones()], torch.stack, {"0": TAKEN, "1": TAKEN}),
    ("fields", lambda: Pair(ones(), ones()), lambda b: b.image + 1,
     {"image": TAKEN, "label": UNCLEAR, "path": UNCLEAR}),
    ("attributes", lambda: Record(ones(), ones()), lambda b: b.image + 1, {"image": TAKEN, "label": UNCLEAR}),
    ("ordered by key", lambda: OrderedDict(three()), lambda b: b["image"], {"image": TAKEN, "label": NO, "path": NO}),
    ("paths alone", lambda: ["a", "b"], lambda b: b[0], {"batch": UNCLEAR}),
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
    with watch:
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


def dict_batches(**more: Any) -> DataLoader[Any]:
    samples = [{"x": torch.randn(4), "y": torch.tensor(i % 2), "mask": torch.ones(50), **more} for i in range(16)]
    return DataLoader(samples, batch_size=4)  # type: ignore[arg-type]  # a list is a data set


def used(model: Any, loader: Any) -> dict[str, bool | None]:
    found = short_diagnosis(make_trainer(), model, train_dataloaders=loader)
    return {key.name: key.used for key in found.measurements.experiments.keys}


def cross_entropy(module: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(module.net(batch["x"]), batch["y"])


def reads(module: Any, batch: Any, batch_idx: int) -> Tensor:
    return cross_entropy(module, batch)


def minds_the_containers(module: Any, batch: Any, batch_idx: int) -> Tensor:
    assert type(batch) is dict
    return cross_entropy(module, batch)


@pytest.mark.parametrize(
    ("step", "hooks", "uses"),
    [
        (reads, {}, {"x": True, "y": True, "mask": False}),
        (reads, {"on_train_batch_end": lambda *_: None}, {"x": True, "y": True, "mask": None}),  # it is given the batch
        (minds_the_containers, {}, {"x": None, "y": None, "mask": None}),
    ],
    ids=["an ignored key", "read by other hooks, perhaps", "left alone"],
)
def test_the_parts_that_a_fit_reads(step: Any, hooks: dict[str, Any], uses: dict[str, bool | None]) -> None:
    Module, _ = make_parts()
    model = type("Model", (Module,), {"training_step": step, **hooks})()
    assert used(model, dict_batches()) == uses


# --- replay -------------------------------------------------------------------------------------------------------


def test_replayed_tensors_are_copied_only_where_a_step_writes_into_them() -> None:
    batch = {"x": torch.ones(2), "names": ["a"]}
    read = iter(Replay([batch], 4))
    next(read)
    second = next(read)
    assert second["x"] is batch["x"]
    assert second is not batch
    assert second["names"] is not batch["names"]
    assert len(list(read)) == 2
    writes = iter(Replay([batch], 3))
    for given in writes:
        given["x"].add_(1)
    assert torch.equal(batch["x"], torch.ones(2))


def test_own_loaders_of_all_kinds() -> None:
    loader = DataLoader(Numbers(), batch_size=4)
    combined = CombinedLoader({"a": loader, "b": [1, 2]}, "max_size")
    mine = own_loaders(combined)
    assert mine.iterables["a"] is not loader
    assert combined.iterables["a"] is loader
    assert mine.iterables["a"].dataset is loader.dataset
    assert own_loaders([loader, {"x": loader}])[1]["x"] is not loader


def test_of_batches_that_are_alike_the_first_is_replayed() -> None:
    sample = Sample(skip=2)
    for number in range(100):
        sample.offer(torch.full((2,), number))
    assert [batch.tolist() for batch in sample.take(8)] == [[0, 0]]


def test_a_sample_is_as_the_run_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sample(skip=10)
    for length in range(10, 1010):
        sample.offer({"x": torch.zeros(length)})
    taken = [len(batch["x"]) for batch in sample.take(4)]
    assert taken == pytest.approx([145, 395, 645, 895], abs=40)
    assert len(sample._batches) <= batches.MOST_KEPT
    monkeypatch.setattr(batches, "MOST_BYTES", 4000)
    small = Sample()
    for length in range(1, 400):
        small.offer(torch.zeros(length))
    assert 1 < len(small._batches) < 8
    assert small._bytes() <= batches.MOST_BYTES


def test_several_batches_come_one_after_the_other() -> None:
    given = [torch.zeros(1), torch.zeros(2), torch.zeros(3)]
    assert [len(batch) for batch in Replay(given, 7)] == [1, 2, 3, 1, 2, 3, 1]

"""The code that makes floats of uint8 pictures is run on batches of the very form that a run was seen with."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_feed.starvation_facts import with_batch
from lightning_feed.watch.verdict.diagnosis import LoopFacts, Picture
from lightning_feed.watch.verdict.remedies_uint8 import uint8_line, uint8_remedies

Pair = namedtuple("Pair", "image label")
PICTURES = torch.full((2, 3, 4, 5), 255.0)
LABELS = torch.tensor([1, 2])


@dataclass
class Holder:
    image: Tensor


def _pictures(batch: Any, **facts: Any) -> tuple[Picture, ...] | None:
    return with_batch(LoopFacts(**facts), batch).pictures


def _run(facts: LoopFacts, batch: Any) -> Any:
    code = uint8_line(facts)
    names: dict[str, Any] = {}
    exec(code, names)  # the line, as a user would paste it
    if "def device_transform" in code:
        return names["device_transform"](None, batch, "train")
    return names["on_after_batch_transfer"](None, batch, 0)


def _as_uint8(value: Any) -> Any:
    """The same batch with uint8 for each picture, as the data set is to give it."""
    if isinstance(value, Tensor):
        return value.to(torch.uint8) if value.dim() == 4 and value.shape[1] == 3 else value
    if isinstance(value, dict):
        return {key: _as_uint8(part) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_as_uint8, value))
    return type(value)(map(_as_uint8, value)) if isinstance(value, (list, tuple)) else value


def _same(made: Any, wanted: Any) -> bool:
    """Whether the pictures are ones, and all else is what it was."""
    if isinstance(wanted, Tensor):
        wanted = wanted / 255 if wanted.is_floating_point() and wanted.dim() == 4 and wanted.shape[1] == 3 else wanted
        return made.dtype == wanted.dtype and torch.equal(made, wanted)
    if type(made) is not type(wanted):
        return False
    if isinstance(wanted, dict):
        return made.keys() == wanted.keys() and all(_same(made[key], wanted[key]) for key in wanted)
    if isinstance(wanted, (list, tuple)):
        return len(made) == len(wanted) and all(map(_same, made, wanted))
    return bool(made == wanted)


BATCHES = {
    "a tensor": PICTURES,
    "a list of two": [PICTURES, LABELS],
    "a tuple of two": (PICTURES, LABELS),
    "a tuple of three": (PICTURES, LABELS, ["a", "b"]),
    "a tuple of one": (PICTURES,),
    "a list of one": [PICTURES],
    "the last of three": [LABELS, LABELS, PICTURES],
    "the middle of five": (LABELS, LABELS, PICTURES, LABELS, "x"),
    "the second and fourth": [LABELS, PICTURES, LABELS, PICTURES, LABELS],
    "a dict": {"image": PICTURES, "label": LABELS, "path": ["a", "b"]},
    "numbers for keys": {0: PICTURES, 1: LABELS},
    "keys with quotes": {'the "image"': PICTURES, "b\\c'": LABELS, "é\n": PICTURES},
    "a dict of dicts": {"a": {"image": PICTURES, "label": LABELS}, "b": {"x": {"image": PICTURES}, "n": 3}},
    "a dict of lists": {"views": [PICTURES, PICTURES], "label": LABELS},
    "several loaders": [{"image": PICTURES, "label": LABELS}, (LABELS, PICTURES)],
    "a named tuple": Pair(PICTURES, LABELS),
    "a named tuple in a dict": {"pair": Pair(LABELS, PICTURES)},
    "with its mask": {"mask": torch.ones(2, 1, 4, 5), "image": PICTURES},
    "crops of two sizes": [PICTURES, PICTURES[..., :2, :2].clone()],
}


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("name", BATCHES)
def test_the_code_fits_the_batch(name: str, ours: bool) -> None:
    batch = BATCHES[name]
    facts = with_batch(LoopFacts(ours=ours), batch)
    assert _same(_run(facts, _as_uint8(batch)), batch)
    assert uint8_line(facts).startswith("def device_transform(" if ours else "def on_after_batch_transfer(")
    assert "\n" not in uint8_line(facts)
    (remedy,) = uint8_remedies(facts, "why", 3.0)
    assert (remedy.code, remedy.predicted_step_ms, remedy.changes) == (uint8_line(facts), 3.0, "device_transform=True")


def test_the_code_is_as_short_as_it_can_be() -> None:
    def returned(batch: Any) -> str:
        return uint8_line(with_batch(LoopFacts(ours=True), batch)).partition(": return ")[2]

    assert returned([PICTURES, LABELS]) == "[batch[0].float().div(255), *batch[1:]]"
    assert returned((LABELS, PICTURES)) == "(*batch[:1], batch[1].float().div(255))"
    assert returned({"image": PICTURES}) == '{**batch, "image": batch["image"].float().div(255)}'


@pytest.mark.parametrize(
    "batch",
    [
        Holder(PICTURES),
        {"image": Holder(PICTURES)},
        OrderedDict(image=PICTURES),
        {(1, 2): PICTURES},
        [PICTURES] * 9,
        {"image": PICTURES, "more": Holder(LABELS)},
    ],
)
def test_no_code_for_a_batch_of_unknown_form(batch: Any) -> None:
    facts = with_batch(LoopFacts(ours=False), batch)
    assert facts.pictures is None
    (remedy,) = uint8_remedies(facts, "why")
    assert remedy.code == "def on_after_batch_transfer(self, batch, dataloader_idx): ..."
    assert uint8_line(replace(facts, ours=True)) == "def device_transform(self, batch, split): ..."


def test_a_loader_of_which_nothing_is_known_is_none_of_ours() -> None:
    facts = with_batch(LoopFacts(), [PICTURES, LABELS])
    assert uint8_line(facts).startswith("def on_after_batch_transfer(self, batch, dataloader_idx): return [")


@pytest.mark.parametrize("batch", [[PICTURES.to(torch.uint8), LABELS], {"image": PICTURES.to(torch.uint8)}])
def test_pictures_that_are_uint8_need_not_become_it(batch: Any) -> None:
    assert uint8_remedies(with_batch(LoopFacts(ours=False), batch), "why") == []


@pytest.mark.parametrize("batch", [[torch.rand(8, 20), LABELS], {"ids": torch.ones(8, 9, 9, dtype=torch.int64)}, 3])
def test_where_there_are_no_pictures_there_is_nothing_to_change(batch: Any) -> None:
    assert _pictures(batch) == ()
    assert uint8_remedies(with_batch(LoopFacts(ours=False), batch), "why") == []


def test_of_pictures_and_masks_the_pictures_count() -> None:
    batch = {"mask": torch.ones(2, 1, 4, 5), "image": PICTURES.to(torch.uint8)}  # the mask has more bytes
    assert [one.dtype for one in _pictures(batch) or ()] == ["uint8"]


@pytest.mark.parametrize("facts", [{"batch_hooks": True}, {"device_transform": True}])
def test_behind_a_hook_nobody_knows_what_the_loader_gave(facts: dict[str, Any]) -> None:
    assert _pictures([PICTURES, LABELS], **facts) is None


def test_who_has_a_device_transform_is_not_told_to_write_one() -> None:
    assert uint8_remedies(LoopFacts(ours=True, device_transform=True), "why") == []
    assert uint8_remedies(LoopFacts(ours=True, device_transform=True, decoder="turbo", own_transforms=True), "why")

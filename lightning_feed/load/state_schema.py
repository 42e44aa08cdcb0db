"""The schema of loader states. A checkpoint's state is accepted or refused as a whole."""

from collections.abc import Callable, Mapping
from types import FunctionType, NoneType
from typing import Any

import torch

from lightning_feed.errors import ResumeError
from lightning_feed.load.elastic_resume import samples_of_all, trained_parts
from lightning_feed.load.kinds import SavedState
from lightning_feed.load.order import STATE_VERSION, mix_seed


def _each(key: object, item: object) -> Callable[[Any], bool]:
    """Schema of a dict with any number of items."""
    return lambda value: type(value) is dict and all(_fits(name, key) and _fits(value[name], item) for name in value)


def _is_generator_state(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.ndim == 1


def _is_trained_part(value: Any) -> bool:
    return _fits(value, [_SIZE]) and len(value) == 2


_COUNT = range(2**63)
_SIZE = range(1, 2**63)
_COMMON = {"version": _SIZE, "kind": str, "seed": (int, NoneType), "begun": bool, "exact": bool}
_BEGUN = {**_COMMON, "epoch": (_COUNT, NoneType), "cycle": _COUNT, "batches": _COUNT}
_STARTS = _each(str, {"epoch?": (_COUNT, NoneType), "seed?": int, "generator?": _is_generator_state})
_MAP = {
    **_BEGUN,
    "world": _SIZE,
    "shares": _SIZE,
    "batch_size": (_SIZE, NoneType),
    "samples": (_COUNT, NoneType),
    "order": ({"sampler": str, "shuffle?": bool, "seed?": int}, NoneType),
    "since": _COUNT,
    "done": [_is_trained_part],
    "pass_start": _STARTS,
    "rest?": ("dealt", "own"),
    "next_start?": _STARTS,
    "sample_seed?": _COUNT,
    "drawn?": _COUNT,
    "beside?": _COUNT,
}
_ITERABLE = {
    **_BEGUN,
    "num_workers": _COUNT,
    "workers": _each(_COUNT, {"drawn": _COUNT, "ended": bool}),
    "next_worker": _COUNT,
    "base_state": (_is_generator_state, NoneType),
    "world?": _SIZE,
    "batch_size?": (_SIZE, NoneType),
    "beside?": _COUNT,
}


_CHECKS: dict[type, Callable[[Any, Any], bool]] = {
    type: lambda value, shape: type(value) is shape,
    str: lambda value, shape: type(value) is str and value == shape,
    range: lambda value, shape: type(value) is int and value in shape,
    tuple: lambda value, shape: any(_fits(value, one) for one in shape),
    list: lambda value, shape: type(value) is list and all(_fits(item, shape[0]) for item in value),
    dict: lambda value, shape: type(value) is dict and all(_has(value, *field) for field in shape.items()),
    FunctionType: lambda value, shape: bool(shape(value)),
}
"""Kinds of schema, in order: a type, a constant, a range of whole numbers, alternatives, a list with a schema for its
items, fields of a dict (optional names end in ``?``), and a predicate."""


def _fits(value: object, shape: object) -> bool:
    return _CHECKS[type(shape)](value, shape)


def _has(value: dict[str, Any], name: str, shape: Any) -> bool:
    plain = name.rstrip("?")
    return _fits(value[plain], shape) if plain in value else plain != name


def check_state(state: Any, *, batches: int = 0, unfinished: bool = False) -> None:
    """Check a complete state, which may hold all ranks.

    Args:
        state: object of any type from the checkpoint.
        batches: smallest possible number of trained batches in the epoch.
        unfinished: True if the epoch is known to have more batches.

    Raises:
        ResumeError: the state has another version, or a part is missing, has another type, or is out of range.
    """
    parts = state.get("ranks", [state]) if isinstance(state, Mapping) else []
    parts = parts if isinstance(parts, list) else []
    for part in parts:
        _check_version(part)
    sound = parts and all(_is_sound(part) and part.get("batches", 0) >= batches for part in parts)
    if not sound or (unfinished and any(map(_nothing_left, parts))):
        raise ResumeError(
            "The loader state in the checkpoint was changed after it was written, or not written by lightning_feed, so "
            "it does not say which samples were trained. Resume from another checkpoint."
        )


def _check_version(state: Any) -> None:
    version = state.get("version") if isinstance(state, Mapping) else None
    if _fits(version, _COUNT) and version != STATE_VERSION:
        raise ResumeError(
            f"The loader state has version {version}, and this lightning_feed reads version {STATE_VERSION}. "
            "Resume with the version of lightning_feed that wrote the checkpoint."
        )


def _is_sound(state: Any) -> bool:
    if not _fits(state, _COMMON):
        return False
    if not state["begun"]:
        return True
    if state["kind"] == "iterable":
        fits = _fits(state, _ITERABLE)
        return fits and max(state["next_worker"], *state["workers"], 0) < max(1, state["num_workers"])
    if state["kind"] == "map":
        return _fits(state, _MAP) and _is_possible(state)
    return True  # state of another kind of loader


def _is_possible(state: SavedState) -> bool:
    """Check that the trained count does not exceed the epoch, and that its order can be drawn again."""
    starts = state["pass_start"]
    if state["since"] > state["batches"] or not all(_fits_the_epoch(state, *start) for start in starts.items()):
        return False
    if state["order"] is None:
        return True
    if state["samples"] is None or (state["batches"] and not _has_order(state)):
        return False
    left = int(state["samples"]) - samples_of_all(state)
    repeated = sum(shares for shares, _ in state["done"])
    in_full_batches: int = (state["batches"] - state["since"] - 1) * state["shares"] * (state["batch_size"] or 1)
    return left >= -repeated and in_full_batches < max(left, 1)


def _has_order(state: SavedState) -> bool:
    """Check that a state holds the source of its order: a seed, a generator or an epoch."""
    order = state["order"]
    start = state["pass_start"].get(order["sampler"], {})
    if "shuffle" in order:
        return "seed" in order and _fits(start.get("epoch"), _COUNT)
    return order["sampler"].startswith("SequentialSampler") or not {"seed", "generator"}.isdisjoint(start)


def _fits_the_epoch(state: SavedState, name: str, start: SavedState) -> bool:
    """Check that a sampler started with the right epoch and derived seed. True if the run has no seed."""
    seed = state["seed"]
    epoch = state["epoch"]
    if seed is None or epoch is None:
        return True
    expected = {"epoch": epoch, "seed": mix_seed(seed, epoch, state["cycle"], name)}
    return all(start[key] == value for key, value in expected.items() if key in start)


def _nothing_left(state: SavedState) -> bool:
    if state.get("order") is None or not state["begun"]:
        return False
    trained = sum(shares * samples for shares, samples in trained_parts(state))
    return trained >= int(state["samples"])

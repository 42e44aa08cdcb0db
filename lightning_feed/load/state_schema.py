"""The schema of loader states: a checkpoint's state is read as a whole, or refused as a whole."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_feed.errors import ResumeError
from lightning_feed.load.carry_over import STATE_VERSION, samples_of_all, trained_parts
from lightning_feed.load.order import mix_seed

Check = Callable[[Any], bool]


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_size(value: Any) -> bool:
    return _is_count(value) and value > 0


def _is_generator_state(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.ndim == 1


def _is(kind: type) -> Check:
    return lambda value: type(value) is kind


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _all(key: Check, item: Check) -> Check:
    return lambda value: type(value) is dict and all(key(name) and item(held) for name, held in value.items())


def _fields(required: dict[str, Check], optional: dict[str, Check]) -> Check:
    """A check of a dict that has the required fields and may have others."""
    checks = {**required, **optional}

    def check(value: Any) -> bool:
        known = type(value) is dict and required.keys() <= value.keys()
        return known and all(fits(value[name]) for name, fits in checks.items() if name in value)

    return check


def _is_trained_part(value: Any) -> bool:
    return type(value) is list and len(value) == 2 and all(map(_is_size, value))


_STARTS = _all(
    _is(str),
    _fields({}, {"epoch": _or_none(_is_count), "seed": _is(int), "generator": _is_generator_state}),
)
_ORDER = _fields({"sampler": _is(str)}, {"shuffle": _is(bool), "seed": _is(int)})
_WORKER = _fields({"drawn": _is_count, "ended": _is(bool)}, {})
_COMMON: dict[str, Check] = {"seed": _or_none(_is(int)), "begun": _is(bool), "exact": _is(bool)}
_BEGUN = {**_COMMON, "epoch": _or_none(_is_count), "cycle": _is_count, "batches": _is_count}
_FACTS: dict[str, Check] = {
    "world": _is_size,
    "shares": _is_size,
    "batch_size": _or_none(_is_size),
    "samples": _or_none(_is_count),
    "order": _or_none(_ORDER),
    "since": _is_count,
    "done": lambda value: type(value) is list and all(map(_is_trained_part, value)),
}
"""The configuration of a map-style loader. A state has all of it, or none where a first version wrote it."""
_MAP = _fields(
    {**_BEGUN, "pass_start": _STARTS},
    {
        **_FACTS,
        "rest": lambda value: value in ("dealt", "own"),
        "next_start": _STARTS,
        "sample_seed": _is_count,
        "drawn": _is_count,
        "beside": _is_count,
    },
)
_ITERABLE = _fields(
    {
        **_BEGUN,
        "num_workers": _is_count,
        "workers": _all(_is_count, _WORKER),
        "next_worker": _is_count,
        "base_state": _or_none(_is_generator_state),
    },
    {"world": _is_size, "batch_size": _or_none(_is_size), "beside": _is_count},
)


def check_state(state: Any, *, batches: int = 0, unfinished: bool = False) -> None:
    """Check the whole of a state, which may have been gathered from all ranks.

    Args:
        state: whatever the checkpoint holds.
        batches: so many of the epoch were trained at least.
        unfinished: the epoch is known to have more.

    Raises:
        ResumeError: it is of another version, or something in it is missing, of another type, or out of range.
    """
    parts = state.get("ranks", [state]) if isinstance(state, Mapping) else []
    for part in parts if isinstance(parts, list) else []:
        version = part.get("version") if isinstance(part, Mapping) else None
        if _is_count(version) and version != STATE_VERSION:
            raise ResumeError(
                f"The loader state has version {version}, and this lightning_feed reads version {STATE_VERSION}. "
                "Resume with the version of lightning_feed that wrote the checkpoint."
            )
    sound = isinstance(parts, list) and bool(parts) and all(map(_is_sound, parts))
    if not sound or any(part.get("batches", 0) < batches or (unfinished and _nothing_left(part)) for part in parts):
        raise ResumeError(
            "The loader state in the checkpoint was changed after it was written, or not written by lightning_feed, so "
            "it does not say which samples were trained. Resume from another checkpoint."
        )


def _is_sound(state: Any) -> bool:
    if not isinstance(state, Mapping) or not _fields({"version": _is_size, "kind": _is(str), **_COMMON}, {})(state):
        return False
    if not state["begun"]:
        return True
    if state["kind"] == "iterable":
        return _ITERABLE(state) and max(state["next_worker"], *state["workers"], 0) < max(1, state["num_workers"])
    if state["kind"] == "map":
        has_facts = not _FACTS.keys().isdisjoint(state)
        return _MAP(state) and (not has_facts or (_FACTS.keys() <= state.keys() and _is_possible(state)))
    return True  # of another kind of loader


def _is_possible(state: Mapping[str, Any]) -> bool:
    """Check that no more was trained than there was, and that the order of the epoch can be drawn again."""
    order, starts = state["order"], state["pass_start"]
    if state["since"] > state["batches"] or not all(_fits_the_epoch(state, *start) for start in starts.items()):
        return False
    if order is None:
        return True
    start = starts.get(order["sampler"], {})
    if "shuffle" in order:
        drawn_from = "seed" in order and _is_count(start.get("epoch"))
    else:
        drawn_from = order["sampler"].startswith("SequentialSampler") or not {"seed", "generator"}.isdisjoint(start)
    if state["samples"] is None or (state["batches"] and not drawn_from):
        return False
    left = int(state["samples"]) - samples_of_all(state)
    repeated = sum(shares for shares, _ in state["done"])
    in_full_batches: int = (state["batches"] - state["since"] - 1) * state["shares"] * (state["batch_size"] or 1)
    return left >= -repeated and in_full_batches < max(left, 1)


def _fits_the_epoch(state: Mapping[str, Any], name: str, start: Mapping[str, Any]) -> bool:
    """Check that a sampler began with the epoch, and with the seed that follows from it, where the run has a seed."""
    seed, epoch = state["seed"], state["epoch"]
    if seed is None or epoch is None:
        return True
    expected = {"epoch": epoch, "seed": mix_seed(seed, epoch, state["cycle"], name)}
    return all(start[key] == value for key, value in expected.items() if key in start)


def _nothing_left(state: Mapping[str, Any]) -> bool:
    if state.get("order") is None or not state["begun"]:
        return False
    trained = sum(shares * samples for shares, samples in trained_parts(state))
    return trained >= int(state["samples"])

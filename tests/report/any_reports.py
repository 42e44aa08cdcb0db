"""Reports of any figures at all, for hypothesis: made from the type hints, so that new fields are among them."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from lightning_feed.report.report import Report

Draw = Callable[[Any], Any]


def any_value(hint: Any, *, finite: bool) -> st.SearchStrategy[Any]:
    """Values of a type."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return st.one_of([st.none() if one is NoneType else any_value(one, finite=finite) for one in inner])
    if origin is Literal:
        return st.sampled_from(inner)
    if origin is dict:
        return st.dictionaries(st.text(max_size=12), any_value(inner[1], finite=finite), max_size=2)
    if origin is tuple and inner[1:] == (...,):
        return st.lists(any_value(inner[0], finite=finite), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*(any_value(one, finite=finite) for one in inner))
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        below = {one.name: any_value(hints[one.name], finite=finite) for one in fields(hint)}
        return st.fixed_dictionaries(below).map(lambda given: hint(**given))  # type: ignore[operator]
    return {
        float: st.floats(allow_nan=not finite, allow_infinity=not finite),
        int: st.integers(-(2**63) + 1, 2**63 - 1),
        bool: st.booleans(),
        str: st.text(max_size=12),
        Path: st.none(),
    }[hint]


def any_report(*, finite: bool) -> st.SearchStrategy[Report]:
    """Reports that no run would write, but every reader must take."""
    hints = get_type_hints(Report)
    names = ("diagnosis", "environment", "written_at", "run")
    return st.fixed_dictionaries({name: any_value(hints[name], finite=finite) for name in names}).map(
        lambda given: Report(**given)
    )

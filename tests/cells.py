"""Cells of a matrix: those that the gate runs, and the others, which run nightly."""

from collections.abc import Collection, Iterable, Mapping
from itertools import product
from typing import Any

import pytest

Axis = Mapping[str, Any] | Iterable[Any]
"""Values of a parameter, by name or to be printed."""


def in_gate(axis: Axis, names: Collection[Any]) -> list[Any]:
    """Values for ``pytest.mark.parametrize``, of which only those with these names run in the gate."""
    named = _named(axis)
    assert set(map(str, names)) <= named.keys()
    gate = set(map(str, names))
    return [pytest.param(value, id=name, marks=_marks(name in gate)) for name, value in named.items()]


def covering(**axes: Axis) -> pytest.MarkDecorator:
    """Parametrize a test with all combinations of the values of several parameters.

    The gate runs the diagonal: each value of each parameter at least once.
    """
    named = {parameter: _named(axis) for parameter, axis in axes.items()}
    names = [list(axis) for axis in named.values()]
    gate = {tuple(each[number % len(each)] for each in names) for number in range(max(map(len, names)))}
    cells = [
        pytest.param(
            *(axis[name] for axis, name in zip(named.values(), cell, strict=True)),
            id="-".join(cell),
            marks=_marks(cell in gate),
        )
        for cell in product(*names)
    ]
    return pytest.mark.parametrize(list(named), cells)


def _named(axis: Axis) -> dict[str, Any]:
    if isinstance(axis, Mapping):
        return dict(axis)
    values = list(axis)
    named = {str(value): value for value in values}
    assert len(named) == len(values)
    return named


def _marks(is_in_gate: bool) -> list[pytest.MarkDecorator]:
    return [] if is_in_gate else [pytest.mark.nightly]

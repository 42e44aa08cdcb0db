"""Frozen values to JSON values and back, by the type hints of their fields."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from lightning_feed.errors import ReportError

Value = TypeVar("Value")

_MOST = 2**63


def to_plain(value: object) -> Any:
    """What ``json.dumps(..., allow_nan=False)`` takes. Numbers that are not finite become None: JSON has none.

    Raises:
        TypeError: for what is neither a dataclass, a sequence, a mapping, text, a number nor None.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):  # NumPy's numbers too
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else None
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: to_plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, (tuple, list)):
        return [to_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {str(key): to_plain(one) for key, one in value.items()}
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def from_plain(kind: type[Value], value: object, where: str) -> Value:
    """Build a dataclass from a JSON object. Keys that it has no field for are left out.

    Args:
        kind: a dataclass of dataclasses, tuples, literals, text, numbers and None.
        value: what ``json.loads`` gave.
        where: what to call it in errors.

    Raises:
        ReportError: for a missing key, or a value of another type than the field's.
    """
    if not isinstance(value, dict):
        raise _wrong(where, value, "an object")
    hints = get_type_hints(kind)
    given: dict[str, Any] = {}
    for one in fields(cast(Any, kind)):
        below = f"{where}.{one.name}" if where else one.name
        if one.name in value:
            given[one.name] = _read(hints[one.name], value[one.name], below)
        elif one.default is MISSING and one.default_factory is MISSING:
            raise ReportError(f"{below} is missing. Write the report anew with the lightning_feed that is installed.")
    return kind(**given)


def _read(hint: Any, value: object, where: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        (kind,) = (one for one in inner if one is not NoneType)
        return None if value is None else _read(kind, value, where)
    if origin is Literal:
        if value not in inner:
            raise _wrong(where, value, f"one of {', '.join(map(repr, inner))}")
        return value
    if origin is tuple:
        return _read_tuple(inner, value, where)
    if is_dataclass(hint):
        return from_plain(cast(type[Any], hint), value, where)
    return _read_scalar(hint, value, where)


def _read_tuple(inner: tuple[Any, ...], value: object, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _wrong(where, value, "a list")
    if inner[1:] == (...,):
        return tuple(_read(inner[0], one, f"{where}[{index}]") for index, one in enumerate(value))
    if len(value) != len(inner):
        raise _wrong(where, value, f"a list of {len(inner)}")
    return tuple(_read(kind, one, f"{where}[{at}]") for at, (kind, one) in enumerate(zip(inner, value, strict=True)))


def _read_scalar(hint: Any, value: object, where: str) -> Any:
    if hint is float:
        # A figure that must be there and is null was not finite when it was written.
        number = math.nan if value is None else _number(value)
        if number is None:
            raise _wrong(where, value, "a finite number")
        return number
    if hint is int:
        number = _number(value)
        if number is None or not number.is_integer() or abs(number) > _MOST:
            raise _wrong(where, value, "a whole number of up to 63 bits")
        return value if isinstance(value, int) else int(number)
    if not isinstance(value, hint):
        raise _wrong(where, value, {str: "text", bool: "true or false"}[hint])
    return value


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:  # a whole number with hundreds of digits
        return None
    return number if math.isfinite(number) else None


def _wrong(where: str, value: object, wanted: str) -> ReportError:
    shown = f"{value!r}"
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    return ReportError(f"{where or 'the report'} is {shown}, and must be {wanted}. Write the report anew.")

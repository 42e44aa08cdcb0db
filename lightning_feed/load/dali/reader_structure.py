"""What a pipeline function returns, taken apart into its outputs, and batches put together in that form."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def take_apart(found: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The leaves of nested dicts, lists and tuples, in order, and what puts as many other leaves into the same form.

    Example:
        >>> leaves, put_together = take_apart({"image": 1, "boxes": (2, 3)})
        >>> leaves, put_together(["a", "b", "c"])
        ([1, 2, 3], {'image': 'a', 'boxes': ('b', 'c')})
    """
    leaves: list[Any] = []
    _collect(found, leaves)
    return leaves, lambda values: _fill(found, iter(values))


def _collect(found: Any, leaves: list[Any]) -> None:
    if isinstance(found, Mapping):
        for value in found.values():
            _collect(value, leaves)
    elif isinstance(found, (list, tuple)):
        for value in found:
            _collect(value, leaves)
    else:
        leaves.append(found)


def _fill(form: Any, values: Iterator[Any]) -> Any:
    if isinstance(form, Mapping):
        return {key: _fill(value, values) for key, value in form.items()}
    if isinstance(form, tuple) and hasattr(form, "_fields"):
        return type(form)(*(_fill(value, values) for value in form))
    if isinstance(form, (list, tuple)):
        return type(form)(_fill(value, values) for value in form)
    return next(values)

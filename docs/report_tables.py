"""The tables of docs/reference/report.md, from the dataclasses of a report and the docstrings of their fields."""

import dataclasses
import inspect
import re
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from sphinx.pycode import ModuleAnalyzer

from lightning_feed.report.document import Parts, Verdict
from lightning_feed.verdict.diagnosis import Diagnosis

PLAIN = {float: "number", int: "whole number", bool: "true / false", str: "text"}
MOST_VALUES = 8
"""Of a field, to be listed in its row."""


def tables() -> str:
    """A section for each object in ``feed_report.json``, in the order of the file."""
    sections: dict[type, tuple[str, str]] = {}
    _collect(Parts, "", sections)
    return "\n".join(f"{'#' * (2 + name.count('.'))} `{name}`\n\n{table}" for name, table in sections.values() if name)


def _collect(kind: type, name: str, sections: dict[type, tuple[str, str]]) -> None:
    if kind in sections:
        return
    sections[kind] = (name, _table(kind))
    for field, hint in get_type_hints(kind).items():
        for inner in (hint, *get_args(hint)):
            if dataclasses.is_dataclass(inner):
                path = f"{name}.{field}".lstrip(".")
                _collect(inner, f"{path}[]" if get_origin(hint) is tuple else path, sections)


def _table(kind: type) -> str:
    rows = ["| key | value | meaning |", "|---|---|---|"]
    for name, hint in get_type_hints(kind).items():
        rows.append(f"| `{name}` | {_value(hint)} | {meaning(kind, name)} |")
    return "\n".join(rows) + "\n"


def _value(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join("null" if one is NoneType else _value(one) for one in inner)
    if origin is tuple:
        return f"list of {_value(inner[0])}" if inner[1:] == (...,) else f"[{', '.join(map(_value, inner))}]"
    if origin is Literal:
        return "text" if len(inner) > MOST_VALUES else " or ".join(f"`{one}`" for one in inner)
    return PLAIN.get(hint, "object")


def meaning(kind: type, name: str) -> str:
    """The docstring of a field, as a cell of a Markdown table."""
    for base in (Diagnosis if kind is Verdict else kind).__mro__:
        if name in inspect.get_annotations(base):
            docs = ModuleAnalyzer.for_module(base.__module__).find_attr_docs()
            words = " ".join(docs.get((base.__qualname__, name), [])).strip() or _first_sentence(kind, name)
            words = re.sub(r":\w+:(`\w+`)", r"\1", words.replace("``", "`"))
            return re.sub(r"\bNone\b", "null", words).replace("|", "\\|")
    raise LookupError(f"{kind.__name__}.{name}")


def _first_sentence(kind: type, name: str) -> str:
    """Of the docstring of the dataclass that is this field's type."""
    hint = get_type_hints(kind)[name]
    found = next((one for one in (hint, *get_args(hint)) if dataclasses.is_dataclass(one)), None)
    return (inspect.getdoc(found) or "").partition("\n\n")[0] if isinstance(found, type) else ""

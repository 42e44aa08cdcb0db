"""The form of ``feed_report.json`` as a JSON Schema, made from the dataclasses that it holds."""

from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lightning_feed.watch.reports.report import Parts

SCHEMA = "lightning_feed.report/1"
"""Name and version of the form. Keys may be added within a version; what is there keeps its meaning."""


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) that every ``feed_report.json`` of this version obeys."""
    parts = _object(Parts)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": SCHEMA,
        "type": "object",
        "properties": {
            "schema": {"const": SCHEMA},
            "written_at": {"type": "string", "format": "date-time"},
            **parts["properties"],
        },
        "required": ["schema", "written_at", *parts["required"]],
    }


def _object(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {
        "type": "object",
        "properties": {one.name: _form(hints[one.name]) for one in fields(kind)},
        "required": [one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING],
    }


def _form(hint: Any) -> dict[str, Any]:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        (kind,) = (one for one in inner if one is not NoneType)
        form = _form(kind)
        return form if kind is float else {"anyOf": [form, {"type": "null"}]}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin is tuple and inner[1:] == (...,):
        return {"type": "array", "items": _form(inner[0])}
    if origin is tuple:
        return {"type": "array", "prefixItems": [_form(one) for one in inner], "minItems": len(inner), "items": False}
    if is_dataclass(hint):
        return _object(hint)
    if hint is float:
        return {"type": ["number", "null"]}  # null also stands for what is not finite
    return {"type": {bool: "boolean", int: "integer", str: "string"}[hint]}

"""A checker for the part of JSON Schema that the report's schema uses. Unknown keywords are an error."""

from typing import Any

_TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "number": (int, float),
    "integer": int,
}
_WORDS = {"$schema", "title", "type", "properties", "required", "const", "enum", "items", "prefixItems", "minItems"} | {
    "additionalProperties"
}


def problems(value: Any, schema: dict[str, Any], where: str = "$") -> list[str]:
    """Every place at which a value breaks a schema."""
    unknown = schema.keys() - _WORDS - {"anyOf", "format"}
    assert not unknown, f"{where}: this checker does not know {unknown}"
    if "anyOf" in schema:
        return [] if any(not problems(value, one, where) for one in schema["anyOf"]) else [f"{where}: no form fits"]
    found = []
    if "const" in schema and value != schema["const"]:
        found.append(f"{where}: {value!r} is not {schema['const']!r}")
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{where}: {value!r} is none of {schema['enum']}")
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        return [*found, f"{where}: {value!r} is no {kinds}"]
    if isinstance(value, dict):
        found += [f"{where}.{name} is missing" for name in schema.get("required", []) if name not in value]
        for name, one in value.items():
            # A key that the schema does not name is a key that is not documented.
            form = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            found += (
                [f"{where}.{name} is not in the schema"] if form is None else problems(one, form, f"{where}.{name}")
            )
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        if len(value) < schema.get("minItems", 0) or (schema.get("items") is False and len(value) > len(first)):
            found.append(f"{where}: {len(value)} items")
        forms = [*first, *[schema["items"]] * (len(value) - len(first))]
        for at, (one, form) in enumerate(zip(value, forms, strict=False)):
            found += problems(one, form, f"{where}[{at}]")
    return found


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))

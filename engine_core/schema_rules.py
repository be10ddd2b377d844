"""What a JSON schema must say in more words so that llguidance keeps to it, and what it would break in silence.

The grammar of a schema is one over the text of JSON, a little wider than the schema in a few places. Those are closed
here, by words that mean the same, or refused.
"""

import re
from collections.abc import Callable
from typing import Any

ESCAPES = r'"\bfnrt'
"""That a JSON text may use. Others would write a property's name in another way, past what is said of that name."""
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")

_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOUR = r"(?:[01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR}:[0-5][0-9])"
_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""Days that exist, and no leap seconds, which only some minutes have."""
_NEAR, _NEAREST = 1e-14, 1e-12  # distances that survive rounding: relative, and from zero
_SPACES = r"\t\n\v\f\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)

_ONE = ("additionalProperties", "items", "not", "if", "then", "else", "contains", "propertyNames", "unevaluatedItems")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def closed(schema: Any) -> Any:
    """The same schema in words that are kept to. Raises ValueError for what could be broken, naming the keyword."""
    if not isinstance(schema, dict):
        return schema
    _check_texts(schema)
    _check_counts(schema)
    found = dict(schema)
    for name in _ONE:
        _change(found, name, closed)
    for name in _LISTS:
        _change(
            found, name, lambda schemas: [closed(each) for each in schemas] if isinstance(schemas, list) else schemas
        )
    for name in _NAMED:
        _change(found, name, _closed_by_name)
    _change(found, "patternProperties", _with_spaces_of_names)
    _change(found, "pattern", _with_spaces)
    _keep_off(found, "exclusiveMinimum", "minimum", 1)
    _keep_off(found, "exclusiveMaximum", "maximum", -1)
    if isinstance(format := found.get("format"), str) and format in _FORMATS:
        del found["format"]
        _add_pattern(found, _FORMATS[format])
    return found


def _change(schema: dict[str, Any], name: str, change: Callable[[Any], Any]) -> None:
    if name in schema:
        schema[name] = change(schema[name])


def _closed_each(schemas: Any) -> Any:
    return [closed(schema) for schema in schemas] if isinstance(schemas, list) else schemas


def _closed_by_name(schemas: Any) -> Any:
    return {name: closed(schema) for name, schema in schemas.items()} if isinstance(schemas, dict) else schemas


def _with_spaces_of_names(schemas: Any) -> Any:
    return {_with_spaces(name): schema for name, schema in schemas.items()} if isinstance(schemas, dict) else schemas


def _with_spaces(pattern: Any) -> Any:
    """White space as JSON Schema's regexes know it: one character more than elsewhere."""
    if not isinstance(pattern, str):
        return pattern
    classes = {"s": f"[{_SPACES}]", "S": f"[^{_SPACES}]"}
    return _ESCAPED.sub(lambda match: classes.get(match[1], match[0]), pattern)


def _keep_off(schema: dict[str, Any], exclusive: str, inclusive: str, sign: int) -> None:
    """A bound that is itself excluded: so many digits that a reader rounds them to it would be beyond it as a text."""
    bound = schema.get(exclusive)
    if isinstance(bound, bool) or not isinstance(bound, int | float) or schema.get("type") == "integer":
        return
    nearest = bound + sign * max(abs(bound) * _NEAR, _NEAREST)
    least = schema.get(inclusive)
    if isinstance(least, int | float) and sign * least > sign * nearest:
        nearest = least
    del schema[exclusive]
    schema[inclusive] = nearest


def _add_pattern(schema: dict[str, Any], pattern: str) -> None:
    if "pattern" not in schema:
        schema["pattern"] = pattern
    elif isinstance(schema.setdefault("allOf", []), list):
        schema["allOf"] = [*schema["allOf"], {"pattern": pattern}]


def _check_texts(schema: dict[str, Any]) -> None:
    for name in ("const", "enum", "properties", "required"):
        if _UNWRITABLE.search(_texts(schema.get(name))):
            raise ValueError(f"{name}: control characters other than \\b \\f \\n \\r \\t cannot be written")


def _texts(value: Any) -> str:
    """All texts and names inside, joined."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "".join(name + _texts(each) for name, each in value.items())
    return "".join(map(_texts, value)) if isinstance(value, list) else ""


def _check_counts(schema: dict[str, Any]) -> None:
    """Names that the schema does not list may come twice, and would be counted twice."""
    least, required = schema.get("minProperties"), schema.get("required")
    num_required = len(set(map(str, required))) if isinstance(required, list) else 0
    is_listed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if isinstance(least, int | float) and least > num_required and not is_listed:
        raise ValueError("minProperties is only kept to where additionalProperties is false, or required names as many")

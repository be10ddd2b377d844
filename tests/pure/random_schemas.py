"""Random JSON schemas of the keywords that answers are held to, small enough that most answers end."""

import random
from typing import Any

_PATTERNS = (r"^[a-c]{1,3}$", r"^\d{2}-\d{2}$", r"^(x|yy)+z?$", r"^\S{1,4}$")
_FORMATS = ("date", "time", "uuid", "ipv4", "date-time")


def random_schema(chance: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema that some value fits."""
    simple = (_string, _number, _integer, _enum, _const, _boolean)
    nested = (_object, _object, _array, _any_of, _tuple)
    make = chance.choice((*simple, *nested) if depth else simple)
    return make(chance, depth)


def _string(chance: random.Random, depth: int) -> dict[str, Any]:
    kind = chance.randrange(3)
    if kind == 0:
        return {"type": "string", "pattern": chance.choice(_PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": chance.choice(_FORMATS)}
    least = chance.randrange(4)
    return {"type": "string", "minLength": least, "maxLength": least + chance.randrange(5)}


def _number(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.choice((-10.5, -1, 0, 0.25, 3))
    return {"type": "number", chance.choice(("minimum", "exclusiveMinimum")): least, "maximum": least + 20}


def _integer(chance: random.Random, depth: int) -> dict[str, Any]:
    if chance.random() < 0.3:
        return {"type": "integer", "multipleOf": chance.choice((2, 5, 7)), "minimum": 0, "maximum": 1000}
    least = chance.randrange(-50, 50)
    return {"type": "integer", "minimum": least, "exclusiveMaximum": least + chance.randrange(2, 200)}


def _enum(chance: random.Random, depth: int) -> dict[str, Any]:
    values = ["a", 'quo"te', "line\n", "é🙂", 5, -1.5, None, True, [1, 2], {"k": "v"}]
    return {"enum": chance.sample(values, chance.randrange(1, 5))}


def _const(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"const": chance.choice([0, "x", None, [], {"a": [1]}, "\\"])}


def _boolean(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": ["boolean", "null"]}


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(("a", "b", "name", "größe", "x y", 'q"', "$ref_", "n\n"), chance.randrange(1, 4))
    properties = {name: random_schema(chance, depth - 1) for name in names}
    required = [name for name in names if chance.random() < 0.7]
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    schema["additionalProperties"] = {"type": "boolean"} if chance.random() < 0.2 else False
    if schema["additionalProperties"]:
        schema["maxProperties"] = len(names) + 1
    return schema


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randrange(3)
    return {
        "type": "array",
        "items": random_schema(chance, depth - 1),
        "minItems": least,
        "maxItems": least + chance.randrange(3),
    }


def _tuple(chance: random.Random, depth: int) -> dict[str, Any]:
    parts = [random_schema(chance, depth - 1) for _ in range(chance.randrange(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _any_of(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(chance, depth - 1) for _ in range(2)]}

"""Constraints that nobody can compile, and some that only look like it."""

import json
from typing import Any


def chain(length: int) -> dict[str, Any]:
    """References one behind the other: what follows them by recursion overflows its stack."""
    links: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(length)}
    return {"$defs": links | {f"a{length}": {"type": "string"}}, "$ref": "#/$defs/a0"}


def nested_choices(depth: int) -> dict[str, Any]:
    """oneOf in oneOf: twice as large with each level."""
    schema: dict[str, Any] = {"type": "string"}
    for level in range(depth):
        ways = ({"type": "object", "properties": {f"{way}{level}": schema}} for way in "ab")
        schema = {
            "oneOf": [{**way, "required": list(way["properties"]), "additionalProperties": False} for way in ways]
        }
    return schema


MINUTES_TO_COMPILE: dict[str, tuple[str, str]] = {
    "a multiple of a large number": ("json_schema", json.dumps({"type": "integer", "multipleOf": 9_999_991})),
    "an intersection of regexes": (
        "lark",
        r"start: T" + "\n" + r"T: /(.|\n)*a(.|\n){300}/ & /(.|\n)*b(.|\n){299}/ & ~/(.|\n)*c(.|\n){200}d/",
    ),
}
ENDS_ITS_PROCESS: dict[str, tuple[str, str]] = {
    "references": ("json_schema", json.dumps(chain(20_000))),
    "rules": ("lark", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(20_000)) + 'r20000: "a"\n'),
    "terminals": ("lark", "start: R0\n" + "".join(f'R{i}: R{i + 1} "b"\n' for i in range(20_000)) + 'R20000: "a"\n'),
}
TOO_LARGE: dict[str, tuple[str, str]] = {
    "doubled terminals": (
        "lark",
        "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(30)) + 'R30: "a"',
    ),
    "nested oneOf": ("json_schema", json.dumps(nested_choices(14))),
}
MALFORMED: dict[str, tuple[str, str, str]] = {  # with a word that the refusal holds
    "an unknown type": ("json_schema", '{"type": "strnig"}', "strnig"),
    "an unsupported keyword": ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
    "a missing definition": ("json_schema", '{"$ref": "#/$defs/nothing"}', "nothing"),
    "a remote reference": ("json_schema", '{"$ref": "https://example.com/schema"}', "example.com"),
    "an unknown format": ("json_schema", '{"type": "string", "format": "colour"}', "colour"),
    "nothing fits": ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 3}', "minLength"),
    "an overlapping oneOf": ("json_schema", '{"oneOf": [{"type": "number"}, {"type": "integer"}]}', "oneOf"),
    "look-ahead": ("regex", "a(?=b)", "look-ahead"),
    "an open bracket": ("regex", "[a-", "unclosed"),
    "a back reference": ("regex", r"(a)\1", "backreference"),
    "no Lark": ("lark", 'start: "a', "lexer"),
    "an unknown rule": ("lark", "start: nothing", "nothing"),
    "no GBNF": ("lark", "root ::= [", "["),
}
LARGE_BUT_FINE: dict[str, tuple[str, str]] = {
    "20,000 values": ("json_schema", json.dumps({"enum": [f"value number {i}" for i in range(20_000)]})),
    "huge counts": ("json_schema", json.dumps({"type": "string", "minLength": 10, "maxLength": 10**9})),
    "counts of counts": ("regex", "(a{1,1000}b{1,1000}){1,1000}"),
}

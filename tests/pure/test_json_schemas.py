"""JSON schemas are honoured or refused, never violated."""

import json
import random
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from trimaran.engine_core.grammar_limits import compiled
from trimaran.engine_core.grammar_text import grammar_text
from trimaran.ipc.frontend_messages import FinishReason
from trimaran.tests.pure.constrained import TOKENIZER, Driver, made
from trimaran.tests.pure.random_schemas import random_schema

SUITE = "jsonschema==4.25.1"  # whose source distribution carries the JSON-Schema-Test-Suite
SHARE_HONOURED = 0.4
SHARE_ACCEPTED = 0.9


def matcher_of(schema: Any) -> Any:
    """Raises ValueError for a schema that is refused."""
    matcher = compiled(TOKENIZER, grammar_text("json_schema", json.dumps(schema)))
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def accepts(matcher: Any, text: str) -> bool:
    """Whether the grammar lets this be the whole answer."""
    copy, tokens = matcher.deep_copy(), list(text.encode())
    return bool(copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting())


def spellings(value: Any) -> set[str]:
    """Ways to write a value as JSON."""
    return {json.dumps(value), json.dumps(value, ensure_ascii=False), json.dumps(value, separators=(",", ":"))}


VIOLATIONS: dict[str, tuple[Any, str]] = {
    "a name in escapes": ({"properties": {"a": {"type": "integer"}}}, r'{"\u0061":"x"}'),
    "a pattern's name in escapes": ({"patternProperties": {"^b": {"type": "integer"}}}, r'{"\u0062":"x"}'),
    "one name twice": ({"type": "object", "minProperties": 2}, '{"x":1,"x":2}'),
    "29 February of no leap year": ({"type": "string", "format": "date"}, '"2021-02-29"'),
    "29 February of a century": ({"type": "string", "format": "date"}, '"1900-02-29"'),
    "31 April": ({"type": "string", "format": "date"}, '"2024-04-31"'),
    "a leap second": ({"type": "string", "format": "date-time"}, '"1998-12-31T23:58:60Z"'),
    "a format beside a pattern": ({"type": "string", "format": "date", "pattern": "^2"}, '"2021-02-29"'),
    "a format inside": ({"items": {"anyOf": [{"type": "string", "format": "time"}]}}, '["22:59:60Z"]'),
    "white space of ECMA": ({"type": "string", "pattern": r"^\S$"}, '"\ufeff"'),
    "white space in a class": ({"type": "string", "pattern": r"^[^\s]$"}, '"\ufeff"'),
    "a control character": ({"const": "\x01"}, r'"\u0001"'),
    "an excluded bound after rounding": ({"type": "number", "exclusiveMinimum": 0.25}, f"0.25{'0' * 30}4"),
    "an excluded upper bound": ({"exclusiveMaximum": 3, "minimum": 1}, f"2.{'9' * 30}"),
    "an excluded zero": ({"type": "number", "exclusiveMinimum": 0}, f"0.{'0' * 400}1"),
    "an overlapping oneOf": ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "1"),
}
HONOURED: dict[str, tuple[Any, str]] = {
    "29 February": ({"type": "string", "format": "date"}, '"2024-02-29"'),
    "of a fourth century": ({"type": "string", "format": "date"}, '"2000-02-29"'),
    "a time": ({"type": "string", "format": "date-time"}, '"1998-12-31T23:58:59.5+01:00"'),
    "a format beside a pattern": ({"type": "string", "format": "date", "pattern": "^2"}, '"2021-02-28"'),
    "counted names": ({"properties": {"a": {}}, "required": ["a"], "type": "object", "minProperties": 1}, '{"a":1}'),
    "near an excluded bound": ({"type": "number", "exclusiveMinimum": 0.25, "maximum": 1}, "0.2500001"),
    "near zero": ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, "0.5"),
    "integers next to an excluded bound": ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 2}, "1"),
    "line ends": ({"enum": ["a\n\t"]}, r'"a\n\t"'),
    "a literal backslash": ({"type": "string", "pattern": r"^\\s$"}, r'"\\s"'),
    "true": (True, '{"a":[null]}'),
}


@pytest.mark.user_pain("T8")
@pytest.mark.parametrize("name", VIOLATIONS)
def test_t8_never_violated(name: str) -> None:
    schema, text = VIOLATIONS[name]
    try:
        matcher = matcher_of(schema)
    except ValueError:
        return
    assert not accepts(matcher, text)


@pytest.mark.parametrize("name", HONOURED)
def test_honoured(name: str) -> None:
    schema, text = HONOURED[name]
    assert accepts(matcher_of(schema), text)


def test_a_property_may_be_named_like_a_keyword() -> None:
    schema = {"type": "object", "properties": {"format": {"const": "date"}, "items": {"type": "integer"}}}
    matcher = matcher_of({**schema, "required": ["format", "items"], "additionalProperties": False})
    assert accepts(matcher, '{"format":"date","items":5}') and not accepts(matcher, '{"format":"date","items":"5"}')


def test_200_random_schemas_are_never_violated() -> None:
    """Every finished answer of a model that says anything it is allowed to."""
    chance, schemas, refused = random.Random(7), [], []
    driver = Driver(num_blocks=2000)
    while len(schemas) < 200:
        schema = random_schema(chance)
        try:
            matcher_of(schema)
        except ValueError as error:
            refused.append((schema, str(error)))
            continue
        driver.submit([len(schemas) % 50, len(schemas) // 50], made("json_schema", schema), max_tokens=250)
        schemas.append(schema)
    driver.run()
    assert not driver.failures and len(refused) < 20, (driver.failures, refused[:3])
    finished = [number for (number, _), reason in driver.finishes.items() if reason is FinishReason.END_TOKEN]
    assert len(finished) > 180
    for number in finished:
        validator = jsonschema_rs.Draft202012Validator(schemas[number], validate_formats=True)
        assert validator.is_valid(json.loads(driver.text(number))), (schemas[number], driver.text(number))


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, downloaded once and kept."""
    cache = Path.home() / ".cache" / "trimaran" / "json-schema-suite"
    if not list(cache.glob("jsonschema-*.tar.gz")):
        command = ("-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(cache), SUITE)
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, timeout=240)
        if done.returncode:
            pytest.skip(f"pip cannot bring {SUITE}, which carries the JSON-Schema-Test-Suite: {done.stderr[-300:]}")
    return next(cache.glob("jsonschema-*.tar.gz"))


def groups(suite: Path) -> Iterator[tuple[str, Any]]:
    """Each schema of the suite with its tests, by file name."""
    with tarfile.open(suite) as archive:
        for member in archive.getmembers():
            if "/tests/draft2020-12/" in member.name and member.name.endswith(".json"):
                file = archive.extractfile(member)
                assert file is not None
                for group in json.load(file):
                    yield member.name.split("draft2020-12/")[1], group


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.user_pain("T8")
def test_t8_the_json_schema_test_suite(suite: Path) -> None:
    """Honoured or refused, its optional parts among them: no invalid instance may be an answer, most valid ones may."""
    counts: Counter[str] = Counter()
    violated = []
    for file, group in groups(suite):
        try:
            matcher = matcher_of(group["schema"])
        except ValueError:
            counts["refused"] += 1
            continue
        counts["honoured"] += 1
        for test in group["tests"]:
            is_accepted = any(accepts(matcher, text) for text in spellings(test["data"]))
            counts[f"valid {test['valid']}, accepted {is_accepted}"] += 1
            if is_accepted and not test["valid"]:
                violated.append((file, group["description"], test["description"]))
    assert not violated, violated
    assert counts["honoured"] > SHARE_HONOURED * (counts["honoured"] + counts["refused"]), counts
    accepted, not_accepted = counts["valid True, accepted True"], counts["valid True, accepted False"]
    assert accepted > SHARE_ACCEPTED * (accepted + not_accepted), counts

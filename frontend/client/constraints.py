"""Constraints on an answer, by the names that clients use for them; `constraint_of` makes the one grammar of them."""

import json
import logging
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from ...ipc.configuration import RequestLimits
from ...ipc.sampling import Grammar
from .refusals import RequestRefused

log = logging.getLogger("trimaran.constraints")

JsonSchema = dict[str, Any] | str | bool
Choices = Annotated[list[str], Meta(min_length=1)]


class StructuredOutputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One constraint on the answer. `json`: a JSON schema, as an object or as text; `grammar`: in Lark, or GBNF."""

    json: JsonSchema | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class JsonSchemaFormat(Struct, frozen=True, kw_only=True):
    """A named schema. It is always held to, whatever `strict` says."""

    schema: JsonSchema
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The OpenAI API's way of asking for JSON. A schema elsewhere, as some servers take it, would go unheard."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class Constraint(NamedTuple):
    """A grammar, and the field that asked for it."""

    field: str
    grammar: Grammar


_KINDS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark", "json_object": "json_object"}
_OLD_NAMES = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}
_told_of: set[str] = set()


class ConstraintFields(Struct, kw_only=True):
    """The fields of a request that constrain its answer; those named guided_ are the older names of the others."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    def constraint(self, limits: RequestLimits) -> Constraint | None:
        """The one that is asked for. Raises RequestRefused where several are, or one is too large."""
        found = [*_of_format(self.response_format), *_of_outputs(self.structured_outputs)]
        for old, name in _OLD_NAMES.items():
            if (value := getattr(self, old)) is not None:
                _note_old_name(old, name)
                found.append(_made(old, name, value))
        return only(found, limits)


def constraint_of(outputs: StructuredOutputs | None, limits: RequestLimits) -> Constraint | None:
    """The constraint of SamplingParams. Raises RequestRefused where several are asked for, or one is too large."""
    return only(_of_outputs(outputs), limits)


def only(found: list[Constraint], limits: RequestLimits) -> Constraint | None:
    """The one there is. Raises RequestRefused where there are several, or it is too large."""
    if not found:
        return None
    first = found[0]
    if len(found) > 1:
        field = found[1].field
        raise RequestRefused(f"{field}: not together with {first.field}; an answer has one constraint", param=field)
    num_bytes = len(first.grammar.source.encode("utf-8", "replace"))
    if num_bytes > limits.max_grammar_bytes:
        raise RequestRefused(
            f"{first.field}: {num_bytes} bytes are above this server's limit of {limits.max_grammar_bytes} for a "
            "constraint",
            param=first.field,
        )
    return first


def _of_format(asked: ResponseFormat | None) -> list[Constraint]:
    if asked is None or asked.type == "text":
        return []
    if asked.type == "json_object":
        return [_made("response_format", "json_object", True)]
    if asked.json_schema is None:
        raise RequestRefused(
            'response_format: type "json_schema" needs json_schema, with the schema under schema',
            param="response_format.json_schema",
        )
    return [_made("response_format", "json", asked.json_schema.schema)]


def _of_outputs(outputs: StructuredOutputs | None) -> list[Constraint]:
    if outputs is None:
        return []
    given = {name: value for name in _KINDS if (value := getattr(outputs, name)) is not None}
    if given.get("json_object") is False:
        del given["json_object"]
    return [_made(f"structured_outputs.{name}", name, value) for name, value in given.items()]


def _made(field: str, name: str, value: Any) -> Constraint:
    match name:
        case "json":
            source = _schema_text(field, value)
        case "json_object":
            source = ""
        case "choice":
            source = json.dumps(value)
        case _:
            source = value
    return Constraint(field, Grammar(kind=_KINDS[name], source=source))


def _schema_text(field: str, schema: JsonSchema) -> str:
    """One text for schemas that are the same but for their white space, so that they are compiled once."""
    try:
        value = msgspec.json.decode(schema) if isinstance(schema, str) else schema
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise RequestRefused(f"{field}: the schema is nested too deeply", param=field) from None
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise RequestRefused(f"{field}: the schema is not valid JSON: {error}", param=field) from None


def _note_old_name(old: str, name: str) -> None:
    if old not in _told_of:
        _told_of.add(old)
        log.warning("a client sends %s, an older name that will go: send structured_outputs with %s instead", old, name)

"""How each family of models writes tool calls. A family reads everything after the reasoning."""

from collections.abc import Callable, Mapping, Set

from .calls import CallReader
from .scanner import Parse, Scanner, Text

Family = Callable[[Scanner, Set[str]], Parse[None]]


def plain_text(scanner: Scanner, names: Set[str]) -> Parse[None]:
    """No calls at all."""
    yield from scanner.rest()


def hermes(scanner: Scanner, names: Set[str]) -> Parse[None]:
    """Hermes, Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere in the text."""
    reader = CallReader(scanner, names)
    while (yield from scanner.until(("<tool_call>",), Text)) is not None:
        scanner.mark -= len("<tool_call>")
        if (yield from reader.object_call()):
            yield from _skip_end(scanner, "</tool_call>")


def llama3_json(scanner: Scanner, names: Set[str]) -> Parse[None]:
    """Llama 3: the answer is `{"name": ..., "parameters": {...}}`, several with `;` between."""
    yield from _leading_json(scanner, names, "<|python_tag|>")


def plain_json(scanner: Scanner, names: Set[str]) -> Parse[None]:
    """The answer is a call as an object, or a list of them."""
    yield from _leading_json(scanner, names, "")


def mistral(scanner: Scanner, names: Set[str]) -> Parse[None]:
    """`[TOOL_CALLS]` and a list of calls (old), or name and arguments after each mark (new)."""
    reader = CallReader(scanner, names)
    while (yield from scanner.until(("[TOOL_CALLS]",), Text)) is not None:
        scanner.mark -= len("[TOOL_CALLS]")
        if (yield from scanner.skip_space()) in ("[", "{"):
            yield from _calls(scanner, reader)
        else:
            yield from _named_call(scanner, reader)


def deepseek(scanner: Scanner, names: Set[str]) -> Parse[None]:
    """V3 and R1 (`function`, separator, name, fenced JSON) and V3.1 (name, separator, JSON)."""
    reader = CallReader(scanner, names)
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    all_begin, all_end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    while (found := (yield from scanner.until((all_begin, begin), Text))) is not None:
        scanner.mark -= len(found)
        if found == all_begin:
            yield from scanner.skip_space()
            if not (yield from scanner.take(begin)):
                yield from reader.give_up()
                continue
        while (yield from _deepseek_call(scanner, reader)):
            yield from scanner.skip_space()
            yield from _skip_end(scanner, end)
            scanner.set_mark()
            if not (yield from scanner.take(begin)):
                yield from _skip_end(scanner, all_end)
                break


FAMILIES: Mapping[str, Family] = {
    "hermes": hermes,
    "llama3_json": llama3_json,
    "mistral": mistral,
    "deepseek": deepseek,
    "plain_json": plain_json,
}


def _leading_json(scanner: Scanner, names: Set[str], tag: str) -> Parse[None]:
    scanner.set_mark()
    yield from scanner.skip_space()
    if tag and (yield from scanner.take(tag)):
        yield from scanner.skip_space()
    if (yield from scanner.peek()) in ("{", "["):
        yield from _calls(scanner, CallReader(scanner, names))
    else:
        scanner.back()
    yield from scanner.rest()


def _calls(scanner: Scanner, reader: CallReader) -> Parse[None]:
    """Calls in a list, or with semicolons between."""
    is_list = yield from scanner.take("[")
    while (yield from reader.object_call()):
        scanner.set_mark()
        if not (yield from scanner.skip_space()) or not (yield from scanner.take("," if is_list else ";")):
            break
    else:
        return
    if is_list:
        yield from scanner.take("]")
    scanner.set_mark()
    yield from scanner.skip_space()


def _named_call(scanner: Scanner, reader: CallReader) -> Parse[None]:
    """`name{...}`, `name[ARGS]{...}`, `name[CALL_ID]id[ARGS]{...}`."""
    name = (yield from _text_before(scanner, ("[", "{"))).strip()
    if (yield from scanner.take("[CALL_ID]")):
        yield from _text_before(scanner, ("[", "{"))
    yield from scanner.take("[ARGS]")
    if (yield from reader.bare_call(name)):
        scanner.set_mark()
        yield from scanner.skip_space()


def _deepseek_call(scanner: Scanner, reader: CallReader) -> Parse[bool]:
    name = (yield from _text_before(scanner, ("<",))).strip()
    if not (yield from scanner.take("<｜tool▁sep｜>")):
        yield from reader.give_up()
        return False
    is_fenced = name == "function" and (yield from scanner.skip_space()) != "{"
    if is_fenced:
        name = (yield from _text_before(scanner, ("\n",))).strip()
        yield from scanner.skip_space()
        yield from scanner.take("```json")
    done = yield from reader.bare_call(name)
    if done and is_fenced:
        yield from _skip_end(scanner, "```")
    return done


def _text_before(scanner: Scanner, stops: tuple[str, ...]) -> Parse[str]:
    begin = scanner.at - scanner.mark  # the mark is kept while text before it goes
    while (character := (yield from scanner.peek())) and character not in stops:
        scanner.at += 1
    return scanner.text[scanner.mark + begin : scanner.at]


def _skip_end(scanner: Scanner, tag: str) -> Parse[None]:
    """The closing tag, which a model may forget, and white space round it."""
    scanner.set_mark()
    yield from scanner.skip_space()
    yield from scanner.take(tag)
    scanner.set_mark()
    yield from scanner.skip_space()

"""From YAML to a `CapabilityFile`: keys known, figures sourced, units plausible; or a Refusal that cures.

A figure is `[value, source]` or `{value: ..., source: ..., note: ...}`; `source` is the id of one of the file's
`documents`, or `measured`, which needs `date` and `tool`.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from pathlib import Path

from .capability_file import MEASURED, CapabilityFile, Document, Figure, Figures, Match, Product, Value
from .complaint import Place, nearest
from .vocabulary import GIB, KEYS, KIB, MIB, TIB, Key, Kind
from .yaml_text import read_yaml

SCHEMA = 1
_IDENTITY = ("schema", "architecture", "title", "platform", "vendor", "device", "match", "documents", "products")
_PRODUCT_IDENTITY = ("name", "device_names")
_FIGURE = ("value", "source", "note", "tool", "date")
_DOCUMENT = ("title", "section", "address")
_MATCH = ("architectures", "machine", "flags")
_DEVICE = ("name", "uuid", "pci_bus_id", "driver", "runtime")
_ARCHITECTURE = re.compile(r"[a-z0-9][a-z0-9_]{1,63}")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(KiB|MiB|GiB|TiB)")
_UNITS = {"KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}


def read_file(path: Path, label: str) -> CapabilityFile:
    """Raises Refusal."""
    return make_file(read_yaml(path, label), label, str(path))


def make_file(content: object, label: str, path: str = "") -> CapabilityFile:
    """Raises Refusal."""
    top = Place(label)
    entries = _mapping(content, top, "a capability file")
    _check_keys(entries, top, (*_IDENTITY, *KEYS))
    _check_schema(entries, top)
    documents = _documents(entries.get("documents"), top.key("documents"))
    return CapabilityFile(
        label=label,
        path=path,
        architecture=_architecture(entries, top),
        title=_text(entries.get("title", ""), top.key("title")),
        platform=_text(entries.get("platform", ""), top.key("platform")),
        vendor=_text(entries.get("vendor", ""), top.key("vendor")),
        match=_match(entries.get("match"), top.key("match")),
        device=_texts(entries.get("device"), top.key("device"), _DEVICE),
        documents=documents,
        figures=_figures(entries, top, documents),
        products=_products(entries.get("products"), top.key("products"), documents),
    )


def _check_schema(entries: Mapping[str, object], top: Place) -> None:
    schema = entries.get("schema")
    if schema != SCHEMA or isinstance(schema, bool):
        found = "is missing" if schema is None else f"is {schema!r}"
        raise top.key("schema").refusal(f"{found}; this version reads schema {SCHEMA}: begin the file with schema: 1")


def _architecture(entries: Mapping[str, object], top: Place) -> str:
    place = top.key("architecture")
    if "architecture" not in entries:
        raise place.refusal("is missing; name the architecture as the compiler does, such as sm_90 or gfx942")
    name = _text(entries["architecture"], place)
    if not _ARCHITECTURE.fullmatch(name):
        raise place.refusal(f"{name!r} is no name of an architecture; write it as the compiler does: sm_90, gfx942")
    return name


def _documents(content: object, place: Place) -> dict[str, Document]:
    if content is None:
        return {}
    documents = {}
    for name, entry in _mapping(content, place, "ids of documents").items():
        here = place.key(name)
        if name == MEASURED:
            raise here.refusal("is what measured figures name as their source; give the document another id")
        texts = _texts(entry, here, _DOCUMENT)
        if not texts.get("title"):
            raise here.refusal("title is missing; say what the vendor calls this document")
        documents[name] = Document(**texts)
    return documents


def _match(content: object, place: Place) -> Match:
    if content is None:
        return Match()
    entries = _mapping(content, place, f"the keys {', '.join(_MATCH)}")
    _check_keys(entries, place, _MATCH)
    return Match(
        architectures=_words(entries.get("architectures"), place.key("architectures")),
        machine=_text(entries.get("machine", ""), place.key("machine")),
        flags=_words(entries.get("flags"), place.key("flags")),
    )


def _products(content: object, place: Place, documents: Mapping[str, Document]) -> tuple[Product, ...]:
    if content is None:
        return ()
    if not isinstance(content, list):
        raise place.refusal("must be a list; begin each product with - name:")
    products: list[Product] = []
    for index, entry in enumerate(content):
        here = place.item(index)
        entries = _mapping(entry, here, "a product, which begins with name:")
        _check_keys(entries, here, (*_PRODUCT_IDENTITY, *KEYS))
        if not (name := _text(entries.get("name", ""), here.key("name"))):
            raise here.key("name").refusal("is missing; products are chosen by it (--device-config FILE:NAME)")
        if name.lower() in {product.name.lower() for product in products}:
            raise here.key("name").refusal(f"{name!r} is the name of an earlier product; keep one of them")
        names = _words(entries.get("device_names"), here.key("device_names"))
        products.append(Product(name=name, device_names=names, figures=_figures(entries, here, documents)))
    return tuple(products)


def _figures(entries: Mapping[str, object], place: Place, documents: Mapping[str, Document]) -> Figures:
    figures: Figures = {}
    for name, key in KEYS.items():
        if name not in entries:
            continue
        here = place.key(name)
        if not key.of:
            figures[name] = {"": _figure(entries[name], here, key, documents)}
            continue
        inner = _mapping(entries[name], here, f"a figure for each {key.of}")
        for entry in inner:
            if key.entries and entry not in key.entries:
                raise here.unknown(entry, key.entries, key.of)
        figures[name] = {entry: _figure(value, here.key(entry), key, documents) for entry, value in inner.items()}
    return figures


def _figure(content: object, place: Place, key: Key, documents: Mapping[str, Document]) -> Figure:
    entries = _figure_entries(content, place, key)
    _check_keys(entries, place, _FIGURE)
    source = _source(entries, place, documents)
    is_measured = source == MEASURED
    if "value" not in entries:
        raise place.refusal("value is missing; leave the whole figure out where it is unknown")
    return Figure(
        value=_value(entries["value"], place, key, is_measured=is_measured),
        source=source,
        note=_text(entries.get("note", ""), place.key("note")),
        tool=_text(entries.get("tool", ""), place.key("tool")),
        date=_date(entries.get("date"), place.key("date"), is_needed=is_measured),
    )


def _figure_entries(content: object, place: Place, key: Key) -> Mapping[str, object]:
    if isinstance(content, list):
        if len(content) != 2:
            raise place.refusal(f"{content!r} must be [value, source], source being the id of a document")
        return {"value": content[0], "source": content[1]}
    if isinstance(content, Mapping):
        return content
    if key.kind is Kind.FLAG and isinstance(content, str):
        return {"value": True, "source": content}  # fp16: guide
    raise place.refusal(
        f"{content!r} has no source; write [{content}, ID] with the id of one of the file's documents, or "
        f"{{value: {content}, source: {MEASURED}, date: YYYY-MM-DD, tool: NAME}}"
    )


def _source(entries: Mapping[str, object], place: Place, documents: Mapping[str, Document]) -> str:
    source = entries.get("source")
    if not isinstance(source, str) or not source:
        raise place.refusal("source is missing; a figure needs the id of a document, or measured")
    if source == MEASURED:
        if not entries.get("tool"):
            raise place.refusal("tool is missing; a measured figure says what measured it, and its date")
        return source
    if source not in documents:
        listed = ", ".join(documents) or "none yet"
        raise place.refusal(
            f"source {source!r} is not one of the file's documents{nearest(source, documents)}; "
            f"take one of them ({listed}), add it under documents:, or write {MEASURED}"
        )
    return source


def _date(content: object, place: Place, *, is_needed: bool) -> str:
    if isinstance(content, datetime.date):
        return content.isoformat()[:10]
    if isinstance(content, str):
        try:
            return datetime.date.fromisoformat(content).isoformat()
        except ValueError:
            pass
    if content is None and not is_needed:
        return ""
    found = "is missing" if content is None else f"{content!r} is no date"
    raise place.refusal(f"{found}; write the day of the measurement as YYYY-MM-DD")


def _value(content: object, place: Place, key: Key, *, is_measured: bool) -> Value:
    match key.kind:
        case Kind.FLAG:
            if not isinstance(content, bool):
                raise place.refusal(f"{content!r} must be true or false")
            return content
        case Kind.TEXT:
            if not isinstance(content, str):
                raise place.refusal(f'{content!r} must be a text; write it in quotes: "{content}"')
            return content
        case Kind.CHOICES:
            return _choices(content, place, key)
        case Kind.SIZE if isinstance(content, str):
            content = _bytes(content, place, key)
    return _number(content, place, key, is_measured=is_measured)


def _bytes(text: str, place: Place, key: Key) -> int:
    found = _SIZE.fullmatch(text)
    if found is None:
        raise place.refusal(f"{text!r} is no size; {key.hint}")
    size = float(found[1]) * _UNITS[found[2]]
    if not size.is_integer():
        raise place.refusal(f"{text!r} is not a whole number of bytes; {key.hint}")
    return int(size)


def _number(content: object, place: Place, key: Key, *, is_measured: bool) -> int | float:
    if isinstance(content, bool) or not isinstance(content, int | float) or content != content:
        unit = f" ({key.unit})" if key.unit else ""
        raise place.refusal(f"{content!r} must be {key.kind}{unit}{_exponent_hint(content)}")
    if key.kind is not Kind.NUMBER and not isinstance(content, int):
        raise place.refusal(f"{content!r} must be {key.kind}")
    is_plausible = content > 0 or key.low == 0 if is_measured else key.low <= content
    if not is_plausible or content < 0 or content > key.high:
        low = "0" if is_measured else f"{key.low:.15g}"
        unit = f" {key.unit}" if key.unit else ""
        hint = key.hint or "look the figure up again"
        raise place.refusal(f"{content} is outside {low} to {key.high:.15g}{unit}; {hint}")
    if key.is_power_of_two and int(content) & (int(content) - 1):
        raise place.refusal(f"{content} is not a power of two; look the figure up again")
    return content if key.kind is not Kind.NUMBER else float(content)


def _exponent_hint(content: object) -> str:
    """YAML takes "989e12" for a text."""
    is_spelt_so = isinstance(content, str) and re.fullmatch(r"[0-9.]+[eE][0-9]+", content)
    return "; YAML takes this spelling for a text: write the number out" if is_spelt_so else ""


def _choices(content: object, place: Place, key: Key) -> dict[str, int]:
    choices: dict[str, int] = {}
    for name, value in _mapping(content, place, "launch choices such as {num_warps: 4}").items():
        if isinstance(value, bool) or not isinstance(value, int) or not key.low <= value <= key.high:
            raise place.key(name).refusal(f"{value!r} must be a whole number from {key.low:.0f} to {key.high:.0f}")
        choices[name] = value
    return choices


def _mapping(content: object, place: Place, what: str) -> dict[str, object]:
    if not isinstance(content, dict):
        found = "is empty" if content is None else f"{str(content)[:40]!r} is no mapping"
        raise place.refusal(f"{found}; here stands {what}: see docs/capability-files.md")
    return content


def _check_keys(entries: Mapping[str, object], place: Place, allowed: tuple[str, ...]) -> None:
    for name in entries:
        if name not in allowed:
            raise place.unknown(name, allowed)


def _texts(content: object, place: Place, allowed: tuple[str, ...]) -> dict[str, str]:
    if content is None:
        return {}
    entries = _mapping(content, place, f"the keys {', '.join(allowed)}")
    _check_keys(entries, place, allowed)
    return {name: _text(value, place.key(name)) for name, value in entries.items()}


def _text(content: object, place: Place) -> str:
    if not isinstance(content, str):
        raise place.refusal(f'{content!r} must be a text; write it in quotes: "{content}"')
    return content


def _words(content: object, place: Place) -> tuple[str, ...]:
    if content is None:
        return ()
    if not isinstance(content, list):
        raise place.refusal(f"{content!r} must be a list of texts: [{content}]")
    return tuple(_text(word, place.item(index)) for index, word in enumerate(content))

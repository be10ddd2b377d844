"""Kinds of option values: how each is read from text or YAML, and what it allows.

Owns the reading of one value. Does not know where a value comes from, nor which options exist.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from msgspec import Struct


class BadValue(ValueError):
    """A value that its kind does not allow. The option's reader adds the name, the value and what is allowed."""


class Kind(Protocol):
    """How a value is read. `read` takes text (flags, environment) or what YAML makes of it; raises BadValue."""

    @property
    def repeats(self) -> bool: ...
    @property
    def allowed(self) -> str: ...
    def read(self, raw: object) -> object: ...


class Text(Struct, frozen=True):
    """Any non-empty text."""

    allowed: str = "text"
    repeats: bool = False

    def read(self, raw: object) -> str:
        if not isinstance(raw, str | int | float) or isinstance(raw, bool) or str(raw) == "":
            raise BadValue
        return str(raw)


class Texts(Struct, frozen=True):
    """A list: the flag repeats, the environment separates by commas, YAML has a list or one text.

    `splits`: commas separate in every source, because no entry holds one.
    """

    allowed: str = "text; repeat the flag, or separate by commas"
    repeats: bool = True
    splits: bool = False

    def read(self, raw: object) -> tuple[str, ...]:
        parts = raw if isinstance(raw, list | tuple) else str(raw).split(",")
        if self.splits:
            parts = [piece for part in parts for piece in str(part).split(",")]
        texts = tuple(str(part).strip() for part in parts)
        if not all(texts):
            raise BadValue
        return texts


class Pairs(Struct, frozen=True):
    """NAME=VALUE pairs, each name once: the flag repeats, the environment separates by commas, YAML has a mapping."""

    allowed: str = "NAME=VALUE, each name once; repeat the flag, or separate by commas"
    repeats: bool = True

    def read(self, raw: object) -> dict[str, str]:
        if isinstance(raw, Mapping):
            return {str(name): str(value) for name, value in raw.items()}
        parts = raw if isinstance(raw, list | tuple) else str(raw).split(",")
        pairs: dict[str, str] = {}
        for part in parts:
            name, equals, value = str(part).strip().partition("=")
            if not (name and equals and value) or name in pairs:
                raise BadValue
            pairs[name] = value
        return pairs


class Choice(Struct, frozen=True):
    """One of a closed set of words."""

    words: tuple[str, ...]
    repeats: bool = False

    @property
    def allowed(self) -> str:
        return ", ".join(self.words)

    def read(self, raw: object) -> str:
        if raw not in self.words:
            raise BadValue
        return str(raw)


class Integer(Struct, frozen=True):
    """A whole number within bounds, or one of a few words."""

    low: int
    high: int | None = None
    words: tuple[str, ...] = ()
    repeats: bool = False

    @property
    def allowed(self) -> str:
        numbers = f"a whole number from {self.low}" + (f" to {self.high}" if self.high is not None else "")
        return " or ".join([numbers, *self.words])

    def read(self, raw: object) -> int | str:
        if isinstance(raw, str) and raw in self.words:
            return raw
        if isinstance(raw, bool) or not isinstance(raw, str | int):
            raise BadValue
        try:
            number = int(raw)
        except ValueError:
            raise BadValue from None
        if number < self.low or (self.high is not None and number > self.high):
            raise BadValue
        return number


class Number(Struct, frozen=True):
    """A number within bounds, or one of a few words."""

    low: float
    high: float | None = None
    unit: str = ""
    words: tuple[str, ...] = ()
    repeats: bool = False

    @property
    def allowed(self) -> str:
        numbers = f"a number from {self.low:g}" + (f" to {self.high:g}" if self.high is not None else "")
        return " or ".join([numbers + (f" ({self.unit})" if self.unit else ""), *self.words])

    def read(self, raw: object) -> float | str:
        if isinstance(raw, str) and raw in self.words:
            return raw
        if isinstance(raw, bool) or not isinstance(raw, str | int | float):
            raise BadValue
        try:
            number = float(raw)
        except ValueError:
            raise BadValue from None
        if not self.low <= number <= (float("inf") if self.high is None else self.high) or number == float("inf"):
            raise BadValue
        return number


class Switch(Struct, frozen=True):
    """On or off: `--name` and `--no-name` as flags, true or false elsewhere."""

    allowed: str = "true or false"
    repeats: bool = False

    def read(self, raw: object) -> bool:
        word = str(raw).lower()
        if word in ("true", "1", "on", "yes"):
            return True
        if word in ("false", "0", "off", "no"):
            return False
        raise BadValue


class File(Struct, frozen=True):
    """The path of a file that is there."""

    allowed: str = "the path of a readable file"
    repeats: bool = False

    def read(self, raw: object) -> Path:
        if not isinstance(raw, str | Path) or not (path := Path(raw).expanduser()).is_file():
            raise BadValue
        return path.absolute()


class FileOrFolder(Struct, frozen=True):
    """The path of a file or folder that is there."""

    allowed: str = "the path of a file or folder that exists"
    repeats: bool = False

    def read(self, raw: object) -> Path:
        if not isinstance(raw, str | Path) or not (path := Path(raw).expanduser()).exists():
            raise BadValue
        return path.absolute()


class Folder(Struct, frozen=True):
    """The path of a folder, which may be made later."""

    allowed: str = "the path of a folder"
    repeats: bool = False

    def read(self, raw: object) -> Path:
        if not isinstance(raw, str | Path) or str(raw) == "" or (path := Path(raw).expanduser()).is_file():
            raise BadValue
        return path.absolute()

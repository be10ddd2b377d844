"""What the vendors' visibility variables say. Their entries are indices or identifiers; none is read as a number here,
because the driver does that, and torch shows what is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_HIDES_ALL = {"", "-1", "none", "NoDevFiles"}


def hiding(variables: Mapping[str, str], names: Sequence[str]) -> str | None:
    """The reason why no device can be seen, when a variable hides them all."""
    for name in names:
        value = variables.get(name)
        if value is not None and value.split(",")[0].strip() in _HIDES_ALL:
            return f"{name}={value!r} hides every device; name some in it, or unset it"
    return None


def shown(variables: Mapping[str, str], names: Sequence[str]) -> str:
    """The variables that are set, for the log."""
    return ", ".join(f"{name}={variables[name]}" for name in names if name in variables)

"""One deliberate break."""

from typing import NamedTuple


class Break(NamedTuple):
    """Replace `old` by `new` in `file`; then `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

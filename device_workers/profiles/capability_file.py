"""A capability file as the rest of the engine sees it: one architecture, its products, every figure with its source."""

from msgspec import Struct

from ...ipc.facts import Provenance

MEASURED = "measured"
"""The source of a figure that a tool measured; every other source names a document of the file."""

Value = bool | int | float | str | dict[str, int]


class Figure(Struct, frozen=True, kw_only=True):
    """One value and its source. `tool` and `date` are of a measurement; `note` says how the document has it."""

    value: Value
    source: str
    note: str = ""
    tool: str = ""
    date: str = ""

    @property
    def provenance(self) -> Provenance:
        return Provenance.MEASURED if self.source == MEASURED else Provenance.DECLARED


Figures = dict[str, dict[str, Figure]]
"""By key, then by entry ("" for a key that is not a mapping)."""


class Document(Struct, frozen=True, kw_only=True):
    """What a vendor published: title, the section or table that holds the figures, and its address."""

    title: str
    section: str = ""
    address: str = ""


class Match(Struct, frozen=True, kw_only=True):
    """When a detected device is of this architecture.

    `architectures` are other names for it; a processor must be a `machine` and have all `flags`.
    """

    architectures: tuple[str, ...] = ()
    machine: str = ""
    flags: tuple[str, ...] = ()


class Product(Struct, frozen=True, kw_only=True):
    """One product. `device_names` are patterns (* and ?) for the whole name that a driver reports."""

    name: str
    device_names: tuple[str, ...] = ()
    figures: Figures = {}


class CapabilityFile(Struct, frozen=True, kw_only=True):
    """`label` is how texts call it: the packaged name, or the path. `chosen` is the product asked for, if any.

    Empty `title`, `platform` or `vendor`: the packaged file of the architecture says it. `device` identifies the one
    device that was measured ("name", "uuid", "driver", ...).
    """

    label: str
    path: str
    architecture: str
    title: str
    platform: str
    vendor: str
    match: Match = Match()
    documents: dict[str, Document] = {}
    device: dict[str, str] = {}
    figures: Figures = {}
    products: tuple[Product, ...] = ()
    chosen: Product | None = None

    def names_architecture(self, architecture: str) -> bool:
        """Whether a detected architecture is this one."""
        return plain_architecture(architecture) in {self.architecture, *self.match.architectures}


def plain_architecture(architecture: str) -> str:
    """Without the settings that compilers append: "gfx942:sramecc+:xnack-", "sm_90a", "sm_100f"."""
    name = architecture.split(":", 1)[0].strip().lower()
    if name.startswith("sm_") and name[-1] in "af":
        return name[:-1]
    return name

"""A profile taken apart into single values with their provenance, and put together again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import fields

from ...ipc.facts import DeviceCapability, DeviceProfile, Feature, Link, Provenance
from .capability_file import Figures
from .vocabulary import FEATURES, KEYS

_CAPABILITY = "capability."
ARCHITECTURE = "capability.architecture"
_MAPPINGS = {"clocks": dict, "libraries": dict, "rates": dict, "best": dict}
_IDENTITY = ("platform", "vendor", "name", "index")


@dataclass
class ProfileValues:
    """Values by the keys of `DeviceProfile.provenance` ("capability.rates.bfloat16"); later ones replace earlier ones.

    A feature's value is whether the device has it; `links` is one value.
    """

    values: dict[str, object] = field(default_factory=dict)
    provenance: dict[str, Provenance] = field(default_factory=dict)

    def put(self, key: str, value: object, provenance: Provenance) -> None:
        self.values[key] = value
        self.provenance[key] = provenance

    def put_figures(self, figures: Figures) -> None:
        """What a capability file says."""
        for name, entries in figures.items():
            if name == "links":
                links = tuple(Link(to="peers", kind=kind, bandwidth=_float(f.value)) for kind, f in entries.items())
                self.put("links", links, next(iter(entries.values())).provenance)
                continue
            for entry, figure in entries.items():
                self.put(KEYS[name].provenance_key(entry), figure.value, figure.provenance)

    def put_profile(self, profile: DeviceProfile) -> None:
        """What a platform detected: every value that is not left at "unknown"."""
        self._put_struct(profile, "", profile.provenance)
        self._put_struct(profile.capability, _CAPABILITY, profile.provenance)

    def _put_struct(self, struct: DeviceProfile | DeviceCapability, prefix: str, known: dict[str, Provenance]) -> None:
        for each in fields(struct):
            value, key = getattr(struct, each.name), prefix + each.name
            if each.name in ("capability", "provenance"):
                continue
            if each.name == FEATURES:
                for feature in value:
                    self._put_detected(f"{key}.{feature.value}", True, known)
            elif each.name in _MAPPINGS:
                for entry, item in value.items():
                    self._put_detected(f"{key}.{entry}", item, known)
            elif _says_something(each.name, value, each.default) or key in known:
                self._put_detected(key, value, known)

    def _put_detected(self, key: str, value: object, known: dict[str, Provenance]) -> None:
        self.put(key, value, known.get(key, Provenance.DETECTED))

    def drop(self, key: str) -> None:
        self.values.pop(key, None)
        self.provenance.pop(key, None)

    def profile(self) -> DeviceProfile:
        """Identity and architecture must be there."""
        top: dict[str, Any] = {}
        inner: dict[str, Any] = {}
        for key, value in self.values.items():
            in_capability = key.startswith(_CAPABILITY)
            name, _, entry = key.removeprefix(_CAPABILITY).partition(".")
            place = inner if in_capability else top
            if not entry:
                place[name] = value
            elif name != FEATURES:
                place.setdefault(name, {})[entry] = value
            elif value:
                place.setdefault(FEATURES, set()).add(Feature(entry))
        inner[FEATURES] = frozenset(inner.get(FEATURES, ()))
        provenance = {key: each for key, each in self.provenance.items() if key not in _IDENTITY}
        return DeviceProfile(**top, capability=DeviceCapability(**inner), provenance=provenance)


def _says_something(name: str, value: object, default: object) -> bool:
    """A value that equals its field's default is not known to have been detected (an index is)."""
    return name in _IDENTITY or value != default


def _float(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)

"""The profile that a worker serves with, and the line that says what it was made from."""

from __future__ import annotations

from msgspec.structs import replace

from ...ipc.facts import Decision, DeviceProfile
from .capability_file import CapabilityFile, Product, plain_architecture
from .declared import declared_profile, product_decision
from .merging import check_architecture, merged, override_product
from .packaged import file_of_architecture, product_of_profile, read_capability_file

_NAME = "device profile"


def settle_profile(
    detected: DeviceProfile, device_config: str | None, allow_mismatch: bool
) -> tuple[DeviceProfile, Decision]:
    """Raises Refusal for a bad --device-config file, or one of another architecture without --allow-mismatch."""
    override = read_capability_file(device_config) if device_config else None
    architecture = detected.capability.architecture
    if override is not None:
        check_architecture(override, detected, allow_mismatch)
        if not override.names_architecture(architecture):
            architecture = override.architecture
    declared = file_of_architecture(architecture)
    profile = merged(declared, detected, override)
    return profile, Decision(
        name=_NAME,
        value=architecture,
        reason="; ".join(_story(architecture, declared, detected, override)),
        overridden=override is not None,
    )


def declare_profile(device_config: str) -> tuple[DeviceProfile, Decision]:
    """Of a device that is not here. Raises Refusal for a bad file."""
    file = read_capability_file(device_config)
    return declared_profile(file), replace(product_decision(file), name=_NAME)


def _story(
    architecture: str, declared: CapabilityFile | None, detected: DeviceProfile, override: CapabilityFile | None
) -> list[str]:
    if declared is None:
        lacking = f"no capability file is packaged for {architecture}"
        story = [f"{lacking}: detected values only (--device-config FILE can add others)"]
    else:
        story = [f"declared by {_named(declared, product_of_profile(declared, detected))}, then as detected"]
    if override is None:
        return story
    story.append(f"then --device-config {_named(override, override_product(override, detected))}")
    found = plain_architecture(detected.capability.architecture)
    if not override.names_architecture(found):
        story.append(f"the device itself is {found} (--allow-mismatch)")
    measured_on = override.device.get("name")
    if measured_on and measured_on != detected.name:
        story.append(f"its figures were measured on {measured_on}, and this is {detected.name}")
    return story


def _named(file: CapabilityFile, product: Product | None) -> str:
    return file.label if product is None else f"{file.label} ({product.name})"

"""Declared < detected < the user's file: which value counts, and where each one came from."""

from __future__ import annotations

from ...ipc.conditions import Refusal
from ...ipc.facts import DeviceProfile, Feature, Provenance
from .capability_file import CapabilityFile, Product
from .declared import put_file
from .packaged import product_of_profile
from .profile_values import ARCHITECTURE, ProfileValues
from .vocabulary import FEATURES, INSTALLED_FEATURES


def check_architecture(override: CapabilityFile, detected: DeviceProfile, allow_mismatch: bool) -> None:
    """Raises Refusal when the user's file is of another architecture or platform than the device."""
    found = detected.capability.architecture
    other_platform = override.platform not in ("", detected.platform)
    if allow_mismatch or (override.names_architecture(found) and not other_platform):
        return
    declared = f"{override.platform} {override.architecture}" if override.platform else override.architecture
    raise Refusal(
        f"--device-config {override.label} is for architecture {declared}, but {detected.name} is "
        f"{detected.platform} {found}; give a file of {found}, leave the option out, or insist with --allow-mismatch"
    )


def merged(
    declared: CapabilityFile | None, detected: DeviceProfile, override: CapabilityFile | None = None
) -> DeviceProfile:
    """The profile that counts. Both files take their product by the detected name, the override one asked for first.

    What is installed (a compiler, Triton) is as detected, whatever a file says. With an override of another
    architecture (see `check_architecture`) the profile is of that one.
    """
    values = ProfileValues()
    if declared is not None:
        put_file(values, declared, product_of_profile(declared, detected))
    values.put_profile(detected)
    _keep_to_installed(values, detected)
    if override is not None:
        put_file(values, override, override_product(override, detected))
        if not override.names_architecture(detected.capability.architecture):
            values.put(ARCHITECTURE, override.architecture, Provenance.DECLARED)
        _keep_to_installed(values, detected)
    return values.profile()


def override_product(override: CapabilityFile, detected: DeviceProfile) -> Product | None:
    """The product asked for, else the one that the driver's name matches."""
    return override.chosen or product_of_profile(override, detected)


def _keep_to_installed(values: ProfileValues, detected: DeviceProfile) -> None:
    """A file may forbid what is installed; it cannot install."""
    for feature in INSTALLED_FEATURES - detected.capability.features:
        values.drop(_feature_key(feature))


def _feature_key(feature: Feature) -> str:
    return f"capability.{FEATURES}.{feature.value}"

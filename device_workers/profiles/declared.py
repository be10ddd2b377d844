"""The profile of a device that is not here: what its file says, over the packaged one of its architecture."""

from __future__ import annotations

from msgspec.structs import replace

from ...ipc.facts import Decision, DeviceProfile, Provenance
from .capability_file import CapabilityFile, Product
from .complaint import Place
from .packaged import file_of_architecture, product_of, product_of_device
from .profile_values import ARCHITECTURE, ProfileValues


def declared_profile(file: CapabilityFile, product: str | None = None, index: int = 0) -> DeviceProfile:
    """Nothing is detected. `product` goes before the one that the file was chosen with, and that before the first.

    Raises Refusal when the product does not exist, or when nothing says which platform and vendor this is.
    """
    chosen = product_of(_with_products(file), product) if product is not None else declared_product(file)
    return _profile(file, chosen, index)


def architecture_profile(file: CapabilityFile) -> DeviceProfile:
    """What holds for every product of the architecture. Raises Refusal as `declared_profile`."""
    return _profile(file, None, 0)


def declared_product(file: CapabilityFile) -> Product | None:
    """The product asked for; else that of the measured device; else the first one listed; None where there are none."""
    if file.chosen is not None:
        return file.chosen
    products = _with_products(file)
    if name := file.device.get("name"):
        return product_of_device(products, name)
    return products.products[0] if products.products else None


def product_decision(file: CapabilityFile) -> Decision:
    """Which product `declared_profile` takes, and why: to be printed."""
    product = declared_product(file)
    if product is None:
        return Decision(name="device", value=file.label, reason="the file names no product of its architecture")
    value = f"{file.label}: {product.name}"
    if file.chosen is not None:
        return Decision(name="device", value=value, reason="asked for by --device-config", overridden=True)
    if name := file.device.get("name"):
        return Decision(name="device", value=value, reason=f"the file was measured on {name}")
    others = ", ".join(other.name for other in _with_products(file).products if other is not product)
    reason = "the first product of the file" + (f"; --device-config {file.label}:NAME takes {others}" if others else "")
    return Decision(name="device", value=value, reason=reason)


def base_of(file: CapabilityFile) -> CapabilityFile | None:
    """The packaged file that this one changes: that of its architecture, unless this is it."""
    packaged = file_of_architecture(file.architecture)
    return None if packaged is None or packaged.path == file.path else packaged


def put_file(values: ProfileValues, file: CapabilityFile, product: Product | None) -> None:
    """What holds for the architecture, then what holds for the product if it is one of the file's."""
    values.put_figures(file.figures)
    if product is not None and product in file.products:
        values.put_figures(product.figures)


def _with_products(file: CapabilityFile) -> CapabilityFile:
    """The file that has the products: this one, or the packaged one of its architecture."""
    packaged = base_of(file)
    return file if file.products or packaged is None else replace(file, products=packaged.products)


def _profile(file: CapabilityFile, product: Product | None, index: int) -> DeviceProfile:
    base = base_of(file)
    layers = (file,) if base is None else (base, file)
    values = ProfileValues()
    for layer in layers:
        put_file(values, layer, product)
    titles = {layer.label: layer.title for layer in layers if layer.title}
    name = next(reversed(titles.values()), file.architecture) if product is None else device_name(product)
    identity = {
        "platform": _known(file, "platform", [layer.platform for layer in layers]),
        "vendor": _known(file, "vendor", [layer.vendor for layer in layers]),
        "name": file.device.get("name", name),
        "index": index,
        ARCHITECTURE: file.architecture,
    }
    for key, value in identity.items():
        values.put(key, value, Provenance.DECLARED)
    return values.profile()


def device_name(product: Product) -> str:
    """As the driver would report it, where the file gives that exactly."""
    exact = (name for name in product.device_names if "*" not in name and "?" not in name)
    return next(exact, product.name)


def _known(file: CapabilityFile, name: str, found: list[str]) -> str:
    """The last layer that says it."""
    for value in reversed(found):
        if value:
            return value
    raise (
        Place(file.label)
        .key(name)
        .refusal(
            f"is missing, and no packaged file is of architecture {file.architecture}; say which {name} this device has"
        )
    )

"""Which capability file is meant: a packaged name or a path, with a product after a colon; or by architecture."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from msgspec.structs import replace

from ...ipc.conditions import Refusal
from ...ipc.facts import DeviceProfile
from .capability_file import CapabilityFile, Product, plain_architecture
from .complaint import nearest
from .reading import read_file

FOLDER = Path(__file__).parent
_ENDING = ".yaml"
_PART_OF_MEMORY = 0.75  # firmware and error correction take a few per cent
_PART_OF_CORES = 0.4  # some drivers count pairs of compute units


def packaged_names() -> tuple[str, ...]:
    """Names that --device-config takes without a path."""
    return tuple(sorted(path.stem for path in FOLDER.glob(f"*{_ENDING}")))


def read_capability_file(name: str) -> CapabilityFile:
    """`name` is a packaged name or a path, and may end with a product: "hopper", "hopper:H200", "./mine.yaml:H200".

    Raises Refusal.
    """
    whole, product = name, ""
    if ":" in name and not Path(name).expanduser().is_file():
        whole, product = name.rsplit(":", 1)
    file = _read(whole)
    return replace(file, chosen=product_of(file, product)) if product else file


def _read(name: str) -> CapabilityFile:
    if name in packaged_names():
        return read_packaged(name)
    path = Path(name).expanduser()
    if path.is_file():
        return read_file(path, name)
    if path.is_dir():
        raise Refusal(f"{name}: is a folder; --device-config takes a capability file or one of {_listed()}")
    near = nearest(name, packaged_names())
    raise Refusal(f"{name}: there is no such file{near}; --device-config takes a path or one of {_listed()}")


@cache
def read_packaged(name: str) -> CapabilityFile:
    return read_file(FOLDER / f"{name}{_ENDING}", name)


def _listed() -> str:
    return ", ".join(packaged_names())


def product_of(file: CapabilityFile, name: str) -> Product:
    """By name, whatever its capitals, spaces and dashes. Raises Refusal with the names there are."""
    wanted = _plain(name)
    for product in file.products:
        if _plain(product.name) == wanted:
            return product
    names = [product.name for product in file.products]
    if not names:
        raise Refusal(f"{file.label}: has no products, so none is called {name!r}; write --device-config {file.label}")
    raise Refusal(
        f"{file.label}: has no product {name!r}{nearest(name, names)}; "
        f"write --device-config {file.label}:NAME with one of {', '.join(names)}"
    )


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def product_of_device(file: CapabilityFile, device_name: str) -> Product | None:
    """The product whose patterns match the whole name that a driver reports. A slice of a device (MIG) matches none."""
    name = " ".join(device_name.lower().split())
    for product in file.products:
        if any(fnmatchcase(name, pattern.lower()) for pattern in product.device_names):
            return product
    return None


def product_of_profile(file: CapabilityFile, detected: DeviceProfile) -> Product | None:
    """As `product_of_device`, but None for a partition that bears the whole device's name: its rates are not those."""
    product = product_of_device(file, detected.name)
    if product is None:
        return None
    memory, cores = detected.memory_bytes, detected.capability.num_multiprocessors
    is_part = _is_less(memory, product, "memory_bytes", _PART_OF_MEMORY)
    is_part |= _is_less(cores, product, "num_multiprocessors", _PART_OF_CORES)
    return None if is_part else product


def _is_less(found: int | None, product: Product, key: str, share: float) -> bool:
    figure = product.figures.get(key, {}).get("")
    return found is not None and figure is not None and found < share * float(str(figure.value))


def file_of_architecture(architecture: str) -> CapabilityFile | None:
    """The packaged file of a detected architecture, if there is one."""
    name = plain_architecture(architecture)
    for file in _packaged_that_say(name):
        if file.names_architecture(name):
            return file
    return None


def processor_files(machine: str) -> tuple[CapabilityFile, ...]:
    """Those of a kind of processor ("x86_64", "aarch64"), the most demanding first."""
    if not machine:
        return ()
    files = [file for file in _packaged_that_say(machine) if file.match.machine == machine]
    return tuple(sorted(files, key=lambda file: -len(file.match.flags)))


def _packaged_that_say(word: str) -> Iterator[CapabilityFile]:
    """Only files whose text holds the word are worth a parse."""
    for name in packaged_names():
        if word in (FOLDER / f"{name}{_ENDING}").read_text(encoding="utf-8"):
            yield read_packaged(name)

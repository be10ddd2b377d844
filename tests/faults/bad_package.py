"""A package with one bad kernel, made on the spot and found by its entry point."""

import shutil
from pathlib import Path

from trimaran.tests.contract_suite.site import Site, make_site

HERE = Path(__file__).parent


class BadPackage:
    """`environment` makes a server see it; `strike` begins a fault under load."""

    def __init__(self, folder: Path, kernel: str, fault: str, *, recorded: bool = False) -> None:
        self.kernel = kernel
        self.implementation = f"bad_{kernel}"
        self._trigger = folder / "struck"
        self._code = folder / "site" / "bad_kernels"
        self._site: Site = make_site(folder / "site")
        self._site.declare("bad-kernels", {"trimaran.kernels": {"bad": "bad_kernels:KERNELS"}})
        self._code.mkdir()
        shutil.copy(HERE / "faulty_kernels.py", self._code / "offers.py")
        self.write(fault, recorded=recorded)

    def write(self, fault: str, *, recorded: bool = False) -> None:
        """Another version of the package's code."""
        shutil.rmtree(self._code / "__pycache__", ignore_errors=True)
        call = f"offer({self.kernel!r}, {fault!r}, {str(self._trigger)!r}, recorded={recorded})"
        (self._code / "__init__.py").write_text(f"from .offers import offer\n\nKERNELS = {call}\n")

    @property
    def environment(self) -> dict[str, str]:
        return self._site.environment

    def strike(self) -> None:
        """From its next call on the kernel fails."""
        self._trigger.touch()

"""A cache folder and one bad kernel over it, for tests that start again, also in other processes."""

import json
from pathlib import Path

from trimaran.ipc.facts import DeviceCapability, DeviceProfile, Problem
from trimaran.kernels.implementation import DeclaredImplementation, FunctionKernel, Kernel, Services
from trimaran.kernels.registry import Registry
from trimaran.kernels.verification import VerdictCache, Verifier

CPU = DeviceProfile(
    platform="cpu", vendor="any", name="a CPU", driver="1", capability=DeviceCapability(architecture="x86_64")
)
PROBLEM = Problem(dtype="float32", head_dim=48, num_heads=2, num_kv_heads=1, block_size=16, hidden_size=96)
SERVICES = Services()


class Shelf:
    """A cache folder, and the registry of each new start over it: `bad` goes before `plain`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.warnings: list[str] = []
        self.num_loads = 0
        self.error: Exception | None = RuntimeError("it does not compile\nand pages more")
        self.bad = DeclaredImplementation(name="bad", kernel="twist", loader=self._load_bad)
        self.plain = DeclaredImplementation(name="plain", kernel="twist", loader=load_plain)

    def _load_bad(self, profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
        self.num_loads += 1
        if self.error is not None:
            raise self.error
        return FunctionKernel(lambda: None)

    def verifier(self) -> Verifier:
        return Verifier({"twist": self.plain}, VerdictCache(self.folder, self.warnings.append))

    def load(self, profile: DeviceProfile = CPU, problem: Problem = PROBLEM) -> dict[str, str]:
        """One start: what is demoted."""
        verifier = self.verifier()
        _, resolution = Registry((self.bad, self.plain), None, verifier).load("twist", profile, problem, SERVICES)
        return dict(resolution.demoted)

    def verdicts(self) -> dict[str, str]:
        found: dict[str, str] = json.loads((self.folder / "kernel-verdicts.json").read_text())
        return found


def load_plain(profile: DeviceProfile, problem: Problem, services: Services) -> Kernel:
    return FunctionKernel(lambda: None)

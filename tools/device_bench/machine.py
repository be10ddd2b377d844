"""On what a measurement ran: host, device, versions. What cannot be read is left out."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def host() -> dict[str, object]:
    found: dict[str, object] = {"cores": os.cpu_count()}
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            found["cpu"] = line.partition(":")[2].strip()
            break
    found["gpus"] = _said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    return found


def versions(peer: Path | None) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    drivers = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    if drivers:
        found["driver"] = drivers[0]
    if peer is not None:
        found["vllm"] = next(
            (d.version for d in importlib.metadata.distributions(name="vllm", path=[str(peer)])), "unknown"
        )
    return found


def commit() -> str:
    """Of the tree this file is in; empty where that is no clone."""
    return _said("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD") if (ROOT / ".git").exists() else ""


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

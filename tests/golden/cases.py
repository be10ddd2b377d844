"""Whose explanations are kept under tests/golden/explain, and how they are made.

python tests/golden/cases.py     writes them anew, for review by hand
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

GOLDEN = Path(__file__).parent / "explain"
DEVICES = Path(__file__).parent / "devices"
SHAPES = Path(__file__).parents[1] / "shapes"
MODELS = ("llama-3.1-8b", "qwen3-0.6b")
CASES = {
    "h200": "hopper:H200",
    "a100": "ampere:A100 SXM 80GB",
    "rtx4090": "ada",
    "rtx5090": "blackwell_sm120",
    "mi300x": "gfx942:MI300X",
    "rx7900xtx": "gfx1100",
    "max1550": "xe_hpc:Max 1550 (one stack)",
    "arc_a770": "arc:A770",
    "ascend_card": "./ascend_card.yaml",
    "apple_laptop": "./apple_laptop.yaml",
    "amx_server": "./amx_server.yaml",
    "arm_server": "./arm_server.yaml",
}


def explained(model: str, device: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One run of the real command, with an empty cache, no terminal, and its files here."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRIMARAN_")}
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "trimaran.frontend.launch.commands", "explain", str(SHAPES / model)]
        options = ["--device-config", device, "--cache-dir", cache, *arguments]
        return subprocess.run(
            [*command, *options], capture_output=True, text=True, timeout=60, env=inherited, cwd=DEVICES, check=False
        )


def text_of(model: str, device: str) -> str:
    """What a user reads: the tables, or the refusal."""
    done = explained(model, device)
    return done.stdout + done.stderr


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for model in MODELS:
        for name, device in CASES.items():
            (GOLDEN / f"{model}-{name}.txt").write_text(text_of(model, device))


if __name__ == "__main__":
    main()

"""Decode steps on the example platform, in a process of its own: prints as JSON what each of them moved and ran."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from trimaran.device_workers.contract_suite.tiny_model import Continuation, Driver, start

NUM_STEPS = 6


def main(folder: str) -> dict[str, Any]:
    engine = start("example", Path(folder))
    from trimaran_example.device import counts, held_bytes

    driver = Driver(engine)
    sequences = [Continuation(row, list(range(3 + row, 12 + 4 * row))) for row in range(3)]
    driver.step([(sequence, len(sequence.tokens)) for sequence in sequences])
    steps, held = [], []
    for _ in range(NUM_STEPS):
        before = counts.copy()
        driver.step([(sequence, 1) for sequence in sequences])
        steps.append(dict(counts - before))
        held.append(held_bytes())
    return {"steps": steps, "held": held, "accelerator": str(torch.accelerator.current_accelerator())}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))

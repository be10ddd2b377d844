"""What the clients ask: random lengths, a JSONL file, or prompts that share prefixes."""

import json
import random
from pathlib import Path

from msgspec import Struct

from ...ipc.conditions import Refusal


class Ask(Struct, frozen=True):
    """One request: a prompt as text or token ids, and how many tokens to make."""

    prompt: str | list[int]
    output_tokens: int
    ignore_eos: bool = True


class Workload(Struct, frozen=True, kw_only=True):
    """How to make asks. Lengths in tokens; `range_ratio` r spreads a length over [1 - r, 1 + r] times itself."""

    kind: str = "random"
    num_prompts: int = 100
    input_len: int = 512
    output_len: int = 128
    range_ratio: float = 0.0
    dataset_path: str | None = None
    num_prefixes: int = 8
    prefix_len: int = 256
    vocab_size: int = 32_000
    seed: int = 0


def make_asks(workload: Workload) -> list[Ask]:
    """The asks, in order. Raises Refusal for a kind or a file that cannot serve."""
    generator = random.Random(workload.seed)
    match workload.kind:
        case "random":
            return [
                Ask(_tokens(generator, workload, _length(generator, workload, workload.input_len)), output)
                for output in _outputs(generator, workload)
            ]
        case "prefix":
            return _shared_prefixes(generator, workload)
        case "jsonl":
            return _from_file(workload)
    raise Refusal(f"no such dataset: {workload.kind!r}; choose random, prefix or jsonl")


def _length(generator: random.Random, workload: Workload, length: int) -> int:
    low, high = length * (1 - workload.range_ratio), length * (1 + workload.range_ratio)
    return max(1, generator.randint(int(low), int(high)))


def _outputs(generator: random.Random, workload: Workload) -> list[int]:
    return [_length(generator, workload, workload.output_len) for _ in range(workload.num_prompts)]


def _tokens(generator: random.Random, workload: Workload, length: int) -> list[int]:
    return [generator.randrange(workload.vocab_size // 4, workload.vocab_size * 3 // 4) for _ in range(length)]


def _shared_prefixes(generator: random.Random, workload: Workload) -> list[Ask]:
    prefixes = [_tokens(generator, workload, workload.prefix_len) for _ in range(workload.num_prefixes)]
    return [
        Ask(generator.choice(prefixes) + _tokens(generator, workload, workload.input_len), output)
        for output in _outputs(generator, workload)
    ]


def _from_file(workload: Workload) -> list[Ask]:
    """Each line an object with `prompt` (text or token ids) and perhaps `output_tokens`."""
    if workload.dataset_path is None:
        raise Refusal("the jsonl dataset needs --dataset-path FILE")
    path = Path(workload.dataset_path)
    if not path.is_file():
        raise Refusal(f"no such file: {path}")
    asks = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompt = entry["prompt"]
        except (ValueError, KeyError, TypeError) as error:
            raise Refusal(f'{path}:{number} is not an object with a "prompt": {error!r}') from None
        chosen = entry.get("output_tokens")
        asks.append(Ask(prompt, int(chosen or workload.output_len), ignore_eos=chosen is not None))
        if len(asks) == workload.num_prompts:
            break
    if not asks:
        raise Refusal(f"{path} holds no prompts")
    return asks

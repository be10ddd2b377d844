"""Prompts of real text for the demo model: some alike at the start, lengths on both sides of block borders."""

from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer

LENGTHS = (3, 9, 15, 16, 17, 24, 31, 32, 33, 40, 47, 48, 49, 57, 64, 65, 73, 80, 96, 113)
NUM_ALIKE = 6
ALIKE_TOKENS = 40


@cache
def demo_prompts(folder: Path) -> tuple[tuple[int, ...], ...]:
    """Twenty prompts; the last `NUM_ALIKE` share their first `ALIKE_TOKENS` tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = sorted(name for name in topics if len(topics[name]) > 900)[: len(LENGTHS)]
    texts = [tokenizer.encode(topics[name]).ids for name in names]
    prompts = [tuple(text[:length]) for text, length in zip(texts, LENGTHS, strict=True)]
    alike = texts[0][200 : 200 + ALIKE_TOKENS]
    return (
        *prompts[:-NUM_ALIKE],
        *((*alike, *prompt[: len(prompt) - ALIKE_TOKENS]) for prompt in prompts[-NUM_ALIKE:]),
    )


def chat_prompt(folder: Path, text: str) -> list[int]:
    """A user's turn as the demo model's template writes it."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    turns = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return list(tokenizer.encode(turns).ids)

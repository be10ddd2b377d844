"""A model written as GGUF and converted gives the logits of the original; its tokenizer cuts as the original would."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from trimaran.device_workers.weights.from_gguf.conversion import Told, converted

from ..gguf_files import TOKENS, byte_level_tokenizer, random_weights, write_gguf

QUIET = Told(lambda fraction, what: None, lambda text: None)
SPACE = "▁"


@pytest.mark.user_pain("L1")
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("scaling", ["none", "linear", "yarn"])
def test_logits_equal_those_of_the_original(tmp_path: Path, architecture: str, scaling: str) -> None:
    metadata: dict[str, Any] = {}
    if scaling != "none":
        metadata = {"rope.scaling.type": scaling, "rope.scaling.factor": 4.0}
        metadata["rope.scaling.original_context_length"] = 128
    weights = random_weights(architecture, tied=False)
    path = write_gguf(tmp_path / "m.gguf", architecture, weights, metadata=metadata)
    folder = converted(path, tmp_path / "cache", QUIET)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert model.dtype == torch.float32
    original = type(model)(model.config)
    original.load_state_dict({name: torch.from_numpy(weight) for name, weight in weights.items()}, strict=True)
    ids = torch.tensor([random.Random(0).choices(range(len(TOKENS)), k=200)])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, original.eval()(ids).logits, rtol=0, atol=0)
    assert model.config.rope_parameters["rope_type"] == ("default" if scaling == "none" else scaling)
    assert AutoTokenizer.from_pretrained(folder, local_files_only=True).chat_template is not None


def byte_level(tmp_path: Path, pre: str, **more: Any) -> Tokenizer:
    """A tokenizer with one token per byte and a single merge."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<s>", *sorted(ByteLevel.alphabet()), "aa"]
    settings = byte_level_tokenizer(pre) | {
        "ggml.tokens": tokens,
        "ggml.token_type": [3, *[1] * 257],
        "ggml.merges": ["a a"],
        "ggml.bos_token_id": 0,
        "ggml.eos_token_id": 0,
        **more,
    }
    path = write_gguf(tmp_path / f"{pre}.gguf", "llama", random_weights("llama"), tokenizer=settings)
    return Tokenizer.from_file(str(converted(path, tmp_path / "cache", QUIET) / "tokenizer.json"))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    assert tokenizer.pre_tokenizer is not None
    return [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "it's 1234", ["it", "'s", " ", "1", "2", "3", "4"]),
        ("gpt-2", "it's 1234  x", ["it", "'s", " 1234", " ", " x"]),
        ("default", "DON'T", ["DON", "'", "T"]),
        ("llama-bpe", "DON'T 12345\n\n x_y", ["DON", "'T", " ", "123", "45", "\n\n", " x", "_y"]),
        ("llama3", "it's", ["it", "'s"]),
        ("qwen2", "DON'T 123\n(x)", ["DON", "'T", " ", "1", "2", "3", "\n", "(x", ")"]),
    ],
)
def test_pre_tokenizers_cut_as_their_models_were_trained(
    tmp_path: Path, pre: str, text: str, expected: list[str]
) -> None:
    assert pieces(byte_level(tmp_path, pre), text) == expected


def test_begin_tokens_follow_the_file_and_then_the_family(tmp_path: Path) -> None:
    def begins(pre: str, **more: Any) -> bool:
        return byte_level(tmp_path, pre, **more).encode("x").tokens[0] == "<s>"

    assert begins("llama-bpe")
    assert not begins("qwen2")
    assert begins("gpt-2", **{"ggml.add_bos_token": True})
    assert not begins("llama3", **{"ggml.add_bos_token": False})


def test_qwen2_composes_characters(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, "qwen2")
    assert tokenizer.decode(tokenizer.encode("e\u0301").ids) == "\u00e9"


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe"])
def test_every_text_comes_back(tmp_path: Path, pre: str) -> None:
    tokenizer = byte_level(tmp_path, pre)
    for text in ["", " ", "a  b\t\n", "naïve café", "日本語 🙂👍🏽", "1 22 333 4444", "\r\n\r\n x"]:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


# SentencePiece


PIECES = {"th": -2.0, "the": -1.0, f"{SPACE}t": -1.5, f"{SPACE}the": -0.5, "he": -0.8, "re": -3.0, f"{SPACE}a": -0.9}
SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, SPACE, *"aehrt"]
SPM_SCORES = [0.0] * 259 + [*PIECES.values(), *[-10.0 - i for i in range(6)]]
SPM_TYPES = [2, 3, 3, *[6] * 256, *[1] * (len(PIECES) + 6)]


def sentence_piece(tmp_path: Path, **more: Any) -> Tokenizer:
    settings = {
        "ggml.model": "llama",
        "ggml.tokens": SPM_TOKENS,
        "ggml.scores": SPM_SCORES,
        "ggml.token_type": SPM_TYPES,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
        **more,
    }
    path = write_gguf(tmp_path / "spm.gguf", "llama", random_weights("llama"), tokenizer=settings)
    return Tokenizer.from_file(str(converted(path, tmp_path / "cache", QUIET) / "tokenizer.json"))


def merged_by_score(text: str) -> list[str]:
    """SentencePiece's rule, done naively: join the adjacent pair that scores highest, the leftmost of equals."""
    scores = dict(zip(SPM_TOKENS, SPM_SCORES, strict=True))
    symbols = list(SPACE + text.replace(" ", SPACE))
    while True:
        joins = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not joins:
            break
        at = min(joins)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [
        s if s in scores else f"<0x{byte:02X}>" for s in symbols for byte in (s.encode() if s not in scores else b"x")
    ]


def test_sentence_piece_merges_by_score(tmp_path: Path) -> None:
    tokenizer = sentence_piece(tmp_path)
    draw = random.Random(7)
    for _ in range(300):
        text = "".join(draw.choices(["a", "e", "h", "r", "t", " ", "the", "é", "🙂"], k=draw.randint(1, 12)))
        encoding = tokenizer.encode(text)
        assert encoding.tokens == ["<s>", *merged_by_score(text)], text
        assert tokenizer.decode(encoding.ids) == text


def test_sentence_piece_without_the_space_in_front(tmp_path: Path) -> None:
    tokenizer = sentence_piece(tmp_path, **{"ggml.add_space_prefix": False, "ggml.add_bos_token": False})
    assert tokenizer.encode("the the").tokens == ["the", f"{SPACE}the"]
    assert tokenizer.decode(tokenizer.encode("the the").ids) == "the the"


@pytest.mark.model
def test_the_demo_s_tokenizer_cuts_digits_and_spaces_as_in_training(demo_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo_folder / "tokenizer.json"))
    assert tokenizer.encode("a  2 b").tokens == ["a", "ĠĠ", "2", "Ġb"]
    assert tokenizer.encode("12").tokens == ["1", "2"]

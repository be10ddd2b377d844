"""The tokenizer that a GGUF file carries, as tokenizer.json and tokenizer_config.json.

Two families: byte-level BPE (`gpt2`), whose pre-tokenizer the file only names, and SentencePiece BPE (`llama`), whose
merges follow from the scores.
"""

from typing import Any

from msgspec import Struct
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from .source import Refused, Source

# llama.cpp's token types.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "▁"

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class PreTokenizer(Struct, frozen=True):
    """How text is cut before merging. Without a pattern, GPT-2's own rule applies."""

    pattern: str | None = None
    single_digits: bool = False
    ignore_merges: bool = False
    composes: bool = False
    adds_bos: bool = False


LLAMA3 = PreTokenizer(pattern=_WORDS + r"\p{N}{1,3}" + _REST, ignore_merges=True, adds_bos=True)
QWEN2 = PreTokenizer(pattern=_WORDS + r"\p{N}" + _REST, composes=True)
GPT2 = PreTokenizer()
PRE_TOKENIZERS = {
    "default": GPT2,
    "gpt-2": GPT2,
    "smollm": PreTokenizer(single_digits=True),
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
}


def tokenizer_of(source: Source) -> Tokenizer:
    """The file's tokenizer.

    Raises:
        Refused: a family or pre-tokenizer that is not supported; `--tokenizer` is the way round.
    """
    family = source.need("tokenizer.ggml.model")
    if family == "gpt2":
        tokenizer, adds_bos = _byte_level(source)
    elif family == "llama":
        tokenizer, adds_bos = _sentence_piece(source), True
    else:
        raise Refused(_unsupported(source, f"tokenizer {family!r}", ["gpt2", "llama"]))
    tokenizer.add_special_tokens(_added(source, CONTROL, special=True))
    tokenizer.add_tokens(_added(source, USER_DEFINED, special=False))
    _add_bos_and_eos(tokenizer, source, adds_bos)
    return tokenizer


def tokenizer_config_of(source: Source, context_length: int) -> dict[str, Any]:
    """tokenizer_config.json: special tokens by text, the chat template, and the longest input."""
    tokens = source.need("tokenizer.ggml.tokens")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token = source.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None and token < len(tokens):
            config[f"{role}_token"] = tokens[token]
    config["model_max_length"] = context_length
    config["clean_up_tokenization_spaces"] = False
    if source.has("tokenizer.chat_template"):
        config["chat_template"] = source.get("tokenizer.chat_template")
    return config


def other_chat_templates_of(source: Source) -> dict[str, str]:
    """Chat templates beside the default one, by name."""
    names = source.get("tokenizer.chat_templates", [])
    found = {str(name): source.get(f"tokenizer.chat_template.{name}") for name in names}
    return {name: text for name, text in found.items() if isinstance(text, str)}


def warning_of(source: Source) -> str | None:
    """What a user should know about a file that names no pre-tokenizer."""
    if source.get("tokenizer.ggml.model") == "gpt2" and source.get("tokenizer.ggml.pre", "default") == "default":
        return (
            f"{source.paths[0].name} names no pre-tokenizer; GPT-2's is assumed, and text may be cut otherwise than in "
            "training. Pass --tokenizer with the original tokenizer.json to be sure."
        )
    return None


def _byte_level(source: Source) -> tuple[Tokenizer, bool]:
    name = source.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise Refused(_unsupported(source, f"pre-tokenizer {name!r}", sorted(PRE_TOKENIZERS)))
    pre = PRE_TOKENIZERS[name]
    merges = [_pair(merge) for merge in source.need("tokenizer.ggml.merges")]
    try:
        model = models.BPE(vocab=_vocabulary(source), merges=merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # all that the library raises for merges that do not fit the vocabulary
        raise Refused(_unsupported(source, f"tokenizer ({error})", sorted(PRE_TOKENIZERS))) from None
    tokenizer = Tokenizer(model)
    if pre.composes:
        tokenizer.normalizer = normalizers.NFC()
    cuts: list[pre_tokenizers.PreTokenizer] = []
    if pre.single_digits:
        cuts.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.pattern is not None:
        cuts.append(pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"))
    bytes_of_text = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=pre.pattern is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_of_text]) if cuts else bytes_of_text
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.adds_bos


def _sentence_piece(source: Source) -> Tokenizer:
    vocabulary = _vocabulary(source)
    scores = source.need("tokenizer.ggml.scores")
    types = source.need("tokenizer.ggml.token_type")
    tokens = source.need("tokenizer.ggml.tokens")
    unknown = source.get("tokenizer.ggml.unknown_token_id", 0)
    mergeable = {
        token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind in (NORMAL, UNUSED)
    }
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges_from_scores(mergeable, vocabulary),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    to_text: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if source.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(SPACE))
        to_text.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(to_text)
    return tokenizer


def merges_from_scores(scores: dict[str, float], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Merges in order of preference: SentencePiece joins the adjacent pair whose joint piece scores highest."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                ranked.append((-score, vocabulary[left], vocabulary[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_bos_and_eos(tokenizer: Tokenizer, source: Source, adds_bos: bool) -> None:
    tokens = source.need("tokenizer.ggml.tokens")
    first = source.get("tokenizer.ggml.bos_token_id") if source.get("tokenizer.ggml.add_bos_token", adds_bos) else None
    last = source.get("tokenizer.ggml.eos_token_id") if source.get("tokenizer.ggml.add_eos_token", False) else None
    added = [int(token) for token in (first, last) if token is not None]
    if not added:
        return
    before = [tokens[first]] if first is not None else []
    after = [tokens[last]] if last is not None else []
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)],
        special_tokens=[(tokens[token], token) for token in added],
    )


def _vocabulary(source: Source) -> dict[str, int]:
    return {token: index for index, token in enumerate(source.need("tokenizer.ggml.tokens"))}


def _added(source: Source, wanted: int, *, special: bool) -> list[AddedToken]:
    tokens, types = source.need("tokenizer.ggml.tokens"), source.get("tokenizer.ggml.token_type", [])
    return [
        AddedToken(token, special=special, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind == wanted
    ]


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _unsupported(source: Source, what: str, supported: list[str]) -> str:
    return (
        f"{source.paths[0].name}: the {what} is not supported. Supported: {', '.join(supported)}. "
        "Pass --tokenizer with the original tokenizer.json or its folder."
    )

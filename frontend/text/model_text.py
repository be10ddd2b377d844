"""What a frontend knows of one model: its tokenizer, template, default sampling and end tokens."""

from pathlib import Path
from typing import Any

from msgspec import Struct

from ...ipc.conditions import Refusal
from .detokenizer import DetokenizerFactory
from .embedding_text import EmbeddingText
from .judge import Judge
from .template import ChatTemplate, TemplateRefusal, find_template
from .tokenizer import Tokenizer, read_json


class SamplingDefaults(Struct, frozen=True, kw_only=True):
    """What generation_config.json says where a request says nothing; None: the API's own default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class ModelText:
    """Loaded once per model directory; immutable afterwards."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        defaults: SamplingDefaults,
        end_token_ids: tuple[int, ...],
        embedding: EmbeddingText | None = None,
        judge: Judge | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.defaults = defaults
        self.end_token_ids = end_token_ids
        self.embedding = embedding or EmbeddingText()
        self.judge = judge
        self.detokenizers = DetokenizerFactory(tokenizer)

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        chat_template: str | None = None,
        generation_defaults: bool = True,
        matryoshka: bool = False,
        reranker: bool = False,
    ) -> "ModelText":
        """Read everything from a model directory; `chat_template` is a template or a path to one. Raises Refusal."""
        tokenizer = Tokenizer.load(directory)
        generation = read_json(directory / "generation_config.json")
        source = _template_source(chat_template) or find_template(
            directory, read_json(directory / "tokenizer_config.json")
        )
        try:
            template = ChatTemplate(source, tokenizer) if source else None
        except TemplateRefusal as error:
            raise Refusal(f"{error}; pass another with --chat-template") from error
        defaults = _defaults(generation) if generation_defaults else SamplingDefaults()
        model = read_json(directory / "config.json")
        judge = Judge.of(template, tokenizer) if reranker else None
        embedding = EmbeddingText.load(directory, matryoshka=matryoshka)
        return cls(tokenizer, template, defaults, _end_token_ids(generation, model, tokenizer), embedding, judge)


def _template_source(option: str | None) -> str | None:
    if option is None:
        return None
    if "{" in option or "\n" in option:
        return option
    path = Path(option)
    if not path.is_file():
        raise Refusal(f"the chat template file {option} does not exist; --chat-template takes a path or a template")
    return path.read_text(encoding="utf-8")


def _defaults(generation: dict[str, Any]) -> SamplingDefaults:
    known = {name: _number(generation.get(name)) for name in SamplingDefaults.__struct_fields__}
    top_k = known.pop("top_k")
    return SamplingDefaults(**known, top_k=None if top_k is None else int(top_k))


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _end_token_ids(generation: dict[str, Any], model: dict[str, Any], tokenizer: Tokenizer) -> tuple[int, ...]:
    named = generation.get("eos_token_id", model.get("eos_token_id"))
    listed = named if isinstance(named, list) else [named]
    ids = [id for id in listed if isinstance(id, int) and not isinstance(id, bool)]
    return tuple(dict.fromkeys([*ids, *tokenizer.end_ids()]))

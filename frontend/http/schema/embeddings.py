"""Vectors of texts, and what is computed from them: scores and rankings."""

from typing import Any, Literal

from msgspec import Struct

from ...client.embedder import EncodingWishes
from .generation import Priority

TextInput = str | list[int | str | list[int]]
"""A text, texts, one text's token ids, or several texts' token ids."""


class VectorFields(Struct, kw_only=True):
    """How texts are read, the same for every route that makes vectors."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: Priority | None = None
    user: str | None = None

    def wishes(self, *, prompt_name: str | None = None, prompt: str | None = None) -> EncodingWishes:
        """For the texts of this request."""
        return EncodingWishes(truncate_to=self.truncate_prompt_tokens, prompt_name=prompt_name, prompt=prompt)


class EmbeddingRequest(VectorFields, kw_only=True):
    """POST /v1/embeddings and /pooling. `prompt_name` names one of the model's own prompts, `prompt` is a text that
    goes before each input. `normalize`: to length 1 (true) or as the model leaves it (false).
    """

    input: TextInput
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    prompt: str | None = None
    messages: Any = None  # from here on refused; see unsupported.VECTORS
    instruction: Any = None
    input_type: Any = None
    task: Any = None
    add_special_tokens: Any = None
    late_chunking: Any = None


class ScoreRequest(VectorFields, kw_only=True):
    """POST /v1/score: one text against each of several, or several pairs."""

    text_1: str | list[str]
    text_2: str | list[str]
    instruction: str | None = None


class RerankDocument(Struct, frozen=True, omit_defaults=True):
    """A document that is more than its text: only the text counts."""

    text: str


class RerankRequest(VectorFields, kw_only=True):
    """POST /v1/rerank."""

    query: str
    documents: list[str | RerankDocument]
    top_n: int | None = None
    return_documents: bool | None = None
    instruction: str | None = None


class VectorUsage(Struct, frozen=True):
    """Tokens read; a vector has none of its own."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Struct, frozen=True, kw_only=True):
    """One text's vector: numbers, or little-endian float32 in base64."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class Embeddings(Struct, frozen=True, kw_only=True):
    """In the order of the inputs."""

    data: list[Embedding]
    model: str
    usage: VectorUsage
    object: Literal["list"] = "list"


class Pooled(Struct, frozen=True, kw_only=True):
    """One text's vector as the model left it."""

    index: int
    data: list[float] | str
    object: Literal["pooling"] = "pooling"


class PoolingAnswer(Struct, frozen=True, kw_only=True):
    """In the order of the inputs."""

    id: str
    created: int
    model: str
    data: list[Pooled]
    usage: VectorUsage
    object: Literal["list"] = "list"


class Score(Struct, frozen=True, kw_only=True):
    """How near two texts are."""

    index: int
    score: float
    object: Literal["score"] = "score"


class Scores(Struct, frozen=True, kw_only=True):
    """In the order of the pairs."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: VectorUsage
    object: Literal["list"] = "list"


class RerankResult(Struct, frozen=True, kw_only=True):
    """One document with its place in the request. `document` is null unless it was asked for."""

    index: int
    relevance_score: float
    document: RerankDocument | None = None


class Ranking(Struct, frozen=True, kw_only=True):
    """The best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: VectorUsage

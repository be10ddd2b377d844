"""How a reranker that answers yes or no is asked about a query and a document (the Qwen3-Reranker form)."""

from msgspec import Struct

from ...ipc.conditions import Refusal
from .template import ChatTemplate
from .tokenizer import Tokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_ARGUMENTS = {"enable_thinking": False}


class Judge(Struct, frozen=True):
    """The words are those the model was trained with; its chat template puts the rest around them."""

    template: ChatTemplate
    tokenizer: Tokenizer
    yes_id: int
    no_id: int

    @classmethod
    def of(cls, template: ChatTemplate | None, tokenizer: Tokenizer) -> "Judge":
        """Raises Refusal for a model that cannot be asked."""
        if template is None:
            raise Refusal("--reranker needs a chat template, and the model has none; pass one with --chat-template")
        yes, no = (tokenizer.encode(answer, add_special_tokens=False) for answer in ("yes", "no"))
        if len(yes) != 1 or len(no) != 1:
            raise Refusal("--reranker needs a model whose tokenizer has a token for yes and one for no; leave it out")
        return cls(template, tokenizer, yes[0], no[0])

    def encode(self, query: str, document: str, instruction: str | None) -> list[int]:
        """Ids of the question. Control-token text in it stays text. Raises TemplateRefusal."""
        asked = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": asked}]
        return self.tokenizer.encode_rendered(self.template.render(messages, arguments=_ARGUMENTS))

"""Where a prompt leaves a model that may reason, and what that means for its answer's constraint and budget."""

from enum import Enum, auto

from msgspec import structs

from ...ipc.sampling import Grammar, ThoughtLimit
from ..parsing.reasoning_parser import ReasoningFormat
from ..text.tokenizer import Tokenizer
from .refusals import RequestRefused


class Thinking(Enum):
    """Where a prompt leaves a model that may reason."""

    FREE = auto()  # it may begin with reasoning
    BEGUN = auto()  # the prompt has opened it
    OVER = auto()  # the prompt has closed it, or the answer is already being written


def thinking_after(rendered: str, continued: str | None, form: ReasoningFormat | None) -> Thinking:
    """`continued`: the message that the answer goes on with."""
    if form is None:
        return Thinking.OVER
    if continued is not None:
        if continued.rfind(form.start) > continued.rfind(form.end):
            return Thinking.BEGUN
        return Thinking.FREE if not continued.strip() else Thinking.OVER
    end = rendered.rstrip()
    if end.endswith(form.start):
        return Thinking.BEGUN
    return Thinking.OVER if end.endswith(form.end) else Thinking.FREE


def behind_reasoning(
    grammar: Grammar, form: ReasoningFormat | None, tokenizer: Tokenizer, thinking: Thinking
) -> Grammar:
    """The same grammar for the answer alone, where reasoning comes before it."""
    if form is None or thinking is Thinking.OVER:
        return grammar
    start, end = (tuple(tokenizer.encode(tag, add_special_tokens=False)) for tag in form.tags)
    if thinking is Thinking.BEGUN:
        return structs.replace(grammar, starts_after=end)
    return structs.replace(grammar, starts_after=end, opened_by=start[0]) if len(start) == 1 else grammar


def thought_limit(
    budget: int | None, form: ReasoningFormat | None, tokenizer: Tokenizer, thinking: Thinking
) -> ThoughtLimit | None:
    """None: nothing is to be limited. Raises RequestRefused."""
    if budget is None:
        return None
    if form is None:
        raise RequestRefused(
            "thinking_token_budget: this model's chat template does not show how it reasons; leave it out, or start "
            "the server with --reasoning-parser",
            param="thinking_token_budget",
        )
    if thinking is Thinking.OVER:
        return None
    start, end = (tokenizer.encode(tag, add_special_tokens=False) for tag in form.tags)
    if len(start) > 1 or len(end) > 1:
        raise RequestRefused(
            f"thinking_token_budget: this model has no tokens for {form.start} and {form.end}, so their place in the "
            "answer is not known to the engine; leave it out",
            param="thinking_token_budget",
        )
    return ThoughtLimit(max_tokens=budget, end_id=end[0], start_id=start[0] if thinking is Thinking.FREE else None)

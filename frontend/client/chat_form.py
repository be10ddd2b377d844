"""What a chat asks of its answer beside sampling, and how the answer is read: the same over HTTP and offline."""

from msgspec import Struct, structs

from ..parsing.answer_parser import AnswerParser
from ..parsing.choosing import Parsers
from ..text.tokenizer import Tokenizer
from .generation import GenerationRequest, SequenceOutput
from .parsed_choice import ParsedChoice
from .thinking import Thinking, behind_reasoning, thought_limit
from .tool_use import ToolUse


class ChatForm(Struct, frozen=True):
    """`parsers` are the model's; `use` is of the request's tools; `thinking` is where the prompt leaves the model."""

    parsers: Parsers
    use: ToolUse
    thinking: Thinking

    @property
    def may_call(self) -> bool:
        """Whether text may hold calls."""
        return bool(self.use.names)

    @property
    def is_parsed(self) -> bool:
        """Whether text may hold reasoning or calls."""
        return self.may_call or self.parsers.reasoning_format is not None

    def parser(self) -> AnswerParser:
        """A new one, for one choice."""
        return AnswerParser(
            self.parsers.tool_format if self.may_call else None,
            self.use.names,
            self.parsers.reasoning_format,
            is_open=self.thinking is Thinking.BEGUN,
        )

    def open_choice(self, sequence: SequenceOutput, *, shows_reasoning: bool = True) -> ParsedChoice:
        """One choice that is collected."""
        return ParsedChoice(self.parser(), sequence, is_single=self.use.is_single, shows_reasoning=shows_reasoning)

    def asked(self, request: GenerationRequest, tokenizer: Tokenizer, budget: int | None) -> GenerationRequest:
        """The request with what belongs to this form; `budget` of reasoning tokens. Raises RequestRefused."""
        constraint, reasoning = self.use.constraint, self.parsers.reasoning_format
        request = structs.replace(
            request,
            kept_controls=self.parsers.kept(with_tools=self.may_call),
            thought=thought_limit(budget, reasoning, tokenizer, self.thinking),
        )
        if constraint is None:
            return request
        return structs.replace(
            request,
            grammar=behind_reasoning(constraint.grammar, reasoning, tokenizer, self.thinking),
            grammar_field=constraint.field,
        )

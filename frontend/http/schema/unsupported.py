"""Fields that would change the output and that this server does not honour yet: refused by name.

A field listed here passes only with a value that asks for nothing. Fields listed nowhere pass unread.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, structs

from ...client.constraints import ConstraintFields
from ...client.refusals import RequestRefused

# name: values that ask for nothing, besides null
GENERATION: Mapping[str, tuple[Any, ...]] = {
    "guided_decoding_backend": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "grammar": (),
    "stop_regex": (),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "typical_p": (1,),
    "mirostat": (0,),
    "return_tokens_as_token_ids": (False,),
    "prompt_embeds": (),
    "lora_path": (),
}
CHAT: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning": (),
    "reasoning_effort": (),
    "thinking": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "mm_processor_kwargs": ({},),
    "echo": (False,),
    "add_special_tokens": (False,),
}
VECTORS: Mapping[str, tuple[Any, ...]] = {
    "messages": (),
    "instruction": ("",),
    "input_type": (),
    "task": (),
    "add_special_tokens": (True,),
    "late_chunking": (False,),
}
COMPLETIONS: Mapping[str, tuple[Any, ...]] = {"suffix": ("",), "thinking_token_budget": ()}


class UnsupportedInGeneration(ConstraintFields, kw_only=True):
    """See GENERATION."""

    guided_decoding_backend: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    grammar: Any = None
    stop_regex: Any = None
    logits_processors: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    typical_p: Any = None
    mirostat: Any = None
    return_tokens_as_token_ids: Any = None
    prompt_embeds: Any = None
    lora_path: Any = None


def refuse_unsupported(request: Struct, *tables: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises RequestRefused naming the first field that asks for something."""
    given = structs.asdict(request)
    for table in tables:
        for name, harmless in table.items():
            value = given.get(name)
            if value is not None and value not in harmless:
                raise RequestRefused(f"{name} is not supported by this server; leave it out", param=name)

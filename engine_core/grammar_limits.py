"""How much one grammar may cost: in its trial, and then in every step."""

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

TRIAL_STACK_BYTES = 2 << 20
"""A trial runs on a stack this small, the core on larger ones: what overflows a stack does so in the trial."""
STACK_BYTES = 64 << 20
TRIAL_MEMORY_BYTES = 512 << 20
_MAX_LEXER_STATES = 50_000  # of 1 to 2 kB, over all answers by one grammar


def parser_limits() -> LLParserLimits:
    """Bounds on the work for one mask, a few hundredths of a second, and on what a grammar's states may take."""
    return LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)


def compiled(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """The grammar at its beginning, its first mask computed once. To be asked for its error."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        first = matcher.deep_copy()
        words = ctypes.create_string_buffer(mask_bytes(tokenizer.vocab_size))
        first.unsafe_compute_mask_ptr(ctypes.addressof(words), len(words))
        if first.is_error():
            return first
    return matcher


def mask_bytes(num_tokens: int) -> int:
    """Of one row of packed bits, in words of 32."""
    return -(-num_tokens // 32) * 4


def roomy_thread(name: str) -> ThreadPoolExecutor:
    """One thread whose stack holds whatever a trial's did."""
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
    before = threading.stack_size(STACK_BYTES)
    try:
        executor.submit(int).result()  # the thread starts with the stack size of this moment
    finally:
        threading.stack_size(before)
    return executor

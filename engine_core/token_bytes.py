"""What each token is as bytes, as grammars need it: it comes from a frontend, and goes to the compiler by memory."""

import os
from typing import Any

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper
from msgspec import Struct

from ..ipc.messages import Decoder, encode

_NO_TEXT = b"\xff"  # begins what is no text: no UTF-8 holds this byte, so no grammar over text allows the token


class _Head(Struct, frozen=True, tag="vocabulary"):
    num_tokens: int
    control_ids: tuple[int, ...]
    end_ids: tuple[int, ...]


_HEAD: Decoder[_Head] = Decoder(_Head)


class TokenBytes:
    """`joined` holds the bytes of all tokens by id, `lengths` how many each has (int32)."""

    def __init__(
        self,
        joined: bytes,
        lengths: "np.ndarray[Any, Any]",
        *,
        control_ids: tuple[int, ...] = (),
        end_ids: tuple[int, ...],
    ) -> None:
        assert int(lengths.sum()) == len(joined), "the lengths of tokens do not add up"
        assert end_ids, "a vocabulary for grammars needs an end token"
        self.joined = joined
        self.lengths = lengths
        self.control_ids = control_ids
        self.end_ids = end_ids

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def of(
        cls, tokens: list[bytes], *, control_ids: tuple[int, ...] = (), end_ids: tuple[int, ...] = ()
    ) -> "TokenBytes":
        """From each token's bytes."""
        lengths = np.array([len(token) for token in tokens], np.int32)
        return cls(b"".join(tokens), lengths, control_ids=control_ids, end_ids=end_ids)

    def tokenizer(self) -> LLTokenizer:
        """As llguidance takes it. Holds the interpreter lock: half a second for 150,000 tokens."""
        vocabulary = _Vocabulary(self)
        vocabulary.tokenizer = LLTokenizer(TokenizerWrapper(vocabulary))
        return vocabulary.tokenizer

    def share(self) -> int:
        """A descriptor of memory that holds it all, for `read`."""
        head = encode(_Head(len(self), self.control_ids, self.end_ids))
        descriptor = os.memfd_create("trimaran-vocabulary")
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(len(head).to_bytes(4, "little") + head + self.lengths.astype("<i4").tobytes() + self.joined)
        return descriptor

    @classmethod
    def read(cls, descriptor: int) -> "TokenBytes":
        """What `share` wrote, in another process."""
        content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        begin = 4 + int.from_bytes(content[:4], "little")
        head = _HEAD.decode(content[4:begin])
        end = begin + 4 * head.num_tokens
        lengths = np.frombuffer(content[begin:end], "<i4")
        return cls(content[end:], lengths, control_ids=head.control_ids, end_ids=head.end_ids)

    def tokens(self) -> list[bytes]:
        """Each token's bytes; those of control tokens marked as no text."""
        ends = np.cumsum(self.lengths)
        joined = self.joined
        tokens = [joined[begin:end] for begin, end in zip((ends - self.lengths).tolist(), ends.tolist(), strict=True)]
        for id in {*self.control_ids, *self.end_ids}:
            tokens[id] = _NO_TEXT + tokens[id]
        return tokens


class _Vocabulary:
    """The attributes by which llguidance reads a vocabulary."""

    bos_token_id = None

    def __init__(self, vocabulary: TokenBytes) -> None:
        self.tokens = vocabulary.tokens()
        self.special_token_ids = sorted({*vocabulary.control_ids, *vocabulary.end_ids})
        self.eos_token_id = vocabulary.end_ids[0]
        self.tokenizer: LLTokenizer | None = None

    def __call__(self, text: bytes | str) -> list[int]:
        """Some tokens of a text. Masks depend on its bytes alone."""
        if self.tokenizer is None:
            return []
        return self.tokenizer.greedy_tokenize(text if isinstance(text, str) else text.decode("utf-8", "replace"))

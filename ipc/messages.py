"""The shape of every message on a socket, and how bytes become one.

The wire is a closed set of tagged structs: each direction has one union and one decoder. Foreign bytes raise
`MalformedMessage` and are dropped by the channel; nothing is ever built from a name that came over the wire.
"""

from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from .conditions import TrimaranError


class MalformedMessage(TrimaranError):
    """Bytes that are no message of this direction."""


class Message(Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of all wire messages. Fields are appended with defaults, never reordered."""


_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Struct) -> bytes:
    """One message as msgpack."""
    return _ENCODER.encode(message)


T = TypeVar("T")


class Decoder(Generic[T]):
    """Decodes one direction's union of messages."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)

    def decode(self, frame: bytes | memoryview) -> T:
        """Raises MalformedMessage for anything outside the union."""
        try:
            return self._decoder.decode(frame)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise MalformedMessage(str(error)) from None

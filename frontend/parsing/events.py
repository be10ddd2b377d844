"""What the parsers find, in the order in which the model wrote it."""

from collections.abc import Iterable

from msgspec import Struct


class Said(Struct, frozen=True, gc=False):
    """Text of the answer."""

    text: str


class Thought(Struct, frozen=True, gc=False):
    """Text of the reasoning."""

    text: str


class CallBegun(Struct, frozen=True, gc=False):
    """A tool call; its arguments follow."""

    name: str


class CallArguments(Struct, frozen=True, gc=False):
    """More of the JSON text of the arguments of the call that was begun last."""

    text: str


class CallEnded(Struct, frozen=True, gc=False):
    """The arguments are a whole JSON object. A call without this event was cut by a limit."""


class CallBroken(Struct, frozen=True, gc=False):
    """The call that was begun last was none, for its arguments are no JSON. What was written of it follows as text."""


Event = Said | Thought | CallBegun | CallArguments | CallEnded | CallBroken


def joined(events: Iterable[Event]) -> list[Event]:
    """The same with neighbours of a kind as one: equal for every chunking of one text."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        match last, event:
            case Said(), Said():
                found[-1] = Said(last.text + event.text)
            case Thought(), Thought():
                found[-1] = Thought(last.text + event.text)
            case CallArguments(), CallArguments():
                found[-1] = CallArguments(last.text + event.text)
            case _:
                found.append(event)
    return found

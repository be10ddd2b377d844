"""Parts an answer into text and tool calls, by one family's format."""

import re
from collections.abc import Collection
from functools import lru_cache

from .call_reader import CallReader
from .events import Event, Said
from .source import Source, Steps, tag_begun
from .tool_formats import ToolFormat

_SPACE = " \t\n\r"


class ToolParser:
    """White space before a call and behind the last one is dropped, and so are the tags of calls. All else is text."""

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        self._format = form
        self._source = Source()
        self._reader = CallReader(self._source, names)
        self._tag_end = 0
        self._steps = self._run()

    def feed(self, text: str) -> list[Event]:
        """What this text adds."""
        self._source.text += text
        return self._advanced()

    def end(self, *, was_cut: bool) -> list[Event]:
        """What is left, now that nothing follows. `was_cut`: a limit ended the text, not the model."""
        self._source.is_ended, self._reader.was_cut = True, was_cut
        return self._advanced()

    def _advanced(self) -> list[Event]:
        next(self._steps, None)
        events, self._reader.events = self._reader.events, []
        return events

    def _run(self) -> Steps[None]:
        source, reader = self._source, self._reader
        yield from self._format.at_start(reader)
        if not reader.num_begun:
            source.at = 0
        self._say_broken(0, is_first=reader.num_begun == 1)
        while (tag := (yield from self._next_tag())) is not None:
            begin, end, num_begun = source.at, self._tag_end, reader.num_begun
            source.at = end
            yield from self._format.after(tag, reader)
            if reader.num_begun == num_begun:
                self._say(source.text[begin:end])
                source.at = end
            self._say_broken(begin, is_first=reader.num_begun == num_begun + 1)

    def _say_broken(self, begin: int, *, is_first: bool) -> None:
        """A call that is none, as text: with what comes before it from `begin` on, if no call was good there."""
        reader = self._reader
        if reader.broken_at is not None:
            self._say(self._source.text[begin if is_first else reader.broken_at : self._source.at])
            reader.num_begun -= 1
            reader.broken_at = None

    def _next_tag(self) -> Steps[str | None]:
        """Say what comes before the next opening tag; the place is then before the white space before it."""
        source, reader = self._source, self._reader
        while True:
            tags = (*self._format.openers, *reader.owed)
            found = _pattern(tags).search(source.text, source.at) if tags else None
            if found is not None and found[0] in self._format.openers:
                self._say_until(found.start())
                self._tag_end = found.end()
                return found[0]
            if found is not None:
                self._say_until(found.start())
                reader.owed.remove(found[0])
                source.at = found.end()
                continue
            self._say_until(len(source.text) - tag_begun(source.text[source.at :], tags))
            source.drop_taken()
            if not (yield from source.more()):
                self._say_rest()
                return None

    def _say_until(self, end: int) -> None:
        """All but the white space before `end`, of which it is not known yet what follows."""
        source = self._source
        text = source.text[source.at : end].rstrip(_SPACE)
        self._say(text)
        source.at += len(text)

    def _say_rest(self) -> None:
        rest = self._source.text[self._source.at :]
        is_markup = self._reader.num_begun and (
            not rest.strip(_SPACE) or any(tag.startswith(rest.strip(_SPACE)) for tag in self._reader.owed)
        )
        if not is_markup:
            self._say(rest)

    def _say(self, text: str) -> None:
        if text:
            self._reader.events.append(Said(text))


@lru_cache(256)
def _pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tags)))

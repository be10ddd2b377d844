"""`python -m trimaran.device_workers.weights.from_gguf FILE CACHE [--without-tokenizer]`: converts, in lines.

Lines on stdout, each a word and its text: `progress FRACTION WHAT`, `warning TEXT`, and last `done FOLDER` (exit 0) or
`refused TEXT` (exit 2). A process of its own, since the supervisor's loop must not do this work.
"""

import sys
from pathlib import Path

from .conversion import Told, converted
from .source import Refused


class Lines:
    """Progress as lines, one per hundredth."""

    def __init__(self) -> None:
        self._last = ""

    def progress(self, fraction: float, what: str) -> None:
        line = f"progress {fraction:.2f} {what}"
        if line != self._last:
            self._last = line
            print(line, flush=True)

    def warning(self, text: str) -> None:
        print(f"warning {_one_line(text)}", flush=True)


def main(arguments: list[str]) -> int:
    with_tokenizer = "--without-tokenizer" not in arguments
    match [argument for argument in arguments if argument != "--without-tokenizer"]:
        case [file, cache]:
            pass
        case _:
            print("usage: python -m trimaran.device_workers.weights.from_gguf FILE CACHE [--without-tokenizer]")
            return 2
    lines = Lines()
    told = Told(lines.progress, lines.warning)
    try:
        folder = converted(Path(file).absolute(), Path(cache).absolute(), told, with_tokenizer=with_tokenizer)
    except Refused as refusal:
        print(f"refused {_one_line(str(refusal))}", flush=True)
        return 2
    print(f"done {folder}", flush=True)
    return 0


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

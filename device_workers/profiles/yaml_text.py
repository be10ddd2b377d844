"""YAML as plain values, with the mistakes that YAML lets pass (a key twice) named by line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ipc.conditions import Refusal

if TYPE_CHECKING:
    import yaml

_MAX_BYTES = 1 << 20


def read_yaml(path: Path, label: str) -> object:
    """The content of a file. Raises Refusal that names the file, the line and the cure."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise Refusal(f"{label}: this file has more than {_MAX_BYTES} bytes; a capability file has a few thousand")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"{label}: cannot be read ({error}); give a capability file that this user can read") from None
    return parse_yaml(text, label)


def parse_yaml(text: str, label: str) -> object:
    """Raises Refusal."""
    import yaml  # 25 ms

    loader = _loader()(text)
    try:
        return loader.get_single_data()
    except yaml.YAMLError as error:
        raise Refusal(f"{label}: not YAML: {_story(error)}; see docs/capability-files.md for the format") from None
    except RecursionError:
        raise Refusal(f"{label}: nested too deeply for a capability file") from None
    finally:
        loader.dispose()


def _story(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"line {mark.line + 1}: {problem}" if mark is not None else str(problem)


def _loader() -> Any:
    """A safe loader that refuses a key given twice."""
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C is ten times as fast

    class UniqueKeys(base):  # type: ignore[misc]
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
            seen: dict[object, int] = {}
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                line = key_node.start_mark.line + 1
                if not isinstance(key, str):
                    raise yaml.constructor.ConstructorError(
                        problem=f"the key {key!r} is not a text (quote it)", problem_mark=key_node.start_mark
                    )
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"{key!r} is given twice, first in line {seen[key]}; keep one of them",
                        problem_mark=key_node.start_mark,
                    )
                seen[key] = line
            return dict(super().construct_mapping(node, deep=deep))

    return UniqueKeys

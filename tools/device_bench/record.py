"""The file of figures: one entry for each group, replaced by a later run of that group alone."""

import json
import os
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read(path: Path) -> Record:
    """Empty where there is no file yet."""
    if not path.is_file():
        return {}
    found = json.loads(path.read_text())
    if not isinstance(found, dict):
        raise SystemExit(f"{path}: holds no record of figures; name another file")
    return found


def merged(record: Record, group: str, entry: Record) -> Record:
    """With this group's entry; the other groups as they were, in the order of names."""
    return dict(sorted({**record, group: entry}.items()))


def merge(path: Path, group: str, entry: Record) -> Record:
    """Into the file, which is whole at every moment."""
    record = merged(read(path), group, entry)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(beside, path)
    return record

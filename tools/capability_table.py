"""The table of packaged files in docs/capability-files.md: `python tools/capability_table.py --write` renews it."""

import sys
from pathlib import Path

from trimaran.device_workers.profiles.packaged import packaged_names, read_capability_file

PAGE = Path(__file__).resolve().parent.parent / "docs" / "capability-files.md"
BEGIN = "<!-- begin: written by tools/capability_table.py -->\n"
END = "<!-- end -->\n"


def table() -> str:
    lines = ["| file | architecture | what | products |", "|---|---|---|---|"]
    for name in packaged_names():
        file = read_capability_file(name)
        products = ", ".join(product.name for product in file.products)
        lines.append(f"| `{name}` | `{file.architecture}` | {file.title} | {products} |")
    return "\n".join(lines) + "\n"


def renewed(page: str) -> str:
    """The page with the table as it must be."""
    head, rest = page.split(BEGIN)
    tail = rest.split(END)[1]
    return head + BEGIN + table() + END + tail


def main() -> int:
    page = PAGE.read_text()
    wanted = renewed(page)
    if "--write" in sys.argv[1:]:
        PAGE.write_text(wanted)
    elif page != wanted:
        print(f"{PAGE.name} is not as the files are; run python tools/capability_table.py --write")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

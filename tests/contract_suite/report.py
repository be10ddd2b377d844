"""What a run of the contract suite printed, by section."""

import re


class Report:
    """Clauses that were kept; the first lines of each broken one; declines with their reasons; what was not judged."""

    def __init__(self, output: str) -> None:
        self.output = output
        self.kept = self._section("kept")
        self.broken = self._by_name("broken clauses")
        self.declined = self._by_name("declined: a decline is not a pass")
        self.not_judged = self._section("not judged")

    def _section(self, title: str) -> list[str]:
        found = re.search(rf"^=+ {re.escape(title)} =+\n(.*?)^=+ ", self.output, re.M | re.S)
        return [] if found is None else [line for line in found.group(1).splitlines() if line]

    def _by_name(self, title: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for line in self._section(title):
            name, _, text = line.partition(": ")
            found[name] = f"{found[name]}\n{text}" if name in found else text
        return found

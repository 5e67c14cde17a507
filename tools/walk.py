"""Refresh the lines of a walk: `python tools/walk.py docs/architecture.md`.

A hop is a path under podium/, a line and, in parentheses, the name of what is defined there. The line follows from the
name; a name that is not defined in its file any more is told, and the walk has to be mended by hand.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

HOP = re.compile(r"`([\w/]+\.py):(\d+)` \(`([\w.]+)`\)")


def line_of(path: str, name: str) -> int | None:
    """Where `name`, or `Class.name`, is defined."""
    owner, _, member = name.rpartition(".")
    inside = not owner
    for number, line in enumerate(Path("podium", path).read_text().splitlines(), 1):
        if owner and re.match(rf"class {owner}\b", line):
            inside = True
        elif inside and re.match(rf"\s*(def|class) {member}\b", line):
            return number
    return None


def refreshed(text: str) -> tuple[str, list[str]]:
    """The text with its lines as they are now, and hops that lead nowhere."""
    gone = []

    def now(hop: re.Match[str]) -> str:
        path, _, name = hop.groups()
        line = line_of(path, name) if Path("podium", path).exists() else None
        if line is None:
            gone.append(f"{path}: {name}")
            return hop[0]
        return f"`{path}:{line}` (`{name}`)"

    return HOP.sub(now, text), gone


def main(paths: list[str]) -> int:
    status = 0
    for path in map(Path, paths):
        text, gone = refreshed(path.read_text())
        path.write_text(text)
        for hop in gone:
            print(f"{path}: {hop} is not defined there")
        status |= bool(gone)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

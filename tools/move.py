"""Move modules and rewrite their names wherever they are written: `python tools/move.py podium.flat=podium.engine.flat`

An entry names a module or a package, old and new; `@FILE` reads entries from a file, one per line. Files go by
`git mv`. Dotted names and paths are changed in all text that git tracks. An entry for part of a package wins over the
entry of the package.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TEXT = {".py", ".md", ".toml", ".txt", ".cfg", ".yml", ".html", ""}
KEEP = ("docs/log.md", "CHANGELOG.md")  # what was, under the names of its time


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True, timeout=60).stdout


def path_of(dotted: str) -> str:
    return dotted.replace(".", "/")


def modules(entries: dict[str, str]) -> dict[str, str]:
    """Every file that moves, old to new."""
    moves: dict[str, str] = {}
    for old, new in sorted(entries.items(), key=lambda entry: -len(entry[0])):  # parts before the whole
        place = Path(path_of(old))
        if place.is_dir():
            for file in sorted(git("ls-files", str(place)).splitlines()):
                moves.setdefault(file, path_of(new) + file[len(str(place)) :])
        elif place.with_suffix(".py").is_file():
            moves.setdefault(f"{place}.py", path_of(new) + ".py")
        else:
            raise SystemExit(f"move: {old} must be a module or a package, there is no {place}.py and no {place}/")
    return moves


def move(moves: dict[str, str]) -> None:
    taken = {new for new in moves.values() if Path(new).exists() and new not in moves}
    if taken:
        raise SystemExit(f"move: these are there already: {sorted(taken)}")
    staged = {old: f"{old}.moving" for old in moves}  # so that names can be exchanged
    for old, between in staged.items():
        git("mv", old, between)
    for old, between in staged.items():
        Path(moves[old]).parent.mkdir(parents=True, exist_ok=True)
        git("mv", between, moves[old])
    for folder in {Path(new).parent for new in moves.values()}:
        while folder.parts and folder.parts[0] == "podium" and not (folder / "__init__.py").exists():
            (folder / "__init__.py").touch()
            git("add", str(folder / "__init__.py"))
            folder = folder.parent


DOTTED = re.compile(r"(?<![\w./])(?:podium|tests)(?:\.\w+)+")
PATH = re.compile(r"(?:(?<![\w/])|(?<=\./))(?:podium|tests)(?:/\w+)+")
FROM = re.compile(r"^([ \t]*)from ((?:podium|tests)[\w.]*) import ([\w, ]+?)(\s*#.*)?$", re.MULTILINE)


def renames(moves: dict[str, str], entries: dict[str, str]) -> dict[str, str]:
    """New dotted names by old ones."""
    names = dict(entries)
    for old, new in moves.items():
        if old.endswith(".py"):
            names[dotted(old)] = dotted(new)
    return names


def dotted(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def renamed(name: str, names: dict[str, str]) -> str:
    """A dotted name whose longest known beginning is exchanged."""
    parts = name.split(".")
    for count in range(len(parts), 1, -1):
        known = names.get(".".join(parts[:count]))
        if known is not None:
            return ".".join([known, *parts[count:]])
    return name


def rewritten(text: str, names: dict[str, str]) -> str:
    def imported(found: re.Match[str]) -> str:
        indent, package, wanted, comment = found.groups()
        by_parent: dict[str, list[str]] = {}
        for entry in wanted.split(","):
            name, _, alias = entry.strip().partition(" as ")
            home, _, new = names.get(f"{package}.{name}", f"{renamed(package, names)}.{name}").rpartition(".")
            alias = alias or ("" if new == name else name)
            by_parent.setdefault(home, []).append(f"{new} as {alias}" if alias else new)
        rows = [f"{indent}from {home} import {', '.join(parts)}" for home, parts in sorted(by_parent.items())]
        return "\n".join(MARK + row for row in rows) + (comment or "")

    text = FROM.sub(imported, text)
    text = "\n".join(
        line[len(MARK) :] if line.startswith(MARK) else DOTTED.sub(lambda found: renamed(found[0], names), line)
        for line in text.split("\n")
    )
    return PATH.sub(lambda found: renamed(found[0].replace("/", "."), names).replace(".", "/"), text)


MARK = "\x00"  # a line that is done


def rewrite(names: dict[str, str]) -> int:
    count = 0
    for file in git("ls-files").splitlines():
        path = Path(file)
        if path.suffix not in TEXT or file.startswith(KEEP) or path.is_symlink() or file.startswith("tools/"):
            continue
        try:
            before = path.read_text()
        except UnicodeDecodeError:
            continue
        after = rewritten(before, names)
        if after != before:
            path.write_text(after)
            count += 1
    return count


def main(arguments: list[str]) -> int:
    lines = [line for a in arguments for line in (Path(a[1:]).read_text().split() if a.startswith("@") else [a])]
    entries = dict(line.split("=") for line in lines)
    moves = modules(entries)
    move(moves)
    print(f"{len(moves)} files moved, {rewrite(renames(moves, entries))} changed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Rename words: `python tools/rename.py tools/words/sweeps.toml` changes names in code, and words in text.

The file has three tables: `files` (`in`: patterns), `names` (identifiers, whole) and `prose` (words in docstrings,
comments, messages and Markdown). In an f-string, what stands in braces is code.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path


def replace(text: str, table: dict[str, str]) -> str:
    """Whole words only, the longest first."""
    if not table:
        return text
    words = "|".join(re.escape(word) for word in sorted(table, key=len, reverse=True))
    return re.sub(rf"(?<!\w)(?:{words})(?!\w)", lambda found: table[found[0]], text)


def string(text: str, names: dict[str, str], prose: dict[str, str]) -> str:
    prefix = text[: len(text) - len(text.lstrip("rbfuRBFU"))].lower()
    if "f" not in prefix:
        return replace(text, prose)
    parts = re.split(r"(\{\{|\}\}|\{[^{}]*\})", text)
    return "".join(replace(p, names) if re.match(r"\{[^{]", p) else replace(p, prose) for p in parts)


def code(text: str, names: dict[str, str], prose: dict[str, str]) -> str:
    """A Python file, token by token; what lies between tokens stays."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    out, done = [], 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            new = names.get(token.string, token.string)
        elif token.type == tokenize.STRING:
            new = string(token.string, names, prose)
        elif token.type == tokenize.COMMENT:
            new = replace(token.string, prose)
        else:
            continue
        begin, end = starts[token.start[0] - 1] + token.start[1], starts[token.end[0] - 1] + token.end[1]
        out += [text[done:begin], new]
        done = end
    return "".join(out) + text[done:]


def main(paths: list[str]) -> int:
    for path in paths:
        entry = tomllib.loads(Path(path).read_text())
        listed = subprocess.run(["git", "ls-files", *entry["files"]["in"]], check=True, capture_output=True, text=True)
        count = 0
        for name in listed.stdout.splitlines():
            before = Path(name).read_text()
            if name.endswith(".py"):
                after = code(before, entry.get("names", {}), entry.get("prose", {}))
            else:
                after = replace(before, entry.get("prose", {}))
            if after != before:
                Path(name).write_text(after)
                count += 1
        print(f"{path}: {count} files changed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

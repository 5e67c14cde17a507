"""Walks through the code, as docs/architecture.md has them, lead to what is there."""

from __future__ import annotations

from pathlib import Path

from tools.walk import HOP, line_of, refreshed

PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"


def test_every_hop_of_a_walk_is_defined_in_its_file() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert HOP.search(text)
    _, gone = refreshed(text)
    assert not gone, "mend the walk in docs/architecture.md"


def test_a_name_may_say_its_class() -> None:
    lines = Path("podium/servers/shard.py").read_text(encoding="utf-8").splitlines()
    number = line_of("servers/shard.py", "Shard.step")
    assert number is not None and "def step" in lines[number - 1]
    assert any(line.startswith("class Shard") for line in lines[:number])
    assert line_of("servers/shard.py", "Shard.nothing") is None

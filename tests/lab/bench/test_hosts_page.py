"""docs/performance.md quotes what docs/bench-hosts.json holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[3] / "docs"
RECORD = json.loads((DOCS / "bench-hosts.json").read_text())
NAMES = {"wide-mlp": "wide perceptron, 25 M", "cifar10-resnet20": "ResNet-20"}


def row_of_page(row: dict[str, Any]) -> str:
    """A line of the page's table of steps."""
    link = f"{row['gbits']:g} Gbit/s" if row["gbits"] else "not shaped"
    times = [row["step_ms"][name]["median"] for name in ("podium", "podium_tls", row["against"], "ddp_tuned")]
    floor = row["step_ms"]["barrier_only"]["median"]
    cells = [NAMES[row["task"]], str(row["ranks_per_host"]), link, *(f"{ms:.0f}" for ms in (*times, floor))]
    return "| " + " | ".join([*cells, quoted(row), quoted(row["ratio_to_fastest_ddp"])]) + " |"


def quoted(found: dict[str, Any]) -> str:
    low, high = found["ratio_interval"]
    return f"{found['ratio']:.2f} ({low:.2f}–{high:.2f})"


def start_of_page(row: dict[str, Any]) -> str:
    seconds = row["seconds"]
    return f"| {row['launcher']} | {seconds['median']:.1f} ({seconds['min']:.1f}–{seconds['max']:.1f}) |"


@pytest.mark.parametrize("line", [*map(row_of_page, RECORD["rows"]), *map(start_of_page, RECORD["start_up"])])
def test_the_page_has_the_row(line: str) -> None:
    assert line in (DOCS / "performance.md").read_text().splitlines()


def test_two_ranks_have_done_the_same_work_to_the_bit() -> None:
    """Two numbers add alike in any order; with four ranks, training makes the difference in rounding larger."""
    assert {row["difference"] for row in RECORD["rows"] if row["ranks_per_host"] == 1} == {0.0}

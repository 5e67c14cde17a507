"""docs/long-runs.md quotes what docs/soak.jsonl holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[3] / "docs"


def runs(version: str) -> list[dict[str, Any]]:
    lines = (DOCS / "soak.jsonl").read_text().splitlines()
    return [arm for line in lines if (run := json.loads(line))["version"] == version for arm in run["arms"]]


def slope(arm: dict[str, Any], what: str) -> float:
    return next(float(row["per_step"]) for row in arm["rows"] if row["what"] == what)


def test_what_a_run_need_not_keep_is_flat_now_and_was_not_before() -> None:
    assert all(arm["holds"] for arm in runs("now"))
    assert not any(arm["holds"] for arm in runs("before"))


def test_the_page_quotes_the_recorded_slopes() -> None:
    page = (DOCS / "long-runs.md").read_text()
    (leaking,) = [arm for arm in runs("before") if slope(arm, "disk of server snapshots") > 1]
    assert f"{slope(leaking, 'memory of rank 2'):.0f} [183, 198]" in page
    assert f"{slope(leaking, 'disk of server snapshots'):.1f}" in page
    for arm in runs("now"):
        assert f"{slope(arm, 'disk of records'):.0f}" in page
        assert f"for {arm['records']:,}" in page

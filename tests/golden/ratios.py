"""Podium's speed beside its peers while code moves: ratios of `podium bench`, held against ratios.json.

    podium bench step --peers ddp --json > step.json
    podium bench ps --peers rpc --json > ps.json
    podium bench collectives --peers gloo --json > collectives.json
    podium bench sweep --json > sweep.json
    python tests/golden/ratios.py step.json ps.json collectives.json sweep.json           compare; 1 where one differs
    python tests/golden/ratios.py --write step.json ps.json collectives.json sweep.json   make ratios.json anew
    python tests/golden/ratios.py --turns FOLDER                                          make turns.json

A machine is faster on some days. So where two trees are compared, each bench runs on both in turns on one day, and
FOLDER holds its documents as BENCH-before-K.json and BENCH-after-K.json; turns.json has the ratios of all readings.

A ratio is of medians in one run, with the 95 % interval that the bench gives; of a sweep, with the range of its rounds.
Two readings differ where their intervals do not touch. An idle machine is asked for: ratios move with its load.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FILE, TURNS = (Path(__file__).with_name(name) for name in ("ratios.json", "turns.json"))


class Ratio(NamedTuple):
    """How Podium compares with a peer, and how sure that is."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g})"

    def touches(self, other: Ratio) -> bool:
        return self.low <= other.high and other.low <= self.high


def of_step(document: dict[str, Any]) -> Iterator[tuple[str, Ratio]]:
    for row in document["rows"]:
        yield f"step {row['task']}: time over DDP's", Ratio(row["ratio"], *row["ratio_interval"])


def of_ps(document: dict[str, Any]) -> Iterator[tuple[str, Ratio]]:
    for row in document["rows"]:
        name = f"ps {row['payload']}: round trips per second over the fastest peer's"
        yield name, Ratio(row["vs_fastest_peer"], *row["vs_fastest_peer_interval"])


def of_collectives(document: dict[str, Any]) -> Iterator[tuple[str, Ratio]]:
    for nbytes, ratio in document["vs_gloo"].items():
        yield (
            f"collectives {nbytes} bytes: gloo's time over Podium's",
            Ratio(ratio, *document["vs_gloo_interval"][nbytes]),
        )


def of_sweep(document: dict[str, Any]) -> Iterator[tuple[str, Ratio]]:
    cells: dict[tuple[str, int], dict[str, list[float]]] = {}
    for row in document["rows"]:
        if row["rounds_us"]:
            cells.setdefault((row["task"], row["trials"]), {})[row["executor"]] = row["rounds_us"]
    for (task, trials), arms in cells.items():
        one, fused = arms.get("eager"), arms.get("fused")
        if one and fused:
            median = statistics.median(one) / statistics.median(fused)
            ratio = Ratio(median, min(one) / max(fused), max(one) / min(fused))
            yield f"sweep {task}, {trials} trials: one by one over fused", ratio


READ = {"step": of_step, "ps": of_ps, "collectives": of_collectives, "sweep": of_sweep}


def by_turns(folder: Path) -> dict[str, dict[str, list[Ratio]]]:
    """By what is measured and tree: its ratios, one per reading."""
    found: dict[str, dict[str, list[Ratio]]] = {}
    for path in sorted(folder.glob("*-*-*.json")):
        bench, tree, _ = path.stem.split("-")
        for name, ratio in READ[bench](json.loads(path.read_text())):
            found.setdefault(name, {}).setdefault(tree, []).append(ratio)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", nargs="*", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--turns", type=Path)
    arguments = parser.parse_args()
    if arguments.turns is not None:
        turns = by_turns(arguments.turns)
        TURNS.write_text(json.dumps(turns, indent=1) + "\n")
        for name, trees in turns.items():
            print(name, *(f"{tree}: {', '.join(map(str, ratios))}" for tree, ratios in trees.items()), sep="\n  ")
        return 0
    documents = [json.loads(path.read_text()) for path in arguments.documents]
    now = {name: ratio for document in documents for name, ratio in READ[document["bench"]](document)}
    if arguments.write:
        FILE.write_text(json.dumps(now, indent=1) + "\n")
        return 0
    then = {name: Ratio(*values) for name, values in json.loads(FILE.read_text()).items()}
    apart = 0
    for name, ratio in now.items():
        before = then.get(name)
        same = before is None or before.touches(ratio)
        apart += not same
        mark = "  " if same else "! "
        print(f"{mark}{name}: {before or '–'} before, {ratio} now")
    print(f"{len(now) - apart} of {len(now)} within noise")
    return 1 if apart else 0


if __name__ == "__main__":
    raise SystemExit(main())

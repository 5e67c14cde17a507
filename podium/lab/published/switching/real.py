"""The page of the runs with real processes, from `switching-real.jsonl` alone.

    python -m podium.lab.published.switching.real docs/studies

The rows were taken from a comparison by `podium compare`, whose command the page holds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from podium.errors import ConfigError
from podium.lab.published.switching.text import listed, table
from podium.lab.report.format import ABSENT, plain, spread
from podium.lab.report.links import INTERVALS, Records, mark, place, to
from podium.lab.stats.statistics import mean_interval
from podium.lab.study.store import Row, Store, write_whole

BASE = "all-reduce"
NAME = "switching-real"
_CLUSTER = "../../examples/clusters/one-slow-of-three-100mbit.toml"
_COMMAND = r"""podium compare digits-cnn -n 3 --launcher shaped \
    --cluster examples/clusters/one-slow-of-three-100mbit.toml --batch-size 192 --epochs 40 \
    --seeds 3 --set threads=1 --strategy all-reduce --strategy strategy-switch \
    --strategy parameter-server:mode=async,servers=3,placement=colocated"""


def draw(out: Path) -> None:
    """Make `switching-real.md` from `switching-real.jsonl` in the same folder."""
    store = Store(out)
    store.results = out / f"{NAME}.jsonl"
    rows = store.rows()
    if not any(row["strategy"] == BASE for row in rows):
        raise ConfigError(f"switching: {store.results} must hold a run of {BASE}, got {len(rows)} rows")
    write_whole(out / f"{NAME}.md", page(rows))


def page(rows: Sequence[Row]) -> str:
    """All of it, from the rows alone."""
    records = Records(f"{NAME}.jsonl", rows)
    strategies = sorted({str(row["strategy"]) for row in rows})
    head = ["strategy", "accuracy, % by seed", "seconds by seed", "time, parts of all-reduce's"]
    head += [
        "reaches all-reduce's accuracy at",
        "switched at epoch, cost in ms",
        "samples missing, repeated",
        "records",
    ]
    lines = [_line(rows, strategy, records) for strategy in strategies]
    title = "## Digits, two convolutions, three workers"
    parts = ["# A straggler on real processes", _introduction(rows, records), f"```\n{_COMMAND}\n```"]
    parts += [title, table(head, lines, left=1), _limits(rows)]
    return "\n\n".join(parts) + "\n"


def _introduction(rows: Sequence[Row], records: Records) -> str:
    first, seeds = rows[0], len({row["seed"] for row in rows})
    workers = records.link(f"{first['workers']} workers, {first['history'][-1][0]:g} epochs", first)
    return (
        "The same question as [in virtual time](switching.md), with real processes: one worker four times slower "
        f"([`speed = 0.25`]({_CLUSTER}) in the cluster file draws out its passes by sleeping, as a slower accelerator "
        f"would), [links of 100 Mbit/s]({_CLUSTER}) shaped by the kernel, a server beside each worker, two CPU cores "
        f"in all, nothing else running. {workers}, {records.whole(f'{seeds} seeds')}, runs interleaved. `±` is a "
        f"[95 % t interval]({INTERVALS}) over the seeds. *Reaches it at*: the first validation with at least the "
        "accuracy that all-reduce ends with, same seed, in parts of all-reduce's whole time. *Records* are lines of "
        f"{records.whole(f'`{NAME}.jsonl`')}, one per run."
    )


def _line(rows: Sequence[Row], strategy: str, records: Records) -> list[str]:
    base = {int(row["seed"]): row for row in rows if row["strategy"] == BASE}
    mine = sorted((row for row in rows if row["strategy"] == strategy), key=lambda row: int(row["seed"]))
    time = mean_interval([row["seconds"] / base[row["seed"]]["seconds"] for row in mine if row["seed"] in base])
    return [
        f"`{strategy}`",
        listed([100 * row["metrics"]["accuracy"] for row in mine], 2),
        listed([row["seconds"] for row in mine], 1),
        "1" if strategy == BASE else ABSENT if time is None else spread(time.mean, time.low, time.high),
        " ".join(_reached(row, base[row["seed"]]) for row in mine if row["seed"] in base) or ABSENT,
        "; ".join(f"{s['epoch']:.1f}, {plain(s['cost_ms']['total'], 2)}" for r in mine for s in r["switches"])
        or ABSENT,
        "; ".join(f"{row['audit']['missing']}, {row['audit']['repeated']}" for row in mine),
        mark(_row(strategy)) + records.links(mine),
    ]


def _row(strategy: str) -> str:
    """The place of a strategy's row."""
    return place(NAME, strategy)


def _reached(row: Row, base: Row) -> str:
    """A validation's accuracy is written down to five places, the final one in full."""
    wanted = base["metrics"]["accuracy"] - 1e-5
    found = [seconds for _, seconds, accuracy in row["history"] if accuracy >= wanted]
    return f"{found[0] / base['seconds']:.2f}" if found else "never"


def _limits(rows: Sequence[Row]) -> str:
    values = [float(row["metrics"]["accuracy"]) for row in rows]
    images = math.lcm(*(Fraction(value).limit_denominator(10_000).denominator for value in values))
    share = math.fsum(values) / len(values)
    error = 196 * math.sqrt(share * (1 - share) / images)
    return (
        f"What may not be concluded: {to(f'{images} test images', _row(BASE))} leave an accuracy uncertain by about "
        f"{plain(error, 2)} points, so no accuracy here differs detectably from another; on a task this easy "
        "asynchronous training from the start loses nothing, unlike [on CIFAR-10](switching.md). The digits' model is "
        "small, so its steps are almost all computing, which is what a switch can win. All-reduce is the one without "
        "overlap and with equal parts for unequal workers: dividing steps by speed (`--balance equal-finish`) was no "
        "arm here."
    )


if __name__ == "__main__":
    draw(Path(sys.argv[1]))

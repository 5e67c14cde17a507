"""Models of an epoch's time, fitted to the records of the accumulation study: what its page's tables are made of."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from podium.lab.report.format import ABSENT, plain, probability
from podium.lab.stats.regress import Extrapolation, Judgement, Model, Point, extrapolate, fit, judge
from podium.lab.stats.time_models import linear, overlapped, physical, power, quadratic, training_numbers

STUDIES = Path(__file__).parents[2] / "docs" / "studies"
FACTORS = ("size", "batch", "nodes", "every")
KINDS = ("resnet50", "efficientnet-b0")
LINKS = (1000, 100)
EPOCH = 100_000


@cache
def records(name: str) -> list[dict[str, Any]]:
    text = (STUDIES / name / "results.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def lines_of(mbit: int) -> str:
    """A link to the records of the runs on this link."""
    found = [line for line, row in enumerate(records("accumulation"), 1) if row["mbit"] == mbit]
    return f"[{found[0]}–{found[-1]}](results.jsonl#L{found[0]}-L{found[-1]})"


@cache
def points(mbit: int | None = None) -> list[Point]:
    return [
        Point(row["cell"], {**dict.fromkeys((f"is {kind}" for kind in KINDS), 0.0), **_numbers(row)}, row["epoch_s"])
        for row in records("accumulation")
        if mbit in (None, row["mbit"])
    ]


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    own = {"batch": row["batch"], "nodes": row["nodes"], "every": row["every"], "mbit": row["mbit"]}
    fixed = {"latency_s": row["latency_us"] / 1e6, "samples": EPOCH, "parameters": row["parameters"]}
    return training_numbers(kind=row["levels"]["model"], **own, **fixed)


def models() -> list[Model]:
    return [overlapped(KINDS), physical(KINDS), power(FACTORS), quadratic(FACTORS), linear(FACTORS)]


@cache
def judged(mbit: int) -> list[Judgement]:
    return [judge(points(mbit), model, resamples=0) for model in models()]


def extrapolated() -> list[tuple[int, str, Extrapolation]]:
    """Line of the table: link fitted to, what from and to, how it went."""
    found = [
        (mbit, f"fewer nodes → most, {mbit} Mbit/s", extrapolate(points(mbit), model, lambda one: one.x["nodes"] < 3))
        for mbit in LINKS
        for model in models()
    ]
    first = LINKS[0] * 1e6 / 8
    found += [
        (LINKS[0], "1000 Mbit/s → 100 Mbit/s", extrapolate(points(), one, lambda p: p.x["bytes_per_s"] == first))
        for one in models()[:2]
    ]
    return found


def model_table() -> list[str]:
    lines = []
    for mbit in LINKS:
        for one in judged(mbit):
            lack = one.fit.lack
            assert lack is not None
            cells = [f"{mbit} Mbit/s", f"`{one.model}`", str(one.parameters), percent(one.median_error)]
            cells += [percent(one.worst_error), f"`{one.worst_cell}`", f"{one.press_r2:.4f}", f"{one.fit.r2:.4f}"]
            cells += [plain(lack.f), probability(lack.p), str(one.negative), lines_of(mbit)]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def beyond_table() -> list[str]:
    lines = []
    for mbit, name, one in extrapolated():
        bias = f"{100 * one.bias:+.1f} %".replace("-", "−")
        cells = [name, f"`{one.model}`", str(one.fitted), str(one.predicted), percent(one.median_error)]
        lines.append(f"| {' | '.join([*cells, percent(one.worst_error), bias, lines_of(mbit)])} |")
    return lines


def percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 1 else f"{100 * share:.0f} %"


def terms_table() -> list[str]:
    """Coefficients of the model that predicts best, with bootstrapped intervals; takes half a minute."""
    lines = []
    for mbit in LINKS:
        for one in fit(points(mbit), overlapped(KINDS)).coefficients:
            ends = ABSENT if one.low is None else f"{plain(one.low if one.low > 1e-6 else 0)} to {plain(one.high)}"
            lines.append(f"| {' | '.join([f'{mbit} Mbit/s', one.name, plain(one.value), ends, lines_of(mbit)])} |")
    return lines

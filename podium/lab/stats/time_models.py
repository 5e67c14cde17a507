"""Models of how long data-parallel training takes, which `regress` fits.

    linear       a slope for each factor
    quadratic    also squares and products
    power        the quadratic model of logarithms: products of powers
    physical     one term per cause: samples, passes, updates, bytes on the link, messages; no coefficient below zero
    overlapped   the same, but an exchange overlaps the backward pass and only its exposed part takes time

The ring's part (bytes, messages) follows Thakur, Rabenseifner and Gropp, 2005, "Optimization of Collective
Communication Operations in MPICH". Not known here: what else ran on the machines.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from podium.lab.stats.regress import Array, Columns, Model, Term


def training_numbers(
    *, kind: str, parameters: int, batch: float, nodes: float, every: float, mbit: float, latency_s: float, samples: int
) -> dict[str, float]:
    """The inputs of the models for one training run, all known before it starts.

    `batch` is per node, `every` the batches of each node between two exchanges, `kind` the name of the trained model.
    """
    passes = samples / (nodes * batch)
    return {
        "size": parameters / 1e6,
        "batch": batch,
        "nodes": nodes,
        "every": every,
        "samples": samples / nodes,
        "passes": passes,
        "exchanges": passes / every,
        "bytes": 4.0 * parameters,
        "bytes_per_s": mbit * 1e6 / 8,
        "latency_s": latency_s,
        f"is {kind}": 1.0,
    }


def linear(factors: Sequence[str]) -> Model:
    """A constant and a slope for each factor."""
    return Model(name="linear", terms=_products(factors, squares=False))


def quadratic(factors: Sequence[str]) -> Model:
    """Also squares and products; the square of a factor with two levels is aliased, and the fit leaves it out."""
    return Model(name="quadratic", terms=_products(factors))


def power(factors: Sequence[str]) -> Model:
    """The quadratic model of logarithms, for the logarithm of seconds."""
    return Model(name="power", terms=_products(factors, log=True), log=True)


def physical(kinds: Sequence[str]) -> Model:
    """One term per cause of time; each kind of model computes at its own speed.

    Uses the numbers `is KIND` (1 or 0), `samples`, `passes` and `exchanges` (each of one node), `nodes`, `bytes` (of
    gradients), `bytes_per_s` and `latency_s`. An exchange takes 2 (N - 1) / N * bytes / rate, so that its coefficient
    is 1 where the link is used in full and nothing hides behind the backward pass.
    """
    terms = _own(kinds) | {
        "exchange": lambda x: x["exchanges"] * wire_s(x),
        "latency": lambda x: x["exchanges"] * (x["nodes"] - 1) * x["latency_s"],
    }
    return Model(name="physical", terms=terms, positive=True)


def overlapped(kinds: Sequence[str]) -> Model:
    """The physical model where an exchange of C seconds costs max(last * C, C - hidden * P) of them.

    P is the seconds of one pass; all buckets but the last are sent while the backward pass still runs. `hidden` is the
    part of a pass that an exchange can overlap, `last` the part of the exchange that cannot begin before the pass ends;
    both depend on a model's buckets.
    """
    terms = {**_own(kinds), "exchange": physical(kinds).terms["exchange"]}
    more = {f"{what} of {kind}": start for what, start in (("hidden", 0.6), ("last", 0.1)) for kind in kinds}
    place = {name: i for i, name in enumerate((*terms, *more))}

    def curve(values: Array, x: Columns) -> Array:
        def of(what: str) -> Array:
            each = [values[place[f"{what} of {kind}"]] * x[f"is {kind}"] for kind in kinds]
            return np.asarray(sum(each[1:], start=each[0]))

        wire = values[place["exchange"]] * wire_s(x)
        one_pass = of("passes") + of("samples") * x["samples"] / x["passes"]
        exposed = np.maximum(of("last") * wire, wire - of("hidden") * one_pass)
        total: Array = x["passes"] * one_pass + x["exchanges"] * (of("updates") + exposed)
        return total

    return Model(name="overlapped", terms=terms, positive=True, curve=curve, more=more)


def wire_s(x: Any) -> Any:
    """Seconds of one ring all-reduce of the gradients at the link's full rate; for one run, or for columns of runs."""
    return 2 * (x["nodes"] - 1) / x["nodes"] * x["bytes"] / x["bytes_per_s"]


def _own(kinds: Sequence[str]) -> dict[str, Term]:
    """Seconds of each kind's samples, passes and updates."""
    words = {"samples": "samples", "passes": "passes", "updates": "exchanges"}
    return {
        f"{what} of {kind}": lambda x, column=column, kind=kind: x[column] * x[f"is {kind}"]  # type: ignore[misc]
        for what, column in words.items()
        for kind in kinds
    }


def _products(factors: Sequence[str], *, squares: bool = True, log: bool = False) -> dict[str, Term]:
    """A constant, each factor, with `squares` their squares and products; with `log`, of the factors' logarithms."""
    chosen: list[tuple[str, ...]] = [(), *((name,) for name in factors)]
    if squares:
        chosen += [(name, name) for name in factors] + list(itertools.combinations(factors, 2))

    def term(names: tuple[str, ...]) -> Term:
        if not names:
            return lambda x: np.ones(len(next(iter(x.values()))))
        return lambda x: math.prod((np.log(x[name]) if log else x[name] for name in names), start=np.float64(1))

    def named(names: tuple[str, ...]) -> str:
        words = [f"log {name}" if log else name for name in names]
        return "constant" if not names else f"{words[0]}²" if len(set(names)) < len(names) else " × ".join(words)

    return {named(names): term(names) for names in chosen}

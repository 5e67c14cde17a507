"""Which combinations of levels a study tries: all of them, a planned fraction, or points spread through a space.

A *full* factorial has every combination. A *fraction* of factors with two levels each sets some factors by the product
of others (`c = a*b`), which halves the runs each time; `Fraction.aliases` lists the effects that it cannot tell apart.
A *Latin hypercube* spreads points so that each factor's range is covered evenly, for factors that are numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podium.errors import ConfigError, MissingExtra, UnknownName
from podium.sweeps.search.space import Range

Level = str | int | float | bool
Levels = dict[str, Level]
"""One combination: factor name to level."""

MOST_CELLS = 100_000
"""A larger design is a mistake in the file, and would fill the memory."""


Factor = Sequence[Level] | Range


@dataclass(frozen=True)
class Fraction:
    """A fractional factorial: its combinations, and which effects they cannot tell apart."""

    combinations: tuple[Levels, ...]
    resolution: int
    """Length of the shortest word of the defining relation: 3 mixes main effects with pairs, 5 mixes no pairs."""
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Main effect or pair to the main effects and pairs confounded with it; unconfounded effects are left out."""


def full(factors: Mapping[str, Sequence[Level]]) -> list[Levels]:
    """Every combination, the last factor changing fastest."""
    _check_levels(factors)
    return [dict(zip(factors, levels, strict=True)) for levels in itertools.product(*factors.values())]


def fractional(factors: Mapping[str, Sequence[Level]], generators: Iterable[str]) -> Fraction:
    """A two-level fraction: each generator (`c = a*b`, `d = -a*b`) sets one factor by the product of others."""
    _check_levels(factors)
    for name, levels in factors.items():
        if len(levels) != 2:
            raise ConfigError(f"design: a fraction needs two levels of each factor, got {len(levels)} of {name!r}")
    words = {target: (sign, rest) for target, sign, rest in (_generator(text, factors) for text in generators)}
    if not words:
        raise ConfigError("design: a fraction needs at least one generator such as 'c = a*b', got none")
    free = [name for name in factors if name not in words]
    for target, (_, rest) in words.items():
        if bound := [name for name in rest if name in words]:
            raise ConfigError(f"design: {target} must be set by free factors, got {', '.join(bound)} among them")
    combinations = []
    for signs in itertools.product((-1, 1), repeat=len(free)):
        at = dict(zip(free, signs, strict=True))
        for target, (sign, rest) in words.items():
            at[target] = sign * math.prod(at[name] for name in rest)
        combinations.append({name: levels[(at[name] + 1) // 2] for name, levels in factors.items()})
    relation = _relation([frozenset((target, *rest)) for target, (_, rest) in words.items()])
    return Fraction(tuple(combinations), min(map(len, relation)), _aliases(list(factors), relation))


def latin_hypercube(factors: Mapping[str, Factor], points: int, seed: int) -> list[Levels]:
    """Cut each factor's range into `points` equal parts and use each part once.

    The levels of a factor with listed levels occur equally often, to within one.
    """
    if points < 2:
        raise ConfigError(f"design: a Latin hypercube needs at least 2 points, got {points}")
    _check_levels({name: levels for name, levels in factors.items() if not isinstance(levels, Range)})
    try:
        from scipy.stats import qmc
    except ImportError:
        raise MissingExtra("scipy", "study", "a Latin hypercube") from None
    shares = qmc.LatinHypercube(d=len(factors), rng=seed, optimization="random-cd").random(points)
    found = [
        {name: _level(factor, float(share)) for (name, factor), share in zip(factors.items(), row, strict=True)}
        for row in shares
    ]
    if len({tuple(at.items()) for at in found}) < points:
        raise ConfigError(
            f"design: {points} points must differ, and these factors have too few levels for that: "
            "ask for fewer points, or for wider ranges"
        )
    return found


def _level(factor: Factor, share: float) -> Level:
    if isinstance(factor, Range):
        # Six digits: a level is also a name, which users type and which appears in files.
        return factor.at(share) if factor.whole else float(f"{factor.at(share):.6g}")
    return factor[min(int(share * len(factor)), len(factor) - 1)]


def _check_levels(factors: Mapping[str, Sequence[Level]]) -> None:
    for name, levels in factors.items():
        if isinstance(levels, Range):
            raise ConfigError(f"design: {name!r} is a range, which only a Latin hypercube can take; list its levels")
        if not levels:
            raise ConfigError(f"design: factor {name!r} must have at least one level, got none")
        if len({str(level) for level in levels}) != len(levels):
            raise ConfigError(f"design: levels of {name!r} must differ, got {', '.join(map(str, levels))}")
    if (cells := math.prod(map(len, factors.values()))) > MOST_CELLS:
        raise ConfigError(f"design: at most {MOST_CELLS:,} cells, got {cells:,}")


def _generator(text: str, factors: Mapping[str, Any]) -> tuple[str, int, tuple[str, ...]]:
    target, equals, product = (part.strip() for part in text.partition("="))
    sign = -1 if product.startswith("-") else 1
    names = tuple(name.strip() for name in product.lstrip("+-").split("*"))
    if not equals or len(names) < 2 or not all(names):
        raise ConfigError(f"design: a generator must read 'c = a*b', got {text!r}")
    for name in (target, *names):
        if name not in factors:
            raise UnknownName("factor", name, factors)
    if len({target, *names}) != len(names) + 1:
        raise ConfigError(f"design: the factors of a generator must differ, got {text!r}")
    return target, sign, names


def _relation(words: Sequence[frozenset[str]]) -> list[frozenset[str]]:
    """The defining relation: all products of the generators' words. A factor times itself is 1."""
    found: list[frozenset[str]] = []
    for size in range(1, len(words) + 1):
        for some in itertools.combinations(words, size):
            product: frozenset[str] = frozenset()
            for word in some:
                product ^= word
            found.append(product)
    if not all(found):
        raise ConfigError("design: generators must be independent, got two that say the same")
    return found


def _aliases(names: Sequence[str], relation: Sequence[frozenset[str]]) -> dict[str, tuple[str, ...]]:
    effects = [frozenset(some) for size in (1, 2) for some in itertools.combinations(names, size)]
    found = {}
    for effect in effects:
        same = [effect ^ word for word in relation if 0 < len(effect ^ word) <= 2]
        if same:
            found[_term(effect, names)] = tuple(_term(other, names) for other in same)
    return found


def _term(effect: frozenset[str], names: Sequence[str]) -> str:
    return " × ".join(name for name in names if name in effect)

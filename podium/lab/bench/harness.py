"""What all benches share: interleaved rounds, ratios with intervals, checks of options, shaped links.

Every contender runs in each round, in an order that rotates, so that drift of the machine affects all of them alike.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from podium.errors import ConfigError, UnknownName
from podium.launch.clusters.description import uniform
from podium.launch.clusters.namespaces import ShapedNetwork

_RESAMPLES = 2000


def interleave(contenders: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Times of each contender, one per round; the first `warmup` rounds are discarded."""
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for n in range(warmup + rounds):
        first = n % len(names)
        for name in names[first:] + names[:first]:
            seconds = contenders[name]()
            if n >= warmup:
                times[name].append(seconds)
    return times


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Median of the rounds' ratios, with a bootstrap 95 % interval; below 1 means that ours is faster."""
    each = np.asarray(ours) / np.asarray(theirs)
    draw = np.random.Generator(np.random.Philox(key=1))
    medians = np.median(draw.choice(each, size=(_RESAMPLES, len(each))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return {"ratio": float(np.median(each)), "ratio_interval": [float(low), float(high)], "rounds": len(each)}


def compared(name: str, numerator: Sequence[float], denominator: Sequence[float]) -> dict[str, Any]:
    """The median of the rounds' ratios under this name, and its interval."""
    found = ratio(numerator, denominator)
    return {name: found["ratio"], f"{name}_interval": found["ratio_interval"]}


def spread(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Median, smallest and largest value of the rounds."""
    low, median, high = np.min(values), np.median(values), np.max(values)
    return {"median": float(median) * scale, "min": float(low) * scale, "max": float(high) * scale}


def spread_ms(times: Sequence[float]) -> dict[str, float]:
    """Median, fastest and slowest round, in milliseconds."""
    return spread(times, 1e3)


def check_names(what: str, names: Collection[str], known: Collection[str]) -> None:
    """Raise `UnknownName` for an unknown name; `what`: for example `peer of bench step`."""
    for name in names:
        if name not in known:
            raise UnknownName(what, name, known)


def check_at_least(bench: str, least: float, **values: float) -> None:
    """Raise `ConfigError`, with all names and values, if a value is below `least`."""
    if min(values.values()) < least:
        names, given = _listed(list(values)), _listed([f"{value:g}" for value in values.values()])
        raise ConfigError(f"bench {bench}: {names} must be at least {least:g}, got {given}")


def _listed(words: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def why_no_links(nodes: int, mbit: float) -> str:
    """Why links cannot be shaped on this machine; empty if they can."""
    if os.geteuid() != 0:
        return "shaped links need root (network namespaces)"
    try:
        with ShapedNetwork(uniform(nodes, mbit=mbit)):
            return ""
    except ConfigError as error:
        return str(error)


def rate_or_reason(option: str, asked: float | None, default: float, nodes: int, mbit: float) -> tuple[float, str]:
    """The rate of shaped links, 0 for none, and the reason for 0.

    With `asked`, a machine that cannot shape links will raise an error later; without, it skips them.
    """
    if asked is not None:
        return asked, f"{option} is 0"
    reason = why_no_links(nodes, mbit)
    return (0.0 if reason else default), reason

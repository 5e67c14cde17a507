from __future__ import annotations

import math
from collections import Counter
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.errors import ConfigError, UnknownName
from podium.lab.stats.factorial import fractional, full, latin_hypercube
from podium.sweeps.search.space import Range

TWO: dict[str, Any] = {name: ["-", "+"] for name in "abcde"}


def test_a_full_design_has_every_combination_once() -> None:
    found = full({"strategy": ["a", "b"], "workers": [2, 4, 8]})
    assert len(found) == 6 and len({tuple(at.items()) for at in found}) == 6
    assert found[:2] == [{"strategy": "a", "workers": 2}, {"strategy": "a", "workers": 4}]


@given(st.integers(2, 4), st.data())
def test_a_fraction_is_balanced_in_every_factor_and_every_pair(free: int, data: st.DataObject) -> None:
    names = list("abcde")[: free + 1]
    rest = data.draw(st.lists(st.sampled_from(names[:free]), min_size=2, max_size=free, unique=True))
    found = fractional({name: TWO[name] for name in names}, [f"{names[free]} = {'*'.join(rest)}"]).combinations
    assert len(found) == 2**free
    for name in names:
        assert Counter(at[name] for at in found) == {"-": 2 ** (free - 1), "+": 2 ** (free - 1)}
    for first, second in combinations(names, 2):
        assert len({(at[first], at[second]) for at in found}) == 4


def test_a_generator_holds_in_every_run_and_a_minus_turns_it_round() -> None:
    sign = {"-": -1, "+": 1}
    for text, turned in (("c = a*b", 1), ("c = -a*b", -1)):
        for at in fractional({name: TWO[name] for name in "abc"}, [text]).combinations:
            assert sign[str(at["c"])] == turned * sign[str(at["a"])] * sign[str(at["b"])]


def test_the_alias_structure_is_that_of_the_textbooks() -> None:
    # Box, Hunter and Hunter's quarter of five factors, d = ab and e = ac: resolution III.
    found = fractional(TWO, ["d = a*b", "e = a*c"])
    assert len(found.combinations) == 8 and found.resolution == 3
    assert set(found.aliases["a"]) == {"b × d", "c × e"}
    assert found.aliases["b"] == ("a × d",) and found.aliases["d"] == ("a × b",)
    assert set(found.aliases["b × c"]) == {"d × e"}
    # A half of five with e = abcd has resolution V: no main effect or pair is mixed with another.
    half = fractional(TWO, ["e = a*b*c*d"])
    assert half.resolution == 5 and not half.aliases


@pytest.mark.parametrize(
    ("generators", "said"),
    [
        ([], "at least one generator"),
        (["c"], "must read"),
        (["c = a*z"], "z"),
        (["c = a*c"], "must differ"),
        (["c = a*b", "d = a*c"], "free factors"),
        (["c = a*b", "d = a*b", "e = a*b"], None),
    ],
)
def test_generators_that_say_nothing_are_refused(generators: list[str], said: str | None) -> None:
    if said is None:  # allowed: c, d and e are one, and the resolution says how bad that is
        assert fractional(TWO, generators).resolution == 2
        return
    with pytest.raises((ConfigError, UnknownName), match=said):
        fractional(TWO, generators)


def test_a_fraction_needs_two_levels() -> None:
    with pytest.raises(ConfigError, match="two levels"):
        fractional({"a": [1, 2], "b": [1, 2, 3], "c": [1, 2]}, ["c = a*b"])


def test_a_latin_hypercube_uses_each_part_of_each_range_once() -> None:
    factors: dict[str, Any] = {"lr": Range(1e-4, 1e-1, log=True), "workers": Range(1, 64, whole=True), "s": ["x", "y"]}
    found = latin_hypercube(factors, 12, seed=3)
    parts = sorted(int(12 * share) for share in ((math.log10(at["lr"]) + 4) / 3 for at in found))
    assert parts == list(range(12))
    assert Counter(at["s"] for at in found) == {"x": 6, "y": 6}
    assert all(isinstance(at["workers"], int) and 1 <= at["workers"] <= 64 for at in found)
    assert found == latin_hypercube(factors, 12, seed=3) != latin_hypercube(factors, 12, seed=4)


def test_ranges_and_designs_that_cannot_be_are_refused() -> None:
    for bad in ((2, 1), (1, 1), (float("nan"), 1)):
        with pytest.raises(ConfigError, match="below its high end"):
            Range(*bad)
    with pytest.raises(ConfigError, match="above 0"):
        Range(0, 1, log=True)
    listed: Any = {"a": Range(0, 1)}
    with pytest.raises(ConfigError, match="only a Latin hypercube"):
        full(listed)
    with pytest.raises(ConfigError, match="fewer points"):
        latin_hypercube({"a": ["x", "y"]}, 5, seed=0)
    with pytest.raises(ConfigError, match="at most"):
        full({name: list(range(100)) for name in "abc"})

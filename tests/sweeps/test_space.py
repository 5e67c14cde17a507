"""The search space: what texts mean, and what is refused."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.errors import ConfigError
from podium.sweeps.search.space import Choices, Range, read_space


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("lr=0.1,0.03,0.01", Choices((0.1, 0.03, 0.01))),
        ("lr=0.1", Choices((0.1,))),
        ("flag=true,false", Choices((True, False))),
        ("activation=relu,gelu", Choices(("relu", "gelu"))),
        ("hidden=64|128,64", Choices((64, "128,64"))),
        ("betas=[0.9,0.99],[0.9,0.999]", Choices(([0.9, 0.99], [0.9, 0.999]))),
        ('names="a,b","c|d"', Choices(("a,b", "c|d"))),
        ('path="../a"', Choices(("../a",))),
        ("schedule=cosine:warmup=5", Choices(("cosine:warmup=5",))),
        ("lr=1e-4..1e-1:log", Range(1e-4, 1e-1, log=True)),
        ("dropout=0..0.5", Range(0.0, 0.5)),
        ("shift=-1..1", Range(-1.0, 1.0)),
        ("width=16..128:int", Range(16, 128, whole=True)),
        ("width=16..128:log:int", Range(16, 128, log=True, whole=True)),
        ("lr=1e-4..1e-1:log:4", Choices((1e-4, 1e-3, 1e-2, 1e-1))),
        ("dropout=0..0.5:3", Choices((0.0, 0.25, 0.5))),
        ("width=1..3:int:9", Choices((1, 2, 3))),
        (" weight-decay = 0 , 1e-4 ", Choices((0, 1e-4))),
    ],
)
def test_a_text_means_what_the_module_says(text: str, meant: object) -> None:
    assert list(read_space([text]).values()) == [meant]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["lr"], "NAME=VALUES"),
        (["=1"], "names must be"),
        (["lr="], "must have a value"),
        (["lr=0.1,,0.2"], "must have a value"),
        (["lr=1..x"], "LOW..HIGH"),
        (["lr=0...5"], "LOW..HIGH"),
        (["lr=1..2,5"], "LOW..HIGH"),
        (["lr=1..2:lin"], "got :lin"),
        (["lr=1..2:3:4"], "got :3:4"),
        (["lr=2..1"], "lr: range: its low end must be below"),
        (["lr=0..1:log"], "above 0"),
        (["w=0.5..3:int"], "whole ends"),
        (["lr=1..2:1"], "at least 2"),
        (["lr=0.1,0.1"], "must differ"),
        (["lr=1,1.0"], "must differ"),
        (["betas=[0,1],[0.0,1]"], "must differ"),
        (["lr=0.1", "lr=0.2"], "given once"),
        (["betas=[0.9,0.99"], "must be closed"),
        (["lr=nan"], "finite"),
        (["day=2020-01-01"], "got datetime"),
        (["seed=0,1"], "--seeds"),
        ({"lr": []}, "at least one"),
        ({"lr": [object()]}, "got <object"),
    ],
)
def test_bad_input_is_refused_with_what_came(given: Any, told: str) -> None:
    with pytest.raises(ConfigError, match="search space") as error:
        read_space(given)
    assert told in str(error.value)


def test_python_gives_lists_ranges_texts_and_single_values() -> None:
    space = read_space(
        {
            "lr": np.array([0.1, 0.2]),
            "wd": Range(1e-5, 1e-2, log=True),
            "p": "0..0.5",
            "depth": 3,
            "betas": [(0.9, 0.99)],
        }
    )
    assert dict(space) == {
        "lr": Choices((0.1, 0.2)),
        "wd": Range(1e-5, 1e-2, log=True),
        "p": Range(0.0, 0.5),
        "depth": Choices((3,)),
        "betas": Choices(((0.9, 0.99),)),
    }
    assert type(space["lr"].draw(random.Random(0))) is float


def test_words_of_python_are_what_they_say_and_quoted_ones_are_text() -> None:
    space = read_space(["flag=True,False", 'w=None,0.5,"None"'])
    assert dict(space) == {"flag": Choices((True, False)), "w": Choices((None, 0.5, "None"))}
    assert dict(read_space(space.texts())) == dict(space)


@given(
    st.lists(st.one_of(st.integers(), st.booleans(), st.text(alphabet="ab,|'\"[]{}. 1", min_size=1), st.floats(-9, 9)))
)
def test_a_space_reads_back_from_its_own_texts(values: list[Any]) -> None:
    different = {(type(value) in (int, float), value): value for value in values}  # 1 and 1.0 are one
    space = read_space(
        {"x": Choices((*different.values(), [1, "a,b"], {"k": "v"})), "y": Range(1, 8, log=True, whole=True)}
    )
    assert dict(read_space(space.texts())) == dict(space)


@given(st.integers(0, 10**6), st.booleans(), st.booleans())
def test_a_draw_lies_in_its_range(seed: int, log: bool, whole: bool) -> None:
    value = Range(2, 9, log=log, whole=whole).draw(random.Random(seed))
    assert 2 <= value <= 9 and isinstance(value, int) == whole


def test_whole_numbers_come_equally_often_at_the_ends_too() -> None:
    rng, counts = random.Random(0), dict.fromkeys(range(1, 5), 0)
    for _ in range(8000):
        counts[int(Range(1, 4, whole=True).draw(rng))] += 1
    assert min(counts.values()) > 1800


def test_a_logarithmic_range_has_its_median_at_the_geometric_mean() -> None:
    rng = random.Random(0)
    draws = sorted(Range(1e-4, 1e-2, log=True).draw(rng) for _ in range(4001))
    assert 0.8e-3 < draws[2000] < 1.25e-3

"""Models of time: they find what was planted, and are judged by configurations that they have not seen."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from podium.errors import ConfigError
from podium.lab.stats.regress import Model, Numbers, Point, extrapolate, fit, judge
from podium.lab.stats.time_models import linear, overlapped, physical, power, quadratic, wire_s

KINDS = ("large", "small")
FACTORS = ("size", "batch", "nodes", "every")
PASS_S = {"large": (0.2, 0.02, 0.03), "small": (0.05, 0.01, 0.006)}
"""Fixed, per sample, update."""
HIDDEN, LAST = 0.6, 0.1


def configurations(mbit: float = 1000.0) -> list[Numbers]:
    found = []
    for kind, batch, nodes, every in itertools.product(KINDS, (32, 64, 100), (1, 2, 3), (1, 4)):
        passes, size = 100_000 / (batch * nodes), {"large": 24.0, "small": 4.0}[kind]
        found.append(
            {
                "size": size,
                "batch": batch,
                "nodes": nodes,
                "every": every,
                "samples": 100_000 / nodes,
                "passes": passes,
                "exchanges": passes / every,
                "bytes": 4e6 * size,
                "bytes_per_s": mbit * 1e6 / 8,
                "latency_s": 5e-5,
                **{f"is {other}": float(kind == other) for other in KINDS},
            }
        )
    return found


def name_of(x: Numbers) -> str:
    return ", ".join(f"{name} {x[name]:g}" for name in (*FACTORS, "bytes_per_s"))


def plain_s(x: Numbers) -> float:
    """Nothing hides."""
    return _seconds(x, wire_s(x))


def hiding_s(x: Numbers) -> float:
    fixed, per_sample, _ = PASS_S["large" if x["is large"] else "small"]
    return _seconds(x, max(LAST * wire_s(x), wire_s(x) - HIDDEN * (fixed + per_sample * x["batch"])))


def _seconds(x: Numbers, exposed: float) -> float:
    fixed, per_sample, update = PASS_S["large" if x["is large"] else "small"]
    return x["passes"] * fixed + x["samples"] * per_sample + x["exchanges"] * (update + exposed)


def planted(
    seconds: Callable[[Numbers], float], *, noise: float = 0.0, runs: int = 3, mbit: float = 1000.0
) -> list[Point]:
    draw = np.random.default_rng(0)
    return [
        Point(name_of(x), x, seconds(x) * float(np.exp(noise * draw.normal())))
        for x in configurations(mbit)
        for _ in range(runs)
    ]


def values(found: Model, points: list[Point]) -> dict[str, float]:
    return {one.name: one.value for one in fit(points, found, resamples=0).coefficients}


class TestFitting:
    def test_a_straight_line_is_found_and_fits_whole(self) -> None:
        points = planted(lambda x: 3 + 2 * x["size"] + 0.5 * x["batch"] + 7 * x["nodes"] + x["every"])
        found = fit(points, linear(FACTORS))
        assert [one.value for one in found.coefficients] == pytest.approx([3, 2, 0.5, 7, 1], rel=1e-6)
        assert found.r2 == pytest.approx(1)

    def test_physical_terms_are_found(self) -> None:
        found = values(physical(KINDS), planted(plain_s))
        assert found["exchange"] == pytest.approx(1, rel=1e-3)
        for kind, (fixed, per_sample, update) in PASS_S.items():
            told = [found[f"{what} of {kind}"] for what in ("passes", "samples", "updates")]
            assert told == pytest.approx([fixed, per_sample, update], rel=1e-2)

    def test_what_hides_behind_a_pass_is_found(self) -> None:
        found = values(overlapped(KINDS), [*planted(hiding_s), *planted(hiding_s, mbit=100.0)])
        assert found["exchange"] == pytest.approx(1, rel=1e-2)
        assert found["hidden of large"] == pytest.approx(HIDDEN, rel=0.02)
        assert found["last of small"] == pytest.approx(LAST, rel=0.1)

    def test_physical_coefficients_are_never_below_zero(self) -> None:
        points = planted(lambda x: 10 / x["exchanges"])  # faster with more exchanges, which no term can say
        assert min(values(physical(KINDS), points).values()) >= 0

    def test_squares_of_factors_with_two_levels_cannot_be_told_apart(self) -> None:
        found = fit(planted(plain_s), quadratic(FACTORS))
        assert found.aliased == ("size²", "every²")
        assert len(found.coefficients) == 13

    def test_an_exchange_that_always_sticks_out_does_not_say_what_its_last_part_is(self) -> None:
        found = fit(planted(hiding_s, mbit=1.0), overlapped(KINDS), resamples=0)
        assert {"last of large", "last of small"} <= set(found.aliased)
        assert not {one.name for one in found.coefficients} & set(found.aliased)

    def test_aic_of_logarithms_is_that_of_the_seconds(self) -> None:
        """The density changes by the seconds themselves: in other units, both models' change alike."""
        minutes = [point._replace(y=point.y / 60) for point in planted(plain_s, noise=0.05)]
        seconds = planted(plain_s, noise=0.05)
        changes = []
        for model in (linear(FACTORS), power(FACTORS)):
            both = [fit(some, model).aic for some in (seconds, minutes)]
            assert both[0] is not None and both[1] is not None
            changes.append(both[0] - both[1])
        assert changes[0] == pytest.approx(changes[1]) and changes[0] == pytest.approx(2 * len(seconds) * np.log(60))

    def test_bootstrapped_intervals_hold_the_planted_value_and_come_out_the_same(self) -> None:
        points = planted(plain_s, noise=0.02)
        first, second = (fit(points, physical(KINDS), resamples=40) for _ in range(2))
        assert first.coefficients == second.coefficients
        exchange = next(one for one in first.coefficients if one.name == "exchange")
        assert exchange.low is not None and exchange.high is not None
        assert exchange.low < 1 < exchange.high < 1.2

    @pytest.mark.parametrize("y", [0.0, -1.0, float("nan")])
    def test_seconds_that_cannot_be_are_refused(self, y: float) -> None:
        points = planted(plain_s)
        points[0] = points[0]._replace(y=y)
        with pytest.raises(ConfigError, match="seconds must be finite and above 0"):
            fit(points, linear(FACTORS))


class TestJudging:
    def test_a_configuration_is_predicted_without_any_of_its_own_runs(self) -> None:
        points = planted(lambda x: 100 + x["batch"], runs=5)
        odd = points[0].cell
        points = [point._replace(y=2 * point.y) if point.cell == odd else point for point in points]
        found = judge(points, linear(("batch",)))
        assert found.worst_cell == odd
        # Had any of its five runs been used, the prediction would lie nearer to twice as much.
        rest = [point for point in points if point.cell != odd]
        (alone,) = fit(rest, linear(("batch",))).predict([points[0]])
        assert found.errors[odd] == pytest.approx(alone / points[0].y - 1)
        assert found.errors[odd] == pytest.approx(-0.5, abs=0.01)

    def test_physical_terms_predict_what_polynomials_cannot(self) -> None:
        points = planted(plain_s, noise=0.01)
        errors = {m.name: judge(points, m, resamples=0) for m in (linear(FACTORS), quadratic(FACTORS), physical(KINDS))}
        assert errors["physical"].median_error < 0.02
        assert errors["quadratic"].median_error > 5 * errors["physical"].median_error
        assert errors["linear"].press_r2 < errors["quadratic"].press_r2 < errors["physical"].press_r2

    def test_r2_on_fitted_runs_is_above_that_of_left_out_ones(self) -> None:
        found = judge(planted(plain_s, noise=0.01), quadratic(FACTORS))
        assert found.fit.r2 > found.press_r2

    def test_overlap_shows_as_lack_of_fit_of_the_model_that_does_not_know_of_it(self) -> None:
        points = planted(hiding_s, noise=0.005, mbit=300.0)
        plain_fit = fit(points, physical(KINDS), resamples=0)
        better = fit(points, overlapped(KINDS), resamples=0)
        assert plain_fit.lack is not None and plain_fit.lack.p < 1e-6
        assert better.lack is not None and better.lack.p > 0.01

    def test_negative_predictions_are_counted(self) -> None:
        found = judge(planted(lambda x: plain_s(x) ** 3), linear(FACTORS))
        assert found.negative > 0

    def test_the_largest_leverage_of_a_configuration_lies_between_their_mean_and_one(self) -> None:
        found = fit(planted(plain_s), quadratic(FACTORS))
        assert found.leverage is not None and 13 / 36 < found.leverage < 1


class TestExtrapolating:
    def test_physical_terms_reach_a_third_node_and_another_link(self) -> None:
        both = [*planted(plain_s), *planted(plain_s, mbit=100.0)]
        for inside in (lambda p: p.x["nodes"] < 3, lambda p: p.x["bytes_per_s"] > 1e8):
            assert extrapolate(both, physical(KINDS), inside).worst_error < 0.02

    def test_two_levels_cannot_tell_a_square(self) -> None:
        found = extrapolate(planted(plain_s), quadratic(FACTORS), lambda p: p.x["nodes"] < 3)
        assert "nodes²" in found.aliased
        assert found.median_error > 0.2
        assert (found.fitted, found.predicted) == (24, 12)
        assert found.leverage is not None and found.leverage > 1

    def test_nothing_to_predict_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="configurations to extrapolate to"):
            extrapolate(planted(plain_s), linear(FACTORS), lambda p: True)

"""Triggers: each rule fires when its paper says, always ends, and can be written as text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from podium.errors import ConfigError
from podium.records.noise import NoiseMeter
from podium.strategies.triggers import TRIGGERS, WATCHED, format_trigger, make_trigger
from podium.strategies.triggers.advice import predicted_gain
from podium.strategies.triggers.base import Course, Memory, Reading, Seen, Trigger
from podium.strategies.triggers.plateau import change
from podium.strategies.triggers.straggler import slowest

COURSE = Course(samples=100, batch_size=10, end=3000)


def validations(rule: Trigger, losses: list[float]) -> list[Reading | None]:
    memory: Memory = {}
    course = COURSE._replace(end=100 * len(losses))
    return [rule.judge(Seen(course, 100 * (i + 1), validated=loss), memory) for i, loss in enumerate(losses)]


def fired_at(readings: list[Reading | None]) -> int | None:
    return next((i for i, reading in enumerate(readings) if reading is not None and reading.fires), None)


# Strategy-Switch's rule.


def test_the_rule_is_the_papers() -> None:
    losses = [1.0, 0.5, 0.45, 0.44, 0.438, 0.437, 0.436]
    rule = make_trigger("plateau:on=validation;against=last;floor=0;window=3;threshold=0.01")
    readings = validations(rule, losses)
    assert [r.value for r in readings[2:] if r] == pytest.approx(
        [(0.5 + 0.1) / 2, (0.1 + 0.01 / 0.45) / 2, (0.01 / 0.45 + 0.002 / 0.44) / 2, *_tail(losses)]
    )
    assert fired_at(readings) == 5


def _tail(losses: list[float]) -> list[float]:
    return [change(losses[i - 2 : i + 1], 0.0) for i in (5, 6)]


def test_a_loss_that_falls_by_a_factor_for_ever_fires_only_with_a_floor() -> None:
    losses = [0.9**i for i in range(80)]
    plain = "plateau:on=validation;against=last;window=6;threshold=0.01"
    assert fired_at(validations(make_trigger(f"{plain};floor=0"), losses)) is None
    assert fired_at(validations(make_trigger(f"{plain};floor=0.05"), losses)) is not None


def test_noise_keeps_the_plain_rule_from_firing_and_not_the_smoothed_one() -> None:
    generator = torch.Generator().manual_seed(1)
    losses = [0.3 + 0.01 * float(torch.randn((), generator=generator)) for _ in range(60)]
    plain = "plateau:on=validation;against=last;threshold=0.01;fallen=1"
    assert fired_at(validations(make_trigger(plain), losses)) is None
    assert fired_at(validations(make_trigger(f"{plain};smoothing=0.8"), losses)) is not None


def test_a_model_that_has_not_begun_to_learn_has_not_settled() -> None:
    losses = [2.3, 2.3, 2.29, 2.3, 2.3, 2.29, 2.3, 1.5, 0.6, 0.3, 0.25, 0.22, 0.2, 0.19, 0.18, 0.18]
    assert fired_at(validations(make_trigger("plateau:on=validation;fallen=1"), losses)) == 5
    assert fired_at(validations(make_trigger("plateau:on=validation"), losses)) == 13


def test_against_the_first_loss_a_geometric_fall_fires() -> None:
    losses = [0.8**i for i in range(30)]
    readings = validations(make_trigger("plateau:on=validation;threshold=0.05"), losses)
    fired = fired_at(readings)
    assert fired is not None
    window = losses[fired - 5 : fired + 1]
    assert readings[fired].value == pytest.approx((window[0] - window[-1]) / 5)  # type: ignore[union-attr]  # it fired


def test_training_loss_is_the_mean_over_an_epoch() -> None:
    rule, memory = make_trigger("plateau:window=2;against=last;floor=0"), {}
    course = COURSE._replace(end=400)
    losses = [1.0] * 10 + [0.5] * 5 + [0.7] * 5
    readings = [rule.judge(Seen(course, 10 * (i + 1), loss=loss), memory) for i, loss in enumerate(losses)]
    told = [reading for reading in readings if reading is not None]
    assert [math.isinf(reading.value) for reading in told] == [True, False]
    assert told[1].value == pytest.approx(0.4)


def test_where_an_epoch_ends_between_two_steps_its_end_is_seen_with_the_next() -> None:
    rule, memory = make_trigger("plateau:window=2;against=last;floor=0"), {}
    seen = [Seen(COURSE, position, loss=loss) for position, loss in [(60, 1.0), (95, 3.0), (120, 1.0), (205, 5.0)]]
    readings = [rule.judge(one, memory) for one in seen]
    assert [reading is not None for reading in readings] == [False, False, True, True]
    assert readings[3] is not None
    assert readings[3].value == pytest.approx(0.5)


@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=12), st.floats(0, 1))
def test_the_change_is_never_negative_and_a_floor_only_lowers_it(losses: list[float], floor: float) -> None:
    assert 0 <= change(losses, floor) <= change(losses, 0.0) + 1e-12


# All of them.


@pytest.mark.parametrize("text", WATCHED)
def test_every_rule_ends_the_phase_in_the_end(text: str) -> None:
    rule = make_trigger(text)
    assert 0 < rule.horizon(COURSE) <= COURSE.end


@pytest.mark.parametrize("text", [*WATCHED, "step:at=5", "epoch:after=1.5", "function:of=math:isnan"])
def test_a_rule_as_text_is_read_back_alike(text: str) -> None:
    rule = make_trigger(text)
    assert make_trigger(format_trigger(rule)) == rule
    assert set(TRIGGERS) >= {rule.name}


@given(
    share=st.floats(0.01, 0.99),
    samples=st.integers(1, 500),
    batch=st.integers(1, 64),
    epochs=st.integers(1, 20),
)
def test_places_lie_at_the_end_of_a_global_step(share: float, samples: int, batch: int, epochs: int) -> None:
    course = Course(samples, batch, epochs * samples)
    place = make_trigger(f"share:at={share}").horizon(course)
    offset = place % samples
    assert offset % batch == 0
    assert course.position_of(course.step_at(place)) == place


def test_fixed_places() -> None:
    assert make_trigger("step:at=13").horizon(COURSE) == 130
    assert make_trigger("epoch:at=2.5").horizon(COURSE) == 250
    assert make_trigger("share:at=0.25").horizon(COURSE) == 750 // 10 * 10
    assert make_trigger("step:after=3").horizon(COURSE._replace(began=200)) == 230
    assert make_trigger("step:at=9999").horizon(COURSE) == COURSE.end


def test_the_first_decay_of_the_rate_fires_and_a_warm_up_does_not() -> None:
    rule, memory = make_trigger("rate-decay:to=0.2"), {}
    rates = [0.1, 0.2, 0.5, 1.0, 1.0, 0.9, 0.3, 0.1, 0.1]
    readings = [rule.judge(Seen(COURSE, 10 * i, loss=1.0, rate=rate), memory) for i, rate in enumerate(rates)]
    assert fired_at(readings) == 7


def test_the_noise_scale_is_that_of_the_gradients() -> None:
    """Gradients drawn around a known mean with a known scatter: tr(S) / |G|^2."""
    generator = torch.Generator().manual_seed(3)
    mean, scatter, batch, workers = torch.full((50,), 0.5), 2.0, 64, 4
    meter, found = NoiseMeter(decay=0.995), 0.0
    for _ in range(3000):
        own = mean + scatter / math.sqrt(batch / workers) * torch.randn(workers, 50, generator=generator)
        meter.add_own(float((own[0] / workers).square().sum()))
        whole = float(own.mean(0).square().sum())
        found = meter.step_done(whole, 1 / workers, batch // workers) or 0.0
    expected = 50 * scatter**2 / float(mean.square().sum())
    assert found == pytest.approx(expected, rel=0.15)


def test_a_straggler_is_far_below_the_others_not_just_the_last() -> None:
    assert slowest({0: 1.0, 1: 1.0, 2: 1.0, 3: 4.0}, 1.5) == (3, 4.0, True)
    assert not slowest({0: 1.0, 1: 1.02, 2: 0.98, 3: 1.1}, 1.5)[2]
    assert slowest({0: 1.0, 1: 4.0}, 1.5)[0] == 1
    rule, memory = make_trigger("straggler:patience=2"), {}
    times = [{0: 1.0, 1: 1.0, 2: t} for t in (4.0, 1.0, 4.0, 4.0)]
    readings = [rule.judge(Seen(COURSE, 10 * i, times=t), memory) for i, t in enumerate(times)]
    assert fired_at(readings) == 3
    gone, memory = make_trigger("straggler:patience=2;gone=true"), {}
    readings = [gone.judge(Seen(COURSE, 10 * i, times=t), memory) for i, t in enumerate([*times, times[1], times[1]])]
    assert fired_at(readings) == 5


def test_advice_follows_its_formula() -> None:
    # Nothing to send: synchronous steps take as long as the slowest, asynchronous ones as long as each.
    assert predicted_gain([1.0, 1.0, 1.0, 4.0], step_s=4.0, batch_size=4) == pytest.approx(3.25)
    # Alike, and an exchange of X = 1.5 T_c: n/R = X p / (2 (p - 1)) = 1, twice of it per push.
    assert predicted_gain([1.0] * 4, step_s=2.5, batch_size=4) == pytest.approx(2.5 / 3.0)


def rule_of_mine(seen: Seen) -> bool:
    return seen.metrics.get("accuracy", 0.0) > 0.9


def test_a_function_of_the_users_is_a_rule() -> None:
    rule = make_trigger("tests.strategies.triggers.test_triggers:rule_of_mine")
    assert rule.judge(Seen(COURSE, 10, loss=1.0), {}) is None
    before = rule.judge(Seen(COURSE, 10, validated=1.0, metrics={"accuracy": 0.5}), {})
    after = rule.judge(Seen(COURSE, 20, validated=1.0, metrics={"accuracy": 0.95}), {})
    assert before is not None and not before.fires
    assert after is not None and after.fires


def test_a_class_of_the_users_is_a_rule(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from typing import ClassVar\n"
        "from podium import Reading, Trigger\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Mine(Trigger):\n"
        "    name: ClassVar[str] = 'mine'\n"
        "    below: float = 0.1\n"
        "    latest: float = 0.8\n"
        "    def judge(self, seen, memory):\n"
        "        return Reading(seen.loss, self.below, seen.loss < self.below, 'low')\n"
    )
    rule = make_trigger(f"{tmp_path}/mine.py:Mine:below=0.5")
    reading = rule.judge(Seen(COURSE, 10, loss=0.3), {})
    assert reading is not None and reading.fires
    assert rule.horizon(COURSE) == 2400


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("plateau:window=1", "window"),
        ("plateau:latest=0", "latest"),
        ("plateau:smoothing=1", "smoothing"),
        ("plateau:fallen=0", "fallen"),
        ("noise:factor=0", "factor"),
        ("straggler:factor=1", "factor"),
        ("rate-decay:to=2", "to must"),
        ("advice:after=1", "after"),
        ("step:at=3;after=4", "one of at and after"),
        ("function:of=math:pi", "must be a function"),
        ("plataeu", "plateau"),
        ("plateau:windw=3", "window"),
    ],
)
def test_bad_rules_are_refused_with_a_reason(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_trigger(text)


def test_all_that_a_rule_remembers_is_plain() -> None:
    """Checkpoints keep it as JSON."""
    import json

    for text in WATCHED:
        rule, memory = make_trigger(text), dict[str, Any]()
        for i in range(30):
            times = {0: 1.0, 1: 2.0}
            rule.judge(Seen(COURSE, 10 * (i + 1), loss=1.0, rate=0.1, times=times, step_s=1.0, noise=3.0), memory)
        rule.judge(Seen(COURSE, 300, validated=1.0), memory)
        assert json.loads(json.dumps(memory)) == memory

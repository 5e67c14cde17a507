"""The switching studies, in virtual time and with real processes: their pages say what their records give."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from podium.lab.report.format import plain, spread
from podium.lab.stats.statistics import holm, mean_interval
from podium.lab.study.file import read_study
from podium.lab.study.run import run_study

scipy_stats = pytest.importorskip("scipy.stats")

ROOT = Path(__file__).parents[2]
STUDIES = ROOT / "docs" / "studies"
SWITCH, SWITCH_FP16, DROPPED = "strategy-switch", "strategy-switch fp16", "strategy-switch fp16, moments dropped"
Rows = dict[int, dict[str, Any]]


@cache
def records(name: str) -> list[dict[str, Any]]:
    text = (STUDIES / name / "results.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@cache
def said(name: str) -> str:
    text = (STUDIES / name / "PAGE.md").read_text(encoding="utf-8")
    return " ".join(re.sub(r"\]\([^)]*\)", "", text).replace("[", "").replace("*", "").split())


def of(arm: str, setting: str) -> Rows:
    found = [row for row in records("switching") if row["levels"] == {"arm": arm, "setting": setting}]
    return {row["seed"]: row for row in sorted(found, key=lambda row: int(row["seed"]))}


def accuracy(row: dict[str, Any]) -> float:
    return 100 * float(row["metrics"]["accuracy"])


def shown(values: Sequence[float]) -> str:
    mean = mean_interval(values)
    assert mean is not None
    return spread(mean.mean, mean.low, mean.high).replace("-", "−")


def part(values: Sequence[float]) -> str:
    """Parts of a time, to a thousandth."""
    mean = mean_interval(values)
    assert mean is not None and mean.low is not None and mean.high is not None
    return f"{mean.mean:.3f} ± {(mean.high - mean.low) / 2:.3f}"


def points(one: Rows, other: Rows) -> list[float]:
    return [accuracy(one[seed]) - accuracy(other[seed]) for seed in one]


def time(one: Rows, other: Rows) -> list[float]:
    return [one[seed]["seconds"] / other[seed]["seconds"] for seed in one]


def reached(one: Rows, base: Rows, name: Callable[[dict[str, Any]], float]) -> list[float]:
    """When the accuracy that the other ended with was first reached, over the other's seconds, of seeds that did."""
    found = []
    for seed, row in one.items():
        at = [p["seconds"] for p in row["history"] if 100 * p["accuracy"] >= name(base[seed]) - 1e-3]
        found += [at[0] / base[seed]["seconds"]] if at else []
    return found


def bullet(start: str, name: str = "switching") -> str:
    text = (STUDIES / name / "PAGE.md").read_text(encoding="utf-8")
    (line,) = (line for line in text.splitlines() if line.startswith(f"- **{start}"))
    return re.sub(r"\]\([^)]*\)", "", line).replace("[", "")


class TestTheSwitch:
    def test_cifar(self) -> None:
        base, text = of("all-reduce", "cifar"), bullet("CIFAR-10")
        switch, fp16, start = (of(arm, "cifar") for arm in (SWITCH, SWITCH_FP16, "async fp16"))
        assert f"takes {part(time(switch, base))} of all-reduce's time at {shown(points(switch, base))} points" in text
        assert f"fp16 it takes {part(time(fp16, base))} at {shown(points(fp16, base))} points" in text
        same = of("all-reduce fp16", "cifar")
        assert f"the same codec {part(time(fp16, same))} at {shown(points(fp16, same))} points" in text
        assert f"from the start: {part(time(start, base))} at {shown(points(start, base))} points" in text

    def test_the_targets_are_met_or_missed_as_it_says(self) -> None:
        base, switch = of("all-reduce", "cifar"), of(SWITCH, "cifar")
        ratio, gap = mean_interval(time(switch, base)), mean_interval(points(switch, base))
        assert ratio is not None and gap is not None and ratio.high is not None and gap.low is not None
        assert ratio.mean <= 0.6 < ratio.high and gap.low < -0.3 <= gap.mean
        assert "both targets met by the mean, neither settled" in bullet("CIFAR-10")
        codec = mean_interval(points(of(SWITCH_FP16, "cifar"), of("all-reduce fp16", "cifar")))
        assert codec is not None and codec.high is not None and codec.mean < -0.3 < codec.high
        mnist = mean_interval(time(of(SWITCH, "mnist"), of("all-reduce", "mnist")))
        assert mnist is not None and mnist.low is not None and mnist.low > 0.6

    def test_when_all_reduces_accuracy_was_reached(self) -> None:
        base = of("all-reduce", "cifar")
        one, two = (reached(of(arm, "cifar"), base, accuracy) for arm in (SWITCH, SWITCH_FP16))
        told = f"in {len(one)} of 3 seeds, with fp16 in {len(two)} of 3, after {one[0]:.2f}"
        assert f"{told} and {statistics.median(two):.2f}" in bullet("CIFAR-10")

    def test_mnist(self) -> None:
        base, same, text = of("all-reduce", "mnist"), of("all-reduce fp16", "mnist"), bullet("MNIST")
        switch, fp16, start = (of(arm, "mnist") for arm in (SWITCH, SWITCH_FP16, "async fp16"))
        assert f"takes {part(time(switch, base))} of all-reduce's time" in text
        assert f"with fp16 {part(time(fp16, base))}, beside all-reduce with fp16 {part(time(fp16, same))}" in text
        told = f"+{shown(points(switch, base))}, with fp16 +{shown(points(fp16, base))}, beside all-reduce with fp16"
        assert f"{told} {shown(points(fp16, same))}" in text
        ratio = statistics.fmean(time(start, base))
        assert f"from the start: {ratio:.3f} of the time at {shown(points(start, base))} points" in text
        middle = [f"{statistics.median(points(arm, base)):.2f}".replace("-", "−") for arm in (switch, fp16)]
        assert f"{middle[0]} and, with fp16, {middle[1]} points" in text
        assert sum(row["setback_epoch"] is not None for row in base.values()) == 1 and "One of six runs" in text

    def test_every_sample_was_used_once_and_every_run_finished(self) -> None:
        rows = records("switching")
        assert all(row["audit"] == {"missing": 0, "repeated": 0} and row["status"] == "finished" for row in rows)
        assert f"all {len(rows)} runs every sample" in said("switching")

    def test_images_and_what_they_leave_open(self) -> None:
        for setting in ("cifar", "mnist"):
            rows = of("all-reduce", setting)
            share, row = statistics.fmean(map(accuracy, rows.values())) / 100, rows[0]
            error = 196 * math.sqrt(share * (1 - share) / row["test"])
            assert f"{row['train']:,} training images, {row['test']:,} test images" in said("switching")
            assert f"±{plain(error, 2)} points" in said("switching")

    def test_what_it_took(self) -> None:
        for device, text in (("cuda", "28 runs, half of them in less than"), ("cpu", "96 runs, half of them in")):
            took = [row["wall_s"] for row in records("switching") if row["config"]["device"] == device]
            assert f"{len(took)} runs" in text and text in said("switching")
            assert f"{statistics.median(took):.0f} s" in said("switching").partition(text)[2][:30]


def step_ms(arm: str, setting: str) -> float:
    (row,) = of(arm, setting).values()
    return float(row["global_step_ms"])


def switch_share(setting: str) -> float:
    """The median share of the budget at which the setting's runs switched."""
    rows = [row for row in records("switching") if row["levels"]["setting"] == setting]
    return statistics.median(row["switch_share"] for row in rows if "switch_share" in row)


def mixed(setting: str, timed: str, before: str, after: str, against: str) -> float:
    """Time of a run that is `before` up to the switch and `after` from it on, over that of `against`."""
    share = switch_share(setting)
    both = share * step_ms(before, timed) + (1 - share) * step_ms(after, timed)
    return both / step_ms(against, timed)


class TestTheClock:
    def test_with_overlap_on_both_sides(self) -> None:
        small, text = "all-reduce, small buckets", bullet("What that all-reduce lacks")
        usual = mixed("cifar", "timed-cifar", small, "async", small)
        core = mixed("cifar", "timed-cifar-core", small, "async", small)
        assert f"takes {usual:.3f} of all-reduce's time with small buckets on both sides, and {core:.3f} at" in text

    def test_with_parts_by_speed(self) -> None:
        base, even = step_ms("all-reduce", "timed-cifar"), step_ms("all-reduce, equal-finish", "timed-cifar")
        both, text = step_ms("all-reduce, equal-finish, small buckets", "timed-cifar"), bullet("What that all-reduce")
        assert f"takes {even / base:.3f} of all-reduce's time without a switch: {even:.0f} ms a step" in text
        assert f"instead of {base:.0f}, and {both:.0f} with small buckets" in text

    def test_when_other_rules_would_have_ended(self) -> None:
        base, fp16, start = (of(arm, "cifar") for arm in ("all-reduce", "all-reduce fp16", "async fp16"))
        before, after = statistics.fmean(time(fp16, base)), statistics.fmean(time(start, base))

        def ended(rule: str) -> str:
            fired = [one["epoch"] / 30 for row in of(SWITCH_FP16, "cifar").values() for one in row["rules"]
                     if one["rule"] == rule and not one["in_force"]]  # fmt: skip
            share = statistics.median(fired)
            return f"{share * before + (1 - share) * after:.2f}"

        sixteenth, eighth, half, decay, loss = map(
            ended, ("share:at=0.0625", "share:at=0.125", "share:at=0.5", "rate-decay", "plateau:on=validation")
        )
        assert half == decay
        told = f"would end at {sixteenth} of all-reduce's time, at an eighth at {eighth}, at half of it or at the"
        assert f"{told} learning rate's decay at {half}, with the validation loss at {loss}" in said("switching")

    def test_the_rule_as_published_fired_in_none_of_these_runs(self) -> None:
        published = "plateau:against=last;threshold=0.01;floor=0;fallen=1"
        rules = [rule for row in records("switching") for rule in row["rules"] if rule["rule"] == published]
        assert not any(rule["epoch"] for rule in rules) and "fired in none of these runs" in said("switching")


class TestMoments:
    SETTINGS = ("cifar", "mnist", "mnist-adam", "digits-momentum")

    def pairs(self, setting: str, value: Callable[[dict[str, Any]], Any], *, same_place: bool) -> list[float]:
        """Kept minus dropped, by seed; of losses only where the two runs switched at the same place."""
        kept, dropped = of(SWITCH_FP16, setting), of(DROPPED, setting)
        return [
            value(kept[seed]) - value(dropped[seed])
            for seed in kept
            if not same_place or kept[seed]["switches"][0]["position"] == dropped[seed]["switches"][0]["position"]
        ]

    def differences(self) -> dict[tuple[str, str], list[float]]:
        found: dict[tuple[str, str], list[float]] = {}
        for setting in self.SETTINGS:
            found[setting, "accuracy"] = self.pairs(setting, accuracy, same_place=False)
            for name in ("loss_after", "loss_later"):
                found[setting, name] = self.pairs(setting, lambda row, name=name: row[name], same_place=True)  # type: ignore[misc]
        return {key: values for key, values in found.items() if len(values) > 2}

    def test_no_accuracy_differs_and_two_losses_do(self) -> None:
        tests = self.differences()
        assert len(tests) == 10 and "over all ten tests" in said("switching")
        alone = [float(scipy_stats.ttest_1samp(values, 0.0).pvalue) for values in tests.values()]
        p = dict(zip(tests, holm(alone), strict=True))
        assert not any(p[setting, "accuracy"] < 0.05 for setting in self.SETTINGS)
        assert {key for key, value in p.items() if value < 0.05} == {
            ("mnist-adam", "loss_later"), ("digits-momentum", "loss_after"), ("digits-momentum", "loss_later"),
        }  # fmt: skip
        later = tests["mnist-adam", "loss_later"]
        assert f"by {shown(later)} (p {p['mnist-adam', 'loss_later']:.3f} after Holm's" in said("switching")
        first, next_ = (shown(tests["digits-momentum", name]).lstrip("−") for name in ("loss_after", "loss_later"))
        assert f"by {first} over the first epoch and {next_} over the next three" in said("switching")

    def test_on_cifar_the_runs_of_one_seed_switched_at_other_places(self) -> None:
        kept, dropped = of(SWITCH_FP16, "cifar"), of(DROPPED, "cifar")
        assert [s for s in kept if kept[s]["switches"][0]["position"] != dropped[s]["switches"][0]["position"]] == [2]


class TestDiLoCo:
    def test_the_best_outer_step_is_told_with_what_it_saves(self) -> None:
        base, best = of("all-reduce", "cifar-equal"), of("diloco 1, 0.5", "cifar-equal")
        tried = {row["levels"]["arm"]: accuracy(row) for row in records("switching")
                 if row["levels"]["arm"].startswith("diloco") and row["seed"] == 0}  # fmt: skip
        assert len(tried) == 5 and max(tried, key=lambda arm: tried[arm]) == "diloco 1, 0.5"
        text = bullet("DiLoCo")
        gap = mean_interval(points(best, base))
        assert gap is not None and gap.high is not None and gap.mean < -1 < gap.high
        assert f"ends {shown(points(best, base))} points below" in text
        assert f"{best[0]['exchanges']} exchanges against {base[0]['exchanges']:,}" in text
        ratio = best[0]["sent_bytes"] / base[0]["sent_bytes"]
        assert f"{ratio:.3f} of the bytes and {statistics.fmean(time(best, base)):.3f} of the time" in text
        ended = [statistics.fmean(row["train_loss"][-1] for row in rows.values()) for rows in (best, base)]
        assert f"ends at {ended[0]:.2f}, all-reduce's at {ended[1]:.2f}" in text


def module() -> Any:
    spec = importlib.util.spec_from_file_location("switching_study", ROOT / "studies" / "switching.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


class TestTheStudy:
    def test_the_records_are_of_the_studys_cells_and_seeds(self) -> None:
        for name in ("switching.py", "switching-real.toml"):
            design = read_study(ROOT / "studies" / name).resolved()
            rows = records(name.partition(".")[0])
            assert sorted((row["cell"], row["seed"]) for row in rows) == sorted(design.order())

    def test_a_setback_is_a_high_loss_after_a_low_one(self) -> None:
        row = {"seconds": 1.0, "steps": 1, "switches": []}
        derived = module().derived
        assert derived({**row, "train_loss": [1.0, 0.05, 0.3, 0.6, 0.7]})["setback_epoch"] == 4
        assert derived({**row, "train_loss": [1.0, 0.6, 0.2]})["setback_epoch"] is None
        found = [row for row in records("switching") if row["setback_epoch"] is not None]
        assert {row["levels"]["setting"] for row in found} == {"mnist"} and len(found) == 18

    @pytest.mark.slow
    def test_the_small_size_runs_and_rows_have_the_studys_own_numbers(self, tmp_path: Path) -> None:
        study = read_study(ROOT / "studies" / "switching.py", "small").changed({}, seeds=1)
        found = run_study(study, out=tmp_path, jobs=2)
        assert found.failed == 0 and len(found.rows) == 6
        switched = next(row for row in found.rows if row["levels"]["arm"] == SWITCH)
        assert len(switched["train_loss"]) == 8 and switched["global_step_ms"] > 0 and switched["exchanges"] > 0
        assert switched["loss_after"] is not None and 0 < switched["switch_share"] < 1

    @pytest.mark.slow
    def test_a_run_today_gives_the_committed_row(self, tmp_path: Path) -> None:
        study = read_study(ROOT / "studies" / "switching.py").changed({}, seeds=1)
        only = {"setting": ["digits-momentum"], "arm": [SWITCH_FP16]}
        (row,) = run_study(study, out=tmp_path, only=only).rows
        kept = of(SWITCH_FP16, "digits-momentum")[0]
        for name in ("sent_bytes", "steps", "samples", "exchanges", "switch_share", "audit"):
            assert row[name] == kept[name]
        for name in ("seconds", "loss_after", "loss_later", "global_step_ms", "train_loss"):
            assert row[name] == pytest.approx(kept[name], rel=1e-3)


class TestRealProcesses:
    def rows(self, strategy: str) -> Rows:
        return {row["seed"]: row for row in records("switching-real") if row["cell"] == strategy}

    def test_times(self) -> None:
        start = "parameter-server:mode=async,servers=3,placement=colocated"
        base, switch, server = (self.rows(name) for name in ("all-reduce", "strategy-switch", start))
        text = said("switching-real")
        assert f"A switch takes {part(time(switch, base))} of all-reduce's time" in text
        assert f"from the start {part(time(server, base))}" in text
        for rows, word in ((base, " of its whole time by all-reduce"), (switch, " by a switch"), (server, " by async")):
            found = reached(rows, base, accuracy)
            assert len(found) == 3 and f"{min(found):.2f} to {max(found):.2f}{word}" in text

    def test_what_the_switch_cost_and_when_it_came(self) -> None:
        found = [row["switches"][0] for _, row in sorted(self.rows("strategy-switch").items())]
        epochs, costs = ([f"{one:.1f}" for one in (s["epoch"] for s in found)], [s["cost_ms"]["total"] for s in found])
        text = said("switching-real")
        assert f"at epochs {epochs[0]}, {epochs[1]} and {epochs[2]}" in text
        assert f"cost {costs[0]:.0f}, {costs[1]:.0f} and {costs[2]:.0f} ms" in text

    def test_every_sample_was_used_once_and_few_images_leave_accuracy_open(self) -> None:
        rows = records("switching-real")
        assert all(row["audit"] == {"missing": 0, "repeated": 0} for row in rows)
        assert f"all {len(rows)} runs" in said("switching-real")
        share = statistics.fmean(row["metrics"]["accuracy"] for row in rows)
        assert f"{196 * math.sqrt(share * (1 - share) / 359):.1f} points" in said("switching-real")
        assert all((359 * row["metrics"]["accuracy"]) % 1 < 1e-6 or (359 * row["metrics"]["accuracy"]) % 1 > 1 - 1e-6
                   for row in rows)  # fmt: skip

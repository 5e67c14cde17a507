"""The rates study: what its page says about codecs is what its records give."""

from __future__ import annotations

import json
import math
import re
import statistics
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from podium.exchange.packing import make_packing
from podium.lab.report.format import spread
from podium.lab.stats.statistics import mean_interval
from podium.lab.study.file import read_study
from podium.lab.study.run import run_study

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "studies" / "rates"
MNIST, CIFAR = "mnist-lenet5", "cifar10-resnet20"
PAIRS = {
    "top-k:ratio=0.01": "top-k:ratio=0.01;feedback=false",
    "power-sgd:rank=1": "power-sgd:rank=1;feedback=false",
    "ef-sign": "sign",
}


@cache
def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / "results.jsonl").read_text(encoding="utf-8").splitlines()]


@cache
def said() -> str:
    text = (FOLDER / "PAGE.md").read_text(encoding="utf-8")
    return " ".join(re.sub(r"\]\([^)]*\)", "", text).replace("[", "").replace("*", "").split())


def points(codec: str, task: str) -> dict[int, float]:
    """Accuracy in percent, by seed."""
    found = {row["seed"]: row for row in rows() if row["levels"] == {"codec": codec, "task": task}}
    return {seed: 100 * row["metrics"]["accuracy"] for seed, row in found.items()}


def ends(first: str, second: str, task: str) -> tuple[float, float, float]:
    """Mean and interval of the difference in points, paired by seed."""
    one, two = points(first, task), points(second, task)
    mean = mean_interval([one[seed] - two[seed] for seed in one])
    assert mean is not None and mean.low is not None and mean.high is not None and mean.n == 3
    return mean.mean, mean.low, mean.high


def told(first: str, second: str, task: str) -> str:
    return spread(*ends(first, second, task)).replace("-", "−")


def ratio(codec: str, task: str) -> float:
    sent = {row["levels"]["codec"]: row["sent_bytes"] for row in rows() if row["levels"]["task"] == task}
    return float(sent[codec] / sent["dense"])


def others() -> list[str]:
    return [codec for codec in dict.fromkeys(row["levels"]["codec"] for row in rows()) if codec != "dense"]


class TestFindings:
    def test_the_codec_that_sends_least_within_a_point_on_both_tasks(self) -> None:
        close = [c for c in others() if all(ends(c, "dense", task)[0] >= -1 for task in (MNIST, CIFAR))]
        best = min(close, key=lambda codec: max(ratio(codec, task) for task in (MNIST, CIFAR)))
        assert best == "power-sgd:rank=4"
        on_mnist = f"{ratio(best, MNIST):.4f} of dense's bytes on MNIST at {told(best, 'dense', MNIST)} points"
        assert f"{on_mnist}, {ratio(best, CIFAR):.3f} on CIFAR-10 at {told(best, 'dense', CIFAR)} points" in said()
        assert ends(best, "dense", CIFAR)[1] < -1 and "do not settle that on CIFAR-10" in said()

    def test_no_codec_stays_above_the_line_on_both_tasks_with_its_whole_interval(self) -> None:
        assert not [c for c in others() if all(ends(c, "dense", task)[1] >= -1 for task in (MNIST, CIFAR))]
        assert "No codec's interval stays above that line on both tasks" in said()

    @pytest.mark.parametrize(("task", "count", "sure"), [(MNIST, 13, 5), (CIFAR, 6, 0)])
    def test_who_is_within_one_point(self, task: str, count: int, sure: int) -> None:
        close = [codec for codec in others() if ends(codec, "dense", task)[0] >= -1]
        settled = [codec for codec in close if ends(codec, "dense", task)[1] >= -1]
        assert (len(others()), len(close), len(settled)) == (18, count, sure)
        line = said().partition("MNIST, LeNet-5")[2] if task == MNIST else said().partition("CIFAR-10, ResNet-20")[2]
        named = set(re.findall(r"`([^`]+)`", line.partition(": ")[2].partition(" (table)")[0]))
        assert named == set(settled or close)

    def test_on_cifar_the_others_are_worse_for_sure_but_for_two(self) -> None:
        below = [codec for codec in others() if ends(codec, "dense", CIFAR)[0] < -1]
        assert {c for c in below if ends(c, "dense", CIFAR)[2] >= -1} == {"sign", "power-sgd:rank=2"}
        assert "all but `sign` and `power-sgd:rank=2` are worse for sure" in said()

    def test_single_numbers_are_those_of_the_records(self) -> None:
        for task in (MNIST, CIFAR):
            mean = mean_interval(list(points("dense", task).values()))
            assert mean is not None and f"(dense {spread(mean.mean, mean.low, mean.high)} %)" in said()
        assert f"sends {ratio('top-k:ratio=0.001', MNIST):.5f} of the bytes" in said()
        assert f"at {told('top-k:ratio=0.001', 'dense', MNIST)} points" in said()
        for codec in ("sign", "vote"):
            assert f"`{codec}` {told(codec, 'dense', MNIST).lstrip('−')}" in said()
            assert ends(codec, "dense", MNIST)[2] < -1
        assert f"`random-k:ratio=0.1` {told('random-k:ratio=0.1', 'dense', CIFAR).lstrip('−')}" in said()
        assert -10.85 < ends("ef-sign", "dense", CIFAR)[0] < -10.75 and "`ef-sign` loses 10.8 ± 0.9 points" in said()

    def test_what_error_feedback_is_worth(self) -> None:
        with_without = list(PAIRS.items())
        for codec, off in with_without[:2]:
            assert told(codec, off, CIFAR) in said()
        on_mnist, on_cifar = (told("ef-sign", "sign", task).lstrip("−") for task in (MNIST, CIFAR))
        assert f"worth {on_mnist} points on MNIST and costs {on_cifar} on CIFAR-10" in said()

    def test_images_and_what_they_leave_open(self) -> None:
        for task, images in ((MNIST, "8,000"), (CIFAR, "10,000")):
            row = next(row for row in rows() if row["levels"]["task"] == task)
            share = statistics.fmean(points("dense", task).values()) / 100
            error = 196 * math.sqrt(share * (1 - share) / row["test"])
            assert f"{row['test']:,} test images leave an accuracy uncertain by ±{error:.2g} points" in said()
            assert f"{row['train']:,}" == images and f"{images} images for {row['epochs']} epochs" in said()

    def test_seconds_on_the_machines_that_ran_them(self) -> None:
        for task in (MNIST, CIFAR):
            took = [row["wall_s"] for row in rows() if row["levels"]["task"] == task]
            assert len(took) == 57 and f"in less than {statistics.median(took):.0f} s" in said()

    def test_replicas_ended_equal_in_all_runs(self) -> None:
        assert all(row["status"] == "finished" and row["replicas_equal"] for row in rows())
        assert f"all {len(rows())} runs" in said()


class TestDesign:
    def test_the_records_are_of_the_studys_cells_and_seeds(self) -> None:
        design = read_study(ROOT / "studies" / "rates.toml").resolved()
        assert sorted((row["cell"], row["seed"]) for row in rows()) == sorted(design.order())
        assert len(design.cells) == 2 * 19

    def test_every_codec_can_be_made_and_pairs_differ_in_feedback_alone(self) -> None:
        packings = {codec: make_packing(codec) for codec in ("dense", *others())}
        for on, off in PAIRS.items():
            assert packings[on].keeps_residual and not packings[off].keeps_residual
        assert not packings["vote"].keeps_residual
        summed = {codec.partition(":")[0] for codec, one in packings.items() if one.codec.reduction == "sum"}
        assert summed == {"dense", "fp16", "bf16", "random-k", "power-sgd"}
        assert {row["levels"]["codec"]: row["reduction"] for row in rows()} == {
            codec: one.codec.reduction for codec, one in packings.items()
        }

    @pytest.mark.slow
    def test_the_small_size_runs_and_its_report_has_the_table(self, tmp_path: Path) -> None:
        study = read_study(ROOT / "studies" / "rates.toml", "small").changed({}, seeds=1)
        found = run_study(study, out=tmp_path, jobs=2)
        sent = {row["levels"]["codec"]: row["sent_bytes"] for row in found.rows}
        assert found.failed == 0 and len(sent) == 6
        # One element in a hundred, gathered by 4 workers: twice the ratio of one wire, and the first parameters.
        assert 0.02 < sent["top-k:ratio=0.01"] / sent["dense"] < 0.05
        assert "Against dense" in Path(found.report).read_text(encoding="utf-8")

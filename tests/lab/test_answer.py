from __future__ import annotations

from typing import Any

import pytest

from podium.lab.report.answer import answer, find
from podium.lab.stats.power import worth_of
from podium.lab.study.store import Row
from podium.lab.study.study import Study
from tests.lab.synthetic import failed_row, make_row, make_rows, phased

FAST, SLOW = [1.0, 1.05, 0.95, 1.02, 0.98], [2.0, 2.2, 1.9, 2.1, 2.05]


def said(rows: list[dict[str, object]], target: float | None = 0.9) -> str:
    return answer(rows, target).split("\n")[0]


def test_a_clear_winner_is_named_with_how_much_and_how_sure() -> None:
    text = said(make_rows({"solo": SLOW, "all-reduce": FAST}))
    assert text.startswith("Fastest to 0.900 accuracy: all-reduce, ")
    assert "faster than solo (95 % CI" in text and "Holm p" in text
    assert "Final accuracy: the same for all." in text


def test_no_difference_that_we_can_detect_is_an_answer() -> None:
    text = said(make_rows({"solo": [1.0, 1.5, 0.9], "all-reduce": [1.1, 1.0, 1.4]}))
    assert "no difference that we can detect from" in text and "× faster" not in text


def test_those_it_cannot_be_told_from_are_named_beside_those_it_beats() -> None:
    near = [1.04, 0.99, 1.01, 1.03, 1.0]
    text = said(make_rows({"solo": SLOW, "all-reduce": FAST, "parameter-server": near}))
    assert "faster than solo" in text and "not distinguishable from parameter-server." in text


def test_a_better_final_metric_is_told_with_its_gap() -> None:
    finals = {"solo": [0.97, 0.972, 0.969, 0.971, 0.97], "all-reduce": [0.93, 0.931, 0.928, 0.932, 0.929]}
    text = said(make_rows({"solo": FAST, "all-reduce": FAST}, finals))
    assert "Final accuracy: best is solo with" in text and "lower is all-reduce by 0.040 (Holm p < 0.001)" in text


def test_the_best_error_is_the_lowest() -> None:
    finals = {"solo": [0.2, 0.21, 0.205], "all-reduce": [0.1, 0.111, 0.104]}
    rows = [make_row(c, s, final=x, metric="mae") for c, values in finals.items() for s, x in enumerate(values)]
    text = said(rows, None)
    assert "Fastest to 0.110 mae" not in text  # solo never gets there, all-reduce not in every seed
    assert "best is all-reduce" in text and "higher is solo by 0.10" in text


def test_one_seed_makes_no_claim() -> None:
    text = said(make_rows({"solo": [2.0], "all-reduce": [1.0]}, {"solo": [0.97], "all-reduce": [0.95]}))
    assert "with one seed there is no interval" in text and "one run each" in text and "Holm" not in text


def test_a_target_that_nobody_reached_is_said_and_training_time_takes_its_place() -> None:
    text = said(make_rows({"solo": SLOW, "all-reduce": FAST}), 0.999)
    assert text.startswith("No strategy reached 0.999 accuracy in every seed. Shortest training time: all-reduce")


def test_failures_are_in_the_answer() -> None:
    text = said([*make_rows({"solo": FAST, "all-reduce": SLOW}), failed_row("all-reduce", 5)])
    assert "1 of 11 runs failed (all-reduce)" in text


def test_when_every_run_failed_the_first_error_is_the_answer() -> None:
    text = said([failed_row("solo", 0, "RankFailed: rank 0\nTrainingError: loss is nan"), failed_row("solo", 1)])
    assert text == "No run finished: 2 failed. The first one, solo, said: TrainingError: loss is nan"


def test_no_rows_are_nothing_to_compare() -> None:
    assert "No run has finished yet" in said([])


def test_one_strategy_alone_is_not_a_comparison() -> None:
    assert said(make_rows({"solo": FAST})).startswith("Only solo has finished runs, so nothing is compared: accuracy")


def test_it_says_what_may_not_be_concluded() -> None:
    rows = make_rows({"solo": SLOW, "all-reduce": FAST})
    limits = answer(rows, None, Study.from_dict({"hardware": {"cores": 2}})).split("\n")[1]
    assert "2 CPU cores" in limits and "9,610 parameters" in limits and "5 seeds" in limits
    assert "says nothing about other hardware" in limits


@pytest.mark.parametrize(
    ("devices", "gpus", "where"),
    [
        (["cuda", "cpu"], ["NVIDIA H200"], "on NVIDIA H200 and 16 CPU cores,"),
        (["cuda:1,cuda:0"], ["NVIDIA L4", "NVIDIA L4"], "on NVIDIA L4 and 16 CPU cores,"),
        (["cuda"], [], "on a GPU and 16 CPU cores,"),
        (["cpu"], ["NVIDIA H200"], "on 16 CPU cores,"),
        (["auto"], ["NVIDIA H200"], "on NVIDIA H200 and 16 CPU cores,"),
        (["auto"], [], "on 16 CPU cores,"),
        ([None, "mps"], None, "on 16 CPU cores,"),
    ],
)
def test_it_says_on_which_gpus_where_any_was_used(devices: list[Any], gpus: list[str] | None, where: str) -> None:
    cells = [{"cell": str(name), "settings": {"device": name}} for name in devices]
    study = {"hardware": {"cores": 16, "gpus": gpus}, "settings": {"device": "cuda"}, "cells": cells}
    assert where in answer(make_rows({"solo": FAST}), None, Study.from_dict(study))


def test_simulated_seconds_are_called_so() -> None:
    assert "simulated" in answer([make_row("solo", 0, launcher="virtual")])
    assert "simulated" not in answer([make_row("solo", 0)])


def test_what_is_simulated_is_not_called_measured_on_this_machine() -> None:
    study = {"hardware": {"cores": 2, "gpus": []}, "cells": [{"cell": "solo", "settings": {}}]}
    said = answer([make_row("solo", 0, launcher="virtual")], None, Study.from_dict(study))
    assert "Measured" not in said and "CPU core" not in said
    assert "Seconds are simulated, not measured" in said and "described machines" in said


def test_a_study_of_both_says_which_seconds_are_simulated() -> None:
    study = {"hardware": {"cores": 2, "gpus": []}, "cells": [{"cell": "solo", "settings": {}}]}
    rows = [make_row("solo", 0, launcher="virtual"), make_row("all-reduce", 0), make_row("all-reduce", 1)]
    said = answer(rows, None, Study.from_dict(study))
    assert "1 of 3 runs are simulated" in said and "Measured on 2 CPU cores" in said


class TestRulesThatEndPhases:
    def rows(self, *values: float | None, latest: bool) -> list[Row]:
        return [make_row("strategy-switch", seed, **phased(*values, latest=latest)) for seed in range(3)]

    def test_a_rule_that_fired_in_no_run_is_told_of(self) -> None:
        said = answer(self.rows(None, 0.4, latest=True))
        assert "The rule plateau of strategy-switch fired in 0 of 3 runs" in said
        assert "could not" not in said

    def test_a_rule_that_never_had_a_value_could_not_fire(self) -> None:
        said = answer(self.rows(None, None, latest=True))
        assert "fired in 0 of 3 runs, and could not: its phase ended before the rule had a value" in said

    def test_a_rule_that_fired_everywhere_is_no_caution(self) -> None:
        assert "fired in" not in answer(self.rows(None, 0.05, latest=False))

    def test_cells_of_one_strategy_are_told_of_together(self) -> None:
        rows = [
            make_row(f"strategy-switch, workers={n}", seed, levels={"strategy": "strategy-switch", "workers": n})
            | phased(None, None, latest=True)
            for n in (2, 4)
            for seed in range(2)
        ]
        assert "The rule plateau of strategy-switch fired in 0 of 4 runs, and could not" in answer(rows)


def test_which_way_is_better_is_the_studys_word_over_the_name() -> None:
    finals = {"solo": [0.2, 0.21, 0.205], "all-reduce": [0.1, 0.111, 0.104]}
    rows = make_rows({"solo": [1.0, 1.1, 1.05], "all-reduce": [1.0, 1.1, 1.05]}, finals)
    assert "best is solo" in answer(rows) and "lower is all-reduce by" in answer(rows)
    other = answer(rows, maximize=False)
    assert "best is all-reduce" in other and "higher is solo by" in other
    up, down = find(rows), find(rows, maximize=False)
    assert (up.lower, down.lower) == (False, True)
    assert up.target == 0.195 and down.target == 0.11  # 5 % short of the best, from either side
    assert [line.reached for line in down.table] == [3, 3]  # validations begin far below: reached at once
    assert worth_of(up, "final accuracy") == 0.01 and worth_of(down, "final accuracy") == pytest.approx(0.05 * 0.105)

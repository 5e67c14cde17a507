"""What is said before a run: a rule that cannot fire in it, an exchange that comes too late, no overlap."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from torch import nn

import podium
from podium.cli import main
from podium.config import RunConfig, parse_strategy
from podium.engine.build import Job
from podium.launch.checks import check
from podium.launch.notices import notices
from podium.launch.prepare import resolve_job
from podium.testing.toys import CLASSES, FEATURES, halve_every_third, toy
from tests.test_examples import run_python

# The toy has 4 global steps an epoch.
NEVER = [
    ("all-reduce until plateau | local-sgd", {"epochs": 10}, "it looks at 6 epochs' losses and sees 3"),
    (
        "all-reduce until plateau:on=validation | local-sgd",
        {"epochs": 30, "eval_every": 3},
        "6 validations' losses and sees 3",
    ),
    ("strategy-switch", {"epochs": 8}, "it looks at 3 epochs' losses and sees 2"),
    (
        "all-reduce until step:at=9 | local-sgd",
        {"epochs": 2},
        "at=9 lies at or beyond the end of the run, which has 8 steps",
    ),
    ("all-reduce until step:at=8 | local-sgd", {"epochs": 2}, "lies at or beyond the end"),
    ("all-reduce until epoch:at=5 | local-sgd", {"epochs": 9, "steps": 12}, "at=5 lies at or beyond the end"),
    ("all-reduce until epoch:at=5;latest=0.2 | local-sgd", {"epochs": 10}, "at=5 lies beyond latest=0.2"),
    ("all-reduce until epoch:at=4 | local-sgd until epoch:at=2 | all-reduce", {"epochs": 8}, "at=2 has passed before"),
    (
        "all-reduce until step:after=3 | local-sgd until step:after=6 | all-reduce",
        {"epochs": 2},
        "after=6 lies at or beyond",
    ),
    ("all-reduce until rate-decay | local-sgd", {"epochs": 6}, "leaves the learning rate above 0.5 of its highest"),
    ("post-local-sgd", {"epochs": 6}, "leaves the learning rate above 0.5 of its highest"),
    ("all-reduce until noise | local-sgd", {"epochs": 6}, "evaluated every 20 steps, and the phase has 12"),
    ("all-reduce until noise:every=2 | local-sgd", {"epochs": 6, "workers": 1}, "measured between workers"),
    ("all-reduce until straggler | local-sgd", {"epochs": 6}, "3 comparisons of speeds in a row, one every 10 steps"),
    ("all-reduce until straggler | local-sgd", {"epochs": 9, "workers": 1}, "there is one worker"),
    (
        "all-reduce until advice:after=0.5;latest=0.4 | local-sgd",
        {"epochs": 9},
        "advice counts after 0.5 of the budget",
    ),
    ("all-reduce until advice | local-sgd", {"epochs": 2}, "speeds are compared every 10 steps, and the phase has 8"),
]
FINE = [
    ("all-reduce until plateau | local-sgd:period=2", {"epochs": 18}),
    ("strategy-switch", {"epochs": 10}),
    ("strategy-switch", {"epochs": 18}),
    ("all-reduce until plateau:on=validation | local-sgd:period=2", {"epochs": 36, "eval_every": 2}),
    ("all-reduce until step:at=7 | local-sgd:period=2", {"epochs": 2}),
    ("all-reduce until share:at=0.5 | local-sgd:period=2 until share:at=0.75 | all-reduce", {"epochs": 2}),
    ("all-reduce until noise | local-sgd:period=2", {"epochs": 10}),
    ("all-reduce until straggler | local-sgd:period=2", {"epochs": 8}),
    ("all-reduce until advice | local-sgd:period=2", {"epochs": 4}),
    ("sync-switch", {"epochs": 4}),
    ("all-reduce", {"epochs": 1}),
    ("solo", {"epochs": 1, "workers": 1}),
]


def train(strategy: str, task: Any = None, **options: Any) -> podium.RunResult:
    values = {"workers": 2, "launcher": "threads", "deadline_s": 30.0, **options}
    return podium.train(task or toy(), strategy=strategy, **values)


class TestRulesThatCannotFire:
    @pytest.mark.parametrize(("strategy", "options", "why"), NEVER)
    def test_it_is_said_before_the_run_and_comes_true(
        self, strategy: str, options: dict[str, Any], why: str, tmp_path: Path
    ) -> None:
        heard: list[dict[str, Any]] = []
        result = train(strategy, on_event=heard.append, out=str(tmp_path), **options)
        (said,) = result.notices
        assert "cannot fire in this run" in said and why in said
        kinds = [event["event"] for event in heard]
        assert heard[kinds.index("notice")]["text"] == said
        assert kinds.index("notice") < kinds.index("eval")
        fired = [rule for rule in result.rules if rule["in_force"] and rule["readings"] and rule["step"] is not None]
        assert not fired, "the rule fired all the same"

    @pytest.mark.parametrize(("strategy", "options"), FINE)
    def test_a_rule_that_can_fire_is_passed_over(self, strategy: str, options: dict[str, Any]) -> None:
        name, given = parse_strategy(strategy)
        config = RunConfig(strategy=name, strategy_options=given, **{"workers": 2, "launcher": "threads", **options})
        assert notices(Job(config, toy(), check(config))) == []

    def test_a_schedule_that_decays_in_time_is_looked_at(self, tmp_path: Path) -> None:
        decays = toy(schedule=halve_every_third)
        assert train("post-local-sgd:period=2", decays, epochs=6, out=str(tmp_path)).notices == ()
        (said,) = train("post-local-sgd:period=2,to=0.01", decays, epochs=2, out=str(tmp_path)).notices
        assert "above 0.01 of its highest" in said

    def test_where_the_phase_lasts_to_the_end_the_next_is_said_never_to_begin(self, tmp_path: Path) -> None:
        (said,) = train("all-reduce until step:at=9 | local-sgd", epochs=2, out=str(tmp_path)).notices
        assert said.endswith("the phase lasts to the end of the run, and local-sgd never begins")

    def test_looking_ahead_changes_nothing_of_the_run(self, tmp_path: Path) -> None:
        told = train("post-local-sgd", epochs=2, seed=3, out=str(tmp_path))
        again = train("post-local-sgd", epochs=2, seed=3, out=str(tmp_path), on_event=lambda event: None)
        assert told.notices and told.param_hash == again.param_hash

    def test_without_a_listener_it_is_logged(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, logger="podium"):
            train("strategy-switch", epochs=2, out=str(tmp_path))
        assert "cannot fire in this run" in caplog.text

    @pytest.mark.slow
    def test_a_comparison_logs_it_once_and_says_afterwards_that_it_came_true(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, logger="podium"):
            found = podium.compare(
                "digits-mlp", strategies=["strategy-switch"], seeds=2, launcher="threads", epochs=2, out=tmp_path
            )
        assert caplog.text.count("cannot fire in this run") == 1
        assert "The rule plateau:window=3 of strategy-switch fired in 0 of 2 runs, and could not" in found.answer

    def test_data_that_cannot_be_opened_are_the_runs_own_affair(self, tmp_path: Path) -> None:
        def broken() -> Any:
            raise OSError("no disk")

        with pytest.raises(OSError, match="no disk"):
            train("strategy-switch", podium.Task(**{**vars(toy()), "data": broken}), out=str(tmp_path))


class TestTheWindowThatIsLeftToTheBudget:
    @pytest.mark.parametrize(("epochs", "window"), [(9, 3), (10, 3), (12, 4), (15, 5), (18, 6), (30, 6)])
    def test_it_is_as_long_as_fits_before_the_latest_end(self, epochs: int, window: int, tmp_path: Path) -> None:
        result = train("strategy-switch", epochs=epochs, out=str(tmp_path))
        (rule,) = [rule for rule in result.rules if rule["in_force"]]
        assert rule["rule"] == ("plateau" if window == 6 else f"plateau:window={window}")
        values = [reading["value"] for reading in rule["readings"]]
        assert values[: window - 1] == [None] * (window - 1)
        assert rule["step"] is not None or values[window - 1 :], "the rule never had a value"

    def test_a_window_that_is_given_stays(self, tmp_path: Path) -> None:
        result = train("strategy-switch:window=6", epochs=10, out=str(tmp_path))
        assert "it looks at 6 epochs' losses and sees 3" in result.notices[0]

    def test_a_run_of_ten_epochs_can_switch_by_its_rule(self, tmp_path: Path) -> None:
        result = train("strategy-switch:threshold=10,fallen=1", epochs=10, out=str(tmp_path))
        (switch,) = result.switches
        assert switch["rule"].startswith("plateau:window=3") and 3 <= switch["epoch"] < 3.5


class TestMeetings:
    @pytest.mark.slow
    def test_workers_that_meet_only_at_the_end_are_told_of(self, tmp_path: Path) -> None:
        (said,) = train("diloco:sync_every=50", epochs=2, out=str(tmp_path)).notices
        assert "every 50 steps, and the run has 8: they exchange only at its end" in said
        (said,) = train("local-sgd:period=9", epochs=2, out=str(tmp_path)).notices
        assert "every 9 steps, and the run has 8" in said
        assert train("local-sgd:period=8", epochs=2, out=str(tmp_path)).notices == ()


class TestOverlap:
    def test_a_model_in_one_bucket_is_told_of_where_links_take_time(self, tmp_path: Path) -> None:
        (said,) = train("all-reduce", wide(), epochs=1, launcher="virtual", out=str(tmp_path)).notices
        assert (
            "0.164 of 0.164 MB of gradients leave in one bucket" in said and "bucket_bytes=20481 would let it" in said
        )

    @pytest.mark.parametrize(
        "strategy", ["all-reduce:bucket_bytes=64", "all-reduce:overlap=false", "parameter-server:mode=async"]
    )
    def test_it_is_not_where_there_are_several_or_nothing_is_to_overlap(self, strategy: str, tmp_path: Path) -> None:
        assert train(strategy, wide(), epochs=1, launcher="virtual", out=str(tmp_path)).notices == ()

    def test_a_small_model_is_not_worth_cutting(self, tmp_path: Path) -> None:
        assert train("all-reduce", epochs=1, launcher="virtual", out=str(tmp_path)).notices == ()

    def test_on_one_host_nothing_is_sent(self, tmp_path: Path) -> None:
        assert train("all-reduce", wide(), epochs=1, out=str(tmp_path)).notices == ()

    def test_a_model_of_one_tensor_cannot_be_cut(self) -> None:
        config = RunConfig(task="tests.test_notices:one_tensor", launcher="virtual", workers=2)
        assert notices(resolve_job(config)) == []

    def test_the_remedy_is_exact_and_faster_on_a_slow_link(self, tmp_path: Path) -> None:
        cluster = tmp_path / "slow.toml"
        described = (
            '[cluster]\nseconds_per_sample = 0.01\n[[node]]\nname = "a"\ncount = 2\nup_mbit = 10\ndown_mbit = 10\n'
        )
        cluster.write_text(described, encoding="utf-8")
        options = {"launcher": "virtual", "cluster": str(cluster), "epochs": 2, "out": str(tmp_path)}
        plain, cut = (train(f"all-reduce{how}", wide(), **options) for how in ("", ":bucket_bytes=20481"))
        assert plain.notices and not cut.notices
        assert plain.param_hash == cut.param_hash
        assert cut.seconds < plain.seconds

    def test_the_switch_takes_it_too(self, tmp_path: Path) -> None:
        switch = "strategy-switch:bucket_bytes=20481"
        result = train(switch, wide(), epochs=20, launcher="virtual", out=str(tmp_path))
        assert result.notices == () and result.switches[0]["before"].startswith("all-reduce:bucket_bytes=20481 until")


def one_tensor() -> podium.Task:
    return podium.Task(**{**vars(toy()), "model": lambda: nn.Linear(FEATURES, 40_000, bias=False), "name": "one"})


def wide() -> podium.Task:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 4096), nn.Tanh(), nn.Linear(4096, CLASSES))

    return podium.Task(**{**vars(toy()), "model": model, "name": "wide"})


class TestTheCommandLine:
    SHORT = ("--strategy", "strategy-switch", "-n", "2", "--epochs", "4", "--launcher", "threads")

    def test_a_dry_run_says_it(self) -> None:
        found = CliRunner().invoke(main, ["train", "digits-mlp", *self.SHORT, "--dry-run"])
        assert found.exit_code == 0
        assert "note: strategy-switch: the rule plateau:window=3 cannot fire in this run" in found.stderr

    @pytest.mark.slow
    def test_train_says_it_before_the_first_validation_and_in_its_summary(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "podium", "train", "digits-mlp", *self.SHORT, "--out", str(tmp_path)]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert found.stderr.index("cannot fire in this run") < found.stderr.index("epoch 1 ")
        assert "  note        strategy-switch: the rule" in found.stdout

    def test_compare_says_it_once_before_anything_runs(self, tmp_path: Path) -> None:
        words = ["compare", "digits-mlp", "--strategies", "solo,strategy-switch", "--seeds", "2", "--epochs", "2"]
        found = CliRunner().invoke(main, [*words, "--launcher", "threads", "--out", str(tmp_path), "--dry-run"])
        assert found.exit_code == 0 and found.stderr.count("cannot fire in this run") == 1

    @pytest.mark.slow
    def test_a_loop_of_ones_own_says_it(self, tmp_path: Path) -> None:
        script = tmp_path / "loop.py"
        script.write_text(LOOP, encoding="utf-8")
        words = ("-m", "podium", "run", str(script), "-n", "2", "--strategy", "all-reduce until plateau | local-sgd")
        said = run_python(*words, "--out", str(tmp_path), "--quiet", cwd=tmp_path)
        assert said.count("cannot fire in this run: it looks at 6 epochs' losses and sees 0") == 1


LOOP = """
import logging, sys
import torch
import podium
logging.basicConfig(stream=sys.stdout)
model = torch.nn.Linear(3, 1)
data = torch.utils.data.TensorDataset(torch.arange(96.0).reshape(32, 3) / 96, torch.zeros(32, 1))
run = podium.join(model, torch.optim.SGD(model.parameters(), lr=0.1))
for x, y in run.batches(data, batch_size=8, epochs=2):
    run.step(lambda: (model(x) - y).square().mean())
"""

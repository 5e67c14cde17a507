"""A division of work that has no meaning is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from podium.config import RunConfig
from podium.errors import ConfigError, UnknownName
from podium.launch.checks import check
from podium.launch.prepare import plan_script, prepare
from tests.balance.test_equality import task


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("parameter-server", {"mode": "async"}),
        ("async-local-sgd", {}),
        ("local-sgd", {"steps": "speed"}),
    ],
)
@pytest.mark.parametrize("balance", ["equal-finish", "proportional", "steal"])
def test_workers_that_take_what_they_can_have_nothing_to_balance(
    strategy: str, options: dict[str, str], balance: str
) -> None:
    config = RunConfig(strategy=strategy, strategy_options=options, workers=2, balance=balance)
    with pytest.raises(ConfigError, match="nothing to balance"):
        check(config)


@pytest.mark.parametrize("strategy", ["gossip", "local-sgd"])
def test_stealing_needs_steps_that_all_make_together(strategy: str) -> None:
    with pytest.raises(ConfigError, match="all workers make together"):
        check(RunConfig(strategy=strategy, workers=2, balance="steal"))


def test_stealing_does_not_go_with_what_a_step_weighs(tmp_path: Path) -> None:
    config = RunConfig(workers=2, balance="steal", out=str(tmp_path))
    with pytest.raises(ConfigError, match="weigh"):
        prepare(config, task(masked=True))


def test_stealing_does_not_go_with_a_loop_of_ones_own(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text("")
    with pytest.raises(ConfigError, match="script's own loop"):
        plan_script(RunConfig(task=str(script), workers=2, balance="steal"))


def test_shares_and_a_balancer_are_one_too_many() -> None:
    with pytest.raises(ConfigError, match="give one"):
        check(RunConfig(workers=2, shares=(2, 1), balance="equal-finish"))


def test_a_balancer_that_does_not_exist_is_refused_with_what_there_is() -> None:
    with pytest.raises(UnknownName, match="equal-finish"):
        check(RunConfig(workers=2, balance="equal-finnish"))


@pytest.mark.parametrize("spec", ["equal-finish:every=0", "proportional:gain=1", "steal:micro=0", "equal:every=2"])
def test_options_out_of_range_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError):
        check(RunConfig(workers=2, balance=spec))

"""Options add up to a configuration, and a configuration can be written down again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from podium.cli import main
from podium.cli.compare import split_strategies
from podium.cli.summary import to_toml
from podium.config import RunConfig, resolve


def dry_run(*words: str) -> dict[str, object]:
    result = CliRunner().invoke(main, [*words, "--dry-run", "--json"])
    assert result.exit_code == 0, result.output
    document: dict[str, object] = json.loads(result.stdout)
    return document


def test_a_file_yields_to_options_and_options_to_set(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[run]\nworkers = 2\nseed = 2\nepochs = 2\n[strategy]\nname = 'parameter-server'\nservers = 2\n")
    config = dry_run("train", "--config", str(file), "--workers", "3", "--seed", "3", "--set", "workers=4")
    assert (config["epochs"], config["seed"], config["workers"]) == (2, 3, 4)
    assert (config["strategy"], config["strategy_options"]) == ("parameter-server", {"servers": 2})


def test_a_dry_run_leaves_nothing_behind(tmp_path: Path) -> None:
    dry_run("train", "--out", str(tmp_path / "runs"))
    dry_run("compare", "--out", str(tmp_path / "runs"))
    assert list(tmp_path.iterdir()) == []


def test_every_option_of_train_reaches_the_configuration(tmp_path: Path) -> None:
    cluster = tmp_path / "two.toml"
    cluster.write_text('[[nodes]]\nname = "a"\ncount = 2\n')
    wanted = {
        "strategy": "solo", "workers": 1, "seed": 7, "epochs": 2, "steps": 5, "batch_size": 32, "launcher": "virtual",
        "device": "auto", "data_dir": "d", "out": "o", "resume": "r", "replay": "p", "checkpoint_every": 9,
    }  # fmt: skip
    words = [word for name, value in wanted.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    config = dry_run("train", "digits-cnn", *words)
    assert {name: config[name] for name in wanted} == wanted
    assert config["task"] == "digits-cnn"


def test_a_comparison_takes_two_workers_unless_told() -> None:
    assert dry_run("compare")["workers"] == 2
    assert dry_run("compare", "--workers", "1")["workers"] == 1
    assert dry_run("compare", "--set", "workers=3")["workers"] == 3


@pytest.mark.parametrize(
    ("text", "strategies"),
    [
        ("solo,all-reduce", ("solo", "all-reduce")),
        ("solo, parameter-server:mode=async,servers=2,all-reduce",
         ("solo", "parameter-server:mode=async,servers=2", "all-reduce")),
        ("a:path=x:y,other=z:w,b", ("a:path=x:y,other=z:w", "b")),
        ("", ()),
    ],
)  # fmt: skip
def test_options_stay_with_their_strategy_in_a_comma_list(text: str, strategies: tuple[str, ...]) -> None:
    assert split_strategies(text) == strategies


def test_lists_and_single_strategies_add_up() -> None:
    plan = dry_run("compare", "--strategies", "solo,all-reduce", "--strategy", "parameter-server:mode=async,servers=2")
    assert plan["factors"]["strategy"] == ["solo", "all-reduce", "parameter-server:mode=async,servers=2"]


CONFIG = RunConfig(
    task="digits-mlp",
    task_options={"lr": 0.5},
    strategy="parameter-server",
    strategy_options={"mode": "async"},
    workers=2,
    shares=(1.0, 3.0),
    out='a "strange" folder\\',
    deadline_s=5.0,
)


def test_a_printed_configuration_can_be_read_back(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(to_toml(CONFIG), encoding="utf-8")
    assert resolve(file) == CONFIG

"""Loops of one's own on several ranks: every setting is heeded or refused, and what goes wrong is said at once."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest

from podium.config import REFUSED_BY_SCRIPTS, RunConfig, resolve
from podium.errors import ConfigError, DataError, PodiumError, TrainingError
from podium.launch.run import run_script
from tests.integration import own_loop
from tests.integration.processes import finish, podium, settings, start

SCRIPT = str(Path(own_loop.__file__))
PLAIN = {"threads": 1, "deadline_s": 20.0}


def run(tmp_path: Path, mode: str, *args: str, workers: int = 2, given: tuple[str, ...] = (), **options: Any) -> None:
    asked = {**PLAIN, "out": tmp_path / "out", "workers": workers, **options}
    config = resolve(None, [f"{name}={value}" for name, value in asked.items()])
    assert run_script(config, SCRIPT, [mode, str(tmp_path), *args], given=given) == 0


def said_by(tmp_path: Path, mode: str, *args: str, **options: Any) -> list[dict[str, Any]]:
    """Run the loop; what each worker said, in order of ranks."""
    folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    run(folder, mode, *args, **options)
    return [json.loads(line) for path in sorted(folder.glob("said-*")) for line in path.read_text().splitlines()]


# Settings.

HEEDED: dict[str, Any] = {
    "strategy": "all-reduce",
    "strategy_options": {},
    "codec": "fp16",
    "collective": "ring",
    "workers": 2,
    "seed": 7,
    "clip_norm": 0.125,
    "autocast": "bf16",
    "buffers": "local",
    "shares": "3,1",
    "balance": "equal",
    "device": "cpu",
    "threads": 1,
    "hosts": None,
    "head": None,
    "nodes": None,
    "slurm": "",
    "placement": "spread",
    "out": "",
    "run_dir": "",
    "deadline_s": 17.0,
    "heartbeat_s": 3.0,
    "start_deadline_s": 50.0,
    "checksums": True,
    "tls": "auto",
    "tls_cert": None,
    "tls_key": None,
    "tls_ca": None,
}
"""Fields that a script heeds, with a value that the test below gives them, if it does."""


def test_every_setting_is_heeded_or_refused() -> None:
    fields = {field.name for field in dataclasses.fields(RunConfig)}
    assert fields == HEEDED.keys() | REFUSED_BY_SCRIPTS.keys(), "a new setting: is it heeded by scripts, or refused?"
    assert not HEEDED.keys() & REFUSED_BY_SCRIPTS.keys()


OTHERWISE = {
    "task": "digits-cnn",
    "task_options": "task.lr=0.1",
    "launcher": "threads",
    "cluster": "cluster.toml",
    "resume": "runs/x",
    "replay": "runs/x",
    "data_dir": "data",
}


@pytest.mark.parametrize("name", sorted(REFUSED_BY_SCRIPTS))
def test_a_setting_that_a_script_does_not_heed_is_refused(name: str, tmp_path: Path) -> None:
    value = OTHERWISE.get(name, "3")
    config = resolve(None, [value if name == "task_options" else f"{name}={value}"])
    with pytest.raises(ConfigError, match=rf"podium run: {name} must not be set"):
        run_script(dataclasses.replace(config, out=str(tmp_path)), SCRIPT, ["plain", str(tmp_path)])
    assert not list(tmp_path.iterdir()), "no rank was started, no folder made"


def test_the_command_line_refuses_at_once_with_exit_code_2(tmp_path: Path) -> None:
    words = settings({"epochs": 3, "out": tmp_path})
    code, _, err = finish(podium("run", SCRIPT, "plain", str(tmp_path), "-n", "2", *words))
    assert code == 2
    assert "epochs must not be set, got 3" in err and "run.batches(…, epochs=N)" in err


def test_settings_reach_the_loop(tmp_path: Path) -> None:
    plain = said_by(tmp_path, "plain")[0]
    asked = {k: HEEDED[k] for k in ("codec", "collective", "seed", "clip_norm", "autocast", "shares", "deadline_s")}
    told = said_by(tmp_path, "plain", **asked)
    for row in told:
        assert (row["codec"], row["collective"], row["seed"]) == ("fp16", "ring", 7)
        assert (row["clip_norm"], row["deadline_s"], row["size"], row["threads"]) == (0.125, 17.0, 2, 1)
        assert row["casts"] == ["torch.bfloat16"]
    assert [row["sizes"][0] for row in told] == [12, 4], "shares divide the step"
    assert plain["sizes"][0] == 8
    assert told[0]["order"] != plain["order"], "the seed fixes the order"
    assert plain["casts"] == ["torch.float32"] and plain["clip_norm"] is None


def test_a_clipped_gradient_moves_less(tmp_path: Path) -> None:
    assert said_by(tmp_path, "plain", clip_norm=1e-6)[0]["moved"] != said_by(tmp_path, "plain")[0]["moved"]


def test_batch_normalisation_is_alike_after_the_loop(tmp_path: Path) -> None:
    for buffers, alike in (("mean", True), ("local", False)):
        rows = said_by(tmp_path, "plain", buffers=buffers)
        assert (rows[0]["buffers"] == rows[1]["buffers"]) is alike, buffers
    rows = said_by(tmp_path, "plain", strategy="parameter-server:mode=async")
    assert rows[0]["buffers"] == rows[1]["buffers"]


def test_broadcast_buffers_are_the_first_workers(tmp_path: Path) -> None:
    local, shared = (said_by(tmp_path, "plain", buffers=policy) for policy in ("local", "broadcast"))
    assert shared[0]["buffers"] == local[0]["buffers"], "the first worker's go their own way"
    assert shared[1]["buffers"] != local[1]["buffers"], "the others' begin every step from there"


@pytest.mark.parametrize(("given", "fits"), [(None, True), (5, True), (0, False), (6, False)])
def test_a_seed_in_script_and_run_must_be_one(given: int | None, fits: bool, tmp_path: Path) -> None:
    options = {} if given is None else {"seed": given}
    if fits:
        assert [row["seed"] for row in said_by(tmp_path, "seed-in-script", given=tuple(options), **options)] == [5, 5]
        return
    with pytest.raises(ConfigError, match=rf"podium.join\(seed=5\): the run was started with seed={given}"):
        run(tmp_path, "seed-in-script", given=("seed",), **options)


# What goes wrong.


def failure_of(tmp_path: Path, mode: str, **options: Any) -> PodiumError:
    with pytest.raises(PodiumError) as raised:
        run(tmp_path, mode, **options)
    return raised.value


def test_a_second_join_is_refused_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    error = failure_of(tmp_path, "twice")
    assert isinstance(error, ConfigError)
    assert "has joined the run already, at " in str(error) and "own_loop.py:" in str(error)
    assert time.monotonic() - began < 30, "it used to wait for 60 s"


@pytest.mark.parametrize("strategy", ["all-reduce", "parameter-server:mode=async", "local-sgd"])
def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path, strategy: str) -> None:
    error = failure_of(tmp_path, "nan-loss", strategy=strategy)
    assert isinstance(error, TrainingError)
    assert "the loss became nan at step" in str(error)


def test_a_gradient_that_is_no_number_ends_the_run_though_the_loss_is_one(tmp_path: Path) -> None:
    error = failure_of(tmp_path, "nan-gradient")
    assert isinstance(error, TrainingError)
    assert "is not finite after step 12" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["nan-loss", "nan-gradient"])
def test_alone_it_ends_with_an_exit_code_of_its_own(tmp_path: Path, mode: str) -> None:
    code, _, err = finish(start(SCRIPT, mode, str(tmp_path)))
    assert code == 1
    assert "podium.errors.TrainingError" in err


@pytest.mark.parametrize("mode", ["dicts", "single"])
def test_samples_that_are_no_pairs_are_refused(tmp_path: Path, mode: str) -> None:
    error = failure_of(tmp_path, mode)
    assert isinstance(error, DataError)
    assert "must be a pair (inputs, target), got a" in str(error)


# Breaking out.


@pytest.mark.parametrize("mode", ["break-after", "break-before"])
@pytest.mark.parametrize("strategy", ["all-reduce", "parameter-server:mode=async", "async-local-sgd", "ad-psgd"])
def test_a_loop_may_be_left_and_begun_again(tmp_path: Path, strategy: str, mode: str) -> None:
    rows = said_by(tmp_path, mode, "3", "3", strategy=strategy)
    left, again = ([row[key] for row in rows if key in row] for key in ("position", "again"))
    assert len(left) == len(again) == 2
    assert len(set(left)) == 1 and again == [left[0] + own_loop.SAMPLES] * 2, "workers agree where the order goes on"
    if strategy != "ad-psgd":  # its replicas never agree
        assert len({row["moved"] for row in rows if "again" in row}) == 1


def test_one_that_leaves_early_gives_its_samples_to_the_others(tmp_path: Path) -> None:
    """The second worker leaves after a step; the first trains to the end, and waits for no sample on loan."""
    began = time.monotonic()
    rows = said_by(tmp_path, "break-before", "999", "1", strategy="parameter-server:mode=async")
    (first, *_), (second, *_) = ([row for row in rows if row["rank"] == rank] for rank in (0, 1))
    assert second["steps"] == 1
    assert first["position"] == second["position"] == 2 * own_loop.SAMPLES
    assert (first["steps"] + second["steps"]) * own_loop.BATCH // 2 == 2 * own_loop.SAMPLES, (
        "every sample was used once"
    )
    assert time.monotonic() - began < 60

"""Trials in actors of a real Ray."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest

from podium.errors import ConfigError, MissingExtra
from podium.sweeps.executors.ray import RayActors, _own_ray
from podium.sweeps.recipe import Recipe
from podium.sweeps.trial import Trial
from tests.sweeps.test_processes import TRAPPED, ListQueue, alone, assert_same, is_alive


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_trials_in_actors_come_to_the_same_bits_as_alone_also_after_one_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ray = pytest.importorskip("ray")
    path, started = tmp_path / "trapped.py", tmp_path / "pids"
    note = f"with open({str(started)!r}, 'a') as file: print(os.getpid(), file=file)"
    path.write_text(TRAPPED.replace("seen = [0]", f"seen = [0]\n    {note}"))
    before = {name: value for name, value in os.environ.items() if name.startswith(("RAY", "PYTHON"))}
    trials = [Trial(number=0), Trial(number=1, options={"trap": "kill"}), Trial(number=2, options={"lr": 0.2}, seed=2)]
    recipe, queue = Recipe(task=f"{path}:task", device="cpu", eval_every=1), ListQueue(trials)
    capsys.readouterr()

    RayActors(count=1, threads=1).run(recipe, queue, queue.events.append)

    assert capsys.readouterr() == ("", "")
    pids = {int(pid) for pid in started.read_text().split()}
    assert len(pids) == 2 and os.getpid() not in pids
    assert not any(map(is_alive, pids)) and not ray.is_initialized()
    assert {name: value for name, value in os.environ.items() if name.startswith(("RAY", "PYTHON"))} == before
    assert queue.outcomes[1].status == "failed" and queue.outcomes[1].why.startswith("its Ray actor is gone: ")
    assert (queue.outcomes[1].steps, queue.states[1]) == (4, None)
    assert_same(queue, alone(recipe, ListQueue([trials[0], trials[2]])), "ray")


PEEK = """
import os, sys
os.environ.pop("RAY_AUTH_TOKEN", None)
os.environ.update(RAY_AUTH_MODE=sys.argv[2], HOME=sys.argv[3])
if sys.argv[2] == "token":
    os.environ["RAY_AUTH_TOKEN"] = "0" * 64
from ray._raylet import GcsClient
try:
    print("in", len(GcsClient(address=sys.argv[1]).get_all_node_info(timeout=5)))
except Exception as error:
    print("out", type(error).__name__, str(error)[:200])
"""


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize("mode", ["disabled", None])
def test_a_ray_of_our_own_asks_for_a_token_whatever_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str | None
) -> None:
    ray = pytest.importorskip("ray")
    raylet = importlib.import_module("ray._raylet")
    if mode is None:
        monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    else:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setenv("HOME", str(tmp_path))
    raylet.Config.initialize("")  # as if Ray were imported here
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="r-") as folder, _own_ray(ray, Path(folder), gpus=0):
        assert os.environ["RAY_AUTH_MODE"] == "token"
        assert len(os.environ["RAY_AUTH_TOKEN"]) >= 32
        address = ray.get_runtime_context().gcs_address
        for asked in ("disabled", "token"):
            words = [sys.executable, "-c", PEEK, address, asked, str(tmp_path)]
            stranger = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
            assert stranger.stdout.startswith("out "), stranger.stdout + stranger.stderr
    assert dict(os.environ) == before
    assert not (tmp_path / ".ray").exists(), "the token must not lie in a file"
    assert raylet.get_authentication_mode() == raylet.AuthenticationMode.DISABLED


def test_a_ray_without_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(__version__="2.51.1"))
    with pytest.raises(ConfigError, match=r"Ray must be at least 2\.52, .*, got 2\.51\.1"):
        RayActors(count=1).check(Recipe(task="digits-mlp", device="cpu"))


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"pip install 'podium\[ray\]'"):
        RayActors(count=1).run(Recipe(task="digits-mlp", device="cpu"), ListQueue([]), print)


def test_what_cannot_be_is_refused_before_ray_starts() -> None:
    pytest.importorskip("ray")
    recipe = Recipe(task="digits-mlp", device="cpu")
    with pytest.raises(ConfigError, match="at most 48"):
        RayActors(count=49, mps=True)
    with pytest.raises(ConfigError, match="executor ray: MPS needs a GPU"):
        RayActors(count=2, mps=True).run(recipe, ListQueue([]), print)

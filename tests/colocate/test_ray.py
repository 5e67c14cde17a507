"""Trials in actors of a real Ray."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from podium.colocate.ray import RayActors
from podium.colocate.recipe import Recipe
from podium.colocate.trial import Trial
from podium.errors import ConfigError, MissingExtra
from tests.colocate.test_processes import TRAPPED, ListDesk, alone, assert_same, is_alive


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
    recipe, desk = Recipe(task=f"{path}:task", device="cpu", eval_every=1), ListDesk(trials)
    capsys.readouterr()

    RayActors(count=1, threads=1).run(recipe, desk, desk.events.append)

    assert capsys.readouterr() == ("", "")
    pids = {int(pid) for pid in started.read_text().split()}
    assert len(pids) == 2 and os.getpid() not in pids
    assert not any(map(is_alive, pids)) and not ray.is_initialized()
    assert {name: value for name, value in os.environ.items() if name.startswith(("RAY", "PYTHON"))} == before
    assert desk.outcomes[1].status == "failed" and desk.outcomes[1].why.startswith("its Ray actor is gone: ")
    assert (desk.outcomes[1].steps, desk.states[1]) == (4, None)
    assert_same(desk, alone(recipe, ListDesk([trials[0], trials[2]])), "ray")


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"pip install 'podium\[ray\]'"):
        RayActors(count=1).run(Recipe(task="digits-mlp", device="cpu"), ListDesk([]), print)


def test_what_cannot_be_is_refused_before_ray_starts() -> None:
    pytest.importorskip("ray")
    recipe = Recipe(task="digits-mlp", device="cpu")
    with pytest.raises(ConfigError, match="at most 48"):
        RayActors(count=49, mps=True)
    with pytest.raises(ConfigError, match="executor ray: MPS needs a GPU"):
        RayActors(count=2, mps=True).run(recipe, ListDesk([]), print)

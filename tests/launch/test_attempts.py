"""What a host knows of earlier starts by its torchrun agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from podium.config import RunConfig
from podium.engine.checkpoint import find_checkpoint
from podium.launch.attempts import Attempts, may_be_started_again, restarts_allowed
from podium.strategies import make_strategy
from podium.testing import toy, train_in
from podium.testing.worlds import Memory

VARIABLES = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_MAX_RESTARTS")


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def start(monkeypatch: pytest.MonkeyPatch, agent: str, attempt: int = 0, restarts: int = 0) -> None:
    """What torchrun sets for a process that it starts."""
    logs = f"/tmp/torchelastic_{agent}/none_{agent}/attempt_{attempt}/0/error.json"
    for name, value in zip(VARIABLES, ("none", logs, str(restarts)), strict=True):
        monkeypatch.setenv(name, value)


def saved(run_dir: Path) -> Path:
    train_in(Memory(), toy(), make_strategy("all-reduce"), 2, run_dir=run_dir)
    return find_checkpoint(run_dir).path


def test_the_folders_of_one_agent_are_found_in_order_and_those_of_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig(out=str(tmp_path))
    start(monkeypatch, "mine")
    assert Attempts.of(config).first is None
    for name in ("run", "run-2", "run-3"):
        Attempts.of(config).add(tmp_path / name)
    start(monkeypatch, "mine", attempt=2)
    assert [folder.name for folder in Attempts.of(config).folders] == ["run", "run-2", "run-3"]
    assert Attempts.of(config).next_folder("run") == tmp_path / "run-4"
    start(monkeypatch, "another")
    assert Attempts.of(config).folders == []


def test_a_folder_that_the_user_named_is_followed_by_others_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(monkeypatch, "mine")
    config = RunConfig(run_dir=str(tmp_path / "here" / "mine"))
    Attempts.of(config).add(tmp_path / "here" / "mine")
    again = Attempts.of(config)
    assert again.first == "mine"
    assert again.next_folder("mine") == tmp_path / "here" / "mine-2"


def test_without_log_files_the_agent_is_the_parent_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(monkeypatch, "mine")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")
    config = RunConfig(out=str(tmp_path))
    Attempts.of(config).add(tmp_path / "run")
    assert Attempts.of(config).first == "run"


def test_without_torchrun_nothing_is_noted(tmp_path: Path) -> None:
    attempts = Attempts.of(RunConfig(out=str(tmp_path)))
    attempts.add(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not may_be_started_again() and not restarts_allowed()


def test_restarts_are_allowed_where_torchrun_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    start(monkeypatch, "mine", restarts=0)
    assert may_be_started_again() and not restarts_allowed()
    start(monkeypatch, "mine", restarts=3)
    assert restarts_allowed()


def test_what_another_user_may_have_written_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(monkeypatch, "mine")
    config = RunConfig(out=str(tmp_path))
    Attempts.of(config).add(tmp_path / "run")
    (mark,) = (tmp_path / "run").iterdir()
    mark.chmod(0o666)
    assert Attempts.of(config).folders == []
    mark.chmod(0o600)
    mark.write_text("")  # the power failed
    assert Attempts.of(config).folders == []


def test_the_newest_checkpoint_of_all_starts_is_found_and_damaged_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(monkeypatch, "mine")
    config = RunConfig(out=str(tmp_path))
    attempts = Attempts.of(config)
    assert attempts.newest() is None
    attempts.add(tmp_path / "run")
    assert attempts.newest() is None
    first = saved(tmp_path / "run")
    attempts.add(tmp_path / "run-2")
    found = attempts.newest()
    assert found is not None and found.path == first
    copied = tmp_path / "run-2" / "resumed" / first.name
    copied.parent.mkdir(parents=True)
    first.rename(copied)
    found = attempts.newest()
    assert found is not None and found.path == copied
    (copied / "shared.safetensors").write_bytes(b"")
    assert attempts.newest() is None

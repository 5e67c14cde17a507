"""A run's folder: one run's alone, and missed when it is gone."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import podium
from podium.errors import CheckpointError, ConfigError, PodiumError, RecordError
from podium.records.recorder import read_records
from podium.testing.faults import TASK
from tests.integration.processes import document, finish
from tests.integration.processes import podium as cli
from tests.integration.runs import FIELDS

LAUNCHERS = ("local", "threads", "virtual")


def train_while(run_dir: Path, harm: Callable[[Path], None], **options: Any) -> podium.RunResult:
    """A long run to whose folder this happens after a few steps."""
    harmed = threading.Event()

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "progress" and not harmed.is_set():
            harmed.set()
            harm(run_dir)

    fixed = {"epochs": 400, "workers": 2, "run_dir": str(run_dir), "eval_every": 0, **FIELDS}
    return podium.train(TASK, on_event=on_event, **{**fixed, **options})


def move(run_dir: Path) -> None:
    run_dir.rename(run_dir.with_name("elsewhere"))


HARM: dict[str, Callable[[Path], None]] = {
    "deleted": shutil.rmtree,
    "moved": move,
    "records deleted": lambda run_dir: shutil.rmtree(run_dir / "records"),
    "one rank's records deleted": lambda run_dir: (run_dir / "records" / "rank-1.jsonl").unlink(),
}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM.keys())
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_folder_that_goes_while_the_run_is_under_way_is_an_error_that_names_it(
    launcher: str, harm: Callable[[Path], None], tmp_path: Path
) -> None:
    with pytest.raises((RecordError, CheckpointError), match=rf"(?s){tmp_path}/run.*(removed|moved)"):
        train_while(tmp_path / "run", harm, launcher=launcher)


def test_a_folder_that_goes_in_the_last_moment_is_an_error_too(tmp_path: Path) -> None:
    """After the last step was recorded, when no rank would notice any more."""
    run_dir = tmp_path / "run"

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "eval":
            shutil.rmtree(run_dir)

    with pytest.raises((RecordError, CheckpointError), match=rf"{run_dir}.*(removed|moved)"):
        podium.train(TASK, epochs=1, run_dir=str(run_dir), launcher="threads", on_event=on_event)


@pytest.mark.slow
def test_of_two_launchers_that_take_one_folder_the_second_ends_at_once(tmp_path: Path) -> None:
    """Both are started at the same moment; one of them trains as if the other were not there."""
    words = ("train", TASK, "--launcher", "threads", "--json", "--epochs", "4", "--set", f"run_dir={tmp_path}/run")
    both = [cli(*words) for _ in range(2)]
    ended = [finish(process) for process in both]
    codes = [code for code, _, _ in ended]
    assert sorted(codes) == [0, 2], ended
    refused = ended[codes.index(2)][2]
    # The first is at work there, or has just ended: whichever the second finds.
    assert "another run must not be under way there" in refused or "must be a folder without a run" in refused
    assert f"{tmp_path}/run" in refused
    result = document(ended[codes.index(0)][1])
    steps = [row["step"] for row in read_records(tmp_path / "run") if row["kind"] == "step"]
    assert steps == list(range(1, result["steps"] + 1))
    assert not (tmp_path / "run" / ".lock").exists()


@pytest.mark.parametrize("launcher", ["threads", "virtual"])
def test_a_second_run_in_a_folder_that_is_in_use_is_refused_and_the_first_is_unharmed(
    launcher: str, tmp_path: Path
) -> None:
    refusals: list[PodiumError] = []

    def intrude(run_dir: Path) -> None:
        (run_dir / "manifest.json").rename(run_dir / "aside")  # as if it were not written yet
        try:
            podium.train(TASK, launcher=launcher, run_dir=str(run_dir), epochs=1)
        except PodiumError as error:
            refusals.append(error)
        (run_dir / "aside").rename(run_dir / "manifest.json")

    result = train_while(tmp_path / "run", intrude, launcher=launcher, epochs=20)
    assert result.status == "finished"
    (refusal,) = refusals
    assert isinstance(refusal, ConfigError)
    assert "another run must not be under way there, got one (" in str(refusal)

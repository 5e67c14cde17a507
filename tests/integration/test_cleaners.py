"""Temporary files are cleaned up while a run goes on: the folder where its ranks meet is removed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest

from podium.errors import PodiumError
from podium.testing.faults import Faults, Gate
from tests.integration.runs import at_gate, pid_of, train


def meeting_place() -> Path:
    """The folder of the run that this process has under way."""
    (folder,) = Path(tempfile.gettempdir()).glob("podium-????????")
    return folder


def clean_then(folder: Path, *ranks: int, whole: bool = True, blocked: bool = False) -> threading.Thread:
    """Once the run is at its gate: remove where it meets, or its sockets alone; kill these ranks; let it go on."""

    def act() -> None:
        place = meeting_place()
        if whole:
            shutil.rmtree(place)
        for path in place.glob("*"):
            if path.is_socket():
                path.unlink()
        if blocked:
            place.write_text("somebody else's")
        for rank in ranks:
            os.kill(pid_of(rank), signal.SIGKILL)
        Gate(folder).open()

    return at_gate(folder, act)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False], ids=["the folder", "its sockets"])
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("all-reduce", (1,)),
        ("all-reduce:collective=ring", (1,)),
        ("parameter-server:mode=sync,servers=2", (1, 3)),
        ("parameter-server:mode=async,servers=2,replicas=2", (4, 0)),
    ],
    ids=lambda value: str(value).partition(":")[0] if isinstance(value, str) else "",
)
def test_ranks_that_are_lost_after_the_place_where_all_meet_was_removed_are_done_without(
    tmp_path: Path, strategy: str, ranks: tuple[int, ...], whole: bool
) -> None:
    acting = clean_then(tmp_path, *ranks, whole=whole)
    gate = next(rank for rank in range(3) if rank not in ranks)
    result = train(tmp_path, Faults().gate(gate, step=9), strategy=strategy, workers=3, deadline_s=60.0)
    acting.join()
    assert result.status == "finished" and result.lost == sorted(ranks)
    assert len(set(result.param_hash.values())) == 1


def test_micro_batches_that_were_drawn_before_are_not_drawn_again(tmp_path: Path) -> None:
    """The counter that workers draw from is a file of that folder."""
    acting = clean_then(tmp_path, 1)
    result = train(tmp_path, Faults().gate(0, step=9), workers=3, balance="steal", deadline_s=60.0)
    acting.join()
    assert result.status == "finished" and result.lost == [1]
    assert (result.audit or {})["repeated"] == 0


def test_where_the_place_cannot_be_made_again_the_run_ends_and_names_it(tmp_path: Path) -> None:
    """Something that is not this user's private folder has its name."""
    acting = clean_then(tmp_path, 1, blocked=True)
    began = time.monotonic()
    try:
        with pytest.raises(PodiumError, match=r"podium-\w{8}"):
            train(tmp_path, Faults().gate(0, step=9), workers=3, deadline_s=20.0)
        assert time.monotonic() - began < 60.0
        acting.join()
    finally:
        for path in Path(tempfile.gettempdir()).glob("podium-????????"):
            path.unlink()


def test_the_folder_is_locked_against_cleaners_that_ask(tmp_path: Path) -> None:
    """systemd-tmpfiles leaves a folder alone where it cannot have the lock."""
    said: list[int] = []

    def act() -> None:
        asks = ["flock", "--nonblock", "--exclusive", str(meeting_place()), "true"]
        said.append(subprocess.run(asks, check=False).returncode)
        Gate(tmp_path).open()

    acting = at_gate(tmp_path, act)
    train(tmp_path, Faults().gate(0, step=3), workers=2, steps=5)
    acting.join()
    assert said == [1]

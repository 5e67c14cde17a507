"""Copies of checkpoints on the disks of other hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from podium.engine.checkpoint import find_checkpoint
from podium.launch.checkpoint_copy import CheckpointFiles
from podium.strategies import make_strategy
from podium.testing import toy, train_in
from podium.testing.worlds import Memory
from tests.launch.coordination.conftest import Make
from tests.launch.coordination.place import LIMIT_S, Place


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A run's folder with a checkpoint."""
    train_in(Memory(), toy(), make_strategy("all-reduce"), 2, run_dir=tmp_path / "home")
    (tmp_path / "home" / "records").mkdir(exist_ok=True)
    return tmp_path / "home"


def begun(place: Make, home: Path, keepers: dict[int, Path]) -> Place:
    """Ranks on hosts of their own: these keep copies in these folders."""
    here = place(3, records=home / "records")
    here.begin()
    here.members[0].spreads = True
    for rank, folder in keepers.items():
        here.members[rank].send_records(folder / "records", (rank,))
        here.members[rank].keep_copies(folder)
    here.hear_all()
    return here


def test_every_host_has_the_checkpoint_before_training_continues(place: Make, home: Path, tmp_path: Path) -> None:
    here = begun(place, home, {1: tmp_path / "one", 2: tmp_path / "two"})
    saved = find_checkpoint(home)
    here.members[0].saved(home, saved.step, keep=2, is_last=False)
    for folder in ("one", "two"):
        assert CheckpointFiles.at(find_checkpoint(tmp_path / folder).path) == CheckpointFiles.at(saved.path)
    assert here.told("warning") == []


def test_a_host_that_cannot_store_it_is_reported_and_the_run_goes_on(place: Make, home: Path, tmp_path: Path) -> None:
    here = begun(place, home, {1: tmp_path / "one", 2: tmp_path / "two"})
    (tmp_path / "two" / "checkpoints").write_text("a file, not a folder")
    saved = find_checkpoint(home)
    here.members[0].saved(home, saved.step, keep=2, is_last=False)
    assert find_checkpoint(tmp_path / "one").step == saved.step
    (event,) = here.told("warning")
    assert event["text"].startswith("rank 2 keeps no copy: ")


def test_a_rank_that_sees_the_launchers_disk_keeps_no_copy(place: Make, home: Path) -> None:
    here = begun(place, home, {})
    here.members[1].keep_copies(home)
    here.pool.submit(here.members[0].saved, home, find_checkpoint(home).step, keep=2, is_last=False).result(LIMIT_S)
    assert here.told("warning") == []

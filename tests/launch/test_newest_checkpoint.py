"""Hosts tell rank 0 which checkpoint they have; the newest comes to rank 0's host."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from podium.comm.base import Message, Meta
from podium.comm.real.channel import Channel
from podium.engine.checkpoint import find_checkpoint
from podium.errors import CheckpointError, CommError, DeadlineExceeded, Lost
from podium.launch import newest_checkpoint
from podium.launch.blobs import as_tensor
from podium.launch.checkpoint_copy import CheckpointFiles
from podium.launch.coordination.rules import COORDINATOR, FIRST_ASKER
from podium.launch.newest_checkpoint import Held, Survey, tell
from podium.strategies import make_strategy
from podium.testing import toy, train_in
from podium.testing.worlds import Memory
from tests.launch.coordination.place import wait_until

SECRET = b"one of these tests"
LIMIT_S = 10.0
NOTHING = Held(None, -1, None)


class Ranks:
    """Rank 0's channel, and other ranks that tell it what they have, in threads."""

    def __init__(self) -> None:
        self.channel = Channel(COORDINATOR, secret=SECRET, listen="tcp:127.0.0.1:0")
        self.pool = ThreadPoolExecutor(4)
        self._others: dict[int, Channel] = {}

    def tell(self, rank: int, held: Held, folder: Path | None = None) -> Future[None]:
        channel = Channel(FIRST_ASKER + rank, secret=SECRET, listen="tcp:127.0.0.1:0")
        self._others[rank] = channel
        channel.introduce({COORDINATOR: self.channel.address})

        def ask(kind: str, meta: Meta, data: bytes) -> Message:
            body = [as_tensor(data)] if data else []
            return channel.wait([channel.call(COORDINATOR, kind, meta, body)], LIMIT_S)[0]

        return self.pool.submit(tell, ask, held, folder)

    def leave(self, rank: int) -> None:
        self._others[rank].close()

    def close(self) -> None:
        for channel in (*self._others.values(), self.channel):
            channel.close()
        self.pool.shutdown()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    train_in(Memory(), toy(), make_strategy("all-reduce"), 2, run_dir=tmp_path / "there")
    return find_checkpoint(tmp_path / "there").path


def held_at(folder: Path, step: int | None = None) -> Held:
    found = find_checkpoint(folder)
    return Held("run", found.step if step is None else step, CheckpointFiles.at(folder))


def test_ranks_that_were_never_started_before_all_begin_a_new_run(ranks: Ranks) -> None:
    told = [ranks.tell(rank, NOTHING) for rank in (1, 2)]
    survey = Survey(ranks.channel, 3, NOTHING, LIMIT_S)
    assert survey.newest() == NOTHING and not survey.is_elsewhere
    assert not any(each.done() for each in told), "nobody goes on before rank 0 has decided"
    survey.finish()
    assert [each.result(LIMIT_S) for each in told] == [None, None]


def test_a_checkpoint_on_another_host_comes_to_rank_0(
    ranks: Ranks, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(newest_checkpoint, "CHUNK_BYTES", 1000)
    monkeypatch.setattr("podium.launch.checkpoint_copy.CHUNK_BYTES", 1000)
    told = [ranks.tell(1, NOTHING), ranks.tell(2, held_at(saved), saved)]
    survey = Survey(ranks.channel, 3, NOTHING, LIMIT_S)
    best = survey.newest()
    assert best == held_at(saved) and survey.is_elsewhere and best.files is not None
    copied = survey.bring(best.files, tmp_path / "here")
    assert CheckpointFiles.at(copied) == CheckpointFiles.at(saved)
    assert not any(each.done() for each in told)
    survey.finish()
    assert [each.result(LIMIT_S) for each in told] == [None, None]


def test_of_two_equally_new_ones_rank_0_takes_its_own(ranks: Ranks, saved: Path) -> None:
    told = ranks.tell(1, held_at(saved), saved)
    survey = Survey(ranks.channel, 2, held_at(saved), LIMIT_S)
    survey.newest()
    assert not survey.is_elsewhere
    survey.finish()
    assert told.result(LIMIT_S) is None


def test_a_newer_one_wins_over_rank_0s_own(ranks: Ranks, saved: Path) -> None:
    ranks.tell(1, held_at(saved), saved)
    survey = Survey(ranks.channel, 2, held_at(saved, step=1), LIMIT_S)
    assert survey.newest().step > 1 and survey.is_elsewhere


def test_a_run_without_a_checkpoint_is_known_by_its_folder(ranks: Ranks) -> None:
    ranks.tell(1, Held("run", -1, None))
    survey = Survey(ranks.channel, 2, NOTHING, LIMIT_S)
    assert survey.newest() == Held("run", -1, None)


def test_a_checkpoint_that_arrives_damaged_is_refused(ranks: Ranks, saved: Path, tmp_path: Path) -> None:
    held = held_at(saved)
    (saved / "shared.safetensors").write_bytes(bytes((saved / "shared.safetensors").stat().st_size))
    ranks.tell(1, held, saved)
    survey = Survey(ranks.channel, 2, NOTHING, LIMIT_S)
    best = survey.newest()
    assert best.files is not None
    with pytest.raises(CheckpointError):
        survey.bring(best.files, tmp_path / "here")


def test_missing_ranks_are_named(ranks: Ranks) -> None:
    ranks.tell(1, NOTHING)
    with pytest.raises(DeadlineExceeded, match=r"^ranks 2, 3 did not come within 0\.5 s \(start_deadline_s\)$"):
        Survey(ranks.channel, 4, NOTHING, 0.5).newest()


def test_a_rank_that_leaves_ends_the_survey(ranks: Ranks) -> None:
    told = ranks.tell(1, NOTHING)
    survey = Survey(ranks.channel, 3, NOTHING, LIMIT_S)
    outcome = ranks.pool.submit(survey.newest)
    wait_until(lambda: 1 in survey._asked)
    ranks.leave(1)
    with pytest.raises(Lost, match="rank 1 left before the run began"):
        outcome.result(LIMIT_S)
    with pytest.raises(CommError):
        told.result(LIMIT_S)


@pytest.mark.parametrize("name", ["../run", "/etc", "..", ""])
def test_a_folder_elsewhere_is_refused(ranks: Ranks, name: str) -> None:
    ranks.tell(1, Held(name, -1, None))
    with pytest.raises(CheckpointError, match="must name one folder"):
        Survey(ranks.channel, 2, NOTHING, LIMIT_S).newest()

"""Records of ranks on other hosts: they arrive in order, once, and only from the rank whose they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from podium.errors import RecordError
from podium.launch import record_stream
from podium.launch.record_stream import RecordStream
from tests.launch.coordination.conftest import Make
from tests.launch.coordination.place import LIMIT_S


def append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def test_what_a_rank_writes_on_its_own_disk_is_appended_at_home(place: Make, tmp_path: Path) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    here = place(2, records=home)
    here.begin()
    append(home / "rank-1.jsonl", '{"of": "a rank that was lost"}\n{"torn')
    here.members[1].send_records(away, (1,))
    for text in ('{"kind": "begin"}\n', '{"kind": "step"}\n{"kind"', ': "end"}\n'):
        append(away / "rank-1.jsonl", text)
    assert not [path for path in away.iterdir() if path.name.startswith(".")], "the probe is gone"
    for member in here.members.values():
        member.done(None)
    here.outcome.result(LIMIT_S)
    lines = (home / "rank-1.jsonl").read_text().splitlines()
    assert lines == ['{"of": "a rank that was lost"}', '{"kind": "begin"}', '{"kind": "step"}', '{"kind": "end"}']


def test_a_folder_that_the_coordinator_sees_is_left_alone(place: Make, tmp_path: Path) -> None:
    here = place(1, records=tmp_path)
    here.begin()
    here.members[0].send_records(tmp_path, (0,))
    append(tmp_path / "rank-0.jsonl", '{"kind": "begin"}\n')
    here.members[0].done(None)
    here.outcome.result(LIMIT_S)
    assert (tmp_path / "rank-0.jsonl").read_text() == '{"kind": "begin"}\n'


def test_a_rank_cannot_write_another_s_records(place: Make, tmp_path: Path) -> None:
    here = place(2, records=tmp_path / "home")
    here.begin()
    here.members[1].send_records(tmp_path / "away", (0,))
    append(tmp_path / "away" / "rank-0.jsonl", '{"kind": "begin"}\n')
    here.members[1]._records.send_new()
    with pytest.raises(RecordError, match=r"must send records of its own ranks, \(1,\), got those of 0"):
        here.outcome.result(LIMIT_S)
    assert not (tmp_path / "home" / "rank-0.jsonl").exists()


def test_a_heartbeat_carries_a_bounded_part_and_the_end_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_stream, "CHUNK_BYTES", 4)
    sent: dict[int, list[bytes]] = {0: [], 3: []}
    append(tmp_path / "rank-3.jsonl", "earlier\n")
    stream = RecordStream(tmp_path, (0, 3), lambda rank, chunk: sent[rank].append(chunk))
    stream.send_new(8)
    assert sent == {0: [], 3: []}
    append(tmp_path / "rank-3.jsonl", "0123456789")
    stream.send_new(8)
    assert sent[3] == [b"0123", b"4567"]
    append(tmp_path / "rank-0.jsonl", "abc")
    stream.send_new(None)
    assert sent == {0: [b"abc"], 3: [b"0123", b"4567", b"89"]}
    stream.send_new(None)
    assert sum(map(len, sent.values())) == 4

"""Parameter servers in real processes: workers and servers are killed, stopped, join and leave; training goes on.

What is checked in the records: every slice applied once to every range, or lost exactly as the records say.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import podium
from podium.config import RunResult
from podium.errors import Lost
from podium.records.audit import audit as audit_of
from podium.records.recorder import Record
from podium.testing.faults import EPOCHS, SAMPLES, Faults, Gate
from tests.integration.runs import at_gate, distance, pid_of, records_of, train

LEASED = ["async", "ssp", "softsync", "backup"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """What one process makes of the same task and seed."""
    return train(tmp_path_factory.mktemp("alone"), strategy="solo", launcher="threads")


def strike(folder: Path, *ranks: int, number: int = signal.SIGKILL) -> threading.Thread:
    """Once the run is at its gate: signal these processes, then let it go on."""

    def act() -> None:
        for rank in ranks:
            os.kill(pid_of(rank), number)
        Gate(folder).open()

    return at_gate(folder, act)


def audit(run_dir: str, *, redone: int | None = None) -> None:
    """Every sample was applied once by every server; `redone` is the server that may have done some twice."""
    updates = records_of(run_dir, "update")
    for server in {row["rank"] for row in updates}:
        for part in {row["range"] for row in updates if row["rank"] == server}:
            mine = [row["lease"] for row in updates if (row["rank"], row["range"]) == (server, part)]
            twice = [lease for lease, count in Counter(mine).items() if count > 1]
            assert not twice or server == redone, f"server {server} applied {twice} more than once"
    assert _trained(run_dir) >= set(range(EPOCHS * SAMPLES))


def _trained(run_dir: str) -> set[int]:
    """Positions of all samples whose slice a server has applied."""
    counts = {row["position"] - row["samples"]: row["samples"] for row in records_of(run_dir, "step")}
    leases = {row["lease"] for row in records_of(run_dir, "update")}
    sizes = {lease: counts.get(lease) or _missing(lease, leases) for lease in leases}
    return {lease + i for lease, size in sizes.items() for i in range(size)}


def _missing(lease: int, leases: set[int]) -> int:
    """The size of a slice whose worker did not live to write the step down: up to the next one."""
    later = [other for other in leases if other > lease]
    return (min(later) if later else EPOCHS * SAMPLES) - lease


@pytest.mark.slow
@pytest.mark.parametrize("mode", LEASED)
def test_a_killed_workers_slices_are_done_by_others(tmp_path: Path, alone: RunResult, mode: str) -> None:
    result = train(tmp_path, Faults().kill(1, step=6), strategy=f"parameter-server:mode={mode},servers=2", workers=3)
    assert result.status == "finished" and result.lost == [1]
    assert sorted(map(int, result.param_hash)) == [0, 2] and len(set(result.param_hash.values())) == 1
    assert result.loss < 2 * alone.loss
    audit(result.run_dir)
    assert {row["worker"] for row in records_of(result.run_dir, "worker_lost")} == {1}


FATES = {
    "the first worker": Faults().kill(0, step=6),
    "in the very first step": Faults().kill(2, step=1),
    "while it makes its model": Faults().kill(1, where="model"),
    "the first while it validates": Faults().kill(0, where="validation", step=2),
    "two at once": Faults().kill(0, step=6).kill(2, step=6),
}


@pytest.mark.parametrize("faults", FATES.values(), ids=FATES.keys())
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_may_be_killed_at_any_moment(tmp_path: Path, alone: RunResult, mode: str, faults: Faults) -> None:
    result = train(tmp_path, faults, strategy=f"parameter-server:mode={mode}", workers=3, checkpoint_every=15)
    gone = sorted(fault.rank for fault in faults.plan)
    assert result.status == "finished" and result.lost == gone
    assert sorted(map(int, result.param_hash)) == [rank for rank in range(3) if rank not in gone]
    assert len(set(result.param_hash.values())) == 1
    if mode == "sync":
        assert distance(result, alone) < 1e-5
    else:
        audit(result.run_dir)


@pytest.mark.parametrize("servers", [1, 2])
def test_synchronous_training_without_a_killed_worker_is_that_of_one_process(
    tmp_path: Path, alone: RunResult, servers: int
) -> None:
    """Optimizer state lives on the servers only: it has to come home, and go out again."""
    strategy = f"parameter-server:servers={servers}"
    result = train(tmp_path, Faults().kill(2, step=17).kill(1, step=25), strategy=strategy, workers=3)
    assert result.lost == [1, 2]
    assert distance(result, alone) < 1e-5


def test_a_stopped_worker_is_not_waited_for(tmp_path: Path) -> None:
    result = train(tmp_path, Faults().stop(1, step=6), strategy="parameter-server:mode=ssp", workers=3, heartbeat_s=1.0)
    assert result.lost == [1]
    audit(result.run_dir)


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("mode", ["sync", *LEASED])
def test_a_killed_server_is_restored_from_its_replica(tmp_path: Path, alone: RunResult, mode: str, rank: int) -> None:
    acting = strike(tmp_path, rank)
    strategy = f"parameter-server:mode={mode},servers=2,replicas=2,snapshot_every=0"
    result = train(tmp_path, Faults().gate(0, step=9), strategy=strategy, workers=3)
    acting.join()
    assert result.status == "finished" and result.lost == [rank]
    assert len(set(result.param_hash.values())) == 1
    (restored,) = records_of(result.run_dir, "restored")
    assert restored["source"] == f"replica at {7 - rank}"
    assert [row["server"] for row in records_of(result.run_dir, "replaced")] == [rank]
    assert not records_of(result.run_dir, "lost_updates")
    if mode == "sync":
        assert distance(result, alone) < 1e-5
    else:
        assert result.loss < 2 * alone.loss
        audit(result.run_dir)


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("mode", ["sync", "async", "gba"])
def test_a_killed_server_is_restored_from_its_snapshot_and_says_what_is_lost(
    tmp_path: Path, alone: RunResult, mode: str, rank: int
) -> None:
    acting = strike(tmp_path, rank)
    strategy = f"parameter-server:mode={mode},servers=2,snapshot_every=5"
    result = train(tmp_path, Faults().gate(0, step=9), strategy=strategy, workers=3)
    acting.join()
    assert result.status == "finished" and result.lost == [rank]
    assert len(set(result.param_hash.values())) == 1
    (restored,) = records_of(result.run_dir, "restored")
    assert restored["source"] == "snapshot" and restored["updates"] % 5 == 0
    lost = [row["updates"] for row in records_of(result.run_dir, "lost_updates")]
    assert all(updates > 0 for updates in lost)
    assert result.loss < 3 * alone.loss
    if mode == "async":
        audit(result.run_dir, redone=rank)  # what its snapshot lacked came again


def test_what_a_server_redoes_after_a_synchronous_phase_is_not_taken_for_repeated(tmp_path: Path) -> None:
    """Updates of that phase have no records, and the snapshot counts them."""
    acting = strike(tmp_path, 3)
    common = "servers=2;snapshot_every=5"
    strategy = f"parameter-server:mode=sync;{common} until step:at=15 | parameter-server:mode=async;{common}"
    result = train(tmp_path, Faults().gate(0, step=21), strategy=strategy, workers=3)
    acting.join()
    (restored,) = records_of(result.run_dir, "restored")
    assert dict(restored["recorded"])[0] == restored["updates"] - 15
    assert result.audit == {"missing": 0, "repeated": 0}


def test_where_leases_are_of_unequal_length_a_restored_first_server_has_no_sample_applied_twice(tmp_path: Path) -> None:
    """Leases are as long as their workers are fast, so those after the restart are cut otherwise than those before."""
    acting = strike(tmp_path, 3)
    strategy = "async-local-sgd:period=4,steps=speed,servers=2,snapshot_every=4"
    result = train(tmp_path, Faults().gate(0, step=9), strategy=strategy, workers=3)
    acting.join()
    assert result.status == "finished" and result.lost == [3]
    assert len(set(result.param_hash.values())) == 1
    updates = [row for row in records_of(result.run_dir, "update") if row["rank"] == 4]
    for part in {row["range"] for row in updates}:
        spans = [range(row["lease"], row["lease"] + row["samples"]) for row in updates if row["range"] == part]
        assert sorted(sample for span in spans for sample in span) == list(range(EPOCHS * SAMPLES))


def test_the_only_server_may_be_lost(tmp_path: Path) -> None:
    acting = strike(tmp_path, 2)
    strategy = "parameter-server:mode=async,snapshot_every=3"
    result = train(tmp_path, Faults().gate(0, step=9), strategy=strategy, workers=2)
    acting.join()
    assert result.status == "finished"
    audit(result.run_dir, redone=2)


def test_a_stopped_server_is_replaced(tmp_path: Path) -> None:
    acting = strike(tmp_path, 3, number=signal.SIGSTOP)
    strategy = "parameter-server:mode=async,servers=2,replicas=2"
    result = train(tmp_path, Faults().gate(0, step=9), strategy=strategy, workers=2, heartbeat_s=1.0)
    acting.join()
    assert result.lost == [3]
    audit(result.run_dir)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_and_the_server_beside_it_may_be_lost_together(tmp_path: Path, alone: RunResult, mode: str) -> None:
    acting = strike(tmp_path, 1)
    strategy = f"parameter-server:mode={mode},servers=2,placement=colocated,replicas=2"
    result = train(tmp_path, Faults().gate(0, step=9), strategy=strategy, workers=3)
    acting.join()
    assert result.status == "finished" and result.lost == [1]
    assert len(set(result.param_hash.values())) == 1
    if mode == "sync":
        assert distance(result, alone) < 1e-5


@pytest.mark.slow
def test_a_server_without_a_copy_ends_the_run_and_says_so(tmp_path: Path) -> None:
    acting = strike(tmp_path, 2)
    with pytest.raises(Lost, match="server 2 was lost and there is no copy of it"):
        train(
            tmp_path,
            Faults().gate(0, step=9),
            strategy="parameter-server:mode=async,snapshot_every=0",
            workers=2,
            deadline_s=5.0,
        )
    acting.join()


TOGETHER = [
    ("sync", 2, 2, (3, 4)),
    ("async", 2, 2, (3, 4)),
    ("sync", 3, 2, (3, 4)),
    ("async", 3, 2, (5, 3)),
    ("ssp", 3, 3, (3, 4, 5)),
    ("gba", 2, 2, (4, 3)),
    ("sync", 3, 3, (4, 3, 1)),
    ("backup", 2, 1, (3, 4, 2)),
]


@pytest.mark.parametrize(("mode", "servers", "replicas", "ranks"), TOGETHER)
def test_servers_that_are_lost_together_do_not_wait_for_each_other(
    tmp_path: Path, mode: str, servers: int, replicas: int, ranks: tuple[int, ...]
) -> None:
    """Each keeps the other's replica, so what is left are snapshots, and whoever survived."""
    acting = strike(tmp_path, *ranks)
    strategy = f"parameter-server:mode={mode},servers={servers},replicas={replicas},snapshot_every=5"
    result = train(tmp_path, Faults().gate(0, step=9), strategy=strategy, workers=3, deadline_s=120.0)
    acting.join()
    assert result.status == "finished" and result.lost == sorted(ranks)
    assert len(set(result.param_hash.values())) == 1
    assert {row["rank"] for row in records_of(result.run_dir, "restored")} == {rank for rank in ranks if rank > 2}
    took = [row["took_ns"] / 1e9 for row in records_of(result.run_dir, "replaced")]
    assert max(took) < 30.0
    assert result.audit == {"missing": 0, "repeated": 0}


def test_a_server_is_lost_again_while_it_is_restored(tmp_path: Path) -> None:
    def act() -> None:
        before = pid_of(3)
        for rank in (3, 4):
            os.kill(pid_of(rank), signal.SIGKILL)
        os.kill(_next_pid_of(3, before), signal.SIGKILL)
        Gate(tmp_path).open()

    acting = at_gate(tmp_path, act)
    strategy = "parameter-server:mode=async,servers=2,replicas=2,snapshot_every=5"
    result = train(tmp_path, Faults().gate(0, step=9), strategy=strategy, workers=3, deadline_s=120.0)
    acting.join()
    assert result.status == "finished" and set(result.lost) == {3, 4}
    assert len(set(result.param_hash.values())) == 1


def _next_pid_of(rank: int, before: int) -> int:
    """The process that takes the place of this one."""
    until = time.monotonic() + 30.0
    while time.monotonic() < until:
        for process in multiprocessing.active_children():
            if process.name == f"podium-{rank}" and process.pid not in (None, before):
                return int(process.pid or 0)
        time.sleep(0.005)
    raise AssertionError("nothing took its place")


@pytest.mark.slow
def test_servers_that_are_lost_together_without_snapshots_end_the_run_and_say_so(tmp_path: Path) -> None:
    acting = strike(tmp_path, 2, 3)
    strategy = "parameter-server:mode=async,servers=2,replicas=2,snapshot_every=0"
    began = time.monotonic()
    with pytest.raises(Lost, match=r"no copy of it: server [23], which kept a replica, was lost too"):
        train(tmp_path, Faults().gate(0, step=9), strategy=strategy, workers=2, deadline_s=120.0, heartbeat_s=1.0)
    assert time.monotonic() - began < 60.0
    acting.join()


@pytest.mark.parametrize("strategy", ["all-reduce", "parameter-server:mode=sync", "parameter-server:mode=async"])
def test_records_of_a_run_that_lost_a_worker_say_that_all_is_well_and_show_what_is_not(
    tmp_path: Path, strategy: str
) -> None:
    result = train(tmp_path, Faults().kill(1, step=6), strategy=strategy, workers=3)
    rows = _all(result.run_dir)
    assert result.lost == [1] and result.audit == {"missing": 0, "repeated": 0}
    lines = {rank: [row for row in rows if row["kind"] == "step" and row["rank"] == rank] for rank in range(3)}
    unwritten = [row for row in rows if row is not lines[1][-1]]  # the others have made this step, or servers have
    assert audit_of(unwritten) == (0, 0)
    for line in (lines[0][-1], lines[2][2], lines[0][4]):
        assert audit_of([row for row in rows if row is not line]) == (line["samples"], 0)
    if "async" in strategy:
        again = next(row for row in rows if row["kind"] == "update" and row["lease"] == lines[2][2]["first"])
        assert audit_of([*rows, again]) == (0, lines[2][2]["samples"])
    else:
        assert audit_of([row for row in rows if row is not lines[1][-3]]) == (lines[1][-3]["samples"], 0)
        assert audit_of([*rows, lines[2][2]]) == (0, lines[2][2]["samples"])


HUNG = [
    "parameter-server:mode=sync",
    "parameter-server:mode=ssp,servers=2",
    "parameter-server:mode=async,servers=2,placement=colocated",
    "parameter-server:mode=backup",
    "parameter-server:mode=gba",
    "async-local-sgd:servers=1",
]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", HUNG)
def test_a_worker_that_hangs_and_goes_on_beating_is_removed(tmp_path: Path, strategy: str) -> None:
    """After one deadline, not after a dozen; and it is named, not the server that waits for it."""
    faults = Faults().and_then("hang", 1, 6)
    result = train(tmp_path, faults, strategy=strategy, workers=3, deadline_s=3.0)
    assert result.status == "finished" and result.lost == [1]
    assert len(set(result.param_hash.values())) == 1
    (lost,) = records_of(result.run_dir, "lost")
    assert re.search(r"while server [34] and others waited for it", lost["cause"]), "whichever waited first"
    assert "deadline_s" in lost["cause"]
    assert (result.audit or {})["missing"] == 0


@pytest.mark.slow
def test_a_slow_worker_that_others_wait_for_is_not_removed(tmp_path: Path) -> None:
    """It makes steps: a lease of many of them may take much longer than the deadline."""
    faults = Faults()
    for step in range(6, 18):
        faults = faults.and_then("nap", 1, step)
    strategy = "async-local-sgd:servers=1,period=20"
    result = train(tmp_path, faults, strategy=strategy, workers=2, deadline_s=3.0, epochs=1, batch_size=8)
    assert result.status == "finished" and result.lost == []


@pytest.mark.slow
def test_a_worker_then_a_server_are_killed_and_another_worker_is_stopped(tmp_path: Path) -> None:
    """Digits, asynchronous: the disturbed run ends within a point of the undisturbed one, and nothing is lost."""
    options: dict[str, Any] = {
        "strategy": "parameter-server:mode=async,servers=2,replicas=2",
        "workers": 4,
        "epochs": 20,
        "threads": 1,
        "heartbeat_s": 1.0,
        "deadline_s": 20.0,
    }
    calm = podium.train("digits-mlp", out=tmp_path / "calm", **options)
    out, blows = tmp_path / "struck", [(1, signal.SIGKILL), (4, signal.SIGKILL), (2, signal.SIGSTOP)]
    acting = threading.Thread(target=_one_after_the_other, args=(out, blows), daemon=True)
    acting.start()
    struck = podium.train("digits-mlp", out=out, **options)
    acting.join()
    assert struck.status == "finished"
    assert sorted(struck.lost) == [1, 2, 4]
    assert abs(struck.metrics["accuracy"] - calm.metrics["accuracy"]) <= 0.01
    updates = records_of(struck.run_dir, "update")
    for server in (4, 5):
        leases = Counter(row["lease"] for row in updates if row["rank"] == server)
        assert max(leases.values()) == 1
    assert len({row["lease"] for row in updates}) == len({row["lease"] for row in records_of(calm.run_dir, "update")})
    kinds = {row["kind"] for row in _all(struck.run_dir)}
    assert {"lost", "worker_lost", "restored", "replaced", "regroup"} <= kinds


def _one_after_the_other(out: Path, blows: list[tuple[int, int]]) -> None:
    """Each blow once the run has gone on a good way after the last."""
    position = 0
    for rank, number in blows:
        position = _wait_for(out, position + 4000)
        os.kill(pid_of(rank), number)


def _wait_for(out: Path, position: int) -> int:
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        for path in out.glob("*/records/rank-0.jsonl"):
            lines = path.read_text(errors="replace").splitlines()[-5:-1]
            for line in lines:
                if '"kind":"step"' in line:
                    here = int(line.partition('"position":')[2].partition(",")[0])
                    if here >= position:
                        return here
        time.sleep(0.02)
    raise AssertionError("the run did not come that far")


def _all(run_dir: str) -> list[Record]:
    from podium.records.recorder import read_records

    return list(read_records(Path(run_dir)))


class TestScaling:
    """More and fewer, while a run is under way."""

    @pytest.mark.parametrize("strategy", ["all-reduce", "parameter-server:servers=2"])
    def test_synchronous_training_does_not_depend_on_who_joins_and_leaves(
        self, tmp_path: Path, alone: RunResult, strategy: str
    ) -> None:
        acting = self._scale_at_gate(tmp_path, workers=4)
        result = train(tmp_path, Faults().gate(0, step=9), strategy=strategy, workers=2)
        acting.join()
        assert result.status == "finished" and result.lost == []
        assert distance(result, alone) < 1e-5
        members = [row["members"] for row in records_of(result.run_dir, "regroup")]
        assert len(members[-1]) == 4 and len(set(result.param_hash.values())) == 1

    def test_workers_and_servers_join_a_run_with_leases(self, tmp_path: Path) -> None:
        """Bounded, so that the other worker does not do all the work while the first is at the gate."""
        acting = self._scale_at_gate(tmp_path, workers=3, servers=2)
        result = train(tmp_path, Faults().gate(0, step=9), strategy="parameter-server:mode=ssp", workers=2)
        acting.join()
        assert result.status == "finished"
        regroup = records_of(result.run_dir, "regroup")[-1]
        assert len(regroup["members"]) == 3 and len(regroup["servers"]) == 2
        assert len({row["rank"] for row in records_of(result.run_dir, "update")}) == 2
        assert len(result.param_hash) == 3 and len(set(result.param_hash.values())) == 1

    @pytest.mark.parametrize("mode", ["sync", "async"])
    def test_workers_and_servers_leave(self, tmp_path: Path, alone: RunResult, mode: str) -> None:
        acting = self._scale_at_gate(tmp_path, workers=2, servers=1)
        strategy = f"parameter-server:mode={mode},servers=2"
        result = train(tmp_path, Faults().gate(0, step=9), strategy=strategy, workers=3)
        acting.join()
        assert result.status == "finished" and result.lost == []
        regroup = records_of(result.run_dir, "regroup")[-1]
        assert len(regroup["members"]) == 2 and len(regroup["servers"]) == 1
        if mode == "sync":
            assert distance(result, alone) < 1e-5

    @staticmethod
    def _scale_at_gate(folder: Path, **wanted: int) -> threading.Thread:
        def act() -> None:
            (run_dir,) = [path for path in folder.iterdir() if path.is_dir()]
            before = {path.name for path in (run_dir / "records").iterdir()}
            told = podium.scale(run_dir, **wanted)
            until = time.monotonic() + 30.0
            while time.monotonic() < until:  # newcomers are awaited once they are ready, not before
                names = {path.name for path in (run_dir / "records").iterdir()}
                if len(names - before) >= len(told.starting):
                    break
                time.sleep(0.05)
            time.sleep(1.0)
            Gate(folder).open()

        return at_gate(folder, act)

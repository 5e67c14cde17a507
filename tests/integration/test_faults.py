"""A rank is killed or stopped: training goes on, or ends with a clear error; nobody waits for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from podium.config import RunResult
from podium.engine.checkpoint import find_checkpoint
from podium.testing.faults import NOISY, STEPS, TASK, Faults
from tests.integration.processes import finish, podium, settings
from tests.integration.runs import audit_steps, distance, records_of, train


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """What one process makes of the same task and seed."""
    return train(tmp_path_factory.mktemp("alone"), strategy="solo", launcher="threads")


SURVIVED = {
    "the first worker killed": Faults().kill(0, step=12),
    "another worker killed": Faults().kill(2, step=17),
    "killed in the very first step": Faults().kill(3, step=1),
    "killed while it makes its model": Faults().kill(1, where="model"),
    "killed in the last step": Faults().kill(2, step=STEPS),
    "the first killed in the last step": Faults().kill(0, step=STEPS),
    "two killed, one after the other": Faults().kill(1, step=8).kill(3, step=25),
    "two killed in one step": Faults().kill(0, step=15).kill(2, step=15),
    "killed while it validates": Faults().kill(0, where="validation", step=2),
    "killed in the last validation": Faults().kill(0, where="validation", step=4),
    "killed while it saves": Faults().kill(0, where="checkpoint", step=2),
    "killed while it saves the last time": Faults().kill(0, where="checkpoint", step=4),
}


@pytest.mark.parametrize("faults", SURVIVED.values(), ids=SURVIVED.keys())
def test_training_goes_on_without_a_killed_worker(tmp_path: Path, alone: RunResult, faults: Faults) -> None:
    result = train(tmp_path, faults, workers=4, checkpoint_every=10)
    gone = sorted(fault.rank for fault in faults.plan)
    assert result.status == "finished"
    assert result.lost == gone
    assert sorted(map(int, result.param_hash)) == [rank for rank in range(4) if rank not in gone]
    assert len(set(result.param_hash.values())) == 1
    assert result.steps == STEPS
    assert distance(result, alone) < 1e-5
    assert result.loss == pytest.approx(alone.loss, abs=1e-5)
    audit_steps(result.run_dir)
    assert find_checkpoint(Path(result.run_dir)).step == STEPS
    assert sorted({row["epoch"] for row in result.history}) == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("rank", [0, 2])
def test_training_goes_on_without_a_stopped_worker(tmp_path: Path, alone: RunResult, rank: int) -> None:
    result = train(tmp_path, Faults().stop(rank, step=14), workers=4, heartbeat_s=1.0)
    assert result.lost == [rank]
    assert len(result.param_hash) == 3
    assert len(set(result.param_hash.values())) == 1
    assert distance(result, alone) < 1e-5
    audit_steps(result.run_dir)
    (lost,) = records_of(result.run_dir, "lost")
    assert "longer than heartbeat_s allows" in lost["cause"]


@pytest.mark.slow
def test_training_goes_on_without_a_worker_that_never_lets_go_of_the_interpreter(
    tmp_path: Path, alone: RunResult
) -> None:
    result = train(tmp_path, Faults().and_then("hold", 1, step=9), workers=3, heartbeat_s=1.0, deadline_s=3.0)
    assert result.lost == [1]
    assert distance(result, alone) < 1e-5


@pytest.mark.slow
def test_a_worker_that_holds_the_interpreter_for_longer_than_a_heartbeat_is_not_lost(tmp_path: Path) -> None:
    faults = Faults().and_then("grip", 1, step=9).and_then("grip", 0, where="validation", step=2)
    result = train(tmp_path, faults, workers=2, heartbeat_s=1.0)
    assert result.lost == []
    assert not records_of(result.run_dir, "regroup")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["validation", "checkpoint"])
@pytest.mark.parametrize("step", [2, 4])
def test_a_first_worker_that_validates_or_saves_for_longer_than_the_deadline_is_not_lost(
    tmp_path: Path, alone: RunResult, where: str, step: int
) -> None:
    faults = Faults().and_then("dawdle", 0, where=where, step=step)
    result = train(tmp_path, faults, workers=3, checkpoint_every=10, deadline_s=1.5)
    assert result.lost == []
    for kind in ("eval", "checkpoint"):  # none was done again: it would take as long again, and so for ever
        steps = [row["step"] for row in records_of(result.run_dir, kind)]
        assert steps == sorted(set(steps))
    assert distance(result, alone) < 1e-5
    audit_steps(result.run_dir)


@pytest.mark.slow
def test_training_goes_on_without_a_worker_that_hangs_in_the_users_code(tmp_path: Path, alone: RunResult) -> None:
    result = train(tmp_path, Faults().and_then("hang", 1, step=9), workers=3, deadline_s=2.0)
    assert result.lost == [1]
    assert distance(result, alone) < 1e-5
    (lost,) = records_of(result.run_dir, "lost")
    assert "hung" in lost["cause"]
    assert lost["cause"].endswith("raise deadline_s")


@pytest.mark.slow
def test_the_command_line_tells_of_a_loss_and_goes_on(tmp_path: Path) -> None:
    faults = Faults().kill(1, step=9)
    code, _, err = finish(podium("train", TASK, "-n", "3", "--out", str(tmp_path), *settings({"task.faults": faults})))
    assert code == 0, err
    assert "rank 1 lost: killed by SIGKILL" in err
    assert "regrouped in" in err


def test_the_last_worker_standing_finishes_alone(tmp_path: Path, alone: RunResult) -> None:
    result = train(tmp_path, Faults().kill(0, step=5).kill(1, step=9).kill(2, step=13), workers=4)
    assert list(result.param_hash) == ["3"]
    assert distance(result, alone) < 1e-5
    audit_steps(result.run_dir)


def test_a_step_that_is_done_again_finds_generator_and_buffers_as_they_were(tmp_path: Path) -> None:
    """Dropout and batch normalisation: losing rank 1 in step 21 is leaving it out from step 21 on, in bits."""
    options = {"task": NOISY, "buffers": "local", "checkpoint_every": 20}
    broken = train(tmp_path / "broken", Faults().kill(1, step=21), workers=2, **options)
    before = train(tmp_path / "before", workers=2, steps=20, **options)
    after = train(tmp_path / "after", workers=1, resume=before.run_dir, **options)
    assert broken.lost == [1]
    assert broken.param_hash["0"] == after.param_hash["0"]
    assert distance(broken, after) == 0.0  # the buffers, too

"""A run that was cut goes on from its checkpoint, on as many workers as there are now."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import podium
from podium.config import RunResult
from podium.engine.checkpoint import find_checkpoint
from podium.errors import CheckpointError, RankFailed
from podium.testing.faults import BATCH, NOISY, SAMPLES, STEPS, Faults
from tests.integration.runs import audit_steps, distance, train


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return train(tmp_path_factory.mktemp("alone"), strategy="solo", launcher="threads")


def cut(out: Path, workers: int, **options: object) -> Path:
    """A run that a user's error ended in step 26, with a checkpoint of step 20."""
    with pytest.raises(RankFailed):
        train(out, Faults().and_then("raise", 0, 26), workers=workers, checkpoint_every=10, **options)
    (run_dir,) = [path for path in out.iterdir() if path.is_dir()]
    assert find_checkpoint(run_dir).step == 20
    return run_dir


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1), (1, 2)])
def test_another_number_of_workers_goes_on_to_the_same_result(
    tmp_path: Path, alone: RunResult, before: int, after: int
) -> None:
    run_dir = cut(tmp_path / "cut", before)
    rest = train(tmp_path / "rest", workers=after, resume=str(run_dir))
    assert rest.status == "finished"
    assert len(rest.param_hash) == after
    assert len(set(rest.param_hash.values())) == 1
    assert distance(rest, alone) < 1e-5
    assert rest.samples == (STEPS - 20) * BATCH
    audit_steps(rest.run_dir, begin=20)


@pytest.mark.slow
def test_dropout_and_batch_normalisation_resume_bit_for_bit(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", task=NOISY, workers=2, checkpoint_every=10)
    rest = train(tmp_path / "rest", task=NOISY, workers=2, resume=str(cut(tmp_path / "cut", 2, task=NOISY)))
    assert rest.param_hash == whole.param_hash
    assert distance(rest, whole) == 0.0


@pytest.mark.slow
def test_a_run_resumed_twice_equals_the_unbroken_one(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", workers=2)
    first = train(tmp_path / "first", workers=2, steps=7)
    second = train(tmp_path / "second", workers=2, steps=23, resume=first.run_dir)
    third = train(tmp_path / "third", workers=2, resume=second.run_dir)
    assert (first.steps, second.steps, third.steps) == (7, 23, STEPS)
    assert third.param_hash == whole.param_hash
    assert [row["epoch"] for row in third.history] == [3.0, 4.0]


def test_a_finished_run_resumed_is_only_validated(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", workers=2)
    again = train(tmp_path / "again", workers=2, resume=whole.run_dir)
    assert again.param_hash == whole.param_hash
    assert again.metrics == whole.metrics
    assert again.samples == 0


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", workers=2, steps=2)
    with pytest.raises(CheckpointError, match=r"was made with seed=0, this run has seed=1"):
        train(tmp_path / "seed", workers=2, seed=1, resume=whole.run_dir)
    with pytest.raises(CheckpointError, match=r"does not fit task small"):
        train(tmp_path / "shape", workers=2, resume=whole.run_dir, task_options={"hidden": 17})
    with pytest.raises(CheckpointError, match="no such run or checkpoint"):
        train(tmp_path / "none", workers=2, resume=str(tmp_path / "nowhere"))
    newest = find_checkpoint(Path(whole.run_dir)).path / "shared.safetensors"
    newest.write_bytes(newest.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match="cut short"):
        train(tmp_path / "torn", workers=2, resume=whole.run_dir)


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_passed_over_and_the_user_is_told(tmp_path: Path) -> None:
    run_dir = cut(tmp_path / "cut", 2)
    newest = find_checkpoint(run_dir).path / "shared.safetensors"
    data = bytearray(newest.read_bytes())
    data[-5] ^= 16
    newest.write_bytes(data)
    with pytest.warns(RuntimeWarning, match=r"(?s)step-00000020 is damaged.*shared.safetensors.*10 steps are lost"):
        rest = train(tmp_path / "rest", workers=2, resume=str(run_dir))
    assert rest.status == "finished"
    assert rest.samples == (STEPS - 10) * BATCH
    told: list[str] = []
    again = train(
        tmp_path / "again",
        workers=2,
        resume=str(run_dir),
        on_event=lambda event: told.append(event["text"]) if event["event"] == "warning" else None,
    )
    assert again.param_hash == rest.param_hash
    assert "resuming from step 10 instead" in told[0]
    assert told[0] in again.notices
    with pytest.raises(CheckpointError, match=r"shared.safetensors: damaged"):  # it was named, so it must be whole
        train(tmp_path / "named", workers=2, resume=str(newest.parent))


def test_a_checkpoint_without_one_of_its_ranks_is_refused(tmp_path: Path) -> None:
    first = train(tmp_path / "first", workers=2, steps=3)
    (find_checkpoint(Path(first.run_dir)).path / "rank-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rank-1.safetensors cannot be read: it is missing.*ranks 0, 1"):
        train(tmp_path / "rest", workers=2, resume=first.run_dir)


def test_two_epochs_of_a_resumed_run_hold_every_sample(tmp_path: Path) -> None:
    """The order goes on where it was, in mid-epoch: what the first run had not used of epoch 0 the second uses."""
    first = train(tmp_path / "first", workers=2, steps=3)
    rest = train(tmp_path / "rest", workers=3, resume=first.run_dir, epochs=1)
    assert first.samples + rest.samples == SAMPLES


LONG_S = 60.0
"""A deadline that is never waited for, also where starting takes its time on busy cores."""
SERVED = [
    "parameter-server:servers=1",
    "parameter-server:mode=async,servers=2,replicas=2",
    "parameter-server:mode=ssp,servers=2,placement=colocated",
    "async-local-sgd:servers=1",
    "all-reduce until epoch:at=2 | parameter-server:mode=async;servers=2",
    "parameter-server:mode=async until epoch:at=2 | all-reduce",
]


@pytest.mark.parametrize("strategy", SERVED)
def test_a_finished_run_with_servers_that_is_resumed_ends_at_once_with_its_result(
    tmp_path: Path, strategy: str
) -> None:
    whole = train(tmp_path / "whole", workers=2, strategy=strategy)
    Path(whole.run_dir, "result.json").unlink()  # as after a kill between the last checkpoint and the result
    began = time.monotonic()
    again = train(tmp_path / "again", workers=2, strategy=strategy, resume=whole.run_dir, deadline_s=LONG_S)
    assert time.monotonic() - began < LONG_S / 2
    assert again.status == "finished" and again.lost == []
    assert (again.param_hash, again.loss, again.steps) == (whole.param_hash, whole.loss, whole.steps)


@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_servers_of_a_phase_that_never_came_end_with_the_run(tmp_path: Path, placement: str) -> None:
    """Also where a worker was lost before it had met them."""
    strategy = f"all-reduce until epoch:at=50 | parameter-server:servers=2;placement={placement}"
    began = time.monotonic()
    result = train(tmp_path, Faults().kill(0, step=5), workers=3, strategy=strategy, deadline_s=LONG_S)
    assert time.monotonic() - began < LONG_S / 2
    assert result.status == "finished" and result.lost == [0]


@pytest.mark.parametrize("launcher", ["threads", "local"])
def test_a_checkpoint_of_other_phases_is_told_of_before_its_run_begins_anew(tmp_path: Path, launcher: str) -> None:
    def events_of(strategy: str, folder: str, **options: Any) -> list[str]:
        said: list[dict[str, Any]] = []
        given = {"strategy": strategy, "workers": 2, "launcher": launcher, "run_dir": tmp_path / folder, **options}
        podium.train("digits-mlp", epochs=2, on_event=said.append, **given)
        return [event["text"] for event in said if event["event"] == "warning"]

    assert events_of("all-reduce until epoch:at=1 | local-sgd", "first", steps=30) == []
    (warning,) = events_of("all-reduce until epoch:at=1.5 | local-sgd", "other", resume=str(tmp_path / "first"))
    assert "was made in phase 2 of 'all-reduce until epoch:at=1 | local-sgd'" in warning
    assert "begins with its first" in warning
    assert events_of("all-reduce until epoch:at=1 | local-sgd", "same", resume=str(tmp_path / "first")) == []

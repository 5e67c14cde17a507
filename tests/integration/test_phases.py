"""Phases on real processes: whoever is lost, the run goes on in its phase, and every sample counts once."""

from __future__ import annotations

import json
import signal
import textwrap
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from podium.config import RunResult
from podium.engine.checkpoint import find_checkpoint
from podium.records.audit import audit
from podium.records.recorder import Record, read_records
from podium.testing.faults import BATCH, EPOCHS, SAMPLES, STEPS, TASK, Faults, Gate
from tests.integration import leftovers
from tests.integration.processes import finish, podium, settings, wait_until_gone
from tests.integration.runs import FIELDS, records_of, train
from tests.integration.test_interrupt import press_ctrl_c, read_until, run_dir_in, wait_at_gate

WORKERS = 3
SHARE = BATCH // WORKERS
AT = 15
"""The global step at which the phase changes."""
TO_SERVERS = f"all-reduce until step:at={AT} | parameter-server:mode=async;servers=2"
BESIDE = f"{TO_SERVERS};placement=colocated"
TO_ROUNDS = f"all-reduce until step:at={AT} | local-sgd:period=4"


def switches(result: RunResult) -> list[tuple[str, str, int]]:
    """From which strategy to which, and at which global step."""
    names = [(s["before"].partition(" ")[0], s["after"].partition(" ")[0], s["step"]) for s in result.switches]
    return [(before.partition(":")[0], after.partition(":")[0], step) for before, after, step in names]


# By a rule.


def test_a_rule_leads_there_and_back_again(tmp_path: Path) -> None:
    settled = "plateau:window=2;threshold=10;fallen=1;latest=1"
    run = f"all-reduce until {settled} | parameter-server:mode=async;servers=2 until {settled} | all-reduce"
    result = train(tmp_path, strategy=run, workers=2, epochs=6)
    (to, home) = result.switches
    assert [name for name, *_ in switches(result)] == ["all-reduce", "parameter-server"]
    assert "settled" in to["why"]
    assert "settled" in home["why"]
    assert SAMPLES * 2 <= to["position"] < home["position"] < SAMPLES * 6
    assert result.audit == {"missing": 0, "repeated": 0}
    assert len(set(result.param_hash.values())) == 1
    pushed = {row["lease"] for row in records_of(result.run_dir, "update")}
    assert to["position"] <= min(pushed) <= max(pushed) < home["position"]


# A killed worker.

KILLED = {
    "in the first phase": Faults().kill(1, step=8),
    "in the last step before the switch": Faults().kill(2, step=AT),
    "in the first step after the switch": Faults().kill(1, step=AT + 1),
    "in the second phase": Faults().kill(2, step=AT + 4),
    "the first, in the first phase": Faults().kill(0, step=8),
    "the first, in the first step after the switch": Faults().kill(0, step=AT + 1),
    "the first, in the second phase": Faults().kill(0, step=AT + 4),
}


SECOND = [name for name in KILLED if "second" in name or "after" in name]
CASES = [*((name, TO_SERVERS) for name in KILLED), *((name, TO_ROUNDS) for name in SECOND)]


@pytest.mark.parametrize(("when", "run"), CASES)
def test_a_run_goes_on_in_its_phase_without_a_killed_worker(tmp_path: Path, when: str, run: str) -> None:
    faults = KILLED[when]
    result = train(tmp_path, faults, strategy=run, workers=WORKERS)
    (fault,) = faults.plan
    check_survived(result, fault.rank, run)


def test_a_worker_killed_with_the_server_beside_it_is_outlived_by_both(tmp_path: Path) -> None:
    """The server comes back as its snapshot was, and so do samples that only it knew of; nothing is applied twice."""
    result = train(tmp_path, Faults().kill(0, step=AT + 3), strategy=BESIDE, workers=WORKERS)
    check_phases(result, 0, BESIDE)
    (restored,) = records_of(result.run_dir, "restored")
    assert restored["rank"] == WORKERS
    updates = [row for row in records_of(result.run_dir, "update") if row["t_ns"] > restored["t_ns"]]
    assert {row["rank"] for row in updates} == {WORKERS, WORKERS + 1}
    for server in (WORKERS, WORKERS + 1):
        since = 0 if server != restored["rank"] else restored["t_ns"]
        check_once(row for row in records_of(result.run_dir, "update") if row["rank"] == server and row["t_ns"] > since)


def check_survived(result: RunResult, rank: int, run: str) -> None:
    check_phases(result, rank, run)
    check_once(records_of(result.run_dir, "update"))
    found = audit(happened(list(read_records(Path(result.run_dir))), rank))
    assert found is not None
    assert found.repeated == 0
    assert found.missing <= SHARE, "more than a killed worker can have left out of its records"


def check_phases(result: RunResult, rank: int, run: str) -> None:
    after = "parameter-server" if "servers" in run else "local-sgd"
    survivors = set(range(WORKERS)) - {rank}
    assert result.status == "finished"
    assert result.lost == [rank]
    assert set(map(int, result.param_hash)) == survivors
    assert len(set(result.param_hash.values())) == 1
    assert result.epochs == EPOCHS
    assert switches(result) == [("all-reduce", after, AT)]
    assert {row["rank"] for row in records_of(result.run_dir, "switch")} >= survivors
    pushed = {row["worker"] for row in records_of(result.run_dir, "update")}
    assert pushed >= survivors if "servers" in run else not pushed


def check_once(updates: Iterable[Record]) -> None:
    """Each part of the parameters was moved by each lease once, whoever it was lent to."""
    applied = Counter((row["rank"], row["range"], row["lease"]) for row in updates)
    assert set(applied.values()) <= {1}


def happened(rows: list[Record], lost: int) -> list[Record]:
    """Without steps that came to nothing: of a round that was undone, or of a lease that was lent again.

    Survivors say from where they did a round again. A lost worker's last lease may be done again by another, because
    nobody knew that all servers had it; servers apply it once.
    """
    undone = [row["position"] for row in rows if row["kind"] == "undone"]
    again = {row["first"] for row in rows if row["kind"] == "step" and row["rank"] != lost}
    kept = []
    for row in rows:
        in_vain = row["kind"] == "step" and undone and row["first"] >= min(undone)
        if row["kind"] == "undone" or (in_vain and (row["rank"] == lost or before_undone(rows, row))):
            continue
        if row["kind"] == "step" and row["rank"] == lost and row["first"] in again:
            continue
        kept.append(row)
    return kept


def before_undone(rows: list[Record], step: Record) -> bool:
    """Whether this worker said afterwards that the round of this step did not happen."""
    said = [row["t_ns"] for row in rows if row["kind"] == "undone" and row["rank"] == step["rank"]]
    return bool(step["t_ns"] < min(said, default=0))


# A launcher that ends.


def started(out: Path) -> Any:
    """`podium train`, in whose second phase the first worker waits at the gate, with a checkpoint of that phase."""
    run = TO_SERVERS.replace(f"at={AT}", "at=8")
    fields = {**FIELDS, "task.faults": Faults().gate(0, step=18), "task.gate": out, "out": out}
    process = podium("train", TASK, "-n", "2", "--strategy", run, "--checkpoint-every", "5", *settings(fields))
    wait_at_gate(process, out)
    return process


def check_resumed(out: Path, run_dir: Path) -> None:
    """It goes on in the second phase: no change of phase, and all is pushed to servers."""
    saved = find_checkpoint(run_dir)
    assert 10 <= saved.step < STEPS
    rest = train(out, strategy=str(strategy_of(run_dir)), workers=2, resume=str(run_dir))
    assert rest.status == "finished"
    assert rest.switches == []
    assert rest.audit == {"missing": 0, "repeated": 0}
    pushed = [row["lease"] for row in records_of(rest.run_dir, "update")]
    assert min(pushed) == saved.position
    assert rest.samples == STEPS * BATCH - saved.position, "also where it was stopped in mid-step"
    assert {row["lease"] for row in records_of(rest.run_dir, "update")} == {
        row["first"] for row in records_of(rest.run_dir, "step")
    }


def strategy_of(run_dir: Path) -> str:
    config = json.loads((run_dir / "manifest.json").read_text())["config"]
    return str(config["strategy_options"]["run"])


@pytest.mark.slow
def test_when_the_launcher_is_killed_after_the_switch_the_rest_is_the_second_phase(tmp_path: Path) -> None:
    process = started(tmp_path)
    children = leftovers.children_of(process.pid)
    process.kill()
    process.communicate()
    wait_until_gone(children)
    check_resumed(tmp_path / "rest", run_dir_in(tmp_path))


@pytest.mark.slow
def test_ctrl_c_in_the_second_phase_saves_it_and_it_can_be_resumed(tmp_path: Path) -> None:
    process = started(tmp_path)
    press_ctrl_c(process)
    read_until(process, "finishing the step")
    Gate(tmp_path).open()
    code, _, err = finish(process)
    assert code == 128 + signal.SIGINT, err
    run_dir = run_dir_in(tmp_path)
    assert audit(list(read_records(run_dir))) == (0, 0)
    check_resumed(tmp_path / "rest", run_dir)


# A loop of the user's own.

SCRIPT = """
import json
import podium
import torch
from torch import nn

torch.manual_seed(3)
inputs, targets = torch.randn(96, 5), torch.randn(96, 2)
model = nn.Linear(5, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run = podium.join(model, optimizer)
names = []
for epoch in range(3):
    for x, y in run.batches((inputs, targets), batch_size=16, epochs=1):
        run.step(lambda: nn.functional.mse_loss(model(x), y))
        names.append(run.strategy.name)
with open(f"{FOLDER}/{run.rank}.json", "w") as file:
    json.dump({"names": names, "hash": run.param_hash()}, file)
"""


@pytest.mark.slow
def test_a_loop_of_ones_own_goes_from_phase_to_phase(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(textwrap.dedent(SCRIPT).replace("{FOLDER}", str(tmp_path)))
    run = "all-reduce until step:at=4 | parameter-server:mode=async until epoch:at=2 | local-sgd:period=2"
    process = podium("run", str(script), "-n", "2", "--strategy", run, "--out", str(tmp_path / "out"))
    code, _, err = finish(process)
    assert code == 0, err
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert told[0]["hash"] == told[1]["hash"]
    for one in told:
        assert one["names"][:4] == ["all-reduce"] * 4
        assert one["names"][-6:] == ["local-sgd"] * 6
        assert set(one["names"][4:-6]) <= {"parameter-server"}
    leased = [name for one in told for name in one["names"] if name == "parameter-server"]
    assert len(leased) == 2 * 8  # eight global steps, two leases each, whoever drew them
    steps = records_of(run_dir_in(tmp_path / "out"), "step")
    used = sorted(row["first"] + i for row in steps for i in range(row["samples"]))
    assert used == list(range(3 * 96))

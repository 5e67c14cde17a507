"""torchrun starts the ranks again after a loss, and when hosts join or leave: the run continues from its checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

import podium
from podium.records.recorder import read_records
from podium.testing import Host, Hosts, make_hosts
from tests.integration.processes import settings, start
from tests.integration.slow_task import TASK as SLOW_TASK

Make = Callable[..., Hosts]
__all__ = ["make_hosts"]  # the fixture
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
# A host that joins or is lost finds torchrun's agents with the address of a store that they made at the beginning,
# unless they make one for every start.
HOSTS = {
    "PODIUM_SECRET": "sixteen letters or more",
    "OMP_NUM_THREADS": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
QUICK = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1,join_timeout=60,read_timeout=20"
EPOCHS = 20
RUN = {"task": SLOW_TASK, "epochs": EPOCHS, "checkpoint_every": 10, "threads": 1, "heartbeat_s": 1}
LIMIT_S = 150.0


class Started:
    """torchrun's agent on a host; its output goes to files, since nobody reads it meanwhile."""

    def __init__(self, host: Host, folder: Path, *words: str) -> None:
        self.host = host
        self.out, self.err = folder / f"{host.name}.out", folder / f"{host.name}.err"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = host.start(TORCHRUN, *words, env=HOSTS, stdout=out, stderr=err)

    def finish(self) -> int:
        return int(self.process.wait(LIMIT_S))


def elastic(hosts: Sequence[Host], folder: Path, *, meet: Host, nodes: str = "2:3", **fields: Any) -> list[Started]:
    """An agent on each of these hosts; they meet on the host `meet`."""
    agent = ("--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", "3")
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{meet.name}:29400", "--rdzv-conf", QUICK)
    return [Started(host, folder, *agent, *where, *ranks(**fields)) for host in hosts]


def ranks(**fields: Any) -> tuple[str, ...]:
    return ("-m", "podium.node", *settings({**RUN, "out": "/tmp/runs", "task.mark": "/tmp/slow", **fields}))


def slow_down(hosts: Iterable[Host]) -> None:
    """Let steps take long, so that the run is not over before a test has lost or added a host."""
    for host in hosts:
        (host.folder / "slow").touch()


def wait_for_checkpoints(*folders: Path) -> None:
    """Until each of these has a checkpoint of a run."""
    until = time.monotonic() + 90
    while not all(list(folder.glob("*/checkpoints/step-????????")) for folder in folders):
        assert time.monotonic() < until, "no checkpoint was written"
        time.sleep(0.05)


def wait_for_a_step(records: Path) -> None:
    until = time.monotonic() + 90
    while not (records.exists() and any(row["kind"] == "step" for row in read_records(records))):
        assert time.monotonic() < until, "no step was done"
        time.sleep(0.05)


def speed_up(hosts: Iterable[Host]) -> None:
    """Once the ranks were started again, let them finish."""
    until = time.monotonic() + 90
    while not any(list(host.folder.glob("runs/*-2/records/rank-0.jsonl")) for host in hosts):
        assert time.monotonic() < until, "the ranks were not started again"
        time.sleep(0.05)
    for host in hosts:
        (host.folder / "slow").unlink()


def results(agents: Sequence[Started]) -> list[dict[str, Any]]:
    """What rank 0 printed, on whichever hosts it was, in order of time."""
    printed = [agent.out.read_text().splitlines() for agent in agents]
    return sorted((json.loads(line) for lines in printed for line in lines), key=lambda row: str(row["run_dir"]))


def errors(agents: Sequence[Started]) -> str:
    return "\n".join(f"{agent.host.name}:\n{agent.err.read_text()}" for agent in agents)


def check_continued(result: dict[str, Any], home: Path, agents: Sequence[Started], *, workers: int) -> None:
    """The last start finished what the first began, with these workers; `home`: where its folder lies."""
    assert result["status"] == "finished", errors(agents)
    assert (result["workers"], result["epochs"]) == (workers, EPOCHS)
    assert result["audit"] == {"missing": 0, "repeated": 0}
    assert len(result["param_hash"]) == workers and len(set(result["param_hash"].values())) == 1
    run_dir = home / Path(result["run_dir"]).name
    assert {row["rank"] for row in read_records(run_dir) if row["kind"] == "step"} == set(range(workers))
    manifest = json.loads((run_dir / "manifest.json").read_text())
    assert f"{manifest['continues']}-2" == run_dir.name
    (note,) = [text for text in result["notices"] if "has started the ranks" in text]
    assert "the run continues from step" in note
    began_at = min(row["position"] for row in read_records(run_dir) if row["kind"] == "begin")
    assert began_at > 0
    assert result["samples"] == EPOCHS * 1438 - began_at


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The accuracy of the same run on two workers that nothing happens to."""
    result = podium.train("digits-mlp", workers=2, epochs=EPOCHS, threads=1, out=tmp_path_factory.mktemp("whole"))
    return result.metrics["accuracy"]


@pytest.mark.root
def test_a_run_continues_on_two_hosts_when_the_third_is_lost(make_hosts: Make, tmp_path: Path, unbroken: float) -> None:
    a, b, c = make_hosts(3)
    slow_down((a, b, c))
    agents = elastic([a, b, c], tmp_path, meet=a)
    wait_for_checkpoints(*(host.folder / "runs" for host in (a, b, c)))
    c.lose()
    speed_up([a, b])
    assert [agent.finish() for agent in agents[:2]] == [0, 0], errors(agents)
    (result,) = results(agents)
    check_continued(result, a.folder / "runs", agents, workers=2)
    assert result["metrics"]["accuracy"] == pytest.approx(unbroken, abs=0.02)
    first = a.folder / "runs" / Path(result["run_dir"]).name.removesuffix("-2")
    assert {row["rank"] for row in read_records(first) if row["kind"] == "step"} == {0, 1, 2}


@pytest.mark.root
def test_the_loss_of_the_first_host_costs_no_checkpoint(make_hosts: Make, tmp_path: Path, unbroken: float) -> None:
    a, b, c = make_hosts(3)
    slow_down((a, b, c))
    agents = elastic([a, b, c], tmp_path, meet=c)
    wait_for_checkpoints(*(host.folder / "runs" for host in (a, b, c)))
    a.lose()
    speed_up([b, c])
    assert [agent.finish() for agent in agents[1:]] == [0, 0], errors(agents)
    (result,) = results(agents)
    check_continued(result, b.folder / "runs", agents, workers=2)
    assert result["metrics"]["accuracy"] == pytest.approx(unbroken, abs=0.02)


@pytest.mark.root
def test_a_host_that_joins_and_gets_rank_0_gets_the_checkpoint_too(make_hosts: Make, tmp_path: Path) -> None:
    a, b, c = make_hosts(3)
    slow_down((a, b, c))
    agents = elastic([b, c], tmp_path, meet=b)
    wait_for_checkpoints(b.folder / "runs")
    agents += elastic([a], tmp_path, meet=b)
    speed_up([a, b, c])
    assert [agent.finish() for agent in agents] == [0, 0, 0], errors(agents)
    before, result = results(agents)
    assert before["status"] == "stopped" and before["audit"] == {"missing": 0, "repeated": 0}
    check_continued(result, a.folder / "runs", agents, workers=3)
    assert before["samples"] + result["samples"] == EPOCHS * 1438, "nothing is trained twice: it was asked to stop"


@pytest.mark.root
def test_a_run_goes_on_without_a_host_whose_torchrun_is_ended(make_hosts: Make, tmp_path: Path) -> None:
    a, b, c = make_hosts(3)
    slow_down((a, b, c))
    agents = elastic([a, b, c], tmp_path, meet=a)
    wait_for_checkpoints(a.folder / "runs")
    b.run("pkill", "-TERM", "-f", "bin/torchrun")
    speed_up([a, c])
    assert [agents[0].finish(), agents[2].finish()] == [0, 0], errors(agents)
    before, result = results(agents)
    assert before["status"] == "stopped"
    check_continued(result, a.folder / "runs", agents, workers=2)
    assert before["samples"] + result["samples"] == EPOCHS * 1438


@pytest.mark.root
def test_a_rank_that_is_killed_on_one_of_two_hosts_is_started_again(make_hosts: Make, tmp_path: Path) -> None:
    """With torchrun's fixed rendezvous: its store remembers the first rank 0."""
    hosts = a, b = make_hosts(2)
    slow_down(hosts)
    fixed = ("--nnodes", "2", "--max-restarts", "2", "--master-addr", a.name, "--master-port", "29511")
    agents = [Started(host, tmp_path, *fixed, "--node-rank", str(i), *ranks()) for i, host in enumerate(hosts)]
    wait_for_checkpoints(*(host.folder / "runs" for host in hosts))
    b.run("pkill", "-KILL", "-f", "[-]u -m podium.node")
    speed_up(hosts)
    assert [agent.finish() for agent in agents] == [0, 0], errors(agents)
    (result,) = results(agents)
    check_continued(result, a.folder / "runs", agents, workers=2)


def on_this_host(out: Path, **fields: Any) -> subprocess.Popen[str]:
    agent = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2")
    return start(*agent, *ranks(out=out, **{"task.mark": out / "slow", **fields}))


def kill_rank_1(agent: subprocess.Popen[str]) -> None:
    """The second process that the agent started."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    started = [int(pid) for pid in children if b"podium.node" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(started[1], signal.SIGKILL)


def test_a_killed_rank_on_one_host_costs_the_steps_since_the_last_checkpoint(tmp_path: Path, unbroken: float) -> None:
    (tmp_path / "slow").touch()
    agent = on_this_host(tmp_path)
    wait_for_checkpoints(tmp_path)
    kill_rank_1(agent)
    (tmp_path / "slow").unlink()
    out, err = agent.communicate(timeout=LIMIT_S)
    assert agent.returncode == 0, err
    (result,) = map(json.loads, out.splitlines())
    check_continued(result, tmp_path, [], workers=2)
    assert result["metrics"]["accuracy"] == pytest.approx(unbroken, abs=0.02)
    assert "the run continues from step" in err


def test_a_run_without_a_checkpoint_begins_again_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    agent = on_this_host(tmp_path, checkpoint_every=0, run_dir=tmp_path / "mine")
    wait_for_a_step(tmp_path / "mine" / "records" / "rank-1.jsonl")
    kill_rank_1(agent)
    (tmp_path / "slow").unlink()
    out, err = agent.communicate(timeout=LIMIT_S)
    assert agent.returncode == 0, err
    assert "without checkpoints the run would then begin at its beginning: --set checkpoint_every=N" in err
    assert "no checkpoint was written yet (--set checkpoint_every=N), so the run begins again from the beginning" in err
    (result,) = map(json.loads, out.splitlines())
    assert result["run_dir"] == str(tmp_path / "mine-2")
    assert result["samples"] == EPOCHS * 1438 and result["audit"] == {"missing": 0, "repeated": 0}


def test_another_torchrun_begins_a_run_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        agent = on_this_host(tmp_path, epochs=2)
        out, err = agent.communicate(timeout=LIMIT_S)
        assert agent.returncode == 0, err
        assert json.loads(out)["samples"] == 2 * 1438
    assert len(list(tmp_path.glob("*/result.json"))) == 2

"""Runs across hosts that share nothing: what the first host's folder holds afterwards."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import podium
from podium.records.recorder import read_records
from podium.testing import Host, Hosts, make_hosts
from tests.integration import on_hosts
from tests.integration.on_hosts import CLEAN, RUN, folder_on
from tests.integration.on_hosts import result_of_torchrun as result_of

Make = Callable[..., Hosts]
pytestmark = pytest.mark.root
__all__ = ["make_hosts"]  # the fixture


def torchrun(hosts: Sequence[Host], *, per_host: int = 1, **fields: Any) -> list[subprocess.Popen[str]]:
    """One run over all these hosts; the first one's process prints the result."""
    return on_hosts.torchrun(hosts, [per_host] * len(hosts), **{"steps": 12, **fields})


def test_the_first_host_has_the_records_and_hashes_of_all(make_hosts: Make) -> None:
    a, b = make_hosts(2)
    result = result_of(torchrun([a, b], strategy="all-reduce"))
    assert len(result["param_hash"]) == 2 and len(set(result["param_hash"].values())) == 1
    assert result["audit"] == CLEAN
    home, away = (folder_on(host, result["run_dir"]) / "records" for host in (a, b))
    assert (home / "rank-1.jsonl").read_bytes() == (away / "rank-1.jsonl").read_bytes() != b""
    assert not [path for path in (*home.iterdir(), *away.iterdir()) if path.name.startswith(".")]
    steps = [row for row in read_records(home.parent) if row["kind"] == "step"]
    assert {row["rank"] for row in steps} == {0, 1}


@pytest.mark.slow
def test_two_ranks_on_each_of_two_hosts_end_with_the_bits_of_four_on_one(make_hosts: Make, tmp_path: Path) -> None:
    """One rank on each of three hosts: `test_same_bits_on_hosts.py`."""
    options = {"strategy": "all-reduce", "seed": 3}
    here = podium.train("digits-mlp", **RUN | options | {"steps": 12, "workers": 4, "out": tmp_path})
    result = result_of(torchrun(list(make_hosts(2)), per_host=2, **options))
    assert result["param_hash"] == {str(rank): bits for rank, bits in here.param_hash.items()}
    assert len(set(result["param_hash"].values())) == 1
    assert result["audit"] == CLEAN


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["hierarchical", "auto", "backend"])
def test_every_kind_of_collective_serves_two_hosts_with_two_ranks_each(make_hosts: Make, collective: str) -> None:
    result = result_of(torchrun(list(make_hosts(2)), per_host=2, strategy="all-reduce", collective=collective))
    assert len(result["param_hash"]) == 4 and len(set(result["param_hash"].values())) == 1
    assert result["audit"] == CLEAN


@pytest.mark.slow
def test_servers_and_workers_of_two_hosts_lose_no_sample(make_hosts: Make) -> None:
    a, b = make_hosts(2)
    options = {"strategy": "parameter-server", "strategy.mode": "async", "strategy.servers": 2}
    result = result_of(torchrun([a, b], per_host=2, **options))
    assert len(set(result["param_hash"].values())) == 1
    assert result["audit"] == CLEAN
    home = folder_on(a, result["run_dir"]) / "records"
    assert {path.name for path in home.iterdir()} == {"launcher.jsonl", *(f"rank-{rank}.jsonl" for rank in range(4))}


@pytest.mark.slow
def test_a_run_resumes_on_the_same_hosts_in_bits_and_on_fewer_to_rounding(make_hosts: Make) -> None:
    a, b = hosts = make_hosts(2)
    whole = result_of(torchrun(list(hosts), strategy="all-reduce"))
    half = result_of(torchrun(list(hosts), strategy="all-reduce", steps=6))
    assert not list(b.folder.glob("runs/*/checkpoints/*")), "only the first host has checkpoints"
    rest = result_of(torchrun(list(hosts), strategy="all-reduce", resume=half["run_dir"]))
    assert rest["param_hash"] == whole["param_hash"] and len(set(rest["param_hash"].values())) == 1
    assert rest["audit"] == CLEAN
    alone = result_of(torchrun([a], strategy="all-reduce", resume=half["run_dir"]))
    assert alone["loss"] == pytest.approx(whole["loss"], rel=1e-4)


@pytest.mark.slow
def test_a_rank_that_cannot_begin_ends_the_run_on_the_first_host_with_its_cause(make_hosts: Make) -> None:
    a, b = make_hosts(2)
    text = "from podium.tasks.digits import digits_mlp as make_task\n"
    (a.folder / "mine.py").write_text(text)  # and on no other host
    began = time.monotonic()
    first, second = torchrun([a, b], task="/tmp/mine.py:make_task", strategy="all-reduce", start_deadline_s=100)
    errors = [process.communicate(timeout=90)[1] for process in (first, second)]
    assert first.returncode != 0 and second.returncode != 0
    assert time.monotonic() - began < 80, "it does not wait for the start deadline"
    assert all("/tmp/mine.py: no such file" in text for text in errors)
    assert "rank 1: on host host1: " in errors[0]


@pytest.mark.slow
def test_what_a_lost_host_recorded_until_its_last_heartbeats_is_there(make_hosts: Make) -> None:
    a, b = make_hosts(2)
    first, _ = torchrun([a, b], strategy="all-reduce", steps=100_000, heartbeat_s=1.5)

    def recorded() -> int:
        return sum(1 for path in a.folder.glob("runs/*/records/rank-1.jsonl") for _ in read_records(path))

    until = time.monotonic() + 60
    while recorded() < 20 and time.monotonic() < until:
        time.sleep(0.1)
    assert recorded() >= 20, "records arrive while the run is under way"
    (there,) = b.folder.glob("runs/*/records/rank-1.jsonl")
    b.lose()
    _, errors = first.communicate(timeout=60)
    assert first.returncode != 0
    assert "rank 1" in errors or "worker 1" in errors
    (home,) = a.folder.glob("runs/*/records/rank-1.jsonl")
    assert there.read_bytes().startswith(home.read_bytes())

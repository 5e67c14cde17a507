"""Scripts with their own training loop, on hosts that share nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from podium.config import resolve
from podium.launch.run import run_script
from podium.testing import Hosts, SlurmCluster, SshServers, make_hosts, start_slurm, start_ssh
from tests.integration.on_hosts import ended, folder_on, podium

pytestmark = pytest.mark.root
__all__ = ["make_hosts", "start_slurm", "start_ssh"]  # the fixtures
Make = Callable[..., Hosts]

LOOP = """
import sys
import torch
from torch.nn.functional import mse_loss
import podium
from beside import RATE

torch.manual_seed(0)
model = torch.nn.Linear(5, 1)
run = podium.join(model, torch.optim.SGD(model.parameters(), lr=RATE))
x = torch.randn(96, 5, generator=torch.Generator().manual_seed(3))
for inputs, targets in run.batches((x, x[:, :1]), batch_size=16, epochs=2):
    run.step(lambda: mse_loss(model(inputs), targets))
print(f"worker {run.rank} of {run.size} got {sys.argv[1:]}:", run.param_hash())
if "fail" in sys.argv and run.rank == 1:
    raise ValueError("as the user asked")
"""


def write_loop(folder: Path) -> None:
    (code := folder / "code").mkdir()
    (code / "loop.py").write_text(LOOP)
    (code / "beside.py").write_text("RATE = 0.05\n")


@pytest.mark.slow
def test_a_script_and_the_files_beside_it_run_by_ssh(
    make_hosts: Make, start_ssh: Callable[[Hosts], SshServers], tmp_path: Path
) -> None:
    hosts = make_hosts(2)
    start_ssh(hosts)
    write_loop(hosts[0].folder)
    words = ("run", "/tmp/code/loop.py", "--launcher", "ssh", "--hosts", "host0,host1", "--workers", "2", "--quiet")
    code, out, err = ended(podium(hosts[0], *words, "--out", "/tmp/runs", "--set", "threads=1", "--", "--lr", "a b"))
    assert code == 0, (out, err)
    first, name = out.strip().split(": ")
    assert first == "worker 0 of 2 got ['--lr', 'a b']", "only the first worker's output is shown"
    (run,) = hosts[0].folder.glob("runs/*")
    assert (run / "logs" / "rank-1.log").read_text() == f"worker 1 of 2 got ['--lr', 'a b']: {name}\n"
    assert json.loads((run / "manifest.json").read_text())["placed"] == {"0": "host0", "1": "host1"}
    assert not (hosts[1].folder / "code").exists()
    write_loop(tmp_path)
    config = resolve(None, ["workers=2", "threads=1", f"out={tmp_path}/runs"])
    assert run_script(config, str(tmp_path / "code" / "loop.py")) == 0
    (log,) = tmp_path.glob("runs/*/logs/rank-1.log")
    assert log.read_text().endswith(f": {name}\n"), "as on one machine"


@pytest.mark.slow
def test_a_script_is_a_batch_job_outside_an_allocation_and_its_failure_is_the_commands(
    make_hosts: Make, start_slurm: Callable[..., SlurmCluster]
) -> None:
    hosts = make_hosts(2)
    slurm = start_slurm(hosts)
    write_loop(hosts[0].folder)
    words = ("run", "/tmp/code/loop.py", "--launcher", "slurm", "--nodes", "2", "--workers", "2", "--out", "/tmp/runs")
    code, out, err = ended(podium(hosts[0], *words, "--set", "threads=1", "--", "--lr", "a b", env=slurm.env))
    assert code == 0, (out, err)
    assert "worker 0 of 2 got ['--lr', 'a b']: " in (hosts[0].folder / "runs" / "loop-all-reduce-1.out").read_text()
    assert folder_on(hosts[0], "/tmp/runs/loop-all-reduce-1/manifest.json").is_file()
    code, out, err = ended(podium(hosts[0], *words, "--", "fail", env=slurm.env))
    assert code == 1 and "ValueError: as the user asked" in err and "loop.py:16" in err

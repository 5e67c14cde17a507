"""Runs that `ssh` starts on hosts that share nothing: the head's folder holds all that a run on one machine leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from podium.launch.run import train as train_here
from podium.records.recorder import read_records
from podium.testing import Hosts, SshServers, make_hosts, start_ssh
from tests.integration.on_hosts import (
    CLEAN,
    ended,
    folder_on,
    podium,
    processes_of,
    result_of,
    steps_at_home,
    train,
    wait_for,
)
from tests.integration.processes import settings

pytestmark = pytest.mark.root
__all__ = ["make_hosts", "start_ssh"]  # the fixtures
Make = Callable[..., Hosts]
Start = Callable[[Hosts], SshServers]


def test_three_hosts_train_as_one_machine_does(make_hosts: Make, start_ssh: Start, tmp_path: Path) -> None:
    hosts = make_hosts(3)
    start_ssh(hosts)
    result = result_of(train(list(hosts), workers=3, steps=12))
    here = train_here("digits-mlp", workers=3, steps=12, threads=1, out=tmp_path)
    assert result["param_hash"] == here.param_hash
    assert result["audit"] == CLEAN
    home = folder_on(hosts[0], result["run_dir"])
    rows = [row for row in read_records(home) if row["kind"] == "step"]
    assert {row["rank"] for row in rows} == {0, 1, 2}
    assert (home / "model.safetensors").is_file()
    assert {path.name for path in (home / "checkpoints" / "step-00000012").iterdir()} == {
        "checkpoint.json",
        "shared.safetensors",
        *(f"rank-{rank}.safetensors" for rank in range(3)),
    }
    assert json.loads((home / "manifest.json").read_text())["placed"] == {"0": "host0", "1": "host1", "2": "host2"}
    for host in hosts:
        assert not list(host.folder.glob("podium-*")), "agents remove their folders"
        assert host is hosts[0] or not (host.folder / "runs").exists()


@pytest.mark.slow
def test_the_secret_stands_in_no_argument_no_environment_and_no_file(make_hosts: Make, start_ssh: Start) -> None:
    hosts = make_hosts(2)
    start_ssh(hosts)
    process = train(list(hosts), workers=2, epochs=300)
    wait_for(lambda: bool(list(hosts[0].folder.glob("runs/*/control.json"))), process)
    (control,) = hosts[0].folder.glob("runs/*/control.json")
    secret = json.loads(control.read_text())["secret"]
    for host in hosts:
        seen = processes_of(host)
        assert "podium.node" in seen and secret not in seen
    hosts[0].run("pkill", "-INT", "-f", "podium train")
    ended(process)
    files = [path for host in hosts for path in host.folder.rglob("*") if path.is_file()]
    assert not [path for path in files if secret.encode() in path.read_bytes()]


TASK = """
from podium.tasks.digits import digits_mlp
from beside import RATE

def make(data_dir=None):
    assert data_dir is None or (open(data_dir + "/words").read() == "of the data")
    return digits_mlp(lr=RATE)
"""


@pytest.mark.slow
def test_the_users_own_code_and_data_are_sent(make_hosts: Make, start_ssh: Start) -> None:
    hosts = make_hosts(2)
    start_ssh(hosts)
    (code := hosts[0].folder / "code").mkdir()
    (code / "mine.py").write_text(TASK)
    (code / "beside.py").write_text("RATE = 0.05\n")
    (data := hosts[0].folder / "data").mkdir()
    (data / "words").write_text("of the data")
    fields = {"task": "/tmp/code/mine.py:make", "workers": 2, "steps": 4, "data_dir": "/tmp/data"}
    assert result_of(train(list(hosts), **fields))["audit"] == CLEAN
    assert not (hosts[1].folder / "code").exists() and not (hosts[1].folder / "data").exists()
    assert list(hosts[1].folder.glob(".cache/podium/data-*/words")), "data are kept for the next run"


@pytest.mark.slow
def test_a_host_joins(make_hosts: Make, start_ssh: Start) -> None:
    hosts = make_hosts(3)
    start_ssh(hosts)
    process = train(list(hosts)[:2], workers=2, epochs=1000)
    wait_for(lambda: steps_at_home(hosts[0]) > 0, process)
    (run,) = (path.name for path in hosts[0].folder.glob("runs/*"))

    def asked() -> bool:
        code, _, err = ended(podium(hosts[0], "scale", f"/tmp/runs/{run}", "--host", "host2 slots=1"))
        assert code == 0 or "still starting" in err, err
        return code == 0

    wait_for(asked, process)
    wait_for(lambda: steps_at_home(hosts[0], rank=2) > 0, process)
    hosts[0].run("pkill", "-INT", "-f", "podium train")
    code, out, err = ended(process)
    assert code == 130, err
    result = json.loads(out)
    assert set(result["param_hash"]) == {"0", "1", "2"} and len(set(result["param_hash"].values())) == 1
    assert result["audit"] == CLEAN


def test_settings_of_hosts_are_checked_before_anything_starts(make_hosts: Make) -> None:
    (host,) = make_hosts(1)
    (host.folder / "hosts.txt").write_text("host0 slots=1\nhost1 slots=x\n")
    words = ("train", "digits-mlp", "--launcher", "ssh", "--json", *settings({"out": "/tmp/runs"}))
    code, out, err = ended(podium(host, *words, "--hosts", "/tmp/hosts.txt"))
    assert code == 2 and "hosts.txt, line 2: slots must be a whole number, got 'x'" in out + err
    code, out, err = ended(podium(host, *words))
    assert code == 2 and "launcher ssh needs hosts" in out + err

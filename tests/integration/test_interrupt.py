"""Signals to the launcher: Ctrl-C once and twice, a request to terminate, and a kill that it cannot answer."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from podium.cli.interrupt import ASKED
from podium.engine.checkpoint import find_checkpoint
from podium.launch.rendezvous import rendezvous_folder
from podium.launch.signals import BURST_S
from podium.testing.faults import STEPS, TASK, Faults, Gate
from tests.integration import leftovers
from tests.integration.processes import document, finish, podium, settings, start, wait_until_gone
from tests.integration.runs import FIELDS, audit_steps, records_of, train
from tests.integration.shaping import CLUSTER, needs_root

AT = 15
"""The step in which rank 0 waits at the gate."""


def command_line(out: Path, *words: str, faults: Faults = Faults().gate(0, step=AT)) -> subprocess.Popen[str]:  # noqa: B008  # frozen
    """`podium train` on two workers, of which one will wait at the gate."""
    fields: dict[str, Any] = {**FIELDS, "task.faults": faults, "task.gate": out, "out": out}
    process = podium("train", TASK, "-n", "2", *words, *settings(fields))
    wait_at_gate(process, out)
    return process


def wait_at_gate(process: subprocess.Popen[str], out: Path) -> None:
    until = time.monotonic() + 100
    while not Gate(out).reached.exists():
        assert process.poll() is None, finish(process)
        assert time.monotonic() < until, "the run never came to the gate"
        time.sleep(0.02)


def press_ctrl_c(process: subprocess.Popen[str]) -> None:
    """As a terminal does: the signal goes to the launcher and to everything it has started."""
    os.killpg(process.pid, signal.SIGINT)


def read_until(process: subprocess.Popen[str], words: str) -> None:
    """Wait until standard error holds these words."""
    assert process.stderr is not None
    seen, until = "", time.monotonic() + 60
    while words not in seen:
        assert time.monotonic() < until, seen
        if select.select([process.stderr], [], [], 0.1)[0]:
            seen += os.read(process.stderr.fileno(), 4096).decode()


def run_dir_in(out: Path) -> Path:
    (run_dir,) = [path for path in out.iterdir() if (path / "manifest.json").is_file()]
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_once_it_finishes_the_step_saves_and_can_be_resumed(tmp_path: Path, number: signal.Signals) -> None:
    process = command_line(tmp_path)
    children = leftovers.children_of(process.pid)
    assert len(children) >= 3  # two ranks and what they were forked from
    if number == signal.SIGINT:
        press_ctrl_c(process)
    else:
        process.terminate()
    read_until(process, ASKED)
    Gate(tmp_path).open()
    code, out, err = finish(process)
    assert code == 130, err
    assert "stopped" in out
    wait_until_gone(children)
    run_dir = run_dir_in(tmp_path)
    saved = find_checkpoint(run_dir)
    assert AT <= saved.step < STEPS
    assert records_of(run_dir, "stop")
    whole = train(tmp_path / "whole", workers=2)
    rest = train(tmp_path / "rest", workers=2, resume=str(run_dir))
    assert rest.param_hash == whole.param_hash
    audit_steps(rest.run_dir, begin=saved.step)


@pytest.mark.slow
def test_asked_twice_it_ends_at_once(tmp_path: Path) -> None:
    process = command_line(tmp_path, "--json")
    children = leftovers.children_of(process.pid)
    press_ctrl_c(process)
    read_until(process, ASKED)
    time.sleep(BURST_S)  # within it, it would be the same request
    press_ctrl_c(process)  # nobody opens the gate
    code, out, err = finish(process, 30)
    assert code == 130, err
    assert document(out)["error"]["type"] == "Interrupted"
    wait_until_gone(children)
    assert records_of(run_dir_in(tmp_path), "step")


@pytest.mark.slow
def test_ctrl_c_while_the_ranks_are_starting_is_not_lost(tmp_path: Path) -> None:
    """The first rank is held up before it has begun; the fork server and the ranks must be deaf to the signal."""
    fields = {**FIELDS, "task.faults": Faults().gate(0, where="data"), "task.gate": tmp_path, "out": tmp_path}
    process = podium("train", TASK, "-n", "2", *settings(fields))
    wait_at_gate(process, tmp_path)
    press_ctrl_c(process)
    read_until(process, ASKED)
    Gate(tmp_path).open()
    code, _, err = finish(process)
    assert code == 130, err
    assert find_checkpoint(run_dir_in(tmp_path)).step >= 1


@pytest.mark.slow
def test_when_the_launcher_is_killed_its_ranks_go_too_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    process = command_line(tmp_path, "--checkpoint-every", "10")
    children = leftovers.children_of(process.pid)
    assert len(children) >= 3
    process.kill()
    process.communicate()
    wait_until_gone(children)
    run_dir = run_dir_in(tmp_path)
    assert find_checkpoint(run_dir).step == 10
    assert {row["step"] for row in records_of(run_dir, "step")} >= set(range(1, AT))
    code, out, err = finish(podium("train", "--resume", str(run_dir), "--json", "--set", "task.faults="))
    assert code == 0, err
    rest = document(out)
    whole = train(tmp_path / "whole", workers=2)
    assert rest["param_hash"] == whole.param_hash
    assert rest["launcher"] == "local"
    audit_steps(rest["run_dir"], begin=10)


@pytest.fixture
def shaped_script(tmp_path: Path) -> subprocess.Popen[str]:
    """A script of the user's own that trains on shaped links and waits at the gate."""
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import podium
        podium.train("{TASK}", workers=2, launcher="shaped", cluster="{tmp_path}/cluster.toml", out="{tmp_path}",
                     task_options={{"faults": "{Faults().gate(0, step=AT)}", "gate": "{tmp_path}"}})
        """)
    )
    process = start(str(script))
    wait_at_gate(process, tmp_path)
    return process


@pytest.mark.slow
@pytest.mark.root
@needs_root
def test_a_terminated_launcher_removes_its_namespaces(shaped_script: subprocess.Popen[str]) -> None:
    children = leftovers.children_of(shaped_script.pid)
    assert leftovers.namespaces()
    shaped_script.terminate()
    code, _, err = finish(shaped_script, 30)
    assert code == 128 + signal.SIGTERM, err
    wait_until_gone(children)  # and that no namespace is left is checked after every test


@pytest.mark.slow
@pytest.mark.root
@needs_root
def test_what_a_killed_launcher_leaves_the_next_one_removes(shaped_script: subprocess.Popen[str]) -> None:
    children = leftovers.children_of(shaped_script.pid)
    shaped_script.kill()
    shaped_script.communicate()
    wait_until_gone(children)
    assert leftovers.namespaces()  # nobody was left to remove them
    with rendezvous_folder():
        pass

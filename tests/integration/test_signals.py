"""Signals that reach more than the launcher, as batch systems send them, and processes that outlive nobody.

`timeout` and a closing terminal signal a process group, systemd and a batch system every process of a job, one by one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podium.cli.interrupt import ASKED
from podium.engine.checkpoint import find_checkpoint
from podium.errors import Lost
from podium.launch.rendezvous import rendezvous_folder
from podium.testing.faults import STEPS, TASK, Faults, Gate
from tests.integration import leftovers
from tests.integration.processes import finish, free_port, settings, start, wait_until_gone
from tests.integration.runs import FIELDS, at_gate, audit_steps, pid_of, records_of, train
from tests.integration.test_interrupt import AT, command_line, read_until, run_dir_in, wait_at_gate


def to_the_group(process: subprocess.Popen[str], number: int) -> None:
    """As `timeout` does: to the program it started, then to its whole group."""
    process.send_signal(number)
    os.killpg(process.pid, number)


def to_each(process: subprocess.Popen[str], number: int) -> None:
    """As systemd and a batch system do: to every process of the job."""
    for pid in [process.pid, *leftovers.children_of(process.pid)]:
        os.kill(pid, number)


CASES = {"term-group": (signal.SIGTERM, to_the_group), "term-each": (signal.SIGTERM, to_each),
         "hup-each": (signal.SIGHUP, to_each)}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("number", "sender"), CASES.values(), ids=CASES)
def test_a_signal_to_all_processes_of_a_run_is_one_request_to_save_and_end(
    tmp_path: Path, number: signal.Signals, sender: Callable[[subprocess.Popen[str], int], None]
) -> None:
    process = command_line(tmp_path)
    children = leftovers.children_of(process.pid)
    sender(process, number)
    read_until(process, ASKED)
    Gate(tmp_path).open()
    code, out, err = finish(process)
    assert code == 130, err
    assert "stopped" in out
    wait_until_gone(children)
    saved = find_checkpoint(run_dir_in(tmp_path))
    assert AT <= saved.step < STEPS
    rest = train(tmp_path / "rest", workers=2, resume=str(run_dir_in(tmp_path)))
    audit_steps(rest.run_dir, begin=saved.step)


@pytest.mark.slow
def test_when_a_kill_follows_the_request_the_checkpoint_is_there_before_the_last_validation(tmp_path: Path) -> None:
    """Batch systems give a few seconds; a validation may take longer."""
    faults = Faults().gate(0, step=AT).and_then("hang", 0, 1, where="validation")
    # No validation but the last, and so many steps that they are not over before the ranks hear of the request.
    fields = {"eval_every": 0, "epochs": 100}
    process = command_line(tmp_path, *settings(fields), faults=faults)
    process.terminate()
    read_until(process, ASKED)
    Gate(tmp_path).open()
    until = time.monotonic() + 60.0  # that validation hangs for longer
    while not any((run_dir_in(tmp_path) / "checkpoints").glob("step-????????")):
        assert time.monotonic() < until, "no checkpoint"
        time.sleep(0.02)
    children = leftovers.children_of(process.pid)
    process.kill()
    process.communicate()
    wait_until_gone(children)
    rest = train(tmp_path / "rest", workers=2, resume=str(run_dir_in(tmp_path)), **fields)
    assert rest.param_hash == train(tmp_path / "whole", workers=2, **fields).param_hash


@pytest.mark.slow
def test_ctrl_z_suspends_the_ranks_too_and_they_go_on_with_the_launcher(tmp_path: Path) -> None:
    faults = Faults().gate(0, step=AT)
    fields = {**FIELDS, "task.faults": faults, "task.gate": tmp_path, "out": tmp_path}
    words = ["-m", "podium", "train", TASK, "-n", "2", *settings(fields)]
    # In a group of its own and in this session: the kernel suspends no group that nobody could wake.
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    wait_at_gate(process, tmp_path)
    (server,) = [pid for pid in leftovers.children_of(process.pid) if leftovers.children_of(pid)]
    ranks = leftovers.children_of(server)
    os.killpg(process.pid, signal.SIGTSTP)
    wait_for_state({process.pid, *ranks}, "T")
    os.killpg(process.pid, signal.SIGCONT)
    wait_for_state(ranks, "RSD")
    Gate(tmp_path).open()
    code, _, err = finish(process)
    assert code == 0, err


def wait_for_state(pids: set[int], states: str) -> None:
    until = time.monotonic() + 20
    while others := [pid for pid in pids if leftovers.state(pid) not in states]:
        assert time.monotonic() < until, others
        time.sleep(0.02)


# torchrun.


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_torchrun_lets_all_its_ranks_save(tmp_path: Path, number: signal.Signals) -> None:
    fields = {**FIELDS, "task.faults": Faults().gate(0, step=AT), "task.gate": tmp_path, "out": tmp_path}
    agent = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
    process = start(*agent, "-m", "podium.node", "--task", TASK, *settings(fields))
    wait_at_gate(process, tmp_path)
    process.send_signal(number)
    while not records_of(run_dir_in(tmp_path), "stop"):
        assert process.poll() is None, finish(process)
        time.sleep(0.02)
    Gate(tmp_path).open()
    finish(process)
    saved = find_checkpoint(run_dir_in(tmp_path))
    assert AT <= saved.step < STEPS
    rest = train(tmp_path / "rest", workers=2, resume=str(run_dir_in(tmp_path)))
    assert rest.param_hash == train(tmp_path / "whole", workers=2).param_hash


# Processes that nobody needs any more.


@pytest.mark.slow
@pytest.mark.parametrize("stopped", ["rank", "fork server"])
def test_a_killed_launcher_takes_all_with_it_also_what_is_stopped_and_the_next_one_removes_the_rest(
    tmp_path: Path, own_temporary_folder: Path, stopped: str
) -> None:
    process = command_line(tmp_path)
    children = leftovers.children_of(process.pid)
    (server,) = [pid for pid in children if leftovers.children_of(pid)]
    os.kill(server if stopped == "fork server" else leftovers.children_of(server).pop(), signal.SIGSTOP)
    process.kill()
    process.communicate()
    wait_until_gone(children, 5.0)
    with rendezvous_folder():
        pass
    assert [name for name in os.listdir(own_temporary_folder) if name.startswith(("podium", "pymp"))] == []


# The fork server.


@pytest.mark.slow
def test_a_fork_server_that_dies_is_named_and_not_a_worker(tmp_path: Path) -> None:
    def kill() -> None:
        os.kill(leftovers.parent_of(pid_of(0)), signal.SIGKILL)

    thread = at_gate(tmp_path, kill)
    with pytest.raises(Lost, match=r"^the fork server, from which all ranks were forked, was lost: killed by SIGKILL"):
        train(tmp_path, Faults().gate(0, step=AT), workers=2)
    thread.join(timeout=10.0)
    assert train(tmp_path / "next", workers=2).status == "finished"


@pytest.mark.slow
def test_the_fork_server_outlives_the_thread_that_asked_for_it_first(tmp_path: Path) -> None:
    """The kernel kills it with the thread that started it; a notebook may call from any."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import threading, podium
        from multiprocessing import forkserver
        if __name__ == "__main__":
            options = dict(task="{TASK}", workers=1, steps=2, out="{tmp_path}")
            thread = threading.Thread(target=podium.train, kwargs=options)
            thread.start()
            thread.join()
            first = forkserver._forkserver._forkserver_pid
            podium.train(**options)
            print(first == forkserver._forkserver._forkserver_pid)
        """)
    )
    code, out, err = finish(start(str(script)))
    assert (code, out.split()) == (0, ["True"]), err


# Debuggers.


@pytest.mark.slow
def test_a_rank_that_a_debugger_holds_is_not_taken_for_dead(tmp_path: Path) -> None:
    held = threading.Event()

    def debug() -> None:
        with every_thread_stopped(pid_of(0)):
            held.set()
            time.sleep(2.5)  # more than twice the heartbeat
        Gate(tmp_path).open()

    thread = at_gate(tmp_path, debug)
    result = train(tmp_path, Faults().gate(0, step=AT), workers=2, heartbeat_s=1.0)
    thread.join(timeout=10.0)
    assert held.is_set()
    assert result.lost == []


_ATTACH, _DETACH = 16, 17


@contextlib.contextmanager
def every_thread_stopped(pid: int) -> Iterator[None]:
    """As a debugger holds a process. By the calling thread, to the end."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    for each in threads:
        assert libc.ptrace(_ATTACH, each, None, None) == 0, os.strerror(ctypes.get_errno())
        os.waitpid(each, 0x40000000)  # __WALL: threads, too
    try:
        yield
    finally:
        for each in threads:
            libc.ptrace(_DETACH, each, None, None)

"""nccl between two processes on one GPU: with another NCCL_HOSTID each, nccl takes them for processes of two hosts.

So what they exchange goes through the host's sockets, as between hosts. Two GPUs of one host were never tried.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from podium.comm.real.process_group import Group, file_store
from podium.errors import Lost
from podium.launch.backend import backend_of, own_gpu, set_up_nccl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LIMIT_S = 90.0
GPU = torch.device("cuda", 0)


def begin(pipe: Connection, folder: str, name: str) -> Group:
    """Set up, say so, and wait for the word to begin: processes start at different speeds."""
    os.environ["NCCL_HOSTID"] = name
    set_up_nccl("127.0.0.1")
    torch.cuda.set_device(GPU)
    torch.zeros(1, device=GPU)
    group = Group(file_store(Path(folder) / "store"), host="127.0.0.1", deadline_s=30.0, device=GPU)
    group.use("nccl")
    pipe.send("ready")
    pipe.recv()
    return group


def exchanges(pipe: Connection, folder: str, index: int) -> None:
    """Every kind of exchange, of several sizes, on GPU and CPU."""
    group = begin(pipe, folder, f"host{index}")
    group.form(0, index, 2)
    wrong: list[str] = []
    for numel in (1, 1000, 1 << 20):
        for device in (GPU, torch.device("cpu")):
            summed = torch.full((numel,), index + 1.0, device=device)
            group.wait(group.all_reduce(summed))
            sent = torch.full((numel,), float(index), device=device)
            group.wait(group.broadcast(sent, 1))
            gathered = torch.empty(2 * numel, device=device)
            group.wait(group.all_gather(torch.full((numel,), float(index), device=device), gathered))
            of_both = torch.arange(2.0, device=device).repeat_interleave(numel)
            right = bool((summed == 3).all()), bool((sent == 1).all()), torch.equal(gathered, of_both)
            if not all(right):
                wrong.append(f"{numel} on {device}: {right}")
    group.drop()
    pipe.send((own_gpu(GPU), wrong))


def loses_its_peer(pipe: Connection, folder: str, index: int, hears_of_it: bool) -> None:
    """Exchange; the second is lost; the first fails, and goes on alone, then with a third process."""
    group = begin(pipe, folder, f"host{index}")
    group.form(0, index, 2)
    tensor = torch.ones(1 << 20, device=GPU)
    group.wait(group.all_reduce(tensor))
    pipe.send("exchanged")
    pipe.recv()  # for the second, the last thing it does
    key = group.all_reduce(tensor)
    if hears_of_it:
        interrupt_when_told(pipe, group)
    pipe.send("waits")
    try:
        group.wait(key)
    except Lost as error:
        pipe.send(str(error))
    group.form(1, 0, 1)
    group.wait(group.all_reduce(tensor))
    pipe.send("alone")
    pipe.recv()
    _exchange(pipe, group, 0)


def joins(pipe: Connection, folder: str) -> None:
    _exchange(pipe, begin(pipe, folder, "host2"), 1)


def _exchange(pipe: Connection, group: Group, index: int) -> None:
    group.form(2, index, 2)
    tensor = torch.ones(1000, device=GPU)
    group.wait(group.all_reduce(tensor))
    pipe.send(tensor.sum().item())
    group.drop()


def never_connects(pipe: Connection, folder: str, index: int) -> None:
    """The second forms gloo's part only."""
    group = begin(pipe, folder, f"host{index}")
    if index == 1:
        group.use("gloo")
        group.form(0, 1, 2)
        pipe.send("formed")
        pipe.recv()
    interrupt_when_told(pipe, group)
    try:
        group.form(0, 0, 2)
    except Lost as error:
        pipe.send(str(error))
    group.form(1, 0, 1)
    pipe.send("alone")


def interrupt_when_told(pipe: Connection, group: Group) -> None:
    """As a rank's membership does when the launcher has given a worker up: in a thread of its own."""

    def body() -> None:
        pipe.recv()
        group.interrupt()

    threading.Thread(target=body, daemon=True).start()


class Started:
    """A process and its pipe. It ends with the tests' own process."""

    def __init__(self, main: Any, *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=main, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def said(self) -> Any:
        assert self.pipe.poll(LIMIT_S), "no answer"
        return self.pipe.recv()


def let_begin(*ranks: Started) -> None:
    assert [rank.said() for rank in ranks] == ["ready"] * len(ranks)
    for rank in ranks:
        rank.pipe.send("begin")


def test_exchanges_of_two_hosts_are_right(tmp_path: Path) -> None:
    ranks = [Started(exchanges, str(tmp_path), index) for index in range(2)]
    let_begin(*ranks)
    (first, wrong), (second, also_wrong) = (rank.said() for rank in ranks)
    assert not wrong and not also_wrong
    assert backend_of([first, second]) == "nccl"
    assert backend_of([own_gpu(GPU), own_gpu(GPU)]) == "gloo", "two workers of one host on its GPU"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_whose_peer_is_lost_goes_on_alone_and_with_another(tmp_path: Path, how: signal.Signals) -> None:
    """A killed process closes its connections; a stopped one is as silent as a host that vanished."""
    is_silent = how == signal.SIGSTOP
    first, second = (Started(loses_its_peer, str(tmp_path), index, is_silent) for index in range(2))
    let_begin(first, second)
    assert first.said() == second.said() == "exchanged"
    assert second.process.pid is not None
    os.kill(second.process.pid, how)
    first.pipe.send("go on")
    assert first.said() == "waits"
    if is_silent:
        first.pipe.send("it is lost")
    assert "a collective failed" in first.said()
    second.process.kill()
    assert first.said() == "alone"
    third = Started(joins, str(tmp_path))
    let_begin(third)
    first.pipe.send("form")
    assert first.said() == third.said() == 2000


def test_a_worker_that_never_connects_does_not_stop_the_others_for_ever(tmp_path: Path) -> None:
    first, second = (Started(never_connects, str(tmp_path), index) for index in range(2))
    let_begin(first, second)
    assert second.said() == "formed"
    first.pipe.send("it is lost")
    assert "did not form: a worker was lost" in first.said()
    assert first.said() == "alone"

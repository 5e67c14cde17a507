"""The three worlds, for tests: run one function per rank, on a communicator, in each of them.

A function that runs in the real world is sent to other processes: it must be a module-level function, or a `partial` of
one.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, final

import torch

from podium.comm.base import Communicator
from podium.comm.clocks import WallClock
from podium.comm.inprocess import raise_first
from podium.comm.memory import MemoryWorld
from podium.comm.real.arena import Arena
from podium.comm.real.channel import Channel
from podium.comm.real.communicator import RealCommunicator
from podium.comm.real.frames import Limits
from podium.comm.real.process_group import Group, file_store, look_up, publish
from podium.comm.real.sockets import Address
from podium.comm.virtual import VirtualWorld
from podium.launch.clusters.description import Cluster, uniform
from podium.launch.forking import fork_server, nullified_main
from podium.launch.rendezvous import rendezvous_folder

Main = Callable[[Communicator], Any]

START_S = 60.0


class World(ABC):
    """Where ranks live."""

    name: str

    @abstractmethod
    def attempt(self, main: Main, workers: int, servers: int = 0, deadline_s: float = 20.0) -> list[Any]:
        """Run `main` on every rank; returns each rank's result, or the exception that it raised."""

    def run(self, main: Main, workers: int, servers: int = 0, deadline_s: float = 20.0) -> list[Any]:
        """Run `main` on every rank; returns the results, and raises if a rank did."""
        outcomes = self.attempt(main, workers, servers, deadline_s)
        raise_first([outcome if isinstance(outcome, BaseException) else None for outcome in outcomes])
        return outcomes


@final
class Memory(World):
    """Threads that race."""

    name = "memory"

    def attempt(self, main: Main, workers: int, servers: int = 0, deadline_s: float = 20.0) -> list[Any]:
        return _in_process(MemoryWorld(workers, servers, deadline_s), main)


@final
class Virtual(World):
    """Simulated time, on equal nodes unless a cluster is given."""

    name = "virtual"

    def __init__(self, cluster: Cluster | None = None, *, colocated: bool = False, seed: int = 0) -> None:
        self.cluster, self.colocated, self.seed = cluster, colocated, seed

    def attempt(self, main: Main, workers: int, servers: int = 0, deadline_s: float = 20.0) -> list[Any]:
        nodes = workers + (0 if self.colocated else servers)
        cluster = self.cluster or uniform(nodes, seconds_per_sample=1e-4)
        return _in_process(VirtualWorld(cluster, workers, servers, colocated=self.colocated, seed=self.seed), main)


@final
class Real(World):
    """Processes: gloo over loopback, messages over Unix sockets, and shared memory with `shared`."""

    name = "real"

    def __init__(
        self, *, shared: bool = False, limits: Limits | None = None, hosts: Callable[[int], str] | None = None
    ) -> None:
        """`limits`: sizes that frames between ranks may have.

        `hosts(rank)`: the host that a rank takes itself to be on. Ranks of one host then use Unix sockets and shared
        memory between them, and TCP to all others.
        """
        self.shared, self.limits, self.hosts = shared, limits, hosts

    def attempt(self, main: Main, workers: int, servers: int = 0, deadline_s: float = 20.0) -> list[Any]:
        context = fork_server()
        with rendezvous_folder() as folder:
            started = []
            for rank in range(workers + servers):
                mine, theirs = context.Pipe()
                host = "" if self.hosts is None else self.hosts(rank)
                listen = f"host:{host};unix:{folder}/c{rank};tcp:127.0.0.1:0" if host else f"unix:{folder}/c{rank}"
                how = _How(rank, workers, servers, listen, folder, deadline_s, self.shared, self.limits)
                process = context.Process(target=_child, args=(main, how, theirs), daemon=True)
                with nullified_main():
                    process.start()
                theirs.close()
                started.append((process, mine))
            try:
                return [_outcome(pipe, rank) for rank, (_, pipe) in enumerate(started)]
            finally:
                for process, _ in started:
                    process.join(5.0)
                    process.kill()


WORLDS: dict[str, Callable[[], World]] = {"memory": Memory, "virtual": Virtual, "real": Real}


def _in_process(world: MemoryWorld | VirtualWorld, main: Main) -> list[Any]:
    results: dict[int, Any] = {}

    def body(comm: Communicator) -> Callable[[], None]:
        return lambda: results.__setitem__(comm.rank, main(comm))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        errors = world.run([body(comm) for comm in world.ranks])
    finally:
        torch.set_num_threads(threads)
    return [results.get(rank) if error is None else error for rank, error in enumerate(errors)]


class _How(NamedTuple):
    """How one rank of the real world takes part."""

    rank: int
    workers: int
    servers: int
    listen: Address
    folder: Path
    deadline_s: float
    shared: bool
    limits: Limits | None


def _child(main: Main, how: _How, pipe: Connection) -> None:
    torch.set_num_threads(1)
    comm = _connect(how)
    try:
        outcome = main(comm)
    except Exception as error:
        outcome = error
    # Not with the pipe's own pickler, which would send tensors as shared memory of a process that is about to end.
    pipe.send_bytes(pickle.dumps(outcome))
    comm.close()


def _connect(how: _How) -> RealCommunicator:
    rank, workers, deadline_s = how.rank, how.workers, how.deadline_s
    ranks: Sequence[int] = range(workers + how.servers)
    across = how.listen.startswith("host:")
    channel = Channel(
        rank,
        secret=b"of this test",
        listen=how.listen,
        deadline_s=deadline_s,
        limits=how.limits,
        arena=Arena() if across else None,
    )
    store = file_store(how.folder / "store")
    publish(store, f"listens-{rank}", channel.address)
    channel.introduce({r: look_up(store, f"listens-{r}", START_S) for r in ranks})
    group = Group(store, host="127.0.0.1", deadline_s=deadline_s) if rank < workers else None
    return RealCommunicator(
        rank,
        range(workers),
        ranks[workers:],
        WallClock(),
        group=group,
        channel=channel,
        deadline_s=deadline_s,
        arena=Arena() if how.shared else None,
        over_channel=across and group is not None,
    )


def _outcome(pipe: Connection, rank: int) -> Any:
    try:
        if pipe.poll(START_S):
            return pickle.loads(pipe.recv_bytes())
        return TimeoutError(f"rank {rank} did not answer within {START_S:g} s")
    except EOFError:
        return ChildProcessError(f"rank {rank} ended without a result")

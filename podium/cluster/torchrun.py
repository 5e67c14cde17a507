"""Ranks started by torchrun, or by anything that sets its environment variables.

    torchrun --nproc-per-node 4 -m podium.node --task digits-mlp --strategy all-reduce
    torchrun --nproc-per-node 4 -m podium.node --strategy all-reduce --script my_loop.py --its-own-option

Nodes may have unequal numbers of processes. The last ranks become servers where the strategy wants some. The process
of rank 0 also holds the coordinator, so here a lost rank ends the run, as torchrun has it anyway: its agent stops all
others.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from podium.building import device_of
from podium.cluster.base import Planned
from podium.cluster.claim import claimed
from podium.cluster.coordinator import Coordinator
from podium.cluster.launch import conclude, plan_script, prepare
from podium.cluster.local import endpoints_of, rules_of
from podium.cluster.process import NodeSpec, run_node
from podium.comm.tls import tls_of
from podium.comm.torch_dist import client_store, look_up, named_part, publish
from podium.config import RunConfig, resolve
from podium.errors import ConfigError, PodiumError, RecordError
from podium.loop import run_user_script
from podium.measure.manifest import write_manifest
from podium.measure.records import Recorder, merge_records, to_json
from podium.strategies import make_strategy


@dataclasses.dataclass(frozen=True)
class Environment:
    """What torchrun tells a process."""

    rank: int
    world_size: int
    local_rank: int
    """Its place among the processes of its node, whose ranks follow one another."""
    local_world_size: int
    host: str
    port: int
    agent_store: bool  # whether torchrun's agent holds the store, rather than rank 0
    attempt: str  # names this start of the ranks: the agent may start them again, and its store remembers

    @classmethod
    def read(cls) -> Environment:
        """From the environment; refuses, with the missing names, when it is not torchrun's."""
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if name not in os.environ]
        if missing:
            raise ConfigError(f"podium.node needs torchrun's environment variables; missing: {', '.join(missing)}")
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return cls(
            rank,
            world,
            int(os.environ.get("LOCAL_RANK", rank)),
            int(os.environ.get("LOCAL_WORLD_SIZE", world)),
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            f"podium-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        )


def run_under_torchrun(argv: list[str]) -> int:
    """One rank's run; rank 0 prints the result as one line of JSON. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once, also from inside an exchange: the agent waits for us
    try:
        environment = Environment.read()
        config, script = _config(argv, environment)
        _Rank(environment, config, script).run()
    except PodiumError as error:
        print(f"podium: {error}", file=sys.stderr)
        return error.exit_code
    return 0


class _Rank:
    """One process of torchrun's."""

    def __init__(self, environment: Environment, config: RunConfig, script: list[str]) -> None:
        """`script` is the user's own and its arguments, or empty where a task is trained."""
        self.environment, self._script = environment, script
        self._held = contextlib.ExitStack()
        """Of rank 0: the run's folder, until the process ends."""
        store = client_store(
            environment.host,
            environment.port,
            config.start_deadline_s,
            is_host=environment.rank == 0 and not environment.agent_store,
            world_size=environment.world_size,
        )
        self.store = named_part(store, environment.attempt)
        self.job = self._agree_on_job(config)

    def run(self) -> None:
        rank, config = self.environment.rank, self.job.config
        coordinator = self._start_coordinator() if rank == 0 else None
        if coordinator is not None:
            publish(self.store, "podium/coordinator", coordinator.address)
        spec = self._spec(look_up(self.store, "podium/coordinator", config.start_deadline_s))
        if self._script:
            run_user_script(spec, None, script=self._script[0], args=tuple(self._script[1:]))
        else:
            run_node(spec)
        if coordinator is not None:
            self._conclude(coordinator)

    def _agree_on_job(self, config: RunConfig) -> Planned:
        """Rank 0 chooses the run's folder, and all take it."""
        plan = plan_script if self._script else prepare
        if self.environment.rank == 0:
            job = plan(config)
            assert job.run_dir is not None
            self._held.enter_context(claimed(job.run_dir))
            for text in getattr(job, "warnings", ()):
                print(f"podium: warning: {text}", file=sys.stderr, flush=True)
            publish(self.store, "podium/run_dir", str(job.config.run_dir))
            return job
        run_dir = look_up(self.store, "podium/run_dir", config.start_deadline_s)
        return plan(config, chosen=Path(run_dir))

    def _start_coordinator(self) -> Coordinator:
        job = self.job
        assert job.run_dir is not None
        write_manifest(job.run_dir, job.config.to_dict(), strategy=repr(job.strategy), launched_by="torchrun")
        self._recorder = Recorder(-1, job.run_dir / "records" / "launcher.jsonl")
        listen = f"tcp:{self._host()}:0"
        rules = rules_of(job, survives_loss=False)
        tls = tls_of(job.config)
        coordinator = Coordinator(rules, listen=listen, secret=_secret(), recorder=self._recorder, tls=tls)
        self._watch = threading.Thread(target=self._coordinate, args=(coordinator,), name="coordinator", daemon=True)
        self._watch.start()
        return coordinator

    def _coordinate(self, coordinator: Coordinator) -> None:
        try:
            coordinator.run()
        except PodiumError as error:
            assert self.job.run_dir is not None
            with contextlib.suppress(RecordError):
                merge_records(self.job.run_dir)
            print(f"podium: {error}\n  records: {self.job.run_dir}", file=sys.stderr, flush=True)
            os._exit(error.exit_code)  # this rank is waiting in an exchange that will never end

    def _conclude(self, coordinator: Coordinator) -> None:
        self._watch.join(timeout=self.job.config.deadline_s)
        coordinator.close()
        self._recorder.close()
        assert self.job.run_dir is not None
        merge_records(self.job.run_dir)
        if not self._script:  # a script says for itself what it came to
            result = conclude(self.job, coordinator.reports, launcher="torchrun")
            print(to_json(result.to_dict()), flush=True)
        self._held.close()

    def _spec(self, coordinator: str) -> NodeSpec:
        environment, job = self.environment, self.job
        processes = endpoints_of(job)
        if environment.world_size != len(processes):
            raise ConfigError(
                f"{job.config.strategy} with {job.config.workers} workers needs {len(processes)} processes, "
                f"got WORLD_SIZE={environment.world_size}"
            )
        endpoints = processes[environment.rank]
        return NodeSpec.of(
            job,
            endpoints,
            config={**job.config.to_dict(), **own_settings(job.config, environment)},
            coordinator=coordinator,
            secret=_secret().hex(),
            store=f"tcp:{environment.host}:{environment.port}",
            store_part=environment.attempt,
            rendezvous=None,
            host=self._host(),
            same_host=False,
            clock_ns=time.monotonic_ns(),
        )

    def _host(self) -> str:
        """The address under which others reach this process: loopback when all are here."""
        if self.environment.local_world_size == self.environment.world_size:
            return "127.0.0.1"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self.environment.host, self.environment.port))  # sends nothing; picks the interface
            return str(probe.getsockname()[0])


def own_settings(config: RunConfig, environment: Environment) -> dict[str, Any]:
    """What of a run's settings is this process's own, where there are several nodes: its device and its threads.

    GPUs and cores are shared with the others of this node, however many other nodes have. Named by its number, a GPU is
    never taken for one of nccl's: nodes could not tell that they have chosen alike.
    """
    if environment.local_world_size == environment.world_size:
        return {}
    threads = config.threads or max(1, len(os.sched_getaffinity(0)) // environment.local_world_size)
    if environment.rank >= config.workers:  # a server, which has no device
        return {"threads": threads}
    device = device_of(config.device, environment.rank, first=environment.rank - environment.local_rank)
    return {"threads": threads, "device": str(device)}


def _config(argv: list[str], environment: Environment) -> tuple[RunConfig, list[str]]:
    """The configuration, and the user's script with its arguments, if one was named."""
    parser = argparse.ArgumentParser(prog="podium.node", description="One rank of a run, under torchrun.")
    parser.add_argument("--config", help="a run file (TOML)")
    parser.add_argument("--task")
    parser.add_argument("--strategy")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--script", nargs=argparse.REMAINDER, default=[], help="the user's own loop; the rest is its")
    given = vars(parser.parse_args(argv))
    file, overrides, script = given.pop("config"), given.pop("overrides"), given.pop("script")
    if script:
        given["task"] = script[0]
    config = resolve(file, overrides, given)
    strategy = make_strategy(config.strategy, config.strategy_options, environment.world_size)
    servers = 0 if strategy.colocated else strategy.server_count
    if environment.world_size <= servers:
        raise ConfigError(f"{config.strategy} needs more than {servers} processes, got {environment.world_size}")
    return dataclasses.replace(config, workers=environment.world_size - servers), script


def _secret() -> bytes:
    """The run's secret, from PODIUM_SECRET; empty will do on loopback only, and the channel insists on that."""
    return os.environ.get("PODIUM_SECRET", "").encode()

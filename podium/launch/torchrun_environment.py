"""What torchrun tells a process, and what follows from it: torch's store, the rank's device, the run's settings."""

from __future__ import annotations

import argparse
import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from podium.comm.real.process_group import client_store
from podium.config import RunConfig, check_script, named_in, resolve
from podium.engine.device import device_of
from podium.errors import CommError, ConfigError
from podium.strategies import make_strategy


@dataclass(frozen=True)
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
    restarts: str  # how often this node's agent has started its ranks again; agents of other nodes may count otherwise

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
            os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on this host."""
        return self.local_world_size == self.world_size

    @property
    def run(self) -> str:
        """What tells this start of these ranks from all others on this host at the same time."""
        name = os.environ.get("TORCHELASTIC_RUN_ID", "")
        return f"{name} start {self.restarts} on port {self.port} with {self.world_size} ranks"

    @property
    def store_part(self) -> str:
        """The prefix of what rank 0 publishes in a store that may remember earlier starts."""
        return f"podium-{self.restarts}" if self.one_host else "podium"


def open_store(environment: Environment, limit_s: float) -> Any:
    """torch's store, at torchrun's address."""
    is_host = environment.rank == 0 and not environment.agent_store
    try:
        return client_store(
            environment.host, environment.port, limit_s, is_host=is_host, world_size=environment.world_size
        )
    except CommError as error:
        if not environment.agent_store or environment.restarts == "0":
            raise
        raise CommError(
            f"{error}; torchrun's agents keep the address of their first store, also when its host is lost: set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on all hosts"
        ) from error


def own_settings(config: RunConfig, environment: Environment) -> dict[str, Any]:
    """What of a run's settings is this process's own, where there are several nodes: its device and its threads.

    GPUs and cores are shared with the others of this node, however many other nodes have.
    """
    if environment.one_host:
        return {}
    threads = config.threads or max(1, len(os.sched_getaffinity(0)) // environment.local_world_size)
    if environment.rank >= config.workers:  # a server, which has no device
        return {"threads": threads}
    device = device_of(config.device, environment.rank, first=environment.rank - environment.local_rank)
    return {"threads": threads, "device": str(device)}


def read_config(argv: list[str], environment: Environment) -> tuple[RunConfig, list[str], frozenset[str]]:
    """The configuration, the user's script with its arguments, if one was named, and which settings were."""
    parser = argparse.ArgumentParser(prog="podium.node", description="One rank of a run, under torchrun.")
    parser.add_argument("--config", help="a run file (TOML)")
    parser.add_argument("--task")
    parser.add_argument("--strategy")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--script", nargs=argparse.REMAINDER, default=[], help="the user's own loop; the rest is its")
    given = vars(parser.parse_args(argv))
    file, overrides, script = given.pop("config"), given.pop("overrides"), given.pop("script")
    named = named_in(overrides, given)
    if script:
        check_script(resolve(file, overrides, given))
        given["task"] = script[0]
    config = resolve(file, overrides, given)
    strategy = make_strategy(config.strategy, config.strategy_options, environment.world_size)
    servers = strategy.server_spec.processes
    if environment.world_size <= servers:
        raise ConfigError(f"{config.strategy} needs more than {servers} processes, got {environment.world_size}")
    return dataclasses.replace(config, workers=environment.world_size - servers), script, named

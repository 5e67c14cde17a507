"""Checks before a replay, which repeats a run's recorded order of arrivals: it must be the same run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from podium.config import RunConfig
from podium.engine.checkpoint import find_checkpoint
from podium.errors import ConfigError
from podium.exchange.codecs.auto import AutoCodec
from podium.exchange.packing import make_packing
from podium.records.manifest import read_manifest
from podium.records.recorder import read_records, to_json
from podium.servers.worker_side.served import SHARED_UNIT_BYTES, UNIT_BYTES
from podium.strategies.base import Strategy
from podium.strategies.phases import Phased


def as_recorded(strategy: Strategy[Any], recorded_dir: Path) -> Strategy[Any]:
    """The strategy with the settings that the recorded run's world chose, such as the size of its messages."""
    spec = strategy.server_spec
    if isinstance(strategy, Phased):
        raise ConfigError(f"replay: {strategy.name}: a run with phases cannot be replayed")
    why = spec.not_replayed or "replicas above 1" * (spec.replicas > 1)
    if why:
        raise ConfigError(f"replay: {strategy.name} with {why} cannot be replayed")
    asked = read_manifest(recorded_dir)["strategy"]
    for candidate in (_in_memory(strategy, True), _in_memory(strategy, False)):
        if repr(candidate) == asked:  # the recorded run was itself a replay, with the size filled in
            return candidate
    begins = (row for row in read_records(recorded_dir) if row["kind"] == "begin" and row["role"] == "worker")
    return _in_memory(strategy, next(begins, {}).get("shares_memory", False)) if repr(strategy) == asked else strategy


def _in_memory(strategy: Strategy[Any], shared: bool) -> Strategy[Any]:
    """The strategy with its message size for shared memory or for a network, unless the user set one."""
    if getattr(strategy, "unit_bytes", 0) is not None:
        return strategy
    size = SHARED_UNIT_BYTES if shared else UNIT_BYTES
    return dataclasses.replace(strategy, unit_bytes=size)  # type: ignore[type-var]  # all strategies are dataclasses


def check_replay(config: RunConfig, asked: Strategy[Any], strategy: Strategy[Any], recorded_dir: Path) -> None:
    """Raise unless this run is the recorded one.

    `asked` is the strategy that the user asked for, `strategy` the result of `as_recorded`.
    """
    manifest = read_manifest(recorded_dir)
    recorded, now = manifest["config"], json.loads(to_json(config.to_dict()))
    if manifest["strategy"] not in (repr(strategy), repr(asked)):
        recorded, now = {**recorded, "strategy": manifest["strategy"]}, {**now, "strategy": repr(asked)}
    if isinstance(make_packing(config.codec).codec, AutoCodec):
        raise ConfigError("replay: codec auto chose by what it measured; name the codec that it chose")
    decisive = ("task", "task_options", "strategy", "codec", "workers", "seed", "epochs", "steps")
    for name in (*decisive, "batch_size", "accumulate", "clip_norm", "autocast", "checkpoint_every", "resume"):
        before = recorded.get(name, now[name])  # the setting may be newer than the record
        if name == "resume" and before is not None and now[name] is not None:
            before = str(find_checkpoint(Path(before), verified=False).path)  # older records name the run's folder
        if before != now[name]:
            raise ConfigError(
                f"replay of {recorded_dir}: {name} must be as recorded ({recorded[name]!r}), got {now[name]!r}"
            )

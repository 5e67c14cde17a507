"""Refuses settings of a run that contradict each other, before anything starts."""

from __future__ import annotations

from typing import Any

from podium.balance import balancer_of
from podium.balance.steal import Steal
from podium.config import RunConfig, parse_spec
from podium.errors import ConfigError
from podium.exchange.codecs import CODECS
from podium.exchange.codecs.auto import AutoCodec
from podium.exchange.collectives import collective_of
from podium.exchange.packing import make_packing
from podium.launch.labels import label_of
from podium.strategies import make_strategy
from podium.strategies.base import Strategy
from podium.strategies.phases import phases_of


def check(config: RunConfig) -> Strategy[Any]:
    """Make the strategy; raises where it cannot run with these settings."""
    strategy: Strategy[Any] = make_strategy(config.strategy, config.strategy_options, config.workers)
    check_packing(config, strategy)
    check_phases(config, strategy)
    collective_of(config)
    check_balance(config, strategy)
    return strategy


def check_balance(config: RunConfig, strategy: Strategy[Any]) -> None:
    """Refuse a division of work that has no effect under this strategy."""
    balancer, who = balancer_of(config), label_of(config.strategy, strategy)
    parts = [phase.strategy for phase in phases_of(strategy) if phase.strategy.cadence.feed == "step"]
    leased = "its workers lease samples when they need them, or each has its own number of steps"
    if config.shares is not None and strategy.cadence.feed != "step":
        raise ConfigError(f"{who}: {leased}, so shares must not be set, got {config.shares}")
    if not parts and balancer.name != "equal" and config.shares is None:
        raise ConfigError(
            f"{who}: {leased} (steps=speed), so there is nothing to balance, got balance={config.balance}"
        )
    if isinstance(balancer, Steal):
        together = [part for part in parts if part.cadence.every == "step" and part.payload.is_sent]
        drawn = [part for part in together if part.cadence.sums_gradients or part.server_spec]
        if not drawn or drawn != together:
            raise ConfigError(
                f"{who}: balance=steal needs steps that all workers make together (all-reduce, parameter-server with "
                "mode=sync); use equal-finish, or steps=speed"
            )


def check_phases(config: RunConfig, strategy: Strategy[Any]) -> None:
    """Refuse now what would fail only when its phase begins."""
    for phase in phases_of(strategy):
        spec = phase.codec or config.codec
        if not phase.strategy.payload.can_be_packed and not make_packing(spec).codec.exact:
            raise ConfigError(f"{phase.text}: what it sends cannot be packed, got codec={spec}")
        if getattr(phase.until, "on", "") == "validation" and config.eval_every == 0:
            raise ConfigError(f"{phase.text}: its rule needs validations, and eval_every=0 makes none")
        if 0 < config.checkpoint_every < phase.strategy.cadence.outer_every:
            raise ConfigError(
                f"{phase.text}: a checkpoint ends a round early, so checkpoint_every must be 0 or at least "
                f"{phase.strategy.cadence.outer_every} steps, got {config.checkpoint_every}"
            )


def check_packing(config: RunConfig, strategy: Strategy[Any]) -> None:
    """Refuse a codec that does not exist, or that workers could not name to servers."""
    codec = make_packing(config.codec).codec
    if not isinstance(codec, AutoCodec):
        return
    for spec in codec.candidates:
        make_packing(spec)
        if strategy.server_spec and parse_spec(spec)[0] not in CODECS:
            raise ConfigError(f"codec auto: {spec} is not one of Podium's own, so workers cannot name it to servers")

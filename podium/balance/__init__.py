"""How global steps are divided among the workers: one file per balancer, and a plain dict from name to class."""

from __future__ import annotations

from podium.balance.base import Balancer
from podium.config import RunConfig, build, parse_spec
from podium.errors import ConfigError
from podium.imports import find_class

BALANCERS: dict[str, str] = {
    "equal": "podium.balance.equal:Equal",
    "proportional": "podium.balance.proportional:Proportional",
    "equal-finish": "podium.balance.equal_finish:EqualFinish",
    "steal": "podium.balance.steal:Steal",
}


def find_balancer(name: str) -> type[Balancer]:
    """The class of a balancer: a name from the list, or the user's own `file.py:Class` or `module:Class`."""
    cls = find_class("balance", name, BALANCERS)
    if not issubclass(cls, Balancer):
        raise ConfigError(f"{name} must be a balancer class, got {cls!r}")
    return cls


def make_balancer(spec: str) -> Balancer:
    """From `name[:key=value;…]`."""
    name, options = parse_spec(spec, "balance")
    return build(find_balancer(name), options, who=f"balance {name}")


def balancer_of(config: RunConfig) -> Balancer:
    """The run's balancer."""
    from podium.balance.fixed import Fixed

    if config.shares is None:
        return make_balancer(config.balance)
    if config.balance != "equal":
        raise ConfigError(
            f"shares fix each worker's part, and balance={config.balance} would change it: give one of them"
        )
    return Fixed(shares=config.shares)

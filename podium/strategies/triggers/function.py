"""The user's own function as a trigger: called after every step and validation, true ends the phase.

def rule(seen):
    return seen.metrics.get("accuracy", 0) > 0.9
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

from podium.errors import ConfigError
from podium.imports import load_named
from podium.strategies.triggers.base import Memory, Reading, Seen, Trigger


@final
@dataclass(frozen=True, kw_only=True)
class Function(Trigger):
    """Fires when the user's own function returns true."""

    name: ClassVar[str] = "function"

    of: str
    """`file.py:function` or `module:function`; takes a `Seen`, returns whether the phase is over."""
    latest: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rule  # noqa: B018  # raise before the run starts if it does not exist

    @property
    def _rule(self) -> Callable[[Seen], Any]:
        found = load_named(self.of)
        if not callable(found):
            raise ConfigError(f"trigger function: {self.of} must be a function, got {type(found).__name__}")
        return found  # type: ignore[no-any-return]  # only its truth value is used

    def judge(self, seen: Seen, memory: Memory) -> Reading | None:
        said = self._rule(seen)
        said = said if said == said else False  # nan does not fire
        if not said and seen.validated is None:
            return None  # a reading per step would fill the records
        return Reading(float(bool(said)), 1.0, bool(said), f"{self.of} returned {said!r}")

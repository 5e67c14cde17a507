"""A place for each test: a coordinator, and members that are threads of this process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.launch.coordination.place import Place

Make = Callable[..., Place]


@pytest.fixture
def place() -> Iterator[Make]:
    made: list[Place] = []
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # short, as Unix socket paths must be

        def make(
            workers: int = 2,
            servers: int = 0,
            *,
            processes: Sequence[tuple[int, ...]] | None = None,
            rules: dict[str, Any] | None = None,
            heartbeat_s: float = 20.0,
            deadline_s: float = 20.0,
            start_deadline_s: float = 20.0,
            **options: Any,
        ) -> Place:
            limits = {"heartbeat_s": heartbeat_s, "deadline_s": deadline_s, "start_deadline_s": start_deadline_s}
            who = {"workers": workers, "servers": servers, "survives_loss": True}
            own = processes or [(rank,) for rank in range(workers + servers)]
            made.append(Place(Path(folder), own, {**who, **limits, **(rules or {})}, **options))
            return made[-1]

        yield make
        for each in made:
            each.end()

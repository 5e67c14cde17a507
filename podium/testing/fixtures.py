"""Fixtures for pytest. Import one into a test module or a conftest.py to use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from podium.testing.hosts import Hosts, why_not


@pytest.fixture
def make_hosts() -> Iterator[Callable[..., Hosts]]:
    """`make_hosts(count, mbit=…)` gives `Hosts` until the test ends; skips the test, with the reason, without root."""
    if reason := why_not():
        pytest.skip(reason)
    with ExitStack() as stack:
        yield lambda count, **options: stack.enter_context(Hosts(count, **options))

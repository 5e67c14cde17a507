"""A process that uses Ray: importing it, leaving the process as it was, its errors in short."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from podium.errors import ConfigError, MissingExtra

RAYS_OWN = ("RAY_", "PYTHONBREAKPOINT")
"""Prefixes of the environment variables that Ray sets."""
_FIRST_WITH_TOKENS = (2, 52)
"""The version of Ray that brought tokens: https://docs.ray.io/en/latest/ray-security/token-auth.html"""
_LONGEST_LOSS = 300


def import_ray(who: str) -> Any:
    """The module; `who` needs it, for messages."""
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise MissingExtra("ray", "ray", who) from error
    version = str(ray.__version__)
    if tuple(int(part) for part in version.split(".")[:2]) < _FIRST_WITH_TOKENS:
        least = ".".join(map(str, _FIRST_WITH_TOKENS))
        raise ConfigError(
            f"{who}: Ray must be at least {least}, which requires a token before it runs code, "
            f"got {version}: pip install 'podium[ray]'"
        )
    return ray


@contextmanager
def restored_process() -> Iterator[None]:
    """Inside, Ray logs errors only; afterwards what it has changed in this process is restored."""
    settings = {name: value for name, value in os.environ.items() if name.startswith(RAYS_OWN)}
    on_sigterm, logger = signal.getsignal(signal.SIGTERM), logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        for name in [name for name in os.environ if name.startswith(RAYS_OWN)]:
            del os.environ[name]
        os.environ.update(settings)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)


def in_short(error: Exception) -> str:
    """The last line of Ray's error, without its addresses and advice."""
    text = str(error).strip().splitlines()
    return (text[-1] if text else type(error).__name__)[:_LONGEST_LOSS]

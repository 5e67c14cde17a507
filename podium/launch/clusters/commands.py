"""System commands that shape nodes, and removing what they made."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

from podium.errors import ConfigError


def find_tool(name: str, path: str | None = None) -> str:
    """The path of `ip` or `tc`; also searches /usr/sbin and /sbin, which may not be on the path."""
    found = shutil.which(name, path=path) or (shutil.which(name, path="/usr/sbin:/sbin") if path is None else None)
    if found is None:
        raise ConfigError(f"shaped launcher: needs the command {name!r}, which is not installed: apt install iproute2")
    return found


def run_command(*words: str, timeout_s: float = 20.0) -> str:
    """Run a command and return its output; the error of a failure has the command and its stderr."""
    line = " ".join(words)
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"shaped launcher: `{line}` did not end within {timeout_s:g} s") from None
    if done.returncode != 0:
        raise ConfigError(f"shaped launcher: `{line}` failed ({done.returncode}): {done.stderr.strip()}")
    return done.stdout


def remove_after(remove: Callable[[], None], error: BaseException | None) -> None:
    """Call `remove`; an error inside the block takes precedence over one here, which becomes its note."""
    try:
        remove()
    except ConfigError as failure:
        if error is None:
            raise
        error.add_note(str(failure))

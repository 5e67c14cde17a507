"""Where progress is shown: bars on a terminal, plain lines elsewhere, nothing when the user asks for quiet.

All of it goes to the error stream, so that standard output has results only. A display knows no events; `progress`
(runs and studies) and `sweep_progress` turn events into lines and bars.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, final

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

LINE_EVERY_S = 10.0
"""Where there is no terminal, progress is printed no more often than this."""
WIDTH = 80
"""Columns where the width is unknown, as in a file."""


def is_live(stream: IO[str]) -> bool:
    """Whether the stream is a terminal of a person (not CI) that can redraw a line."""
    return stream.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"


def console(stream: IO[str]) -> Console:
    """A rich console that writes escape codes only to a live terminal, and no colours under NO_COLOR."""
    from rich.console import Console

    live = is_live(stream)
    coloured = live and not os.environ.get("NO_COLOR")
    return Console(
        file=stream,
        force_terminal=live,
        color_system="auto" if coloured else None,
        highlight=False,
        markup=False,
        emoji=False,
        width=None if live else WIDTH,
    )


class Display:
    """Shows warnings only. A context manager, so that the terminal is left clean."""

    has_bars = False

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the terminal."""

    def say(self, line: str) -> None:
        """Show a line that stays."""

    def warn(self, line: str) -> None:
        """Show a line, also under `--quiet`."""
        print(line, file=sys.stderr, flush=True)

    def draw(self, name: str, done: int, total: int | None, facts: str) -> None:
        """Show progress of the bar `name`."""

    def forget(self, name: str) -> None:
        """Drop a bar, and with it the rate from which the time left is estimated."""

    def is_due(self) -> bool:
        """Whether it is time for a line about progress, where there are no bars."""
        return False


@final
class Lines(Display):
    """Plain lines."""

    def __init__(self, stream: IO[str], now: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._now, self._last = stream, now, now()

    def say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)
        self._last = self._now()

    def warn(self, line: str) -> None:
        self.say(line)

    def is_due(self) -> bool:
        return self._now() - self._last >= LINE_EVERY_S


@final
class Bars(Display):
    """Bars with rates and time left, redrawn in place, below the lines that stay."""

    has_bars = True

    def __init__(self, stream: IO[str]) -> None:
        self._bars = _make_bars(console(stream))
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def say(self, line: str) -> None:
        self._bars.console.print(line)

    def warn(self, line: str) -> None:
        self.say(line)

    def draw(self, name: str, done: int, total: int | None, facts: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, facts=facts)
        self._bars.update(self._tasks[name], completed=done, total=total, facts=facts)

    def forget(self, name: str) -> None:
        if name in self._tasks:
            self._bars.remove_task(self._tasks.pop(name))


def display(*, quiet: bool = False) -> Display:
    """Bars if the error stream is a live terminal, else lines; with `quiet`, warnings only."""
    if quiet:
        return Display()
    return Bars(sys.stderr) if is_live(sys.stderr) else Lines(sys.stderr)


def _make_bars(console: Console) -> RichProgress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:<7}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}", markup=False),
        TimeRemainingColumn(compact=True),
    )
    return Progress(*columns, console=console, transient=True)

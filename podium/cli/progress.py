"""What a person sees while a run goes on: bars on a terminal, plain lines elsewhere, nothing when asked.

All of it goes to the error stream, so that standard output holds results alone. A Progress takes the events of
`podium.launch.run` and `podium.lab.study.run` by being called with them, from whichever thread they come.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

Event = Mapping[str, Any]

LINE_EVERY_S = 10.0
"""Away from a terminal, steps are reported no more often than this."""
WIDTH = 80
"""Columns where the terminal does not say; also the widest a table is made for a file."""


_ALWAYS = ("lost", "regroup", "replaced", "scale", "warning")
"""Events of one run among many that are worth a line."""


def is_live(stream: IO[str]) -> bool:
    """Whether the stream is a terminal that a person watches and that can redraw a line."""
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


def format_bytes(count: float) -> str:
    """`2.1 MB`: powers of a thousand, as links are rated."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def format_seconds(seconds: float) -> str:
    """`0.42 s`, `12.3 s`, `4 min 05 s`, `2 h 03 min`."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_number(value: float) -> str:
    """Four digits that matter, whatever the size."""
    return f"{value:.4f}" if 0.001 <= abs(value) < 1000 or value == 0 else f"{value:.4g}"


def describe(event: Event) -> str | None:
    """The line for an event that is worth one whatever the pace; None for the rest."""
    kind = event.get("event")
    if kind == "start":
        return f"run {event['run_dir']}"
    if kind == "notice":
        return f"note: {event['text']}"
    if kind == "eval":
        where = f"epoch {round(event['epoch'], 2):g}  step {event['step']}"
        return f"{where}  loss {format_number(event['loss'])}  {_metrics(event)}"
    if kind == "lost":
        return f"rank {event['rank']} lost: {event['cause']}"
    if kind == "regroup":
        members = ", ".join(str(rank) for rank in event["members"])
        return f"regrouped in {format_seconds(event['took_s'])}: workers {members} go on"
    if kind == "replaced":
        return f"server {event['server']} replaced in {format_seconds(event['took_s'])}"
    if kind == "scale":
        return f"scaling to {event['workers']} workers and {event['servers']} servers"
    if kind == "warning":
        return f"warning: {event['text']}"
    if kind == "end" and event.get("status") == "stopped":
        return "stopped; what was done is saved"
    return None


class Progress:
    """Takes events and shows warnings only; the other two show all. A context, so that a terminal is left clean."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the terminal as it was found."""

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if event.get("event") == "warning":
            print(describe(event), file=sys.stderr, flush=True)


@final
class Lines(Progress):
    """One plain line per thing worth knowing; of a comparison, one line per run."""

    def __init__(self, stream: IO[str], *, many: bool = False, now: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._many, self._now = stream, many, now
        self._began = self._last = now()
        self._pace = Pace(now)
        self._runs_seen = 0
        self._result = ""

    def __call__(self, event: Event) -> None:
        kind = event.get("event")
        if kind == "start":
            self._pace = Pace(self._now)
        if kind == "progress":
            self._say(self._paced(event))
        elif kind == "eval" and self._many:
            self._result = "  " + _metrics(event)
        elif kind == "cell-end":
            self._say(self._run_ended(event))
        elif not self._many or kind in _ALWAYS:
            self._say(describe(event))

    def _say(self, line: str | None) -> None:
        if line is not None:
            print(line, file=self._stream, flush=True)
            self._last = self._now()

    def _paced(self, event: Event) -> str | None:
        rate = self._pace.rate(event)
        if self._now() - self._last < LINE_EVERY_S:
            return None
        done, total = _reached(event)
        ends = f"  {format_seconds((total - done) / rate)} left" if rate else ""
        return f"{100 * done / total:.0f} %  step {event['step']}  {_facts(event, rate)}{ends}"

    def _run_ended(self, event: Event) -> str:
        number, total = event["number"], event["total"]
        self._runs_seen += 1
        left = (total - number) * (self._now() - self._began) / self._runs_seen
        ends = f"  about {format_seconds(left)} left" if left else ""
        status = "" if event["status"] == "finished" else f"  {event['status']}"
        line = f"{number:>{len(str(total))}}/{total}  {_cell(event)}{status}{self._result}{ends}"
        self._result = ""
        return line


class Pace:
    """How fast a run goes, by the watcher's own clock: what is left is then in the watcher's seconds, too."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._first: tuple[float, int] | None = None

    def rate(self, event: Event) -> float | None:
        """Samples per second since the first event, which a resumed run reports far from 0; None until a second one."""
        now, (done, _) = self._now(), _reached(event)
        if self._first is None:
            self._first = (now, done)
        since, before = self._first
        return (done - before) / (now - since) if now > since and done > before else None


def _reached(event: Event) -> tuple[int, int]:
    """Samples used, and all that will be: under asynchronous training one worker's steps tell neither."""
    return event["position"], event["total_samples"]


@final
class Bars(Progress):
    """Bars with rates and time left, redrawn in place; above them, the lines worth keeping."""

    def __init__(self, stream: IO[str], *, many: bool = False) -> None:
        self._bars, self._many = _make_bars(console(stream)), many
        self._tasks: dict[str, TaskID] = {}
        self._pace, self._total = Pace(), 0

    def __enter__(self) -> Bars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def __call__(self, event: Event) -> None:
        kind = event.get("event")
        if kind in ("cell", "cell-end"):
            done = event["number"] - (kind == "cell")
            self._draw("runs", done, event["total"], _cell(event))
        elif kind == "start":
            self._pace, self._total = Pace(), 0
            self._forget("samples")
        elif kind in ("progress", "eval"):
            self._advance(event)
        # One run keeps its lines; those of many would push each other off the screen.
        if not self._many or kind in _ALWAYS:
            line = describe(event)
            if line is not None:
                self._bars.console.print(line)

    def _advance(self, event: Event) -> None:
        """Validations count as well: in a run of very short epochs hardly any other event comes through."""
        known = {"total_samples": self._total, **event}
        self._total = known["total_samples"]
        if self._total:
            self._draw("samples", *_reached(known), _facts(known, self._pace.rate(known)))

    def _draw(self, name: str, done: int, total: int, facts: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, facts=facts)
        self._bars.update(self._tasks[name], completed=done, total=total, facts=facts)

    def _forget(self, name: str) -> None:
        """Drop the last run's bar and with it its pace, from which the time left is guessed."""
        if name in self._tasks:
            self._bars.remove_task(self._tasks.pop(name))


def _cell(event: Event) -> str:
    return f"{event['cell']}, seed {event['seed']}"


def _metrics(event: Event) -> str:
    return "  ".join(f"{name} {format_number(value)}" for name, value in event["metrics"].items())


def _facts(event: Event, rate: float | None) -> str:
    speed = "" if rate is None else f"{rate:,.0f} samples/s  "
    return speed if event["loss"] is None else f"{speed}loss {format_number(event['loss'])}"


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


def progress(*, quiet: bool = False, many: bool = False) -> Progress:
    """Whichever suits the error stream. `many` is for a comparison, where each single run matters less."""
    if quiet:
        return Progress()
    return Bars(sys.stderr, many=many) if is_live(sys.stderr) else Lines(sys.stderr, many=many)

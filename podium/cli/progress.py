"""The progress of a run or a study: its events as lines and bars.

A Progress is called with the events of `podium.launch.run` and `podium.lab.study.run`, from any thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, final

from podium.cli.display import Display, display

Event = Mapping[str, Any]

_ALWAYS = ("lost", "regroup", "replaced", "scale", "warning")
"""Events that get a line even when there are many runs."""


def format_bytes(count: float) -> str:
    """`2.1 MB`: powers of a thousand, as for links."""
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
    """Four decimals, or four significant digits for very small and large numbers."""
    return f"{value:.4f}" if 0.001 <= abs(value) < 1000 or value == 0 else f"{value:.4g}"


def describe(event: Event) -> str | None:
    """The line for an event that always gets one; None for other events."""
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
        return f"regrouped in {format_seconds(event['took_s'])}: workers {members} continue"
    if kind == "replaced":
        return f"server {event['server']} replaced in {format_seconds(event['took_s'])}"
    if kind == "scale":
        return f"scaling to {event['workers']} workers and {event['servers']} servers"
    if kind == "warning":
        return f"warning: {event['text']}"
    if kind == "end" and event.get("status") == "stopped":
        return "stopped; what was done is saved"
    return None


@final
class Progress:
    """Shows a run on a display; with `many`, a comparison, with fewer lines for each run."""

    def __init__(self, shown: Display, *, many: bool = False, now: Callable[[], float] = time.monotonic) -> None:
        self.display, self._many, self._now = shown, many, now
        self._began, self._pace, self._total = now(), Pace(now), 0
        self._runs_seen, self._result = 0, ""

    def __enter__(self) -> Progress:
        self.display.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.display.__exit__(*error)

    def __call__(self, event: Event) -> None:
        kind = event.get("event")
        if kind == "start":
            self._pace, self._total = Pace(self._now), 0
            self.display.forget("samples")
        elif kind in ("cell", "cell-end"):
            self._count_runs(event)
        elif kind in ("progress", "eval"):
            self._advance(event)
        line = describe(event)
        if kind == "warning":
            self.display.warn(str(line))
        elif line is not None and (not self._many or kind in _ALWAYS):
            self.display.say(line)

    def _count_runs(self, event: Event) -> None:
        is_over = event["event"] == "cell-end"
        self.display.draw("runs", event["number"] - (not is_over), event["total"], _cell(event))
        if is_over and not self.display.has_bars:
            self.display.say(self._run_ended(event))

    def _advance(self, event: Event) -> None:
        """Validations count as progress: a run of very short epochs has hardly any other event."""
        if event["event"] == "eval":
            self._result = "  " + _metrics(event)
        known = {"total_samples": self._total, **event}
        self._total = known["total_samples"]
        if not self._total:
            return
        rate = self._pace.rate(known)
        self.display.draw("samples", *_reached(known), _facts(known, rate))
        if event["event"] == "progress" and self.display.is_due():
            self.display.say(_paced(event, rate))

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
    """A run's speed by the wall clock of this process, so that the time left is in wall time, also in a simulation."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._first: tuple[float, int] | None = None

    def rate(self, event: Event) -> float | None:
        """Samples per second since the first event (a resumed run does not start at 0); None until a second event."""
        now, (done, _) = self._now(), _reached(event)
        if self._first is None:
            self._first = (now, done)
        since, before = self._first
        return (done - before) / (now - since) if now > since and done > before else None


def _reached(event: Event) -> tuple[int, int]:
    """Samples used, and all samples of the run: in asynchronous training one worker's steps show neither."""
    return event["position"], event["total_samples"]


def _paced(event: Event, rate: float | None) -> str:
    done, total = _reached(event)
    ends = f"  {format_seconds((total - done) / rate)} left" if rate else ""
    return f"{100 * done / total:.0f} %  step {event['step']}  {_facts(event, rate)}{ends}"


def _cell(event: Event) -> str:
    return f"{event['cell']}, seed {event['seed']}"


def _metrics(event: Event) -> str:
    return "  ".join(f"{name} {format_number(value)}" for name, value in event["metrics"].items())


def _facts(event: Event, rate: float | None) -> str:
    speed = "" if rate is None else f"{rate:,.0f} samples/s  "
    return speed if event["loss"] is None else f"{speed}loss {format_number(event['loss'])}"


def progress(*, quiet: bool = False, many: bool = False) -> Progress:
    return Progress(display(quiet=quiet), many=many)

"""Bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io

import pytest

from podium.cli.display import Bars, Display, Lines, console, is_live
from podium.cli.progress import Progress, format_bytes, format_seconds, progress

START = {"event": "start", "run_dir": "runs/x", "workers": 2, "servers": 0}
STEP = {
    "event": "progress", "step": 10, "position": 640, "total_steps": 40, "total_samples": 2560, "epoch": 0.4,
    "loss": 0.5,
}  # fmt: skip
LATER = {**STEP, "step": 20, "position": 1280}
EVAL = {"event": "eval", "epoch": 1, "step": 20, "position": 1300, "loss": 0.25, "metrics": {"accuracy": 0.9375}}
LOST = {"event": "lost", "rank": 3, "cause": "killed by signal 9"}
REGROUP = {"event": "regroup", "generation": 1, "members": [0, 1, 2], "took_s": 0.04}
END = {"event": "end", "status": "finished"}


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "CI", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


class Times:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_lines_say_what_matters_and_nothing_twice() -> None:
    stream = io.StringIO()
    lines = Progress(Lines(stream))
    for event in (START, STEP, STEP, EVAL, LOST, REGROUP, END):
        lines(event)
    assert stream.getvalue().splitlines() == [
        "run runs/x",
        "epoch 1  step 20  loss 0.2500  accuracy 0.9375",
        "rank 3 lost: killed by signal 9",
        "regrouped in 0.04 s: workers 0, 1, 2 continue",
    ]


def test_a_long_silence_is_broken_by_the_step_the_rate_and_the_time_left() -> None:
    stream, times = io.StringIO(), Times()
    lines = Progress(Lines(stream, now=times), now=times)
    lines(STEP)
    times.now = 20.0
    lines(LATER)
    lines(LATER)
    # 640 samples in 20 s, and 1280 remain; where the run began (it may be a resumed one) does not count.
    assert stream.getvalue() == "50 %  step 20  32 samples/s  loss 0.5000  40.0 s left\n"


def test_a_comparison_has_one_line_per_run() -> None:
    stream, times = io.StringIO(), Times()
    lines = Progress(Lines(stream, now=times), many=True, now=times)
    for number, cell in enumerate(("solo", "all-reduce"), 1):
        where = {"cell": cell, "seed": 0, "number": number, "total": 4}
        for event in ({**where, "event": "cell"}, START, EVAL, END):
            lines(event)
        times.now += 3.0
        lines({**where, "event": "cell-end", "status": "finished" if cell == "solo" else "failed"})
    assert stream.getvalue().splitlines() == [
        "1/4  solo, seed 0  accuracy 0.9375  about 9.00 s left",
        "2/4  all-reduce, seed 0  failed  accuracy 0.9375  about 6.00 s left",
    ]


def test_bars_show_rate_and_steps_and_leave_the_lines_worth_keeping() -> None:
    stream = Terminal()
    with Progress(Bars(stream)) as bars:
        for event in (START, STEP, LATER, LOST, EVAL):
            bars(event)
    shown = stream.getvalue()
    assert "1300/2560" in shown
    assert "samples/s" in shown
    assert "rank 3 lost" in shown


def test_bars_of_a_comparison_count_its_runs() -> None:
    stream = Terminal()
    with Progress(Bars(stream), many=True) as bars:
        bars({"event": "cell", "cell": "solo", "seed": 1, "number": 3, "total": 4})
        for event in (START, STEP, EVAL):
            bars(event)
    shown = stream.getvalue()
    assert "2/4" in shown
    assert "solo, seed 1" in shown
    assert "accuracy" not in shown


def test_what_is_not_a_terminal_gets_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert type(progress().display) is Lines
    assert type(progress(quiet=True).display) is Display


@pytest.mark.parametrize(("name", "value"), [("CI", "true"), ("TERM", "dumb")])
def test_a_terminal_nobody_watches_is_not_live(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_live(Terminal())
    monkeypatch.setenv(name, value)
    assert not is_live(Terminal())


@pytest.mark.parametrize(("stream", "no_color"), [(Terminal(), "1"), (io.StringIO(), "")])
def test_no_escape_codes_under_no_color_or_away_from_a_terminal(
    stream: io.StringIO, no_color: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("FORCE_COLOR", "1")
    console(stream).print("text", style="bold red")
    assert "text" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_colours_are_used_on_a_live_terminal() -> None:
    stream = Terminal()
    console(stream).print("text", style="bold red")
    assert "\x1b[" in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.42, "0.42 s"), (12.34, "12.3 s"), (245, "4 min 05 s"), (7380, "2 h 03 min")]
)
def test_times_are_read_at_a_glance(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(999, "999 B"), (2_100_000, "2.1 MB"), (3.2e12, "3.2 TB")])
def test_bytes_are_written_in_powers_of_a_thousand(count: float, text: str) -> None:
    assert format_bytes(count) == text

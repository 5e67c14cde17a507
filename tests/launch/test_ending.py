"""A program that trains and is told to end saves first; one that cannot in time still puts away what it has made."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import podium
from podium.engine.checkpoint import find_checkpoint
from podium.launch import ending
from podium.launch.ending import termination_saves, termination_unwinds


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_program_that_is_terminated_while_it_trains_saves_and_then_ends(
    tmp_path: Path, number: signal.Signals
) -> None:
    def on_event(event: dict[str, object]) -> None:
        if event["event"] == "eval":
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    with pytest.raises(SystemExit) as caught:
        podium.train("digits-mlp", launcher="threads", workers=2, epochs=1000, run_dir=tmp_path, on_event=on_event)
    assert caught.value.code == 128 + number
    assert find_checkpoint(tmp_path).step > 0
    assert (tmp_path / "result.json").is_file()
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_run_that_does_not_end_in_time_is_unwound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "GRACE_S", 0.1)
    monkeypatch.setattr(ending, "BURST_S", 0.0)
    cleaned = False
    with pytest.raises(SystemExit) as caught, termination_saves(None) as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.wait(10)
        try:
            threading.Event().wait(20)
        finally:
            cleaned = True
    assert caught.value.code == 143
    assert cleaned


def test_the_callers_own_event_counts_too() -> None:
    own = threading.Event()
    with termination_saves(own) as stop:
        assert not stop.is_set()
        own.set()
        assert stop.is_set()


def test_signals_that_the_caller_takes_are_left_alone() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with termination_saves(None) as stop, termination_unwinds():
            signal.raise_signal(signal.SIGTERM)
            assert not stop.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


def test_a_process_for_runs_whose_parent_went_while_it_started_does_none(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    words = [sys.executable, "-m", "podium.lab.study", str(gone.pid)]
    ended = subprocess.run(words, check=False, input=f"{tmp_path}\n", text=True, capture_output=True, timeout=60)
    assert ended.returncode == -signal.SIGKILL, ended.stderr  # and not over the file that it does not find there

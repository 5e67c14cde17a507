"""Ctrl-C once asks, twice insists."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from podium.cli import interrupt
from podium.cli.interrupt import ASKED, stop_on_interrupt
from podium.launch.signals import ASKING


def test_the_first_interrupt_asks_and_a_later_one_raises(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupt, "BURST_S", 0.0)
    with stop_on_interrupt() as stop:
        assert not stop.is_set()
        signal.raise_signal(signal.SIGINT)
        assert stop.wait(10)
        assert capfd.readouterr().err == f"\n{ASKED}\n"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)  # whoever insisted must not cut the cleaning up short


def test_a_signal_that_interrupts_a_wait_for_the_event_itself_does_not_hang() -> None:
    with stop_on_interrupt() as stop:
        with stop._cond:  # as `stop.wait` holds it, for a moment
            signal.raise_signal(signal.SIGINT)
        assert stop.wait(10)


@pytest.mark.parametrize("number", ASKING)
def test_a_signal_that_comes_twice_within_a_second_is_one(number: int, capfd: pytest.CaptureFixture[str]) -> None:
    with stop_on_interrupt() as stop:
        signal.raise_signal(number)
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)
        assert stop.wait(10)
    assert capfd.readouterr().err == f"\n{ASKED}\n"


def test_a_closing_terminal_is_not_heeded_where_it_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with stop_on_interrupt() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.is_set()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_afterwards_the_signal_means_what_it_meant() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="inside"), stop_on_interrupt():
        raise ValueError("inside")
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_the_main_thread_nothing_is_touched() -> None:
    seen: list[bool] = []

    def body() -> None:
        with stop_on_interrupt() as stop:
            seen.append(stop.is_set())

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [False]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_process_that_was_forked_off_inside_ends_by_the_signal_as_usual() -> None:
    with stop_on_interrupt() as stop:
        ready, told = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(told, b"!")  # a signal that comes before Python has begun here would be forgotten
            time.sleep(20)
            os._exit(3)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
        assert not stop.is_set()

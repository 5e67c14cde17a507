"""What holds for every test."""

from __future__ import annotations

import signal
import threading

import pytest
import torch
from hypothesis import settings

# Two threads add up in another order than one: bits are compared with one.
torch.set_num_threads(1)

# Under `nohup` a hang-up is ignored, in every process that tests start, too. Tests of signals send some.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A busy machine is no failure: tests have a timeout of their own.
settings.register_profile("podium", deadline=None, print_blob=True)
settings.load_profile("podium")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)

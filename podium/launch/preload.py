"""What the fork server imports once, so that ranks forked from it start at once.

`torch._dynamo` is here because the first optimizer imports it (1.25 s). Nothing in this list may touch a GPU.
"""

import os
import sys

import torch
import torch._dynamo
import torch.distributed

import podium.launch.process
from podium.launch import signals

torch.set_num_threads(1)  # no thread pool may exist when the server forks

if any("multiprocessing.forkserver" in word for word in sys.orig_argv):  # only in the fork server itself
    signals.die_with_parent()
    os.setsid()
    signals.leave_to_launcher()

__all__ = ["podium", "torch"]

"""What the fork server imports once, so that ranks forked from it start at once.

`torch._dynamo` is here because the first optimizer imports it (1.25 s). Nothing in this list may touch a GPU.
"""

import torch
import torch._dynamo
import torch.distributed

import podium.cluster.process

torch.set_num_threads(1)  # no thread pool may exist when the server forks

__all__ = ["podium", "torch"]

"""What tests of the shaped launcher need, and whether this machine has it."""

from __future__ import annotations

import os
import shutil

import pytest

CLUSTER = """
[[node]]
name = "node"
count = 3
up_mbit = 500
down_mbit = 500
"""


def _missing() -> str:
    if os.geteuid() != 0:
        return "needs root (network namespaces)"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    return f"needs {' and '.join(absent)} (iproute2)" if absent else ""


needs_root = pytest.mark.skipif(bool(_missing()), reason=_missing() or "all is here")

"""Entry point of `python -m podium.node`: one rank under torchrun, configured by torchrun's environment variables.

    torchrun --nproc-per-node 4 -m podium.node --task digits-mlp --strategy all-reduce

The work is done in `podium.launch.torchrun` and `podium.launch.process`.
"""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> int:
    """Run one rank; returns the exit code."""
    from podium.launch.torchrun import run_under_torchrun

    return run_under_torchrun(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())

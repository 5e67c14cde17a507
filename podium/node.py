"""Entry point of `python -m podium.node`: what other programs start on a machine.

    torchrun --nproc-per-node 4 -m podium.node --task digits-mlp --strategy all-reduce
    python -m podium.node --join < invitation

Under torchrun it is one rank, configured by torchrun's environment variables (`podium.launch.torchrun`). With `--join`
it is the agent of a host, which starts ranks as a launcher elsewhere says (`podium.launch.hosts.agent`).
"""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> int:
    """Run one rank; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words == ["--join"]:
        from podium.launch.hosts.agent import run_agent

        return run_agent()
    from podium.launch.torchrun import run_under_torchrun

    return run_under_torchrun(words)


if __name__ == "__main__":
    sys.exit(main())

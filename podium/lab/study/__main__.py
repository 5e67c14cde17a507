"""`python -m podium.lab.study PARENT`: a process for runs of a study. Reads their folders from stdin, one per line."""

from __future__ import annotations

import sys

from podium.lab.study.run_one import main

if __name__ == "__main__":
    main(int(sys.argv[1]), sys.stdin)

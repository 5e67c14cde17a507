"""`python -m podium.lab.study PARENT`: runs of a study, in a process of their own. Reads their folders, a line each."""

from __future__ import annotations

import sys

from podium.lab.study.run_one import main

if __name__ == "__main__":
    main(int(sys.argv[1]), sys.stdin)

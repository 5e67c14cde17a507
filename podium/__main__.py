"""`python -m podium` is `podium`."""

from __future__ import annotations

from podium.cli import main

# Processes started by `spawn` or `forkserver` import this module again; they must not start the program again.
if __name__ == "__main__":
    main(prog_name="podium")

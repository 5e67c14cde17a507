"""`python -m podium` is `podium`."""

from __future__ import annotations

from podium.cli import main

# Processes that are started by `spawn` or `forkserver` import this module anew; they must not start the program anew.
if __name__ == "__main__":
    main(prog_name="podium")

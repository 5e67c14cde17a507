"""`python -m podium.study.rates FOLDER`: the run that `FOLDER/asked.json` asks for."""

from __future__ import annotations

import sys
from pathlib import Path

from podium.study.rates.one import main

if __name__ == "__main__":
    main(Path(sys.argv[1]))

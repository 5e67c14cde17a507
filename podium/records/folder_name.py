"""Names for folders that nobody named: of runs, comparisons and sweeps."""

from __future__ import annotations

import re
import secrets
import time
from pathlib import Path

_LONGEST = 120


def new_folder(within: str | Path, what: str) -> Path:
    """A path that tells what the folder holds and when it began; three random bytes keep it apart. Makes no folder."""
    stem = re.sub(r"[^\w.]+", "-", what).strip("-")[:_LONGEST]
    return Path(within) / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"

"""Default names for folders of runs, comparisons and sweeps."""

from __future__ import annotations

import re
import secrets
import time
from pathlib import Path

_LONGEST = 120


def new_folder(within: str | Path, what: str) -> Path:
    """A path from `what`, the time and three random bytes, which make it unique. Does not make the folder."""
    stem = re.sub(r"[^\w.]+", "-", what).strip("-")[:_LONGEST]
    return Path(within) / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"

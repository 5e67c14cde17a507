"""Sample files that are too large for the repository: beside it in shared/data, or where PODIUM_TEST_DATA says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data"


def shared_data(name: str) -> Path:
    """The folder of one data set; skips the test that asks where it is absent."""
    folder = Path(os.environ.get("PODIUM_TEST_DATA", _BESIDE)) / name
    if not folder.is_dir():
        pytest.skip(f"sample data not found: {folder} (set PODIUM_TEST_DATA)")
    return folder

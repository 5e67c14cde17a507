"""What a launcher tells while a run is under way."""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]
"""`event` says which kind."""

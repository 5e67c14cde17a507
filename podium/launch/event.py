"""Events that a launcher reports while a run is under way."""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]
"""The key `event` holds the kind."""

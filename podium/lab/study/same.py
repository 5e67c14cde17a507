"""Whether a folder's study is the one that is asked for, so that it may be continued there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podium.errors import ConfigError
from podium.lab.study.store import Row

SAME = ("name", "cells", "replications", "settings", "target", "stop", "order_seed", "clusters")
"""What must agree for a study to be continued."""
TOLD = ("question", "notes", "reference", "responses", "baseline", "against", "retries", "maximize", "changes")
"""What may have been changed since: it concerns how results are reported, or how often failures are retried."""


def check_same(found: Mapping[str, Any], wanted: Mapping[str, Any], folder: str) -> None:
    """Refuse to mix two studies in one folder; both are as `study.json` holds them."""
    found, wanted = _comparable(found), _comparable(wanted)
    # Which way is better is a matter of telling, unless runs were ended by it.
    ended = bool((wanted.get("stop") or {}).get("target"))
    for name in (*SAME, *(["maximize"] if ended else [])):
        if found.get(name) != wanted.get(name):
            what, old, new = _difference(name, found.get(name), wanted.get(name))
            raise ConfigError(
                f"compare: {folder} holds another study, with {what} {old!r}; wanted {new!r}. "
                "Give another folder, or the same study to resume it"
            )


def _comparable(study: Mapping[str, Any]) -> Row:
    """A study as it is compared: a cluster counts by what its file says, not by where it lies."""

    def without(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in settings.items() if name != "cluster"}

    cells = [{**cell, "settings": without(cell["settings"])} for cell in study["cells"]]
    return {**study, "cells": cells, "settings": without(study["settings"])}


def _difference(name: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    """Where two values differ: of two tables, only the first key at which they do."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        key = next(key for key in (*new, *old) if old.get(key) != new.get(key))
        return f"{name}: {key}", old.get(key), new.get(key)
    if isinstance(old, list) and isinstance(new, list):
        pair = next(((a, b) for a, b in zip(old, new, strict=False) if a != b), (len(old), len(new)))
        return name, *pair
    return name, old, new

"""Whether a folder's study is the requested one, so that it may be resumed there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podium.errors import ConfigError
from podium.lab.study.store import Row

SAME = ("name", "cells", "replications", "settings", "target", "stop", "order_seed", "clusters")
"""Fields that must agree for a study to be resumed."""
TOLD = ("question", "notes", "reference", "responses", "baseline", "against", "retries", "maximize", "changes")
"""Fields that may have changed: they affect only how results are reported, or how often failures are retried."""


def check_same(found: Mapping[str, Any], wanted: Mapping[str, Any], folder: str) -> None:
    """Refuse to mix two studies in one folder; both are given as `study.json` stores them."""
    found, wanted = _comparable(found), _comparable(wanted)
    # `maximize` affects only the report, unless reaching the target ended runs.
    ended = bool((wanted.get("stop") or {}).get("target"))
    for name in (*SAME, *(["maximize"] if ended else [])):
        if found.get(name) != wanted.get(name):
            what, old, new = _difference(name, found.get(name), wanted.get(name))
            raise ConfigError(
                f"compare: {folder} holds another study, with {what} {old!r}; wanted {new!r}. "
                "Give another folder, or the same study to resume it"
            )


def _comparable(study: Mapping[str, Any]) -> Row:
    """A study for comparison, without the paths of cluster files: their checksums are compared instead."""

    def without(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in settings.items() if name != "cluster"}

    cells = [{**cell, "settings": without(cell["settings"])} for cell in study["cells"]]
    return {**study, "cells": cells, "settings": without(study["settings"])}


def _difference(name: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    """The name and the two values of a difference; in tables and lists, the first entry that differs."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        key = next(key for key in (*new, *old) if old.get(key) != new.get(key))
        return f"{name}: {key}", old.get(key), new.get(key)
    if isinstance(old, list) and isinstance(new, list):
        pair = next(((a, b) for a, b in zip(old, new, strict=False) if a != b), (len(old), len(new)))
        return name, *pair
    return name, old, new

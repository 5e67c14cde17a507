"""Cluster files as text: what `read_cluster` reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from podium.launch.clusters.description import Cluster, Node
from podium.records.disk import write_atomically


def write_cluster(path: str | Path, cluster: Cluster, comments: Iterable[str] = ()) -> None:
    """Write a cluster file, with these lines as comments at its top; it replaces one that is there."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(Path(path), to_toml(cluster, comments))


def to_toml(cluster: Cluster, comments: Iterable[str] = ()) -> str:
    """The cluster's nodes, links, changes and placement; values that are the default are left out."""
    described, plain = cluster.to_dict(), Cluster(nodes=cluster.nodes).to_dict()
    settings = {key: value for key, value in described.items() if not isinstance(value, list)}
    by_link = settings.pop("servers_by_link", False)
    parts = ["".join(f"# {line}\n" for line in comments)]
    parts.append(_table("[cluster]", {key: value for key, value in settings.items() if value != plain.get(key)}))
    unset = {field.name: field.default for field in dataclasses.fields(Node)}
    for node in described["nodes"]:
        parts.append(_table("[[node]]", {key: value for key, value in node.items() if value != unset[key]}))
    for kind, entries in (("[[link]]", described["links"]), ("[[change]]", described.get("changes", []))):
        parts += [_table(kind, {k: value for k, value in entry.items() if value is not None}) for entry in entries]
    placement: dict[str, Any] = {key: described[key] for key in ("workers", "servers") if described[key]}
    parts.append(_table("[placement]", placement | ({"servers": "by-link"} if by_link else {})))
    return "\n".join(part for part in parts if part)


def _table(header: str, values: Mapping[str, Any]) -> str:
    """Numbers, strings and lists of strings are written alike in JSON and TOML."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join([header, *lines, ""]) if lines else ""

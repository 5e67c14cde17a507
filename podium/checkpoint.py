"""Checkpoints: a folder per step, whole or absent.

    checkpoints/step-00000120/
        shared.safetensors    parameters, optimizer, schedule, position: by name, so any number of workers can load it
        rank-0.safetensors    what is one worker's own: its generator and its buffers
        checkpoint.json       what it is: step, position, members

Ranks write into a `.partial` folder; the first worker renames it once all are done. A kill at any moment leaves the
last whole one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from podium.errors import CheckpointError
from podium.files import load_tree, save_tree, write_atomically


class Checkpoint(NamedTuple):
    """One whole checkpoint on disk."""

    path: Path
    step: int
    position: int
    members: tuple[int, ...]

    def shared(self) -> dict[str, Any]:
        return load_tree(self.path / "shared.safetensors")  # type: ignore[no-any-return]  # what save_shared wrote

    def own(self, rank: int) -> dict[str, Any] | None:
        """What this rank wrote for itself, or None if it was not a member."""
        path = self.path / f"rank-{rank}.safetensors"
        return load_tree(path) if rank in self.members and path.is_file() else None


def folder_for(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def save_own(run_dir: Path, step: int, rank: int, state: Mapping[str, Any]) -> None:
    """Write what is this rank's own. Call on every worker, then a barrier, then `save_shared` on the first."""
    save_tree(_partial(run_dir, step) / f"rank-{rank}.safetensors", state)


def save_shared(run_dir: Path, step: int, state: Mapping[str, Any], members: tuple[int, ...], keep: int) -> Path:
    """Write what all share, make the checkpoint whole, and drop all but the newest `keep`."""
    partial, target = _partial(run_dir, step), folder_for(run_dir, step)
    save_tree(partial / "shared.safetensors", state)
    facts = {"step": step, "position": state["position"], "members": list(members)}
    write_atomically(partial / "checkpoint.json", json.dumps(facts).encode())
    if target.exists():  # the same step again, after a resume from before it
        shutil.rmtree(target)
    try:
        partial.replace(target)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror}") from error
    abandoned = [p for p in target.parent.glob("step-*.partial") if p.name < partial.name]  # a rank was lost over it
    for old in abandoned + sorted(target.parent.glob("step-????????"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`, or the newest whole one of a run's folder."""
    if not path.exists():
        raise CheckpointError(f"{path}: no such run or checkpoint")
    if not (path / "checkpoint.json").is_file():
        whole = [p for p in sorted((path / "checkpoints").glob("step-????????")) if (p / "checkpoint.json").is_file()]
        if not whole:
            raise CheckpointError(f"{path}: holds no whole checkpoint")
        path = whole[-1]
    try:
        facts = json.loads((path / "checkpoint.json").read_text())
        return Checkpoint(path, facts["step"], facts["position"], tuple(facts["members"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: checkpoint.json cannot be read: {error}") from error


def _partial(run_dir: Path, step: int) -> Path:
    folder = folder_for(run_dir, step)
    return folder.with_name(folder.name + ".partial")

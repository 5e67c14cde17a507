"""Checkpoints: a folder per step, whole or absent.

    checkpoints/step-00000120/
        shared.safetensors    parameters, optimizer, schedule, position: by name, so any number of workers can load it
        rank-0.safetensors    what is one worker's own: its generator and its buffers
        checkpoint.json       what it is: step, position, members, and size and checksum of every file

Ranks write into a `.partial` folder; the first worker renames it once all are done. A kill at any moment leaves the
last whole one, and so does a power failure: files and folders are flushed to disk before the next thing is done.

The first worker publishes a checkpoint only when it has seen the file of every member, by its checksum. A worker on a
host with a disk of its own sends its file instead (`podium.engine.training` does so, over the communicator).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from podium.engine.files import Checksum, checksum_of, load_tree, save_tree, verify
from podium.errors import CheckpointError
from podium.records.disk import make_folder, sync_folder, write_atomically

_FACTS = "checkpoint.json"
_SHARED = "shared.safetensors"
_REPLACED = ".replaced"


class Checkpoint(NamedTuple):
    """One whole checkpoint on disk."""

    path: Path
    step: int
    position: int
    members: tuple[int, ...]
    files: Mapping[str, Checksum] = {}
    """Every file of it, by name; empty for an old checkpoint without checksums."""
    warnings: tuple[str, ...] = ()
    """What the user has to know: that newer checkpoints are damaged, that this one cannot be verified."""

    def shared(self) -> dict[str, Any]:
        return self._load(_SHARED)

    def own(self, rank: int) -> dict[str, Any] | None:
        """What this rank wrote for itself, or None if it was not a member."""
        return self._load(name_of(rank)) if rank in self.members else None

    def _load(self, name: str) -> dict[str, Any]:
        return load_tree(self.path / name, self.files.get(name))  # type: ignore[no-any-return]  # what was saved


def folder_for(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def name_of(rank: int) -> str:
    """The file of what is a rank's own."""
    return f"rank-{rank}.safetensors"


def save_own(run_dir: Path, step: int, rank: int, state: Mapping[str, Any]) -> Checksum:
    """Write what is this rank's own. Call on every worker, then a barrier, then `save_shared` on the first."""
    return save_tree(_partial(run_dir, step) / name_of(rank), state)


def read_own(run_dir: Path, step: int, rank: int) -> bytes:
    """The file that `save_own` wrote, to be sent to a first worker that does not see this disk."""
    path = _partial(run_dir, step) / name_of(rank)
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def take_own(run_dir: Path, step: int, rank: int, data: bytes) -> None:
    """Write the file of a rank whose disk is another one."""
    write_atomically(_partial(run_dir, step) / name_of(rank), data, durable=True, error=CheckpointError)


def drop_own(run_dir: Path, step: int, rank: int) -> None:
    """Remove what this rank wrote on a disk of its own, once the first worker has published its copy."""
    partial = _partial(run_dir, step)
    (partial / name_of(rank)).unlink(missing_ok=True)
    if partial.is_dir() and not any(partial.iterdir()):
        partial.rmdir()


def unseen(run_dir: Path, step: int, parts: Mapping[int, Checksum]) -> list[int]:
    """The ranks whose files, which they have just written, are not here."""
    partial = _partial(run_dir, step)
    return [rank for rank, part in parts.items() if not _is_here(partial / name_of(rank), part)]


def save_shared(
    run_dir: Path,
    step: int,
    state: Mapping[str, Any],
    members: tuple[int, ...],
    keep: int,
    parts: Mapping[int, Checksum] | None = None,
) -> Path:
    """Write what all share, make the checkpoint whole, and drop all but the newest `keep`.

    `parts`: what the members say they wrote; without it, what lies in the folder is taken for it.
    """
    partial, target = _partial(run_dir, step), folder_for(run_dir, step)
    files = {_SHARED: save_tree(partial / _SHARED, state)}
    for rank in members:
        expected = None if parts is None else parts[rank]
        try:
            files[name_of(rank)] = checksum_of(partial / name_of(rank), expected)
        except CheckpointError as error:
            raise CheckpointError(
                f"checkpoint of step {step}: the file of rank {rank} must be there before it is published ({error}); "
                "do all hosts see the run's folder?"
            ) from error
    for left in partial.glob("rank-*"):  # by a rank that was lost over an earlier try
        if left.name not in files:
            left.unlink()
    facts = {"step": step, "position": state["position"], "members": list(members), "files": files}
    text = json.dumps({**facts, "sha256": _digest(facts)})
    write_atomically(partial / _FACTS, text, durable=True, error=CheckpointError)
    try:
        _publish(partial, target)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror}") from error
    abandoned = [p for p in target.parent.glob("step-*.partial") if p.name < partial.name]  # a rank was lost over it
    for old in abandoned + sorted(target.parent.glob("step-????????"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def _publish(partial: Path, target: Path) -> None:
    """Give a checkpoint its name; one of the same step, of before a resume, stays until this one is there."""
    replaced = target.with_name(target.name + _REPLACED)
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        target.replace(replaced)
    partial.replace(target)
    sync_folder(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def find_checkpoint(path: Path, *, verified: bool = True) -> Checkpoint:
    """The checkpoint at `path`, or the newest whole one of a run's folder.

    In a run's folder, a damaged one is passed over for the one before it, and `warnings` says so. A checkpoint that is
    named itself must be whole. Not `verified`: the bytes of its files are checked when they are loaded.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such run or checkpoint")
    if (path / _FACTS).is_file():
        return _open(path, verified)
    damaged: list[tuple[Path, str]] = []
    for candidate in _candidates(path):
        try:
            found = _open(candidate, verified=True)
        except CheckpointError as error:
            damaged.append((candidate, str(error)))
            continue
        lost = [_passed_over(candidate, why, found) for candidate, why in damaged]
        return found._replace(warnings=(*lost, *found.warnings))
    if damaged:
        listed = "".join(f"\n  {why}" for _, why in damaged)
        raise CheckpointError(f"{path}: holds no whole checkpoint; those that are there are damaged:{listed}")
    raise CheckpointError(f"{path}: holds no whole checkpoint")


def _candidates(run_dir: Path) -> list[Path]:
    """A run's checkpoints, newest first; one that was about to be replaced when the run was killed counts too."""
    folder = run_dir / "checkpoints"
    named = {p.name: p for p in folder.glob("step-????????")}
    for left in folder.glob(f"step-????????{_REPLACED}"):
        named.setdefault(left.name.removesuffix(_REPLACED), left)
    return [named[name] for name in sorted(named, reverse=True)]


def _passed_over(damaged: Path, why: str, found: Checkpoint) -> str:
    return (
        f"checkpoint {damaged.name} is damaged and was passed over: {why}\n  resuming from step {found.step} instead: "
        f"{_steps_between(damaged, found)} steps are lost and will be trained again"
    )


def _steps_between(damaged: Path, found: Checkpoint) -> int | str:
    step = damaged.name.removeprefix("step-").removesuffix(_REPLACED)
    return int(step) - found.step if step.isdigit() else "some"


def _open(path: Path, verified: bool) -> Checkpoint:
    """A checkpoint's facts, once all its files are there; `verified`: and hold the bytes that were written."""
    if not (path / _FACTS).is_file():
        raise CheckpointError(f"{path}: {_FACTS} is missing")
    try:
        facts = json.loads((path / _FACTS).read_text())
        members = tuple(int(rank) for rank in facts["members"])
        files = {str(name): Checksum(int(size), str(sha)) for name, (size, sha) in facts.get("files", {}).items()}
        found = Checkpoint(path, int(facts["step"]), int(facts["position"]), members, files)
        digest = facts.pop("sha256", None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: {_FACTS} cannot be read: {error}") from error
    if (digest is None) != (not files) or (digest is not None and digest != _digest(facts)):
        raise CheckpointError(f"{path}: {_FACTS} is damaged: it must have the checksum {digest}, got {_digest(facts)}")
    names = [_SHARED, *map(name_of, members)]
    if files and set(files) != set(names):
        raise CheckpointError(f"{path}: {_FACTS} is damaged: it must name {', '.join(names)}, got {', '.join(files)}")
    for name in names:
        if not (path / name).is_file():
            listed = ", ".join(str(rank) for rank in members)
            raise CheckpointError(
                f"{path / name} cannot be read: it is missing, and the checkpoint was made of ranks {listed}"
            )
        if verified:
            verify(path / name, files.get(name))
        elif files:
            checksum_of(path / name, files[name])
    if not files:
        word = f"checkpoint {path.name} has no checksums (an older version wrote it): it is taken as it is"
        found = found._replace(warnings=(word,))
    return found


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _is_here(path: Path, part: Checksum) -> bool:
    try:
        return path.is_file() and checksum_of(path) == part
    except CheckpointError:
        return False


def _partial(run_dir: Path, step: int) -> Path:
    """Where a checkpoint is made. The run's own folder must be there: a deleted folder is not made again."""
    folder = folder_for(run_dir, step)
    partial = folder.with_name(folder.name + ".partial")
    if not run_dir.is_dir():
        raise CheckpointError(f"{run_dir}: the run's folder was removed while the run was under way")
    try:
        make_folder(partial)
    except OSError as error:
        raise CheckpointError(f"{partial} cannot be written: {error.strerror or error}") from error
    return partial

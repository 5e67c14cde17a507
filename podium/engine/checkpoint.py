"""Checkpoints: a folder per step, complete or absent.

    checkpoints/step-00000120/
        shared.safetensors    parameters, optimizer, schedule, position: by name, so any number of workers can load it
        rank-0.safetensors    one worker's own state: its generators, buffers and residuals
        checkpoint.json       step, position, members, and size and checksum of every file

Ranks write into a `.partial` folder; the first worker renames it once all are done. A kill or a power failure at any
moment leaves the last complete one: files and folders are flushed to disk before the next write.

The first worker publishes a checkpoint only when it has verified the checksum of every member's file. A worker on a
host with its own disk sends its file over the communicator (`podium.engine.checkpoint_parts`).
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
from podium.records.disk import make_folder, sync_file, sync_folder, write_atomically

FACTS = "checkpoint.json"
_SHARED = "shared.safetensors"
_REPLACED = ".replaced"


class Checkpoint(NamedTuple):
    """One complete checkpoint on disk."""

    path: Path
    step: int
    position: int
    members: tuple[int, ...]
    files: Mapping[str, Checksum] = {}
    """Every file of it, by name; empty for an old checkpoint without checksums."""
    warnings: tuple[str, ...] = ()
    """For the user: newer checkpoints are damaged, or this one cannot be verified."""

    def shared(self) -> dict[str, Any]:
        return self._load(_SHARED)

    def own(self, rank: int) -> dict[str, Any] | None:
        """This rank's own state, or None if it was not a member."""
        return self._load(name_of(rank)) if rank in self.members else None

    def _load(self, name: str) -> dict[str, Any]:
        return load_tree(self.path / name, self.files.get(name))  # type: ignore[no-any-return]  # what was saved


def folder_for(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def name_of(rank: int) -> str:
    """The file of a rank's own state."""
    return f"rank-{rank}.safetensors"


def save_own(run_dir: Path, step: int, rank: int, state: Mapping[str, Any]) -> Checksum:
    """Write this rank's own state. Call on every worker, then a barrier, then `save_shared` on the first."""
    return save_tree(_partial(run_dir, step) / name_of(rank), state)


def read_own(run_dir: Path, step: int, rank: int) -> bytes:
    """The file that `save_own` wrote, to be sent to a first worker that does not see this disk."""
    path = _partial(run_dir, step) / name_of(rank)
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def take_own(run_dir: Path, step: int, rank: int, data: bytes) -> None:
    """Write the file of a rank on another disk."""
    write_atomically(_partial(run_dir, step) / name_of(rank), data, durable=True, error=CheckpointError)


def drop_own(run_dir: Path, step: int, rank: int) -> None:
    """Remove this rank's file from its own disk, once the first worker has published the copy."""
    partial = _partial(run_dir, step)
    (partial / name_of(rank)).unlink(missing_ok=True)
    if partial.is_dir() and not any(partial.iterdir()):
        partial.rmdir()


def unseen(run_dir: Path, step: int, parts: Mapping[int, Checksum]) -> list[int]:
    """The ranks whose files are not on this disk."""
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
    """Write the shared state, publish the checkpoint, and delete all but the newest `keep`.

    `parts`: the members' checksums of their files; without it, the files in the folder are accepted.
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
    for left in partial.glob("rank-*"):  # from a rank that was lost during an earlier attempt
        if left.name not in files:
            left.unlink()
    facts = {"step": step, "position": state["position"], "members": list(members), "files": files}
    text = json.dumps({**facts, "sha256": _digest(facts)})
    write_atomically(partial / FACTS, text, durable=True, error=CheckpointError)
    try:
        _publish(partial, target)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror}") from error
    _remove_old(partial, target, keep)
    return target


def publish_copy(run_dir: Path, step: int, keep: int) -> None:
    """Give a checkpoint that was copied into its `.partial` folder its final name, once every file is verified."""
    partial, target = _partial(run_dir, step), folder_for(run_dir, step)
    _open(partial, verified=True)
    for path in partial.iterdir():  # before older checkpoints are removed
        sync_file(path)
    _publish(partial, target)
    _remove_old(partial, target, keep)


def _remove_old(partial: Path, target: Path, keep: int) -> None:
    abandoned = [p for p in target.parent.glob("step-*.partial") if p.name < partial.name]  # a rank was lost then
    for old in abandoned + sorted(target.parent.glob("step-????????"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def _publish(partial: Path, target: Path) -> None:
    """Give a checkpoint its final name; an older one of the same step stays until this one is in place."""
    replaced = target.with_name(target.name + _REPLACED)
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        target.replace(replaced)
    partial.replace(target)
    sync_folder(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def find_checkpoint(path: Path, *, verified: bool = True) -> Checkpoint:
    """The checkpoint at `path`, or the newest complete one of a run's folder.

    In a run's folder, a damaged one is skipped for the one before it, with a warning. A checkpoint that `path` names
    must be complete. Not `verified`: the bytes of its files are checked when they are loaded.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such run or checkpoint")
    if (path / FACTS).is_file():
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
    """A run's checkpoints, newest first, with those that were being replaced when the run was killed."""
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
    """Read a checkpoint's facts and check that all its files exist; `verified`: and that their bytes are intact."""
    if not (path / FACTS).is_file():
        raise CheckpointError(f"{path}: {FACTS} is missing")
    try:
        facts = json.loads((path / FACTS).read_text())
        members = tuple(int(rank) for rank in facts["members"])
        files = {str(name): Checksum(int(size), str(sha)) for name, (size, sha) in facts.get("files", {}).items()}
        found = Checkpoint(path, int(facts["step"]), int(facts["position"]), members, files)
        digest = facts.pop("sha256", None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: {FACTS} cannot be read: {error}") from error
    if (digest is None) != (not files) or (digest is not None and digest != _digest(facts)):
        raise CheckpointError(f"{path}: {FACTS} is damaged: it must have the checksum {digest}, got {_digest(facts)}")
    names = [_SHARED, *map(name_of, members)]
    if files and set(files) != set(names):
        raise CheckpointError(f"{path}: {FACTS} is damaged: it must name {', '.join(names)}, got {', '.join(files)}")
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
    """Where a checkpoint is written. The run's folder must exist: a deleted one is not made again."""
    folder = folder_for(run_dir, step)
    partial = folder.with_name(folder.name + ".partial")
    if not run_dir.is_dir():
        raise CheckpointError(f"{run_dir}: the run's folder was removed while the run was under way")
    try:
        make_folder(partial)
    except OSError as error:
        raise CheckpointError(f"{partial} cannot be written: {error.strerror or error}") from error
    return partial

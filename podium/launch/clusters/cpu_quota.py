"""CPU quotas of shaped nodes: a control group per node."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import secrets
import time
from pathlib import Path

from podium.errors import ConfigError
from podium.launch.clusters.commands import remove_after
from podium.launch.clusters.description import Cluster
from podium.launch.rendezvous import note_what_is_made


class CpuQuota:
    """A control group per node that has `cpus`, for as long as the `with` block lasts; cgroup v1 or v2.

    The group limits all of a node's ranks together. Where no node has `cpus` it does nothing and needs nothing.
    """

    def __init__(self, cluster: Cluster, folder: Path | None = None) -> None:
        """`folder`: the rendezvous folder that lists the groups, so that the next launcher can remove them."""
        self.cluster, self._folder = cluster, folder
        self.groups: dict[int, Path] = {}
        """The group's folder, by node."""
        self._owner = os.getpid()

    def __enter__(self) -> CpuQuota:
        limited = [i for i, node in enumerate(self.cluster.nodes) if node.cpus is not None]
        if not limited:
            return self
        parent = _cpu_parent()
        run = secrets.token_hex(3)
        groups = {i: parent / f"podium-{run}-{i}" for i in limited}
        if self._folder is not None:
            note_what_is_made(self._folder, groups=groups.values())
        atexit.register(self.remove)
        try:
            for i, group in groups.items():
                self._create(i, group)
        except OSError as error:
            self.remove()
            raise _no_quota(f"{error.filename or parent}: {error.strerror}") from error
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        remove_after(self.remove, error)

    def add(self, node: int, pid: int) -> None:
        """Put a process, with its threads and later children, under its node's quota, if the node has one."""
        if node not in self.groups:
            return
        try:
            _move(pid, self.groups[node])
        except OSError as error:
            raise _no_quota(f"process {pid} cannot be moved to {self.groups[node]}: {error.strerror}") from error

    def facts(self) -> dict[str, dict[str, int]]:
        """The kernel's own counts by node name: `nr_periods`, `nr_throttled` and more."""
        return {self.cluster.nodes[i].name: _read_stat(group) for i, group in self.groups.items()}

    def remove(self) -> None:
        """Delete the groups; a process that is still inside returns to the group above, unlimited."""
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.remove)
        while self.groups:
            _, group = self.groups.popitem()
            try:
                _remove_group(group)
            except OSError as error:
                raise ConfigError(f"shaped launcher: {group} cannot be removed: {error.strerror}") from error

    def _create(self, index: int, group: Path) -> None:
        cpus = self.cluster.nodes[index].cpus
        assert cpus is not None
        # A step is often shorter than the usual period of 100 ms: it would run at full speed and then pause.
        period_us = 10_000 if cpus >= 0.1 else 100_000
        quota_us = round(cpus * period_us)
        group.mkdir()
        self.groups[index] = group
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"{quota_us} {period_us}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(period_us))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))


def _cpu_parent() -> Path:
    """The nearest group above this process in which groups with a CPU quota can be made."""
    for kind, mount in _cgroup_mounts():
        own = mount / _own_group(kind).lstrip("/")
        # In a container the path may be the host's, and the folder may not exist.
        start = own if own.is_dir() else mount
        for folder in (start, *start.parents):
            if _takes_quota(folder, kind):
                return folder
            if folder == mount:
                break
    raise _no_quota("none of the mounted cgroup hierarchies has a writable cpu controller")


def _cgroup_mounts() -> list[tuple[str, Path]]:
    """Mounted hierarchies that may hold the cpu controller: ("cgroup" | "cgroup2", where)."""
    found = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup2" or (kind == "cgroup" and "cpu" in options.split(",")):
            found.append((kind, Path(place)))
    return found


def _own_group(kind: str) -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" if kind == "cgroup2" else "cpu" in controllers.split(","):
            return path
    return "/"


def _takes_quota(folder: Path, kind: str) -> bool:
    if not os.access(folder, os.W_OK):
        return False
    if kind == "cgroup":
        return (folder / "cpu.shares").exists()
    try:
        if "cpu" in (folder / "cgroup.subtree_control").read_text().split():
            return True
        if "cpu" not in (folder / "cgroup.controllers").read_text().split():
            return False
        # Fails (busy) for a group that holds processes itself: then try the parent group.
        (folder / "cgroup.subtree_control").write_text("+cpu")
    except OSError:
        return False
    return True


def _no_quota(why: str) -> ConfigError:
    return ConfigError(
        f"shaped launcher: the cluster file gives nodes cpus, and no CPU quota can be set here ({why}): "
        "leave cpus out, or run as root with the cpu cgroup mounted writable"
    )


def _read_stat(group: Path) -> dict[str, int]:
    rows = (line.split() for line in (group / "cpu.stat").read_text().splitlines())
    return {name: int(value) for name, value in rows}


def _remove_group(group: Path) -> None:
    deadline = time.monotonic() + 2.0
    while True:
        for pid in (group / "cgroup.procs").read_text().split():
            _move(int(pid), group.parent)
        try:
            group.rmdir()
            return
        except OSError as error:  # busy for a moment while a process in it is ending
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _move(pid: int, group: Path) -> None:
    with contextlib.suppress(ProcessLookupError):  # the process has ended
        (group / "cgroup.procs").write_text(str(pid))

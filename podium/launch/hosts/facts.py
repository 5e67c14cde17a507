"""What an agent tells of its host, and what the head refuses."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import tempfile
import time
from typing import Any, NamedTuple

import torch

import podium
from podium.comm.base import Meta
from podium.comm.real.sockets import Address
from podium.errors import ConfigError
from podium.launch.hosts.failure import Failure

MOST_SKEW_S = 30.0
"""Clocks that differ by more are refused: times in records, certificates and file dates of two hosts would not fit."""
LEAST_DISK_BYTES = 64 << 20
"""Free space that an agent needs in its temporary folder, for records, logs and the copy of a checkpoint."""


class HostFacts(NamedTuple):
    """One host."""

    name: str
    address: str
    """Its address for the other hosts: that of the interface that routes to the head."""
    podium: str
    torch: str
    python: str
    time: float
    """Seconds since 1970 on its clock, when it asked."""
    cores: int
    memory_bytes: int
    gpus: tuple[str, ...]
    folder: str
    """Its temporary folder."""
    free_bytes: int
    """Of the disk of that folder."""

    @classmethod
    def here(cls, address: str) -> HostFacts:
        folder = tempfile.gettempdir()
        return cls(
            name=socket.gethostname(),
            address=address,
            podium=podium.__version__,
            torch=torch.__version__,
            python=platform.python_version(),
            time=time.time(),
            cores=len(os.sched_getaffinity(0)),
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            gpus=tuple(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())),
            folder=folder,
            free_bytes=shutil.disk_usage(folder).free,
        )

    @classmethod
    def from_meta(cls, meta: Meta) -> HostFacts:
        """From an agent, which may be of another version: what it does not tell is blank."""
        blank = cls("", "", "unknown", "unknown", "", 0.0, 0, 0, (), "", 0)._asdict()
        values: dict[str, Any] = {name: meta.get(name, blank[name]) for name in cls._fields}
        return cls(**{**values, "gpus": tuple(str(gpu) for gpu in values["gpus"])})


def complaint(facts: HostFacts, label: str, now: float, *, needs_disk: bool = True) -> Failure | None:
    """Why this host cannot take part; None where it can. `now`: this machine's time when the facts arrived."""
    if facts.podium != podium.__version__:
        return _wrong_version(label, "Podium", podium.__version__, facts.podium)
    if _release(facts.torch) != _release(torch.__version__):
        return _wrong_version(label, "PyTorch", _release(torch.__version__), facts.torch)
    skew = facts.time - now
    if abs(skew) > MOST_SKEW_S:
        way = "ahead of" if skew > 0 else "behind"
        what = f"its clock is {abs(skew):.0f} s {way} this machine's, and may differ by {MOST_SKEW_S:g} s"
        return Failure(what, f"on {label}: timedatectl set-ntp true", of_request=True)
    if needs_disk and facts.free_bytes < LEAST_DISK_BYTES:
        what = f"{facts.folder} must have {LEAST_DISK_BYTES >> 20} MB free, got {facts.free_bytes >> 20}"
        return Failure(what, f"on {label}: make room (df -h {facts.folder}), or set TMPDIR there", of_request=True)
    return None


def _wrong_version(label: str, what: str, wanted: str, got: str) -> Failure:
    package = {"Podium": "podium", "PyTorch": "torch"}[what]
    fix = f"on {label}: pip install {package}=={wanted}, or name another interpreter: python=PATH in the file of hosts"
    return Failure(f"{what} must be {wanted}, as on this machine, got {got}", fix, of_request=True)


def _release(version: str) -> str:
    """Without the build (`+cu128`): builds for CPU and GPU may train together."""
    return version.partition("+")[0]


def route_to(address: Address) -> str:
    """This host's address on the interface that routes to `tcp:host:port`. Sends nothing."""
    host, _, port = address.removeprefix("tcp:").rpartition(":")
    return routed(host.strip("[]"), int(port))


def routed(host: str, port: int) -> str:
    """This machine's address on the interface that routes to a host. Sends nothing."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"this machine has no route to {host}: {error.strerror}") from None


def sees(folder: str, probe: str) -> bool:
    """Whether this host sees the file that the head has just made in a folder of its own."""
    return os.path.isfile(os.path.join(folder, probe))  # unlike Path's, false where this user may not look

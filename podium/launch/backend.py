"""nccl or gloo: what the workers of a generation exchange tensors on GPUs with, and how nccl is set up on a host.

nccl needs a GPU of its own for every worker. Each worker tells the coordinator which GPU it has when it joins, and the
coordinator chooses for all members of a generation: no worker has to know what the others see.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_SIOCGIFCONF = 0x8912
_IFREQ_BYTES = 40
_MOST_ADDRESSES = 1024
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_INET6 = Path("/proc/net/if_inet6")


def backend_of(gpus: Iterable[str]) -> str:
    """nccl where every worker has its own GPU, gloo otherwise. `gpus`: what `own_gpu` returned on each worker."""
    names = list(gpus)
    return "nccl" if all(names) and len(set(names)) == len(names) else "gloo"


def own_gpu(device: torch.device) -> str:
    """What tells this GPU from all others, on every host; empty where the device is none, or torch has no nccl.

    Made of the machine's boot and of the GPU's place in it, since numbers depend on what a process sees. As for nccl
    itself, NCCL_HOSTID names the host where it is set.
    """
    if device.type != "cuda" or not dist.is_nccl_available():
        return ""
    found: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack its place
    place = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}"
    return f"{os.environ.get('NCCL_HOSTID') or _BOOT_ID.read_text().strip()} {place}"


def set_up_nccl(host: str) -> None:
    """Settings of nccl for this process, before it forms its first group. What the user has set is left alone.

    nccl connects through the interface of this address. Waits raise an error when a member is lost; by default torch
    would end the process.
    """
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    interface = interface_of(host)
    if interface is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without `=`, any whose name begins so


def interface_of(address: str) -> str | None:
    """The name of this host's network interface that has this address; None where it has none."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return None
    found = _ipv4() if wanted.version == 4 else _ipv6()
    return next((name for name, own in found if own == wanted), None)


def _ipv4() -> Iterator[tuple[str, ipaddress.IPv4Address]]:
    """All addresses of all interfaces that are up; SIOCGIFADDR would return the first of each."""
    rows = array.array("B", bytes(_IFREQ_BYTES * _MOST_ADDRESSES))
    asked = struct.pack("@iL", len(rows), rows.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        size = struct.unpack("@iL", fcntl.ioctl(sock, _SIOCGIFCONF, asked))[0]
    for start in range(0, size, _IFREQ_BYTES):
        row = rows[start : start + _IFREQ_BYTES].tobytes()
        label = row[:16].partition(b"\0")[0].decode()
        yield label.partition(":")[0], ipaddress.IPv4Address(row[20:24])


def _ipv6() -> Iterator[tuple[str, ipaddress.IPv6Address]]:
    with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
        for line in _INET6.read_text().splitlines():
            digits, *_, name = line.split()
            yield name, ipaddress.IPv6Address(int(digits, 16))

"""Agents started by the system's `ssh`: nothing has to be installed on a host but Podium itself.

Logins must work without a prompt (a key, an agent, a ticket). Options come from the user's ssh configuration; with
PODIUM_SSH_OPTIONS, more are given to every call, such as `-F my_config`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import final

from podium.errors import ConfigError, PodiumError
from podium.launch.hosts.base import MODULE, Command, StartedAgent, Starter
from podium.launch.hosts.entries import HostEntry, read_hosts
from podium.launch.hosts.facts import routed
from podium.launch.hosts.failure import Failure
from podium.launch.hosts.invitation import Invitation

_CONNECT_S = 10
_OPTIONS = "PODIUM_SSH_OPTIONS"
_REMEDIES = {
    r"Could not resolve hostname": "correct the name, or add it to /etc/hosts or to ~/.ssh/config",
    r"timed out": f"is HOST up, and is that its address? ssh -v HOST (it waits {_CONNECT_S} s)",
    r"No route to host|Network is unreachable": "is HOST up, and is that its address? ssh -v HOST",
    r"Connection refused": "on HOST: systemctl start ssh (or the port of its ssh server in ~/.ssh/config)",
    r"Permission denied \(": "ssh-copy-id HOST (logins must work without a password)",
    r"Host key verification failed": "ssh HOST, once, and accept its key",
    r"(python\S*|exec: .*): (not found|No such file|cannot execute|Permission denied)": (
        "install Python and Podium on HOST, or name its interpreter: python=PATH in the file of hosts"
    ),
}
"""What helps, by what ssh or the shell on the host said; HOST stands for the host."""


@final
class Ssh(Starter):
    """A login per host."""

    remedies = _REMEDIES

    def __init__(self, hosts: str | None) -> None:
        if hosts is None:
            raise ConfigError("launcher ssh needs hosts: --hosts FILE, with a line per host, or --hosts host1,host2")
        if shutil.which("ssh") is None:
            raise ConfigError(
                "launcher ssh needs the command `ssh`, which is not installed: apt install openssh-client"
            )
        self._hosts = read_hosts(hosts)

    def entries(self, processes: int) -> list[HostEntry]:
        return self._hosts

    def unknown(self, entry: HostEntry) -> Failure | None:
        found = find_address(entry)
        return found if isinstance(found, Failure) else None

    def head_address(self, entries: Sequence[HostEntry]) -> str:
        return head_address(list(entries))

    def start(self, entries: Mapping[int, HostEntry], invitation: Invitation) -> dict[int, StartedAgent]:
        return {number: Command(self.words(entry), invitation.numbered(number)) for number, entry in entries.items()}

    def words(self, entry: HostEntry) -> list[str]:
        limits = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}", "-o", "ServerAliveInterval=15")
        command = f"exec sh -c {shlex.quote(remote_command(entry))}"  # whatever the user's login shell is
        return ["ssh", *extra_options(), *limits, "-T", entry.target, command]

    def advice(self, entry: HostEntry) -> str:
        return f"ssh {entry.target} {entry.python or 'python3'} -m podium --version"


def remote_command(entry: HostEntry) -> str:
    """What the shell on the host runs: the interpreter that the entry names, or this one's path, or `python3`."""
    module = " ".join(MODULE)
    if entry.python is not None:
        return f"exec {shlex.quote(entry.python)} {module}"
    here = shlex.quote(sys.executable)
    return f"if [ -x {here} ]; then exec {here} {module}; else exec python3 {module}; fi"


def extra_options() -> list[str]:
    return shlex.split(os.environ.get(_OPTIONS, ""))


def head_address(entries: list[HostEntry]) -> str:
    """This machine's address for the hosts: that of the interface that routes to the first that is not this machine."""
    found = {entry: address_of(entry) for entry in entries}
    away = [entry for entry, address in found.items() if not address.startswith("127.")] or entries
    failures: list[PodiumError] = []
    for entry in away:  # to one of them: ssh tells why another cannot be reached
        try:
            return routed(found[entry], 22)
        except ConfigError as error:
            fix = "correct the host's address, or give this machine's: --set head=ADDRESS"
            failures.append(Failure(str(error), fix, of_request=True).error(entry.target))
    raise failures[0]


def address_of(entry: HostEntry) -> str:
    """The host's address, by the resolver or by the ssh configuration."""
    found = find_address(entry)
    if isinstance(found, Failure):
        raise found.error(entry.target)
    return found


def find_address(entry: HostEntry) -> str | Failure:
    """As `address_of`, without raising."""
    for name in (entry.name, _configured_name(entry)):
        try:
            return str(socket.getaddrinfo(name, 22, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            why = error.strerror
    what = f"its name cannot be resolved to an IPv4 address from here: {why}"
    fix = f"{_REMEDIES['Could not resolve hostname']}; where only a jump host knows it: --set head=ADDRESS"
    return Failure(what, fix, of_request=True)


def _configured_name(entry: HostEntry) -> str:
    shown = subprocess.run(
        ["ssh", *extra_options(), "-G", entry.target], capture_output=True, text=True, timeout=_CONNECT_S, check=False
    )
    found = re.search(r"^hostname (\S+)$", shown.stdout, re.MULTILINE)
    return found[1] if found else entry.name

"""A real sshd on test hosts: `ssh host1 COMMAND` from any of them to any of them, without a prompt.

    with Hosts(3) as hosts, SshServers(hosts):
        hosts[0].run("ssh", "host2", "hostname")

Each host has the user's key, the hosts' public keys and a client configuration in its `~/.ssh`, as a user would have
made them. A command that ssh starts finds Python, `podium` and its package as one that `Host.run` starts does; the
client's environment does not reach it. A command that still runs when the server ends goes on, as on any machine.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import final

from podium.errors import ConfigError
from podium.testing.daemons import Daemons, Service, need_new_folder
from podium.testing.hosts import START_S, Host, find_program, login_environment, why_not, why_without

_HOME = "/tmp/.ssh"
_USER_KEY = "id_ed25519"
_HOST_KEY = "host_key"


def why_not_ssh() -> str:
    """Why no sshd can run on hosts here, as a reason to skip a test; empty where it can."""
    wanted = {"sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}
    return why_not() or why_without("ssh between hosts needs", wanted)


@final
class SshServers(Service):
    """An sshd on each host, while the `with` block lasts."""

    options = ("-F", f"{_HOME}/config")
    """For an ssh that is to read this configuration only; without them it also reads the machine's."""

    def __init__(self, hosts: Iterable[Host]) -> None:
        if reason := why_not_ssh():
            raise ConfigError(reason)
        self._hosts, self._daemons = tuple(hosts), Daemons()

    def _check(self) -> None:
        need_new_folder(self._hosts, ".ssh")

    def _begin(self) -> None:
        self._make_keys()
        for host in self._hosts:
            self._start(host)
        started = [host.folder / ".ssh" / "sshd.pid" for host in self._hosts]  # written once it listens
        self._daemons.wait(lambda: all(path.exists() for path in started), "sshd", START_S)

    def _make_keys(self) -> None:
        """One key for the user of all hosts; each host has its own, which all others know."""
        first, known = self._hosts[0].folder / ".ssh", []
        for host in self._hosts:
            own = host.folder / ".ssh"
            own.mkdir(mode=0o700)
            known.append(f"{host.name},{host.address} {_make_key(own / _HOST_KEY)}")
        _make_key(first / _USER_KEY)
        for host in self._hosts:
            own = host.folder / ".ssh"
            if own != first:
                shutil.copy(first / _USER_KEY, own)
            shutil.copy(first / f"{_USER_KEY}.pub", own / "authorized_keys")
            (own / "known_hosts").write_text("\n".join(known) + "\n")
            settings = {"IdentityFile": f"{_HOME}/{_USER_KEY}", "UserKnownHostsFile": f"{_HOME}/known_hosts"}
            _write_settings(own / "config", settings)

    def _start(self, host: Host) -> None:
        own = host.folder / ".ssh"
        settings = {
            "ListenAddress": host.address,
            "HostKey": f"{_HOME}/{_HOST_KEY}",
            "PidFile": f"{_HOME}/sshd.pid",
            "AuthorizedKeysFile": f"{_HOME}/authorized_keys",
            "StrictModes": "no",  # the home is /tmp, which others may write to
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "PermitRootLogin": "prohibit-password",
            "SetEnv": " ".join(f'"{name}={value}"' for name, value in login_environment().items()),
        }
        _write_settings(own / "sshd_config", settings)
        host.run("mkdir", "-p", "/run/sshd")
        sshd = find_program("sshd")
        assert sshd is not None
        self._daemons.start(host, sshd, "-D", "-e", "-f", f"{_HOME}/sshd_config", log=f"{_HOME}/sshd.log")

    def _end(self) -> None:
        self._daemons.end()
        for host in self._hosts:
            shutil.rmtree(host.folder / ".ssh", ignore_errors=True)


def _make_key(path: Path) -> str:
    """Make a key pair; returns the public key."""
    words = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "podium.testing", "-f", str(path))
    subprocess.run(words, stdin=subprocess.DEVNULL, check=True, timeout=START_S)
    return path.with_suffix(".pub").read_text().strip()


def _write_settings(path: Path, settings: dict[str, str]) -> None:
    path.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    path.chmod(0o600)

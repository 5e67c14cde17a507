"""Mistakes with `podium train --launcher ssh`: each ends on the head with the host's name, the cause and what to do."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import podium
from podium.testing import Hosts
from tests.integration.ssh_hosts import left_clean, ssh_hosts, wrapped_python

pytestmark = pytest.mark.root

QUICK_S = 15.0
"""How long an error may take that waits for no timeout: a busy machine imports torch in some seconds, twice."""
SHIFTED_CLOCK = "import time\nreal = time.time\ntime.time = lambda: real() + 300\n"
OTHER_TORCH = "import torch\ntorch.__version__ = '2.12.1+cpu'\n"


@pytest.fixture(scope="module")
def hosts(own_temporary_folder: Path) -> Iterator[Hosts]:
    """The head and three hosts; no ssh server runs on the last one."""
    with ssh_hosts(own_temporary_folder, 4, served=3) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left_behind(hosts: Hosts) -> Iterator[None]:
    """Instead of the folder's fixture: the hosts stay until the module's end."""
    with left_clean(hosts):
        yield


def ends(
    hosts: Hosts, listed: str, *more: str, within_s: float = QUICK_S, code: int = 1, task: str = "digits-mlp"
) -> str:
    """What the head prints for a run on these hosts."""
    (hosts[0].folder / "hosts.txt").write_text(listed.replace(",", "\n") + "\n")
    words = ("train", task, "--workers", "2", "--steps", "4", "--launcher", "ssh", "--hosts", "hosts.txt", "--quiet")
    began = time.monotonic()
    done = hosts[0].run(sys.executable, "-m", "podium", *words, *more)
    took = time.monotonic() - began
    print(done.stderr, f"after {took:.1f} s")
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert took < within_s
    return done.stderr


def test_a_host_that_nobody_knows(hosts: Hosts) -> None:
    told = ends(hosts, "host1,nohost", code=2)
    assert "host nohost: its name cannot be resolved" in told and "/etc/hosts" in told


def test_an_ssh_server_that_does_not_run(hosts: Hosts) -> None:
    told = ends(hosts, "host1,host3")
    assert "host host3: " in told and "Connection refused" in told
    assert "fix: on host3: systemctl start ssh" in told


def test_an_address_that_no_machine_has(hosts: Hosts) -> None:
    nobody = hosts[0].address.rpartition(".")[0] + ".77"
    told = ends(hosts, f"host1,{nobody}", within_s=20)
    assert f"host {nobody}: " in told and "No route to host" in told
    assert f"fix: is {nobody} up" in told and f"ssh -v {nobody}" in told


def test_an_address_in_a_network_that_this_machine_has_no_route_to(hosts: Hosts) -> None:
    told = ends(hosts, "192.0.2.7,host1")
    assert "host 192.0.2.7: " in told and "Network is unreachable" in told and "ssh -v 192.0.2.7" in told
    told = ends(hosts, "192.0.2.7", code=2)
    assert "host 192.0.2.7: this machine has no route to 192.0.2.7" in told and "--set head=ADDRESS" in told


@pytest.mark.slow
def test_a_host_that_answers_nothing(hosts: Hosts) -> None:
    hosts[0].cut(hosts[1])
    try:
        told = ends(hosts, "host1,host2", within_s=25)
    finally:
        hosts[0].mend(hosts[1])
    assert "host host1: " in told and "timed out" in told
    assert "fix: is host1 up" in told and "10 s" in told


def test_no_key(hosts: Hosts) -> None:
    keys = hosts[2].folder / ".ssh" / "authorized_keys"
    kept = keys.rename(keys.with_name("kept"))
    try:
        told = ends(hosts, "host1,host2")
    finally:
        kept.rename(keys)
    assert "host host2: " in told and "Permission denied" in told
    assert "fix: ssh-copy-id host2" in told


def test_no_python(hosts: Hosts) -> None:
    told = ends(hosts, "host1,host2 python=/opt/podium/bin/python")
    assert "host host2: " in told and "/opt/podium/bin/python" in told and re.search("not found|No such file", told)
    assert "fix: install Python and Podium on host2, or name its interpreter: python=PATH" in told


def test_no_podium(hosts: Hosts) -> None:
    with wrapped_python(hosts[2], shell='export PYTHONPATH=; set -- -S "$@"') as entry:
        told = ends(hosts, f"host1,{entry}")
    assert "host host2: " in told and "No module named podium" in told.replace("'", "")
    assert f"fix: on host2: pip install podium=={podium.__version__}" in told


def test_another_version_of_podium(hosts: Hosts) -> None:
    package, other = Path(podium.__file__).parent, hosts[2].folder / "other"
    shutil.copytree(package, other / "podium", ignore=shutil.ignore_patterns("__pycache__"))
    init = other / "podium" / "__init__.py"
    text = init.read_text()
    init.write_text(text.replace(f'__version__ = "{podium.__version__}"', '__version__ = "9.9.9"'))
    assert init.read_text() != text
    with wrapped_python(hosts[2], path="/tmp/other") as entry:
        told = ends(hosts, f"host1,{entry}", code=2)
    shutil.rmtree(other)
    assert f"host host2: Podium must be {podium.__version__}, as on this machine, got 9.9.9" in told
    assert f"fix: on host2: pip install podium=={podium.__version__}" in told


def test_another_version_of_torch(hosts: Hosts) -> None:
    with wrapped_python(hosts[2], code=OTHER_TORCH) as entry:
        told = ends(hosts, f"host1,{entry}", code=2)
    assert "host host2: PyTorch must be " in told and "got 2.12.1+cpu" in told
    assert "fix: on host2: pip install torch==" in told


def test_a_clock_that_is_wrong(hosts: Hosts) -> None:
    with wrapped_python(hosts[2], code=SHIFTED_CLOCK) as entry:
        told = ends(hosts, f"host1,{entry}", code=2)
    assert "host host2: its clock is 300 s ahead of this machine's" in told
    assert "fix: on host2: timedatectl set-ntp true" in told


def test_a_full_disk(hosts: Hosts) -> None:
    hosts[2].run("sh", "-c", "mkdir -p /run/small && mount -t tmpfs -o size=16m none /run/small")
    with wrapped_python(hosts[2], shell="export TMPDIR=/run/small") as entry:
        told = ends(hosts, f"host1,{entry}", code=2)
    assert "host host2: /run/small must have 64 MB free, got 1" in told
    assert "fix: on host2: make room (df -h /run/small), or set TMPDIR there" in told


@pytest.mark.slow
def test_a_port_that_is_blocked(hosts: Hosts) -> None:
    blocked = ("-p", "tcp", "-s", hosts[2].address, "--dport", "1024:", "--syn", "-j", "REJECT")
    if hosts[0].run("iptables", "-A", "INPUT", *blocked).returncode:
        pytest.skip("iptables does not work here")
    try:
        told = ends(hosts, "host1,host2", within_s=30)
    finally:
        hosts[0].run("iptables", "-D", "INPUT", *blocked)
    assert "host host2: " in told and f"cannot be reached from here at tcp:{hosts[0].address}:" in told
    assert "fix: open that port for host2" in told and "--set head=ADDRESS" in told


@pytest.mark.slow
def test_an_address_of_the_head_that_hosts_do_not_reach(hosts: Hosts) -> None:
    hosts[0].run("ip", "addr", "add", "192.0.2.1/32", "dev", "lo")
    told = ends(hosts, "host1,host2", "--set", "head=192.0.2.1", within_s=30)
    assert "cannot be reached from here at tcp:192.0.2.1:" in told and "Network is unreachable" in told
    assert "--set head=ADDRESS" in told


@pytest.mark.slow
def test_keys_of_ones_own_reach_the_hosts(hosts: Hosts) -> None:
    hosts[0].run(sys.executable, "-m", "podium", "certs", "keys")
    files = {"tls_cert": "keys/node.pem", "tls_key": "keys/node.key", "tls_ca": "keys/ca.pem"}
    given = [word for key, path in files.items() for word in ("--set", f"{key}={path}")]
    ends(hosts, "host1,host2", *given, code=0, within_s=60)
    told = ends(hosts, "host1,host2", *given, "--set", "tls_ca=keys/nothing.pem", code=2)
    assert "keys/nothing.pem" in told and "tls_ca" in told


def test_an_address_that_is_not_the_heads(hosts: Hosts) -> None:
    told = ends(hosts, "host1,host2", "--set", "head=192.0.2.9", code=2)
    assert "192.0.2.9" in told and "head" in told


TASK = """
    from pathlib import Path
    import socket
    from podium.tasks.digits import digits_mlp

    def make_task(data_dir=None):
        return digits_mlp()

    def fails():
        if socket.gethostname() == "host2":
            raise RuntimeError("no such luck")
        return digits_mlp()
"""


def test_data_that_are_too_large_to_send(hosts: Hosts) -> None:
    (hosts[0].folder / "mine.py").write_text(textwrap.dedent(TASK))
    for host, size in ((hosts[0], 3 << 30), (hosts[1], 3 << 30)):
        (host.folder / "data").mkdir()
        with (host.folder / "data" / "samples.bin").open("wb") as file:
            file.truncate(size)
    told = ends(hosts, "host1,host2", "--data-dir", "/tmp/data", task="/tmp/mine.py:make_task", code=2)
    assert "host host2: the data of /tmp/data are not there, and 3.2 GB are too much to send" in told
    assert "fix: rsync -a /tmp/data/ host2:/tmp/data/" in told


def test_a_disk_that_is_full_before_the_data_are_there(hosts: Hosts) -> None:
    (hosts[0].folder / "mine.py").write_text(textwrap.dedent(TASK))
    (hosts[0].folder / "more").mkdir()
    (hosts[0].folder / "more" / "samples.bin").write_bytes(bytes(20 << 20))
    hosts[2].run("sh", "-c", "mkdir -p /run/cache && mount -t tmpfs -o size=16m none /run/cache")
    with wrapped_python(hosts[2], shell="export XDG_CACHE_HOME=/run/cache") as entry:
        told = ends(hosts, f"host1,{entry}", "--data-dir", "/tmp/more", task="/tmp/mine.py:make_task")
    assert "host host2: /run/cache/podium/data-" in told and "No space left on device" in told
    assert "fix: on host2: make room (df -h), or set TMPDIR, XDG_CACHE_HOME there" in told


def test_a_data_folder_of_many_files_is_no_mistake(hosts: Hosts) -> None:
    (hosts[0].folder / "mine.py").write_text(textwrap.dedent(TASK))
    (hosts[0].folder / "many").mkdir()
    for number in range(4000):
        (hosts[0].folder / "many" / f"sample-with-a-long-name-{number}").touch()
    ends(hosts, "host1,host2", "--data-dir", "/tmp/many", task="/tmp/mine.py:make_task", code=0, within_s=60)


def test_a_rank_that_fails_on_one_host(hosts: Hosts) -> None:
    (hosts[0].folder / "mine.py").write_text(textwrap.dedent(TASK))
    told = ends(hosts, "host1,host2", task="/tmp/mine.py:fails")
    assert "error: rank 1 on host host2: RuntimeError: no such luck" in told
    assert "mine.py:" in told and "records and logs: " in told

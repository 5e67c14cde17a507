"""The checks of `podium doctor`: each tries a feature on this machine.

A check is "ok" only when the feature itself was executed; one that could not be tried is "skipped", with the reason.
Each failed check has a fix.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from podium.errors import ConfigError, PodiumError

Status = Literal["ok", "failed", "skipped"]

PROBE_BYTES = 64 << 20
ROUND_TRIPS = 200
EXTRAS: dict[str, dict[str, str]] = {
    "study": {name: name for name in ("statsmodels", "scipy", "matplotlib", "plotly", "duckdb")},
    "sweep": {"optuna": "optuna", "nvidia-ml-py": "pynvml"},
    "check": {"playwright": "playwright"},
    "tls": {"cryptography": "cryptography"},
    "ray": {"ray": "ray"},
    "data": {"torchvision": "torchvision", "datasets": "datasets"},
}
"""The packages of each extra, and the module of each package."""


@dataclass(frozen=True, kw_only=True)
class Check:
    name: str
    status: Status
    detail: str
    fix: str = ""
    """What to do about it; always given for a failed check."""


def checks(out: str = "runs", collective: Callable[[], str] | None = None) -> list[Check]:
    """Try everything; takes a few seconds. `out` is the folder that runs are written to."""
    return [
        check_python(),
        check_torch(),
        check_conflict(),
        check_tcp(),
        check_unix(),
        check_collective(collective or exercise_collective),
        check_shared_memory(collective or (lambda: exercise_collective(collective="shared"))),
        check_nccl(),
        check_energy(),
        check_shaping(),
        check_quota(),
        check_folder(Path(out)),
        *(check_extra(name, packages) for name, packages in EXTRAS.items()),
    ]


def to_dict(found: Sequence[Check]) -> dict[str, Any]:
    """All checks and whether none failed, in JSON types."""
    return {"ok": all(c.status != "failed" for c in found), "checks": [dataclasses.asdict(c) for c in found]}


def check_python() -> Check:
    return Check(name="python", status="ok", detail=f"{platform.python_version()}, {sys.executable}")


def check_torch() -> Check:
    """Compute one gradient, to detect a build whose libraries do not load."""
    fix = "pip install 'torch>=2.11,<2.14'"
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check(name="torch", status="failed", detail=f"cannot be imported: {error}", fix=fix)
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if not (2, 11) <= version < (2, 14):
        detail = f"must be at least 2.11 and below 2.14, got {torch.__version__}"
        return Check(name="torch", status="failed", detail=detail, fix=fix)
    x = torch.full((4,), 3.0, requires_grad=True)
    (gradient,) = torch.autograd.grad((x * x).sum(), x)
    if gradient.tolist() != [6.0] * 4:
        detail = f"{torch.__version__} computes a wrong gradient: {gradient.tolist()}"
        return Check(name="torch", status="failed", detail=detail, fix=fix)
    return Check(name="torch", status="ok", detail=f"{torch.__version__}, one gradient computed")


def check_conflict() -> Check:
    """`podium-nlp`, an unrelated package, installs a module that is also called podium."""
    try:
        version = importlib.metadata.version("podium-nlp")
    except importlib.metadata.PackageNotFoundError:
        return Check(
            name="no conflict", status="ok", detail="podium-nlp, which has a module of the same name, is not installed"
        )
    return Check(
        name="no conflict",
        status="failed",
        detail=f"podium-nlp {version} is installed and writes to the same folder podium/",
        fix="pip uninstall podium-nlp, then install podium again",
    )


class LinkSpeed(NamedTuple):
    """Measured speed of a pair of connected sockets."""

    round_trip_us: float
    gigabytes_per_s: float

    def __str__(self) -> str:
        return f"round trip {self.round_trip_us:.0f} µs, {self.gigabytes_per_s:.2f} GB/s, measured"


def check_tcp() -> Check:
    fix = "allow connections to 127.0.0.1 (firewall, or `ip link set lo up` in a container)"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return Check(name="loopback TCP", status="ok", detail=str(measure_link(server)))
    except OSError as error:
        return Check(name="loopback TCP", status="failed", detail=str(error), fix=fix)


def check_unix() -> Check:
    try:
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
            server.bind(f"{folder}/socket")
            server.listen()
            return Check(name="Unix socket", status="ok", detail=str(measure_link(server)))
    except OSError as error:
        fix = f"make {tempfile.gettempdir()} writable, with a short path (TMPDIR)"
        return Check(name="Unix socket", status="failed", detail=str(error), fix=fix)


def measure_link(server: socket.socket, nbytes: int = PROBE_BYTES, timeout_s: float = 10.0) -> LinkSpeed:
    """Connect to a listening socket and measure small round trips (median), then one large transfer to its receipt."""
    server.settimeout(timeout_s)
    piece = b"x" * min(nbytes, 4 << 20)
    echo = threading.Thread(target=_answer, args=(server, nbytes, timeout_s), daemon=True)
    echo.start()
    with socket.socket(server.family, socket.SOCK_STREAM) as client:
        client.settimeout(timeout_s)
        client.connect(server.getsockname())
        if server.family == socket.AF_INET:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(ROUND_TRIPS):
            begun = time.perf_counter()
            client.sendall(b"?")
            _receive(client, 1)
            trips.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        for start in range(0, nbytes, len(piece)):
            client.sendall(piece[: nbytes - start])
        _receive(client, 1)
        took = time.perf_counter() - begun
    echo.join(timeout_s)
    return LinkSpeed(statistics.median(trips) * 1e6, nbytes / took / 1e9)


def _answer(server: socket.socket, nbytes: int, timeout_s: float) -> None:
    try:
        peer, _ = server.accept()
        with peer:
            peer.settimeout(timeout_s)
            for _ in range(ROUND_TRIPS):
                peer.sendall(_receive(peer, 1))
            _receive(peer, nbytes)
            peer.sendall(b"!")
    except OSError:
        return  # the client sees the connection end, and reports it


def _receive(source: socket.socket, nbytes: int) -> bytes:
    """Receive this many bytes; returns the last chunk."""
    room = memoryview(bytearray(min(nbytes, 1 << 20)))
    while nbytes:
        count = source.recv_into(room[: min(nbytes, len(room))])
        if not count:
            raise ConnectionError("the connection ended early")
        nbytes -= count
    return bytes(room[:count])


def exercise_collective(device: str = "cpu", collective: str = "backend") -> str:
    """Train three steps of all-reduce on two real processes; returns a summary, or raises."""
    from podium.launch.run import train

    with tempfile.TemporaryDirectory() as folder:
        asked = {"workers": 2, "steps": 3, "device": device, "collective": collective, "out": folder}
        result = train("digits-mlp", strategy="all-reduce", **asked)  # type: ignore[arg-type]  # each field has its type
    hashes = set(result.param_hash.values())
    if len(result.param_hash) != 2 or len(hashes) != 1:
        raise ConfigError(f"two workers must end with equal parameters, got hashes {dict(result.param_hash)}")
    return f"2 processes, 3 steps in {result.seconds:.2f} s, equal parameters after them"


def check_collective(exercise: Callable[[], str]) -> Check:
    fix = "see that processes may be started and that 127.0.0.1 is reachable, then `podium train --workers 2` for more"
    try:
        return Check(name="gloo", status="ok", detail=exercise())
    except (PodiumError, ImportError, OSError) as error:
        return Check(name="gloo", status="failed", detail=f"{type(error).__name__}: {error}", fix=fix)


def check_shared_memory(exercise: Callable[[], str]) -> Check:
    try:
        return Check(name="shared memory", status="ok", detail=exercise())
    except (PodiumError, ImportError, OSError) as error:
        fix = "workers of one host add up through gloo instead, which is slower"
        return Check(name="shared memory", status="skipped", detail=f"{error}; {fix}")


def check_nccl() -> Check:
    try:
        import torch
    except (ImportError, OSError):
        return Check(name="nccl", status="skipped", detail="torch cannot be imported")
    if not torch.cuda.is_available():
        return Check(name="nccl", status="skipped", detail="no CUDA GPU here")
    if torch.cuda.device_count() < 2:
        return Check(name="nccl", status="skipped", detail="one GPU only: nccl needs one per rank, nothing to exchange")
    try:
        return Check(name="nccl", status="ok", detail=exercise_collective("cuda"))
    except (PodiumError, ImportError, OSError, RuntimeError) as error:
        fix = "set NCCL_DEBUG=INFO and run `podium train --workers 2 --device cuda` for the cause"
        return Check(name="nccl", status="failed", detail=f"{type(error).__name__}: {error}", fix=fix)


def check_energy() -> Check:
    found, missing = [], []
    for name, read in (("NVML", _read_nvml), ("RAPL", _read_rapl)):
        try:
            found.append(f"{name}: {read():.0f} J since it began counting")
        except (OSError, ImportError) as error:
            missing.append(f"{name}: {error}")
    if found:
        return Check(name="energy", status="ok", detail="; ".join(found + missing))
    return Check(
        name="energy",
        status="skipped",
        detail=f"joules will be left blank ({'; '.join(missing)})",
        fix="GPU: pip install 'podium[sweep]'; Intel or AMD CPU: run as root, who alone may read its counter",
    )


def _read_nvml() -> float:
    from podium.records.nvml import open_gpus, why_absent

    if why := why_absent():
        raise OSError(why)
    joules = [millijoules / 1e3 for gpu in open_gpus() if (millijoules := gpu.energy_mj()) is not None]
    if not joules:
        raise OSError("no GPU here has a counter")
    return sum(joules)


def _read_rapl(folder: Path = Path("/sys/class/powercap")) -> float:
    counters = sorted(folder.glob("intel-rapl:[0-9]*/energy_uj"))
    if not counters:
        raise OSError("this machine shows no counter")
    return sum(int(counter.read_text()) for counter in counters) / 1e6


def check_shaping() -> Check:
    """Make two network namespaces, shape them, connect them and remove them."""
    name = "shaped links"
    if os.geteuid() != 0:
        detail = "network namespaces need root; the shaped launcher was not tried"
        return Check(name=name, status="skipped", detail=detail, fix="run `podium doctor` as root")
    from podium.launch.clusters.description import uniform
    from podium.launch.clusters.namespaces import ShapedNetwork

    try:
        with ShapedNetwork(uniform(2, mbit=100)) as network:
            seen = sorted(set(network.facts["congestion_control"]["seen"]))
        detail = f"2 namespaces made, shaped to 100 Mbit/s, connected ({', '.join(seen)}) and removed"
        return Check(name=name, status="ok", detail=detail)
    except ConfigError as error:
        fix = "apt install iproute2; in a container, grant CAP_NET_ADMIN and CAP_SYS_ADMIN"
        return Check(name=name, status="failed", detail=str(error), fix=fix)


def check_quota() -> Check:
    """Run a busy process under a quota, and check that the kernel throttled it."""
    if os.geteuid() != 0:
        detail = "control groups need root; CPU quotas were not tried"
        return Check(name="CPU quota", status="skipped", detail=detail, fix="run `podium doctor` as root")
    from podium.launch.clusters.cpu_quota import CpuQuota
    from podium.launch.clusters.description import Cluster, Node

    fix = "only cluster files that give `cpus` need it: leave that out, or mount the cpu cgroup writable"
    busy = "import sys, time\nsys.stdin.read()\nend = time.process_time() + 0.1\nwhile time.process_time() < end: pass"
    try:
        with CpuQuota(Cluster(nodes=(Node(name="half", cpus=0.5),))) as quota:
            child = subprocess.Popen([sys.executable, "-c", busy], stdin=subprocess.PIPE)
            try:
                quota.add(0, child.pid)
                child.communicate(timeout=30)
            finally:
                child.kill()
                child.wait()
            held = quota.facts()["half"].get("nr_throttled", 0)
    except (ConfigError, subprocess.TimeoutExpired) as error:
        return Check(name="CPU quota", status="failed", detail=str(error), fix=fix)
    if not held:
        detail = "half a CPU was set, and a busy process was never held back"
        return Check(name="CPU quota", status="failed", detail=detail, fix=fix)
    return Check(name="CPU quota", status="ok", detail=f"half a CPU was set; a busy process was held back {held} times")


def check_folder(out: Path, need_bytes: int = 200 << 20) -> Check:
    """Write a file where runs go (without making the folder itself), and check the free space."""
    place = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".podium-doctor-") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(place).free
    except OSError as error:
        detail = f"{place} cannot be written to: {error.strerror}"
        return Check(name="run folder", status="failed", detail=detail, fix="choose another one with --out")
    detail = f"{place} written to, {free / 1e9:.1f} GB free"
    if free < need_bytes:
        fix = f"free {need_bytes / 1e6:.0f} MB there, or choose another folder with --out"
        return Check(name="run folder", status="failed", detail=detail, fix=fix)
    return Check(name="run folder", status="ok", detail=detail)


def check_extra(extra: str, packages: dict[str, str]) -> Check:
    """Import an extra's modules in a separate process: some take long, and some change settings of the process."""
    name, install = f"extra {extra}", f"pip install 'podium[{extra}]'"
    installed = [package for package in packages if _version(package)]
    missing = [package for package in packages if package not in installed]
    if missing:
        detail = f"not installed: {', '.join(missing)}"
        return Check(name=name, status="skipped", detail=detail, fix=install)
    script = f"import {', '.join(packages.values())}"
    try:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return Check(name=name, status="failed", detail=f"`{script}` took over 120 s", fix=install)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Check(name=name, status="failed", detail=f"`{script}`: {last}", fix=f"{install} --force-reinstall")
    versions = ", ".join(f"{package} {_version(package)}" for package in packages)
    return Check(name=name, status="ok", detail=f"imported {versions}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

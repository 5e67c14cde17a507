"""The container file and the compose file of examples/containers.

No engine runs containers here. `buildah` builds the image on a base that `debootstrap` makes, and its commands run in
its root file system: under buildah's chroot isolation, and on hosts of `podium.testing`, which stand for the
containers' network. Torch and other packages are not installed from an index: the image sees those of this Python
environment, mounted read-only. Limits of CPU time and the image's usual base are not tried.
"""

from __future__ import annotations

import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import podium
from podium.launch.clusters.description import read_cluster
from podium.testing import Host, Hosts, hosts, make_hosts

Make = Callable[..., Hosts]
__all__ = ["make_hosts"]  # the fixture

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "containers"
CLUSTER = ROOT / "examples" / "clusters" / "one-slow-of-four.toml"
PACKAGES = sysconfig.get_path("platlib")
INSIDE = "/mnt/container"
"""Where a host has the image's root file system."""


@pytest.fixture(scope="session")
def compose() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    found: dict[str, Any] = yaml.safe_load((EXAMPLE / "compose.yaml").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="session")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example's folder with its secrets made."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh-keygen: apt install openssh-client")
    folder = tmp_path_factory.mktemp("containers") / "example"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("secrets"))
    subprocess.run([folder / "make_keys.sh"], check=True, timeout=20)
    return folder


class TestTheComposeFile:
    def test_its_hosts_are_the_nodes_of_the_cluster_file_with_their_speeds(self, compose: dict[str, Any]) -> None:
        nodes = {node.name: node.speed for node in read_cluster(CLUSTER).nodes}
        assert {name: service["cpus"] for name, service in compose["services"].items() if name != "head"} == nodes
        lines = [line for line in (EXAMPLE / "hosts").read_text().splitlines() if not line.startswith("#")]
        assert lines == [f"{name} slots=1" for name in nodes]
        assert list(compose["services"]["head"]["depends_on"]) == list(nodes)

    def test_one_image_serves_all_roles_on_a_network_of_their_own(self, compose: dict[str, Any]) -> None:
        for service in compose["services"].values():
            assert service["image"] == "podium" and service["networks"] == ["cluster"]
            build = service["build"]
            assert (EXAMPLE / build["context"] / build["dockerfile"]).resolve() == EXAMPLE / "Containerfile"
            assert "ports" not in service
        assert compose["networks"] == {"cluster": {"internal": True}}

    def test_secrets_are_files_and_nothing_secret_is_in_an_environment_or_a_command(
        self, compose: dict[str, Any], secrets: Path
    ) -> None:
        for name, secret in compose["secrets"].items():
            assert list(secret) == ["file"] and Path(secret["file"]) == Path("secrets", name)
            assert (secrets / secret["file"]).stat().st_mode & 0o077 == 0
        for service in compose["services"].values():
            assert "environment" not in service and set(service["secrets"]) <= set(compose["secrets"])
        assert "head_key" not in compose["services"]["slow"]["secrets"], "no host can log in to another"
        ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
        assert "examples/containers/secrets/" in ignored

    def test_keys_are_made_once_and_stand_for_every_host(self, secrets: Path, compose: dict[str, Any]) -> None:
        key = (secrets / "secrets" / "head_key").read_bytes()
        subprocess.run([secrets / "make_keys.sh"], check=True, timeout=20)
        assert (secrets / "secrets" / "head_key").read_bytes() == key
        names, *rest = (secrets / "secrets" / "known_hosts").read_text().split()
        assert names.split(",") == [name for name in compose["services"] if name != "head"]
        assert rest[:2] == (secrets / "secrets" / "host_key.pub").read_text().split()[:2]


class Image(NamedTuple):
    """A container of the built image; `root` is its root file system."""

    run: Callable[..., str]
    root: Path


@pytest.fixture(scope="session")
def image() -> Iterator[Image]:
    needed = {"buildah": "buildah", "debootstrap": "debootstrap"}
    if reason := hosts.why_not() or hosts.why_without("building the image needs", needed):
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="podium-image-", dir="/var/tmp"))  # hosts have another /tmp
    try:
        yield build(folder)
    finally:
        shutil.rmtree(folder)


def build(folder: Path) -> Image:
    def buildah(*words: str, timeout_s: float = 120) -> str:
        store = ("--storage-driver", "vfs", "--root", str(folder / "store"), "--runroot", str(folder / "run"))
        return command("buildah", *store, *words, timeout_s=timeout_s)

    isolated = ("--isolation", "chroot", "--volume", f"{PACKAGES}:/packages:ro")
    empty = buildah("from", "scratch")
    make_base(Path(buildah("mount", empty)))
    buildah("config", "--env", "PYTHONPATH=/packages", empty)
    buildah("commit", "--rm", empty, "base")
    file = ("--file", str(EXAMPLE / "Containerfile"), "--build-arg", "BASE=localhost/base", "--tag", "podium")
    buildah("bud", *isolated, *file, str(ROOT))
    container = buildah("from", "--pull-never", "localhost/podium")
    root = Path(buildah("mount", container))
    (site,) = root.glob("opt/podium/lib/python3.*/site-packages")
    (site / "mounted.pth").write_text("/packages\n")
    return Image(lambda *words: buildah("run", *isolated, container, *words), root)


def make_base(root: Path) -> None:
    """A Debian with Python and ssh, whose pip reaches no index but takes the packages that are mounted."""
    release = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    suite = release if Path("/usr/share/debootstrap/scripts", release).is_file() else "stable"
    include = "--include=python3,python3-venv,openssh-server,openssh-client"
    try:
        command("debootstrap", "--variant=minbase", include, suite, str(root), timeout_s=240)
    except AssertionError as error:
        pytest.skip(f"debootstrap made no base image of {suite}: {str(error).splitlines()[-1]}")
    here = ".".join(platform.python_version_tuple()[:2])
    there = command("chroot", str(root), "python3", "-c", "import platform; print(platform.python_version())")
    if not there.startswith(f"{here}."):
        pytest.skip(f"Python {there} of {suite} cannot use this environment's packages, which are for {here}")
    (root / "packages").mkdir()
    # pip reads this option the wrong way round: `false` is what turns isolation off.
    (root / "etc" / "pip.conf").write_text("[global]\nno-index = true\nno-build-isolation = false\n")


def command(*words: str, timeout_s: float = 60) -> str:
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}".strip()
    return done.stdout.strip()


class Services:
    """Services of the compose file, each on a host that stands for its container."""

    def __init__(self, machines: Hosts, compose: dict[str, Any], folder: Path, image: Image) -> None:
        self._compose, self._folder, self._image = compose, folder, image
        self.machines = dict(zip(compose["services"], machines, strict=True))
        names = "".join(f"{host.address} {name}\n" for name, host in self.machines.items())
        for name, host in self.machines.items():
            self._prepare(name, host, "127.0.0.1 localhost\n" + names)

    def run(self, name: str, *words: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        return self.machines[name].run("chroot", INSIDE, *words, env=self._environment(), timeout_s=timeout_s)

    def start(self, name: str) -> None:
        """Start a service and wait until its health check passes."""
        service = self._compose["services"][name]
        self.machines[name].start("chroot", INSIDE, *service["command"], env=self._environment())
        check, until = service["healthcheck"]["test"], time.monotonic() + 30
        while (done := self.run(name, *check[1:])).returncode != 0:
            assert time.monotonic() < until, done.stderr
            time.sleep(0.02)

    def _environment(self) -> dict[str, str]:
        """As the image has it."""
        path = re.search(r"^ENV PATH=(\S+)$", (EXAMPLE / "Containerfile").read_text(), re.MULTILINE)
        assert path
        return {"PATH": path[1], "PYTHONPATH": "", "HOME": "/root"}

    def _prepare(self, name: str, host: Host, names: str) -> None:
        """What an engine does: mounts, the names of the network, secrets, configs, volumes."""
        own, service = host.folder / "container", self._compose["services"][name]
        own.mkdir()
        (own / "hosts").write_text(names)
        (own / "volume").mkdir()
        files = {f"/run/secrets/{secret}": self._compose["secrets"][secret] for secret in service["secrets"]}
        files |= {part["target"]: self._compose["configs"][part["source"]] for part in service.get("configs", ())}
        for number, content in enumerate(files.values()):
            shutil.copy(self._folder / content["file"], own / str(number))
        lines = [
            "set -e",
            f"hostname {name}",
            f"mkdir {INSIDE} && mount --bind {self._image.root} {INSIDE} && cd {INSIDE}",
            "mount -t proc none proc && mount --rbind /dev dev && mount -t tmpfs none tmp && mount -t tmpfs none run",
            f"mkdir run/sshd run/secrets && mount --bind {PACKAGES} packages",
            "mount --bind /tmp/container/hosts etc/hosts && mount --bind /tmp/container/volume runs",
            *(f"touch .{path} && mount --bind /tmp/container/{i} .{path}" for i, path in enumerate(files)),
        ]
        done = host.run("sh", "-c", "\n".join(lines))
        assert done.returncode == 0, done.stderr


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(400)
class TestTheImage:
    def test_podium_is_installed_in_it_and_trains(self, image: Image) -> None:
        assert image.run("podium", "--version") == f"podium {podium.__version__}"
        assert image.run("python", "-c", "import podium; print(podium.__file__)").startswith("/opt/podium/")
        words = ("train", "digits-mlp", "--workers", "2", "--set", "steps=4", "--out", "/tmp/runs", "--json")
        assert '"param_hash"' in image.run("podium", *words)

    def test_the_head_logs_in_to_every_host_and_no_host_to_another(
        self, image: Image, make_hosts: Make, compose: dict[str, Any], secrets: Path
    ) -> None:
        services = Services(make_hosts(len(compose["services"])), compose, secrets, image)
        names = [name for name in compose["services"] if name != "head"]
        for name in names:
            services.start(name)
        for name in names:
            done = services.run("head", "ssh", "-o", "BatchMode=yes", name, "hostname; podium --version")
            assert done.stdout.split() == [name, "podium", podium.__version__], done.stderr
        assert services.run("slow", "ssh", "-o", "BatchMode=yes", "fast-0", "true").returncode == 255

    def test_the_command_of_the_head_trains_on_all_hosts_and_the_records_come_home(
        self, image: Image, make_hosts: Make, compose: dict[str, Any], secrets: Path
    ) -> None:
        if "--hosts" not in image.run("podium", "train", "--help"):
            pytest.skip("this Podium has no launcher ssh")
        services = Services(make_hosts(len(compose["services"])), compose, secrets, image)
        for name in services.machines:
            if name != "head":
                services.start(name)
        words = (*shlex.split(compose["services"]["head"]["command"]), "--set", "steps=40")
        done = services.run("head", *words, timeout_s=200)
        assert done.returncode == 0, done.stderr
        (run,) = (services.machines["head"].folder / "container" / "volume").iterdir()
        assert {path.name for path in run.glob("records/rank-*")} == {f"rank-{rank}.jsonl" for rank in range(4)}

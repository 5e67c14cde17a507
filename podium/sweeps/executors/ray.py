"""Trials in Ray actors that each book a share of the GPU.

Ray schedules and starts the processes; it limits neither memory nor multiprocessors, and without MPS the driver lets
the actors take turns. Only short JSON texts are sent through Ray: a model goes through a file.

The sweep starts its own Ray, on the loopback address, and shuts it down at the end. A Ray that is already initialized
is used and left running; its actors are bound to this machine, whose files and GPU they share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, final

import podium
from podium.errors import TrainingError
from podium.launch.ray_process import import_ray, in_short, restored_process
from podium.sweeps.executors.mps import GRACE_S, check_clients, daemon_for, need_gpu, take_off
from podium.sweeps.executors.process_executor import ProcessExecutor
from podium.sweeps.executors.process_pool import ProcessMessage, ProcessPool, ProcessTransport
from podium.sweeps.executors.trial_process import ProcessSetup, ProgressPage, TrialProcess, settle_in
from podium.sweeps.recipe import Recipe

_GRACE_S = 5.0
_OBJECT_STORE_BYTES = 80 << 20  # the least that Ray takes; Podium stores nothing in it
_WHO = "executor ray"
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent to anyone
    "RAY_worker_niceness": "0",  # or every other process of the machine would have priority
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # listen on the loopback address only, as on Windows and macOS
    "RAY_AUTH_MODE": "token",  # or any process of this machine could run code in it; not the default of every version
}


@final
@dataclass(frozen=True, kw_only=True)
class RayActors(ProcessExecutor):
    """Trials in Ray actors, several to a GPU."""

    name = "ray"

    mps: bool = False
    """Whether actors compute on the GPU at the same time, through MPS; otherwise they take turns."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mps:
            check_clients(self.name, self.count)

    def check(self, recipe: Recipe) -> None:
        import_ray(_WHO)
        if self.mps:
            need_gpu(self.name, recipe)
        super().check(recipe)

    @contextmanager
    def transport(self, recipe: Recipe, pool: ProcessPool, spool: Path) -> Iterator[ProcessTransport]:
        ray, on_gpu = import_ray(_WHO), recipe.torch_device.type == "cuda"
        with ExitStack() as stack:
            daemon = stack.enter_context(daemon_for(self.name, recipe)) if self.mps else None
            if not ray.is_initialized():
                stack.enter_context(_own_ray(ray, spool / "ray", gpus=int(on_gpu)))
            share = 1 / pool.count if on_gpu else 0
            if daemon is None:
                actors = RayProcesses(ray, share)
            else:
                actors = RayProcesses(
                    ray, share, daemon.env(), grace_s=GRACE_S, before_kill=functools.partial(take_off, daemon)
                )
            yield stack.enter_context(actors)


class _Actor:
    """A `TrialProcess` in a Ray actor; its messages are the arguments and results of calls."""

    def __init__(self, setup: str) -> None:
        told = ProcessSetup.from_json(setup)
        settle_in(told)
        self._process = TrialProcess(told)

    def answer(self, text: str) -> str:
        return self._process.answer(text)


@final
class RayProcesses(ProcessTransport):
    """Starts processes as Ray actors on this machine."""

    def __init__(
        self,
        ray: Any,
        gpu_share: float,
        env: Mapping[str, str] = MappingProxyType({}),
        *,
        grace_s: float = _GRACE_S,
        before_kill: Callable[[int], Any] = lambda _pid: None,
    ) -> None:
        """`before_kill` is called with the process id of an actor that is about to be killed while it works."""
        self._ray, self._share, self._env = ray, gpu_share, env
        self._grace_s, self._before_kill = grace_s, before_kill
        self._actors: dict[int, tuple[Any, ProgressPage]] = {}
        self._open: dict[Any, int] = {}
        """Calls that are not answered yet."""

    def start(self, setup: ProcessSetup) -> int | None:
        # The actor sets its environment itself: Ray chooses the visible GPU after setting it.
        setup = dataclasses.replace(setup, env=self._env)
        affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        actor = self._ray.remote(_Actor).options(
            num_cpus=0,
            num_gpus=self._share,
            max_restarts=0,
            max_task_retries=0,
            runtime_env={"env_vars": {"PYTHONPATH": _python_path(), "OMP_NUM_THREADS": str(setup.threads)}},
            scheduling_strategy=affinity(self._ray.get_runtime_context().get_node_id(), soft=False),
        )
        self._actors[setup.number] = actor.remote(setup.to_json()), ProgressPage(setup.page)
        return None

    def send(self, number: int, text: str) -> None:
        self._open[self._actors[number][0].answer.remote(text)] = number

    def hear(self, timeout_s: float) -> list[ProcessMessage]:
        if not self._open:
            time.sleep(timeout_s)
            return []
        self._ray.wait(list(self._open), num_returns=1, timeout=timeout_s)
        ready, _ = self._ray.wait(list(self._open), num_returns=len(self._open), timeout=0)
        return [self._receive_one(call) for call in ready]

    def _receive_one(self, call: Any) -> ProcessMessage:
        number = self._open.pop(call)
        try:
            return ProcessMessage(number, self._ray.get(call, timeout=self._grace_s))
        except self._ray.exceptions.RayError as error:
            return ProcessMessage(number, None, f"its Ray actor is gone: {in_short(error)}")

    def end(self, number: int) -> None:
        self._end([number])

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end(list(self._actors))

    def _end(self, numbers: list[int]) -> None:
        """Wait up to `grace_s` for the actors' open calls, then kill the actors."""
        ending = {number: self._actors.pop(number) for number in numbers}
        calls = {call: number for call, number in self._open.items() if number in ending}
        self._open = {call: number for call, number in self._open.items() if call not in calls}
        busy = list(calls)
        try:
            if busy:
                _, busy = self._ray.wait(busy, num_returns=len(busy), timeout=self._grace_s)
        finally:
            for call in busy:
                self._before_kill(ending[calls[call]][1].pid)
            for actor, _ in ending.values():
                self._ray.kill(actor)
            _see_off([page.pid for _, page in ending.values()])


@contextmanager
def _own_ray(ray: Any, folder: Path, gpus: int) -> Iterator[None]:
    """A local Ray, for as long as the `with` lasts. Joining it needs its token."""
    with (
        _as_it_was(),
        _own_token(),
        # If Ray was imported before, it has read its environment already; and it prints to standard output.
        _replaced("ray._private.ray_constants", "ENABLE_RAY_CLUSTER", False),
        _replaced("ray._private.worker", "print_to_stdstream", lambda *_args, **_options: None),
    ):
        try:
            ray.init(
                address="local",
                num_cpus=0,  # Ray would start this many processes in advance, which actors with settings cannot use
                num_gpus=gpus,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=str(folder),
            )
        except (OSError, ValueError, RuntimeError) as error:
            ray.shutdown()
            raise TrainingError(f"executor ray: Ray must start, it did not: {error}") from error
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Set Ray's environment variables; afterwards restore what Ray has changed in this process."""
    # The default is Ray's number of CPUs, 0 here, and would start one process after the other.
    at_once = {"RAY_worker_maximum_startup_concurrency": str(len(os.sched_getaffinity(0)))}
    with restored_process():
        os.environ.update(_SETTINGS | at_once)
        yield


@contextmanager
def _own_token() -> Iterator[None]:
    """Have Ray require a new token for this sweep, whatever the environment was when Ray was imported.

    By default Ray stores its token in the user's home, in a file that other users may be able to read.
    """
    raylet = importlib.import_module("ray._raylet")
    os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    try:
        _read_again(raylet)
        if raylet.get_authentication_mode() != raylet.AuthenticationMode.TOKEN:
            raise TrainingError("executor ray: Ray must require a token before it runs code, it does not")
        yield
    finally:
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
            os.environ.pop(name, None)
        _read_again(raylet)


def _read_again(raylet: Any) -> None:
    """Make Ray read its environment, which it does only at import."""
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _replaced(module: str, name: str, value: object) -> Iterator[None]:
    """Replace a name in one of Ray's modules, where Ray has no setting; does nothing if the name does not exist."""
    place = importlib.import_module(module)
    if not hasattr(place, name):
        yield
        return
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


def _python_path() -> str:
    """PYTHONPATH of an actor: this Podium comes first."""
    root = str(Path(podium.__file__).resolve().parents[1])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])


def _see_off(pids: list[int]) -> None:
    """Wait until Ray has ended these processes; kill those that live after `_GRACE_S`."""
    until = time.monotonic() + _GRACE_S
    for pid in filter(None, pids):
        while _is_alive(pid) and time.monotonic() < until:
            time.sleep(0.01)
        if _is_alive(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

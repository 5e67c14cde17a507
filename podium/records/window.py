"""Measures one piece of work on a device: seconds, joules, memory, utilisation of the GPU and the host.

The figures of a `Reading` are measured or absent, never guessed; `Reading.absent` has the reason. Energy follows the
rules of MLPerf's power measurement as far as possible without a meter at the wall:

- Energy and performance come from the same run: one window gives both, so no report can take the best of each.
- A window lasts `ENERGY_WINDOW_S` at least. Where the work is shorter, the same code repeats the loop; a shorter
  window's energy is given and flagged (`energy_is_short`). The counter moves in steps and the board's sensor measures
  only part of the time (Yang, Adamek, Armour, Part-time Power Measurements, 2023, https://arxiv.org/abs/2312.02741).
- Clocks and power limits must not change between the arms of a comparison, and the limit, the clocks, the driver and
  the temperature are recorded beside the result. Arms are interleaved: hotter silicon draws more.
- Total and idle-subtracted energy are both reported. There is no energy of one process or one trial: joules per trial
  are the total divided by the trials.
- Results are named by `LABEL`: GPU board energy alone, without the host, and never "MLPerf results".
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, final

import torch

from podium.errors import ConfigError
from podium.records.nvml import GPM_METRICS, Gpm, Gpu, why_absent

LABEL: Final = "GPU board energy by NVML, MLPerf-Power-style"
ENERGY_WINDOW_S: Final = 60.0
"""The shortest window whose energy is worth reporting."""

SAMPLE_EVERY_S: Final = 0.1
"""How often an open window samples memory and utilisation."""

_FAMILY_EVERY_S: Final = 1.0  # finding new processes costs more than reading the known ones
_FAMILY_PART: Final = 0.02  # where there are thousands, it takes at most this part of a core
_JOIN_S: Final = 5.0
_PROC: Final = Path("/proc")
_IDLE_SAMPLE_S: Final = 0.05


class Idle(NamedTuple):
    """Power and memory of a GPU while nothing runs on it; None where NVML does not give them."""

    power_w: float | None
    memory_bytes: int | None
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The measurements of one window. None is absent, and `absent` has the reason, by field."""

    seconds: float
    """Wall-clock time between the edges of the window."""
    energy_j: float | None
    """Energy of the whole board, by its counter."""
    energy_over_idle_j: float | None
    """The same minus the energy of an idle board."""
    power_w: float | None
    """Mean power: energy / seconds."""
    power_over_idle_w: float | None
    energy_is_short: bool
    """The window was shorter than `ENERGY_WINDOW_S`: an energy in it is a hint, not a result."""
    memory_bytes: float | None
    """Peak device memory of all processes (sampled every 100 ms), over the idle baseline."""
    utilisation: float | None
    """Mean per cent of the time in which any kernel ran, however small."""
    sm_util: float | None
    """Per cent of the multiprocessors that were busy, over the window, as the three below."""
    sm_occupancy: float | None
    """Active warps, in per cent of the maximum."""
    any_tensor_util: float | None
    """Per cent of the time that tensor cores worked."""
    dram_bw_util: float | None
    """Bytes moved, in per cent of the memory bandwidth."""
    temperature_before_c: float | None
    temperature_after_c: float | None
    host_memory_bytes: float | None
    """Peak resident memory of this process and its descendants. Shared pages count once for each process."""
    cpu_s: float | None
    """CPU time of this process and its descendants. It may lack the end of a process that was not waited for."""
    absent: Mapping[str, str]
    """Why a field is None, by its name."""


def measure_idle(gpu: Gpu, seconds: float = 5.0) -> Idle:
    """Measure a GPU on which nothing should run. Blocks for `seconds`, which should be a second or more.

    The same board draws more while a process has a CUDA context: measure idle in the state that the work is compared
    with, and report which it was.
    """
    if not seconds > 0:
        raise ConfigError(f"measure_idle: seconds must be above 0, got {seconds}")
    _synchronise(gpu)
    began, before = time.perf_counter(), gpu.energy_mj()
    powers, memories = [], []
    while (left := began + seconds - time.perf_counter()) > 0:
        powers.append(gpu.power_w())
        memories.append(gpu.memory_used_bytes())
        time.sleep(min(_IDLE_SAMPLE_S, left))
    took, after = time.perf_counter() - began, gpu.energy_mj()
    known = [power for power in powers if power is not None]
    power = sum(known) / len(known) if known else None
    if before is not None and after is not None and after > before:
        power = (after - before) / 1e3 / took
    held = [memory for memory in memories if memory is not None]
    return Idle(power, min(held) if held else None, took)


@final
class Window:
    """Measures between `begin` and `end`, or inside its `with`; then `reading` has the figures.

    Both edges wait for the kernels that this process has launched on the board (other processes must synchronise
    themselves). A thread samples memory and utilisation every 100 ms; it ends with the window. Without a `gpu`, only
    seconds and the host's figures are measured. With `idle`, energy and power are also given without their idle part,
    and memory is counted from the idle baseline; else memory is counted from the memory in use at the beginning.
    `gpm=False` does not use the chip's own counters, for runs beside a profiler. A window may be used again, after its
    end.
    """

    def __init__(self, gpu: Gpu | None, *, idle: Idle | None = None, gpm: bool = True) -> None:
        self._gpu, self._idle = gpu, idle
        self._no_gpu = "" if gpu is not None else why_absent() or "no GPU was given"
        self._gpm = Gpm(gpu) if gpu is not None and gpm else None
        self._sampler: _Sampler | None = None
        self._reading: Reading | None = None

    @property
    def reading(self) -> Reading:
        """The figures, once the window has ended."""
        if self._reading is None:
            raise ConfigError("Window: reading is available once the window has ended, and it has not")
        return self._reading

    def begin(self) -> None:
        if self._sampler is not None:
            raise ConfigError("Window: begin must follow end, and this window is open")
        _synchronise(self._gpu)
        self._reading = None
        self._sampler = _Sampler(self._gpu)
        weakref.finalize(self, self._sampler.stop)  # no thread stays if a window is dropped without `end`
        self._sampler.start()
        if self._gpm is not None:
            self._gpm.begin()
        self._around = _around(self._gpu)
        self._began = _moment(self._gpu)

    def end(self) -> Reading:
        if self._sampler is None:
            raise ConfigError("Window: end must follow begin, and this window is not open")
        try:
            _synchronise(self._gpu)
        finally:
            ended, around = _moment(self._gpu), _around(self._gpu)
            gpm = {} if self._gpm is None else self._gpm.end()
            sampler, self._sampler = self._sampler, None
            sampler.finish()
            self._reading = self._read(ended, around, gpm, sampler)
        return self._reading

    def __enter__(self) -> Window:
        self.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.end()
        else:
            with contextlib.suppress(RuntimeError):  # a failed device cannot be waited for: raise the first error
                self.end()

    def _read(self, ended: _Moment, after: _Around, gpm: Mapping[str, float | None], sampler: _Sampler) -> Reading:
        began, before, idle, why = self._began, self._around, self._idle, self._why
        seconds = ended.at_s - began.at_s
        sheet = _Sheet()
        energy = sheet.put("energy_j", _rise(began.energy_j, ended.energy_j), why("energy_mj", "its counter fell"))
        power = sheet.put("power_w", None if energy is None else energy / seconds, sheet.absent.get("energy_j", ""))
        idle_w = None if idle is None else idle.power_w
        idle_j = None if idle_w is None else idle_w * seconds
        no_idle = sheet.absent.get("energy_j", "no idle power is known: give idle=measure_idle(gpu)")
        sheet.put("energy_over_idle_j", _less(energy, idle_j), no_idle)
        sheet.put("power_over_idle_w", _less(power, idle_w), no_idle)
        baseline = before.memory_bytes if idle is None else idle.memory_bytes
        no_memory = sampler.trouble or why("memory_used_bytes", "no idle memory is known")
        sheet.put("memory_bytes", _less(sampler.memory_bytes, baseline), no_memory)
        sheet.put("utilisation", sampler.mean_utilisation, sampler.trouble or why("utilisation"))
        unasked = "GPM was not asked for" if self._gpu is not None else why("")
        for metric in GPM_METRICS:
            sheet.put(metric, gpm.get(metric), unasked if self._gpm is None else self._gpm.absent.get(metric, ""))
        sheet.put("temperature_before_c", before.temperature_c, why("temperature_c"))
        sheet.put("temperature_after_c", after.temperature_c, why("temperature_c"))
        sheet.put("host_memory_bytes", sampler.host_bytes, sampler.trouble or f"{_PROC} cannot be read")
        sheet.put("cpu_s", _rise(before.cpu_s, after.cpu_s), f"{_PROC} cannot be read")
        short = seconds < ENERGY_WINDOW_S
        return Reading(seconds=seconds, energy_is_short=short, absent=sheet.absent, **sheet.figures)

    def _why(self, figure: str, otherwise: str = "NVML gave nothing") -> str:
        if self._gpu is None:
            return self._no_gpu
        return self._gpu.absent.get(figure, otherwise)


class _Sheet:
    """Collects figures, and the reasons for missing ones."""

    def __init__(self) -> None:
        self.figures: dict[str, float | None] = {}
        self.absent: dict[str, str] = {}

    def put(self, field: str, value: float | None, why_not: str) -> float | None:
        self.figures[field] = value
        if value is None:
            self.absent[field] = why_not
        return value


class _Moment(NamedTuple):
    """Time and energy, read right after each other, since power is their ratio."""

    at_s: float
    energy_j: float | None


class _Around(NamedTuple):
    """Other figures at an edge of a window; slower to read, so read outside of it."""

    memory_bytes: float | None
    temperature_c: float | None
    cpu_s: float | None


def _moment(gpu: Gpu | None) -> _Moment:
    millijoules = None if gpu is None else gpu.energy_mj()
    return _Moment(time.perf_counter(), None if millijoules is None else millijoules / 1e3)


def _around(gpu: Gpu | None) -> _Around:
    if gpu is None:
        return _Around(None, None, _cpu_of_family())
    return _Around(gpu.memory_used_bytes(), gpu.temperature_c(), _cpu_of_family())


def _synchronise(gpu: Gpu | None) -> None:
    """Wait for the kernels that this process has launched; does not start CUDA."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize(None if gpu is None else gpu.index)


@final
class _Sampler:
    """A thread that samples peak memory and utilisation. Stores sums and peaks only."""

    def __init__(self, gpu: Gpu | None) -> None:
        self._gpu = gpu
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="podium-window", daemon=True)
        self._family: list[int] = []
        self._look_again_s = 0.0
        self._used: list[float] = [0.0, 0.0]  # the sum of utilisation samples, and their number
        self.memory_bytes: float | None = None
        self.host_bytes: float | None = None
        self.trouble = ""

    @property
    def mean_utilisation(self) -> float | None:
        total, count = self._used
        return total / count if count else None

    def start(self) -> None:
        self._sample()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def finish(self) -> None:
        """End the thread, and sample once more. If it does not end (the driver hangs), sets `trouble`."""
        self.stop()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            self.trouble = f"the thread that reads it did not end within {_JOIN_S:.0f} s"
        else:
            self._look_again_s = 0.0
            self._sample()

    def _run(self) -> None:
        while not self._stopped.wait(SAMPLE_EVERY_S):
            self._sample()

    def _sample(self) -> None:
        if self._gpu is not None:
            self.memory_bytes = _most(self.memory_bytes, self._gpu.memory_used_bytes())
            busy = self._gpu.utilisation()
            if busy is not None:
                self._used[0] += busy
                self._used[1] += 1
        began = time.monotonic()
        if began >= self._look_again_s:
            self._family = list(_family())
            took = time.monotonic() - began
            self._look_again_s = began + max(_FAMILY_EVERY_S, took / _FAMILY_PART)
        self.host_bytes = _most(self.host_bytes, _resident_bytes(self._family))


def _most(known: float | None, new: float | None) -> float | None:
    return known if new is None else new if known is None else max(known, new)


def _less(value: float | None, part: float | None) -> float | None:
    return None if value is None or part is None else value - part


def _rise(before: float | None, after: float | None) -> float | None:
    """The increase of a counter; None where it was reset."""
    rise = _less(after, before)
    return rise if rise is not None and rise >= 0 else None


def _resident_bytes(pids: Iterable[int]) -> float | None:
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended
            pages += int((_PROC / str(pid) / "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") if pages else None


def _cpu_of_family() -> float | None:
    """CPU seconds of this process and its descendants so far, including ended ones that were waited for."""
    family = _family()
    if not family:
        return None
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    others = sum(ticks for pid, ticks in family.items() if pid != os.getpid())
    return time.process_time() + reaped.ru_utime + reaped.ru_stime + others / os.sysconf("SC_CLK_TCK")


def _family() -> dict[int, int]:
    """This process and its descendants, with the clock ticks each has used, including its reaped children's."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for entry in os.listdir(_PROC):
            if entry.isdecimal():
                with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
                    facts = (_PROC / entry / "stat").read_text().rpartition(")")[2].split()
                    children.setdefault(int(facts[1]), []).append(int(entry))
                    ticks[int(entry)] = sum(map(int, facts[11:15]))
    found = {pid: ticks[pid] for pid in (os.getpid(),) if pid in ticks}
    unvisited = list(found)
    while unvisited:
        for child in children.get(unvisited.pop(), ()):
            found[child] = ticks[child]
            unvisited.append(child)
    return found

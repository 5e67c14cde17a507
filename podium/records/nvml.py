"""NVML's figures for one NVIDIA GPU: energy, power, memory, utilisation.

`open_gpu` returns a `Gpu`, or None where nvidia-ml-py, the driver or the GPU is missing; `why_absent` then says which.
A figure that NVML does not give is None, and `Gpu.absent` has the reason; nothing is estimated.

NVML does not know the usage of a single process or trial (all figures are of the whole board), nor what happened
between two updates of the energy counter, which changes every 100 ms on an H200. Power is an average over the last
second on Hopper and on most of Ampere. Utilisation is the part of the time in which *any* kernel ran: one tiny kernel
after another reads 100 %. `Gpm` measures how much of the chip was busy.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final, NamedTuple, final

from podium.errors import ConfigError

try:
    import pynvml
except ImportError:  # only the extra `sweep` brings it
    pynvml = None

_MISSING: Final = "nvidia-ml-py is not installed: pip install 'podium[sweep]'"

GPM_METRICS: Final[Mapping[str, int]] = {"sm_util": 2, "sm_occupancy": 3, "any_tensor_util": 5, "dram_bw_util": 10}
"""The metrics of `Gpm` and their NVML numbers; each in per cent of the chip's maximum."""

GPM_WINDOW_S: Final = 0.15
"""The shortest window whose `Gpm` figures mean anything."""


class _Refused(Exception):
    """NVML is missing or returned an error; the message is the reason."""


class Clocks(NamedTuple):
    """The GPU's current clock rates."""

    sm_mhz: float
    memory_mhz: float


@final
class Gpu:
    """One GPU as NVML sees it. Every figure covers the whole board and all its users.

    Made by `open_gpu`; close it, or use it in a `with`. Reading takes microseconds (energy: some milliseconds), waits
    for no kernel, and may be done from any thread.
    """

    def __init__(self, handle: Any, index: int) -> None:
        self._handle, self._closed = handle, False
        self.index = index
        """The device's index in torch, after CUDA_VISIBLE_DEVICES."""
        self.absent: dict[str, str] = {}
        """Why a figure was None at its last reading, by the name of its method."""
        self.name: str | None = self._ask("name", "nvmlDeviceGetName")
        self.uuid: str | None = self._ask("uuid", "nvmlDeviceGetUUID")
        self.driver: str | None = self._ask("driver", "nvmlSystemGetDriverVersion", of_device=False)
        self.power_limit_w = _thousandth(self._ask("power_limit_w", "nvmlDeviceGetEnforcedPowerLimit"))

    def energy_mj(self) -> int | None:
        """Millijoules since the driver was loaded. Only the difference of two readings means anything."""
        return self._ask("energy_mj", "nvmlDeviceGetTotalEnergyConsumption")  # type: ignore[no-any-return]  # an int

    def power_w(self) -> float | None:
        """The GPU's power, averaged by the board over the last second or less."""
        return _thousandth(self._ask("power_w", "nvmlDeviceGetPowerUsage"))

    def memory_used_bytes(self) -> int | None:
        """Device memory in use by all processes, including contexts and the driver's own."""
        memory = self._ask("memory_used_bytes", "nvmlDeviceGetMemoryInfo")
        return None if memory is None else int(memory.used)

    def utilisation(self) -> float | None:
        """Per cent of the last sampling period in which any kernel ran, however small."""
        rates = self._ask("utilisation", "nvmlDeviceGetUtilizationRates")
        return None if rates is None else float(rates.gpu)

    def temperature_c(self) -> float | None:
        celsius = self._ask("temperature_c", "nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU)
        return None if celsius is None else float(celsius)

    def clocks_mhz(self) -> Clocks | None:
        which = (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM)
        sm, memory = (self._ask("clocks_mhz", "nvmlDeviceGetClockInfo", clock) for clock in which)
        return None if sm is None or memory is None else Clocks(float(sm), float(memory))

    def close(self) -> None:
        """Release NVML; further readings are None. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            _let_go()

    def __enter__(self) -> Gpu:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Gpu({self.name}, index={self.index})"

    def _ask(self, figure: str, function: str, *arguments: Any, of_device: bool = True) -> Any:
        """NVML's answer, or None with the reason in `absent`."""
        self.absent.pop(figure, None)
        try:
            if self._closed:
                raise _Refused("the GPU was closed")
            return _call(function, *((self._handle,) if of_device else ()), *arguments)
        except _Refused as refusal:
            self.absent[figure] = str(refusal)
            return None


@final
class Gpm:
    """How busy the chip was between `begin` and `end`, by its own counters: the keys of `GPM_METRICS`, in per cent.

    Needs a Hopper GPU or newer. The counters are updated every 50 to 100 ms, so the edges are that imprecise, and
    windows shorter than `GPM_WINDOW_S` have no figures. `absent` has the reason why a figure is None. One profiler at
    a time: beside ncu or DCGM the counters may fail or be wrong.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._first, self._began_s = gpu, None, 0.0
        self.absent: dict[str, str] = {}

    def begin(self) -> None:
        """Take the first sample. An earlier one that was not ended is dropped."""
        self._drop()
        self.absent.clear()
        try:
            self._check_open()
            if not _call("nvmlGpmQueryDeviceSupport", self._gpu._handle).isSupportedDevice:
                raise _Refused("this GPU has no GPM counters: Hopper and newer have")
            self._first = _sample(self._gpu)
            self._began_s = time.perf_counter()
        except _Refused as refusal:
            self._miss(str(refusal))

    def end(self) -> dict[str, float | None]:
        """Take the second sample and return the metrics between the two."""
        found: dict[str, float | None] = dict.fromkeys(GPM_METRICS)
        if self._first is None:
            if not self.absent:
                self._miss("GPM was not begun")
            return found
        try:
            values = self._between()
        except _Refused as refusal:
            self._miss(str(refusal))
            return found
        finally:
            self._drop()
        for name, value in values.items():
            if isinstance(value, str):
                self.absent[name] = value
            else:
                found[name] = value
        return found

    def _between(self) -> dict[str, float | str]:
        self._check_open()
        lasted_s = time.perf_counter() - self._began_s
        if lasted_s < GPM_WINDOW_S:  # both samples may be equal: zeros, not measurements
            raise _Refused(f"GPM needs {GPM_WINDOW_S} s between its two samples, there were {lasted_s:.3f}")
        second = _sample(self._gpu)
        try:
            return _metrics(self._first, second)
        finally:
            _call("nvmlGpmSampleFree", second)

    def _check_open(self) -> None:
        if self._gpu._closed:
            raise _Refused("the GPU was closed")

    def _drop(self) -> None:
        if self._first is not None and not self._gpu._closed:
            with contextlib.suppress(_Refused):
                _call("nvmlGpmSampleFree", self._first)
        self._first = None

    def _miss(self, why: str) -> None:
        self.absent.update(dict.fromkeys(GPM_METRICS, why))


def can_ask() -> bool:
    """Whether nvidia-ml-py is installed."""
    return pynvml is not None


def open_gpu(index: int = 0) -> Gpu | None:
    """The GPU that torch calls `cuda:<index>`, or None where it is not available: see `why_absent`. Starts no CUDA."""
    try:
        return _open(index)
    except _Refused:
        return None


def open_gpus() -> Iterator[Gpu]:
    """The GPUs that torch would see, each closed when the next is taken."""
    index = 0
    while (gpu := open_gpu(index)) is not None:
        with gpu:
            yield gpu
        index += 1


def why_absent(index: int = 0) -> str:
    """Why `open_gpu` returns None here; empty where it returns a GPU."""
    try:
        _open(index).close()
    except _Refused as refusal:
        return str(refusal)
    return ""


def visible_device(index: int, visible: str | None) -> int | str:
    """The physical device behind CUDA's device `index`: a number, or a UUID or its prefix.

    `visible` is the value of CUDA_VISIBLE_DEVICES. As in CUDA, the list ends before its first invalid entry.
    Raises LookupError where there is no such device.
    """
    if visible is None:
        return index
    found: list[int | str] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdecimal():
            found.append(int(entry))
        elif entry.startswith(("GPU-", "MIG-")):
            found.append(entry)
        else:
            break
    if index >= len(found):
        raise LookupError(f"device {index} is hidden by CUDA_VISIBLE_DEVICES={visible!r}")
    return found[index]


def _open(index: int) -> Gpu:
    if index < 0:
        raise ConfigError(f"open_gpu: index must be at least 0, got {index}")
    if pynvml is None:
        raise _Refused(_MISSING)
    try:
        _call("nvmlInit")
    except _Refused as refusal:
        raise _Refused(f"there is no NVIDIA driver here that answers: {refusal}") from None
    try:
        return Gpu(_find(index), index)
    except BaseException:
        _let_go()
        raise


def _let_go() -> None:
    with contextlib.suppress(_Refused):  # the driver was unloaded meanwhile: nothing is left to release
        _call("nvmlShutdown")


def _find(index: int) -> Any:
    try:
        wanted = visible_device(index, os.environ.get("CUDA_VISIBLE_DEVICES"))
    except LookupError as error:
        raise _Refused(str(error)) from None
    handles = [_call("nvmlDeviceGetHandleByIndex", i) for i in range(_call("nvmlDeviceGetCount"))]
    if isinstance(wanted, str):
        return _find_uuid(handles, wanted)
    if wanted >= len(handles):
        raise _Refused(f"NVML knows {len(handles)} GPUs, device {wanted} is none of them")
    # NVML counts by bus address, CUDA by speed unless CUDA_DEVICE_ORDER is set: with different GPUs one number may mean
    # two of them.
    by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if not by_bus and len({_call("nvmlDeviceGetName", handle) for handle in handles}) > 1:
        raise _Refused(
            "the GPUs are of several kinds, and CUDA numbers them by speed: set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    return handles[wanted]


def _find_uuid(handles: Iterable[Any], wanted: str) -> Any:
    if wanted.startswith("MIG-"):
        raise _Refused(f"{wanted} is a part of a GPU (MIG), whose energy and power NVML does not tell apart")
    matching = [handle for handle in handles if _call("nvmlDeviceGetUUID", handle).startswith(wanted)]
    if len(matching) != 1:
        raise _Refused(f"{len(matching)} GPUs have a UUID that begins with {wanted!r}")
    return matching[0]


def _call(function: str, *arguments: Any) -> Any:
    try:
        return getattr(pynvml, function)(*arguments)
    except pynvml.NVMLError as error:
        raise _Refused(f"{function}: {error}") from None


def _sample(gpu: Gpu) -> Any:
    sample = _call("nvmlGpmSampleAlloc")
    try:
        return _call("nvmlGpmSampleGet", gpu._handle, sample)
    except _Refused:
        _call("nvmlGpmSampleFree", sample)
        raise


def _metrics(first: Any, second: Any) -> dict[str, float | str]:
    """The value of each of `GPM_METRICS`, or the reason why it has none."""
    asked = pynvml.c_nvmlGpmMetricsGet_t()
    asked.version, asked.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(GPM_METRICS)
    asked.sample1, asked.sample2 = first, second
    for place, number in enumerate(GPM_METRICS.values()):
        asked.metrics[place].metricId = number
    _call("nvmlGpmMetricsGet", asked)
    return {name: _value(asked.metrics[place]) for place, name in enumerate(GPM_METRICS)}


def _value(metric: Any) -> float | str:
    if metric.nvmlReturn:
        return f"GPM metric {metric.metricId}: {pynvml.NVMLError(metric.nvmlReturn)}"
    value = float(metric.value)
    return value if math.isfinite(value) else f"GPM metric {metric.metricId}: NVML gave {value}"


def _thousandth(value: Any) -> float | None:
    return None if value is None else value / 1e3

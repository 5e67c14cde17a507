"""What NVML says of one NVIDIA GPU: energy, power, memory, how busy it is.

`open_board` gives a `Board`, or None where there is no driver or no such GPU; `why_absent` then says why. A board asks
through nvidia-ml-py where that is installed, else straight through the driver's own library. A figure that NVML does
not give is None, and `Board.absent` says why; nothing is estimated.

What NVML does not know: what a single process or trial used (all figures are of the whole board), and what happened
between two updates of the energy counter, which moves every 100 ms on an H200. Power is an average over the last
second on Hopper and on most of Ampere. Utilisation is the part of the time in which *any* kernel ran: one tiny kernel
after another reads 100 %. How much of the chip was busy is what `Gpm` says.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, TypeVar, final

from podium.errors import ConfigError, MissingExtra, UnknownName

Backend = Literal["auto", "pynvml", "ctypes"]
T = TypeVar("T")

_BACKENDS: Final = ("auto", "pynvml", "ctypes")
_LIBRARY: Final = "libnvidia-ml.so.1"
_TEXT_BYTES: Final = 96
_SM_CLOCK, _MEMORY_CLOCK = 1, 2
_GPU_SENSOR: Final = 0

GPM_METRICS: Final[Mapping[str, int]] = {"sm_util": 2, "sm_occupancy": 3, "any_tensor_util": 5, "dram_bw_util": 10}
"""What `Gpm` asks for, by NVML's number; each in per cent of what the chip could do at most."""


GPM_WINDOW_S: Final = 0.15
"""The shortest stretch whose `Gpm` figures mean anything."""


class _Refused(Exception):
    """NVML, or what leads to it, said no; the message is the reason."""


class Clocks(NamedTuple):
    """What the board's clocks run at now."""

    sm_mhz: float
    memory_mhz: float


@final
class Gpu:
    """One GPU as NVML sees it. Every figure is of the whole board, whoever uses it.

    Made by `open_board`; close it, or use it in a `with`. Reading takes microseconds (energy: some milliseconds), waits
    for no kernel, and may be done from any thread.
    """

    def __init__(self, calls: _Calls, handle: Any, index: int) -> None:
        self._calls, self._handle, self._closed = calls, handle, False
        self.index = index
        """The device's index as torch counts, behind CUDA_VISIBLE_DEVICES."""
        self.backend = calls.backend
        self.absent: dict[str, str] = {}
        """Why a figure was None when it was last asked for, by the name of its method."""
        self.name = self._ask("name", calls.name)
        self.uuid = self._ask("uuid", calls.uuid)
        self.driver = self._ask("driver", lambda _: calls.driver())
        limit = self._ask("power_limit_w", calls.power_limit_mw)
        self.power_limit_w = None if limit is None else limit / 1e3

    def energy_mj(self) -> int | None:
        """Millijoules since the driver was loaded. Only the difference of two readings means anything."""
        return self._ask("energy_mj", self._calls.energy_mj)

    def power_w(self) -> float | None:
        """What the board draws, averaged by the board over the last second or less."""
        milliwatts = self._ask("power_w", self._calls.power_mw)
        return None if milliwatts is None else milliwatts / 1e3

    def memory_used_bytes(self) -> int | None:
        """Device memory in use by everybody, contexts and the driver's own included."""
        return self._ask("memory_used_bytes", self._calls.memory_used_bytes)

    def utilisation(self) -> float | None:
        """Per cent of the last sampling period in which any kernel ran, however small."""
        return self._ask("utilisation", self._calls.utilisation)

    def temperature_c(self) -> float | None:
        return self._ask("temperature_c", self._calls.temperature_c)

    def clocks_mhz(self) -> Clocks | None:
        return self._ask("clocks_mhz", self._calls.clocks_mhz)

    def close(self) -> None:
        """Let go of NVML; further readings are None. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            _let_go(self._calls)

    def __enter__(self) -> Gpu:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Board({self.name}, index={self.index}, backend={self.backend!r})"

    def _ask(self, figure: str, read: Callable[[Any], T]) -> T | None:
        if self._closed:
            self.absent[figure] = "the board was closed"
            return None
        try:
            answer = read(self._handle)
        except _Refused as refusal:
            self.absent[figure] = str(refusal)
            return None
        self.absent.pop(figure, None)
        return answer


@final
class Gpm:
    """How busy the chip was between `begin` and `end`, by its own counters: the keys of `GPM_METRICS`, in per cent.

    Needs nvidia-ml-py and a Hopper GPU or newer. The counters are brought up to date every 50 to 100 ms, so the edges
    are that blurred, and what is shorter than `GPM_WINDOW_S` is absent. `absent` says why a figure is None. One
    profiler at a time: beside ncu or DCGM the counters may refuse or be wrong.
    """

    def __init__(self, board: Gpu) -> None:
        self._board, self._first, self._began_s = board, None, 0.0
        self.absent: dict[str, str] = {}

    def begin(self) -> None:
        """Take the first sample. An earlier one that was not ended is dropped."""
        self._drop()
        self.absent.clear()
        try:
            self._check_open()
            self._board._calls.check_gpm(self._board._handle)
            self._first = self._board._calls.gpm_sample(self._board._handle)
            self._began_s = time.perf_counter()
        except _Refused as refusal:
            self._miss(str(refusal))

    def end(self) -> dict[str, float | None]:
        """Take the second sample; what was between the two."""
        found: dict[str, float | None] = dict.fromkeys(GPM_METRICS)
        if self._first is None:
            if not self.absent:
                self._miss("GPM was not begun")
            return found
        calls = self._board._calls
        try:
            self._check_open()
            lasted_s = time.perf_counter() - self._began_s
            if lasted_s < GPM_WINDOW_S:  # both samples may be one and the same: zeros that nobody measured
                raise _Refused(f"GPM needs {GPM_WINDOW_S} s between its two samples, there were {lasted_s:.3f}")
            second = calls.gpm_sample(self._board._handle)
            try:
                values = calls.gpm_metrics(self._first, second, GPM_METRICS.values())
            finally:
                calls.gpm_free(second)
        except _Refused as refusal:
            self._miss(str(refusal))
            return found
        finally:
            self._drop()
        for name, number in GPM_METRICS.items():
            value = values[number]
            if isinstance(value, str):
                self.absent[name] = value
            else:
                found[name] = value
        return found

    def _check_open(self) -> None:
        if self._board._closed:
            raise _Refused("the board was closed")

    def _drop(self) -> None:
        if self._first is not None and not self._board._closed:
            with contextlib.suppress(_Refused):
                self._board._calls.gpm_free(self._first)
        self._first = None

    def _miss(self, why: str) -> None:
        self.absent.update(dict.fromkeys(GPM_METRICS, why))


def open_board(index: int = 0, backend: Backend = "auto") -> Gpu | None:
    """The GPU that torch calls `cuda:<index>`, or None where it cannot be asked: see `why_absent`.

    Raises MissingExtra where nvidia-ml-py is asked for by name and is not installed. Does not start CUDA.
    """
    try:
        return _open(index, backend)
    except _Refused:
        return None


def why_absent(index: int = 0, backend: Backend = "auto") -> str:
    """Why `open_board` gives None here; empty where it gives a board."""
    try:
        _open(index, backend).close()
    except _Refused as refusal:
        return str(refusal)
    return ""


def visible_device(index: int, visible: str | None) -> int | str:
    """What CUDA's device `index` is to the machine: a number or a UUID (perhaps only its beginning).

    `visible` is the value of CUDA_VISIBLE_DEVICES. As in CUDA, the list ends before its first entry that names nothing.
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


def _open(index: int, backend: Backend) -> Gpu:
    if backend not in _BACKENDS:
        raise UnknownName("NVML backend", backend, _BACKENDS)
    if index < 0:
        raise ConfigError(f"open_board: index must be at least 0, got {index}")
    calls = _load(backend)
    try:
        return Gpu(calls, _find(calls, index), index)
    except BaseException:
        _let_go(calls)
        raise


def _let_go(calls: _Calls) -> None:
    with contextlib.suppress(_Refused):  # the driver went away meanwhile: there is nothing left to hold
        calls.close()


def _load(backend: Backend) -> _Calls:
    if backend == "ctypes":
        return _CtypesCalls()
    try:
        import pynvml
    except ImportError:
        if backend == "pynvml":
            raise MissingExtra("nvidia-ml-py", "sweep", "open_board(backend='pynvml')") from None
        return _CtypesCalls()
    return _PynvmlCalls(pynvml)


def _find(calls: _Calls, index: int) -> Any:
    try:
        wanted = visible_device(index, os.environ.get("CUDA_VISIBLE_DEVICES"))
    except LookupError as error:
        raise _Refused(str(error)) from None
    boards = [calls.handle(i) for i in range(calls.count())]
    if isinstance(wanted, str):
        return _find_uuid(calls, boards, wanted)
    if wanted >= len(boards):
        raise _Refused(f"NVML knows {len(boards)} GPUs, device {wanted} is none of them")
    # NVML counts by bus address, CUDA by speed unless it is told otherwise: with unlike boards a number is no name.
    by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if not by_bus and len({calls.name(board) for board in boards}) > 1:
        raise _Refused(
            "the GPUs are of several kinds, and CUDA numbers them by speed: set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    return boards[wanted]


def _find_uuid(calls: _Calls, boards: Iterable[Any], wanted: str) -> Any:
    if wanted.startswith("MIG-"):
        raise _Refused(f"{wanted} is a part of a GPU (MIG), whose energy and power NVML does not tell apart")
    matching = [board for board in boards if calls.uuid(board).startswith(wanted)]
    if len(matching) != 1:
        raise _Refused(f"{len(matching)} GPUs have a UUID that begins with {wanted!r}")
    return matching[0]


class _Calls(ABC):
    """The questions that NVML is asked, whoever carries them; NVML is held until `close`. All raise `_Refused`."""

    backend: Literal["pynvml", "ctypes"]

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def driver(self) -> str: ...

    @abstractmethod
    def count(self) -> int: ...

    @abstractmethod
    def handle(self, index: int) -> Any: ...

    @abstractmethod
    def name(self, handle: Any) -> str: ...

    @abstractmethod
    def uuid(self, handle: Any) -> str: ...

    @abstractmethod
    def power_limit_mw(self, handle: Any) -> int: ...

    @abstractmethod
    def energy_mj(self, handle: Any) -> int: ...

    @abstractmethod
    def power_mw(self, handle: Any) -> int: ...

    @abstractmethod
    def memory_used_bytes(self, handle: Any) -> int: ...

    @abstractmethod
    def utilisation(self, handle: Any) -> float: ...

    @abstractmethod
    def temperature_c(self, handle: Any) -> float: ...

    @abstractmethod
    def clocks_mhz(self, handle: Any) -> Clocks: ...

    @abstractmethod
    def check_gpm(self, handle: Any) -> None: ...

    @abstractmethod
    def gpm_sample(self, handle: Any) -> Any: ...

    @abstractmethod
    def gpm_free(self, sample: Any) -> None: ...

    @abstractmethod
    def gpm_metrics(self, first: Any, second: Any, numbers: Iterable[int]) -> dict[int, float | str]:
        """The value of each metric, or why it has none."""


@final
class _PynvmlCalls(_Calls):
    """Through nvidia-ml-py, whose names differ between its versions: each is looked up when it is needed."""

    backend = "pynvml"

    def __init__(self, package: Any) -> None:
        self._nvml = package
        try:
            self._ask("nvmlInit")
        except _Refused as refusal:
            raise _Refused(f"there is no NVIDIA driver here that answers: {refusal}") from None

    def close(self) -> None:
        self._ask("nvmlShutdown")

    def driver(self) -> str:
        return _text(self._ask("nvmlSystemGetDriverVersion"))

    def count(self) -> int:
        return int(self._ask("nvmlDeviceGetCount"))

    def handle(self, index: int) -> Any:
        return self._ask("nvmlDeviceGetHandleByIndex", index)

    def name(self, handle: Any) -> str:
        return _text(self._ask("nvmlDeviceGetName", handle))

    def uuid(self, handle: Any) -> str:
        return _text(self._ask("nvmlDeviceGetUUID", handle))

    def power_limit_mw(self, handle: Any) -> int:
        return int(self._ask("nvmlDeviceGetEnforcedPowerLimit", handle))

    def energy_mj(self, handle: Any) -> int:
        return int(self._ask("nvmlDeviceGetTotalEnergyConsumption", handle))

    def power_mw(self, handle: Any) -> int:
        return int(self._ask("nvmlDeviceGetPowerUsage", handle))

    def memory_used_bytes(self, handle: Any) -> int:
        return int(self._ask("nvmlDeviceGetMemoryInfo", handle).used)

    def utilisation(self, handle: Any) -> float:
        return float(self._ask("nvmlDeviceGetUtilizationRates", handle).gpu)

    def temperature_c(self, handle: Any) -> float:
        return float(self._ask("nvmlDeviceGetTemperature", handle, _GPU_SENSOR))

    def clocks_mhz(self, handle: Any) -> Clocks:
        sm, memory = (float(self._ask("nvmlDeviceGetClockInfo", handle, which)) for which in (_SM_CLOCK, _MEMORY_CLOCK))
        return Clocks(sm, memory)

    def check_gpm(self, handle: Any) -> None:
        if not self._ask("nvmlGpmQueryDeviceSupport", handle).isSupportedDevice:
            raise _Refused("this GPU has no GPM counters: Hopper and newer have")

    def gpm_sample(self, handle: Any) -> Any:
        sample = self._ask("nvmlGpmSampleAlloc")
        try:
            return self._ask("nvmlGpmSampleGet", handle, sample)
        except _Refused:
            self.gpm_free(sample)
            raise

    def gpm_free(self, sample: Any) -> None:
        self._ask("nvmlGpmSampleFree", sample)

    def gpm_metrics(self, first: Any, second: Any, numbers: Iterable[int]) -> dict[int, float | str]:
        asked = self._named("c_nvmlGpmMetricsGet_t")()
        asked.version = self._named("NVML_GPM_METRICS_GET_VERSION")
        asked.sample1, asked.sample2 = first, second
        listed = tuple(numbers)
        asked.numMetrics = len(listed)
        for place, number in enumerate(listed):
            asked.metrics[place].metricId = number
        self._ask("nvmlGpmMetricsGet", asked)
        return {number: self._gpm_value(asked.metrics[place]) for place, number in enumerate(listed)}

    def _gpm_value(self, metric: Any) -> float | str:
        if metric.nvmlReturn:
            return f"GPM metric {metric.metricId}: {self._named('NVMLError')(metric.nvmlReturn)}"
        value = float(metric.value)
        return value if math.isfinite(value) else f"GPM metric {metric.metricId}: NVML gave {value}"

    def _named(self, name: str) -> Any:
        try:
            return getattr(self._nvml, name)
        except AttributeError:
            raise _Refused(f"the installed nvidia-ml-py has no {name}") from None

    def _ask(self, function: str, *arguments: Any) -> Any:
        call = self._named(function)
        try:
            return call(*arguments)
        except self._nvml.NVMLError as error:
            raise _Refused(f"{function}: {error}") from None


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


@final
class _CtypesCalls(_Calls):
    """Straight through the driver's library, for where nvidia-ml-py is not installed. It has no GPM."""

    backend = "ctypes"

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise _Refused(f"there is no NVIDIA driver here: {error}") from None
        try:
            self._ask("nvmlInit_v2")
        except _Refused as refusal:
            raise _Refused(f"there is no NVIDIA driver here that answers: {refusal}") from None

    def close(self) -> None:
        self._ask("nvmlShutdown")

    def driver(self) -> str:
        return self._words("nvmlSystemGetDriverVersion")

    def count(self) -> int:
        return self._number("nvmlDeviceGetCount_v2")

    def handle(self, index: int) -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        self._ask("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(found))
        return found

    def name(self, handle: ctypes.c_void_p) -> str:
        return self._words("nvmlDeviceGetName", handle)

    def uuid(self, handle: ctypes.c_void_p) -> str:
        return self._words("nvmlDeviceGetUUID", handle)

    def power_limit_mw(self, handle: ctypes.c_void_p) -> int:
        return self._number("nvmlDeviceGetEnforcedPowerLimit", handle)

    def energy_mj(self, handle: ctypes.c_void_p) -> int:
        found = ctypes.c_ulonglong()
        self._ask("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.byref(found))
        return found.value

    def power_mw(self, handle: ctypes.c_void_p) -> int:
        return self._number("nvmlDeviceGetPowerUsage", handle)

    def memory_used_bytes(self, handle: ctypes.c_void_p) -> int:
        found = _Memory()
        self._ask("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(found))
        return int(found.used)

    def utilisation(self, handle: ctypes.c_void_p) -> float:
        found = _Rates()
        self._ask("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(found))
        return float(found.gpu)

    def temperature_c(self, handle: ctypes.c_void_p) -> float:
        return float(self._number("nvmlDeviceGetTemperature", handle, ctypes.c_uint(_GPU_SENSOR)))

    def clocks_mhz(self, handle: ctypes.c_void_p) -> Clocks:
        sm, memory = (
            float(self._number("nvmlDeviceGetClockInfo", handle, ctypes.c_uint(which)))
            for which in (_SM_CLOCK, _MEMORY_CLOCK)
        )
        return Clocks(sm, memory)

    def check_gpm(self, handle: ctypes.c_void_p) -> None:
        raise _Refused("GPM counters need nvidia-ml-py: pip install 'podium[sweep]'")

    def gpm_sample(self, handle: ctypes.c_void_p) -> Any:
        self.check_gpm(handle)

    def gpm_free(self, sample: Any) -> None:
        raise AssertionError("no GPM sample was ever given out")

    def gpm_metrics(self, first: Any, second: Any, numbers: Iterable[int]) -> dict[int, float | str]:
        raise AssertionError("no GPM sample was ever given out")

    def _number(self, function: str, *arguments: Any) -> int:
        found = ctypes.c_uint()
        self._ask(function, *arguments, ctypes.byref(found))
        return found.value

    def _words(self, function: str, *arguments: Any) -> str:
        found = ctypes.create_string_buffer(_TEXT_BYTES)
        self._ask(function, *arguments, found, ctypes.c_uint(_TEXT_BYTES))
        return _text(found.value)

    def _ask(self, function: str, *arguments: Any) -> None:
        try:
            call = getattr(self._library, function)
        except AttributeError:
            raise _Refused(f"this NVIDIA driver has no {function}") from None
        status = call(*arguments)
        if status:
            raise _Refused(f"{function}: {self._meaning(status)}")

    def _meaning(self, status: int) -> str:
        explain = self._library.nvmlErrorString
        explain.restype = ctypes.c_char_p
        return _text(explain(ctypes.c_int(status)) or b"no reason given")


def _text(found: str | bytes) -> str:
    return found.decode(errors="replace") if isinstance(found, bytes) else found

"""Energy of a piece of work by the machine's counter: the GPU board's (NVML), or the processor's (RAPL).

A counter covers the whole board or package and all its users. Where there is none, nothing is estimated.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol, final

if TYPE_CHECKING:
    from podium.records.nvml import Gpu

POWERCAP = Path("/sys/class/powercap")


class Meter(Protocol):
    """Counts joules."""

    what: str
    """The counter's name in reports."""

    def joules(self) -> float | None:
        """From an arbitrary start; only differences mean anything. None where it cannot be read."""

    def close(self) -> None:
        """Release the counter."""


def open_meter(device: str) -> Meter | None:
    """The counter that belongs to a run's device; None where there is none, or where a run uses several devices."""
    kind, _, index = device.partition(":")
    if "," in device or kind not in ("cpu", "cuda"):
        return None
    return _open_gpu(int(index or 0)) if kind == "cuda" else _open_packages()


@final
class GpuMeter:
    """The GPU's own counter, by NVML."""

    what = "GPU board, by NVML"

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def joules(self) -> float | None:
        millijoules = self._gpu.energy_mj()
        return None if millijoules is None else millijoules / 1e3

    def close(self) -> None:
        self._gpu.close()


@final
class PackageMeter:
    """All processor packages, by the kernel's RAPL counters, which wrap around to 0."""

    what = "processor packages, by RAPL"

    def __init__(self, packages: list[Path]) -> None:
        self._packages = packages
        self._last = [self._read(package) for package in packages]
        self._total = 0

    def joules(self) -> float | None:
        for place, package in enumerate(self._packages):
            now, before = self._read(package), self._last[place]
            if now is None or before is None:
                return None
            self._total += now - before if now >= before else now - before + self._full(package)
            self._last[place] = now
        return self._total / 1e6

    def close(self) -> None:
        """Files are opened for each reading."""

    @staticmethod
    def _read(package: Path) -> int | None:
        try:
            return int((package / "energy_uj").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None

    @staticmethod
    def _full(package: Path) -> int:
        try:
            return int((package / "max_energy_range_uj").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return 0


def _open_gpu(index: int) -> GpuMeter | None:
    from podium.records.nvml import open_gpu  # here: only runs on a GPU need it

    gpu = open_gpu(index)
    return None if gpu is None else GpuMeter(gpu)


def _open_packages(root: Path = POWERCAP) -> PackageMeter | None:
    packages = sorted(path for path in root.glob("intel-rapl:*") if ":" not in path.name.partition(":")[2])
    meter = PackageMeter(packages)
    return meter if packages and meter.joules() is not None else None

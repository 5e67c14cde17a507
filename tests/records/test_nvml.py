"""A GPU's own figures: there with their source, or absent with a reason."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from podium.errors import ConfigError
from podium.records import manifest, nvml
from podium.records.nvml import GPM_METRICS, Gpm, Gpu, open_gpu, open_gpus, visible_device, why_absent

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


# Anywhere.


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_driver_there_is_no_gpu_and_the_reason_says_so() -> None:
    assert open_gpu() is None and list(open_gpus()) == []
    assert "no NVIDIA driver" in why_absent()


def test_without_the_package_the_reason_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "pynvml", None)  # as if it were not installed
    assert open_gpu() is None and "podium[sweep]" in why_absent()


def test_without_the_package_a_manifest_names_the_gpus_that_the_driver_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "pynvml", None)
    monkeypatch.setattr(manifest, "_DRIVER", tmp_path)
    assert "gpus" not in manifest.hardware()
    for bus in ("0000:00:06.0", "0000:00:07.0"):
        (tmp_path / "gpus" / bus).mkdir(parents=True)
        (tmp_path / "gpus" / bus / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:  \t\t 0\n")
    assert manifest.hardware()["gpus"] == ["NVIDIA H200", "NVIDIA H200"]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="index must be at least 0, got -1"):
        open_gpu(-1)


class Twins:
    """A fake pynvml with two GPUs that answer everything but their energy."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2

    class NVMLError(Exception):
        """What the package raises."""

    def __init__(self, *names: str) -> None:
        self.names, self.opened = names, 0

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.names[handle]

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}{handle}"

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        return 700_000

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 80_500

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 41

    def nvmlDeviceGetClockInfo(self, handle: int, which: int) -> int:
        return which * 1000

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        raise self.NVMLError("Not Supported")


def test_a_figure_that_nvml_refuses_is_absent_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins("H200", "H200")
    monkeypatch.setattr(nvml, "pynvml", twins)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with open_gpu(1) or pytest.fail(why_absent(1)) as gpu:
        assert (gpu.name, gpu.uuid, gpu.driver, gpu.power_limit_w) == ("H200", "GPU-11", "580.1", 700.0)
        assert (gpu.power_w(), gpu.temperature_c(), gpu.clocks_mhz()) == (80.5, 41.0, (1000.0, 2000.0))
        assert gpu.energy_mj() is None
        assert gpu.absent == {"energy_mj": "nvmlDeviceGetTotalEnergyConsumption: Not Supported"}
    assert gpu.power_w() is None and gpu.absent["power_w"] == "the GPU was closed"
    assert [gpu.index for gpu in open_gpus()] == [0, 1]
    assert "device 2 is none of them" in why_absent(2) and twins.opened == 0


def test_gpus_of_several_kinds_have_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "pynvml", Twins("H200", "L4"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in why_absent()
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert why_absent() == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    with open_gpu() or pytest.fail(why_absent()) as gpu:
        assert gpu.name == "L4"


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        (" 1 , 3 ", [1, 3]),
        ("GPU-8932f937,MIG-1a", ["GPU-8932f937", "MIG-1a"]),
        ("1,-1,0", [1]),  # as CUDA reads it: nothing behind an entry that names nothing
        ("1,none,0", [1]),
        ("", []),
        ("-1", []),
    ],
)
def test_devices_are_counted_as_cuda_counts_them(visible: str | None, found: list[int | str]) -> None:
    assert [visible_device(index, visible) for index in range(len(found))] == found
    if visible is not None:
        with pytest.raises(LookupError, match="is hidden by CUDA_VISIBLE_DEVICES"):
            visible_device(len(found), visible)


# On a GPU.


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    found = open_gpu()
    assert found is not None, why_absent()
    with found:
        yield found


def load(seconds: float) -> None:
    """Keep the tensor cores busy."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.empty_like(a)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        for _ in range(20):
            torch.mm(a, a, out=b)
        torch.cuda.synchronize()


@pytest.mark.gpu
@on_a_gpu
def test_every_figure_is_there_and_within_reason(gpu: Gpu) -> None:
    assert gpu.name == torch.cuda.get_device_name(0)
    assert gpu.driver and gpu.power_limit_w and 50 < gpu.power_limit_w < 2000
    assert (gpu.energy_mj() or 0) > 0 and 5 < (gpu.power_w() or 0) < 2000
    assert 0 < (gpu.memory_used_bytes() or 0) < torch.cuda.get_device_properties(0).total_memory * 1.05
    assert 0 <= (gpu.utilisation() or 0) <= 100 and 10 < (gpu.temperature_c() or 0) < 120
    clocks = gpu.clocks_mhz()
    assert clocks is not None and clocks.sm_mhz > 0 and clocks.memory_mhz > 0
    assert gpu.absent == {}
    gpu.close()
    assert gpu.energy_mj() is None and gpu.absent == {"energy_mj": "the GPU was closed"}


@pytest.mark.gpu
@on_a_gpu
def test_a_gpu_is_found_by_number_by_uuid_and_by_the_beginning_of_one(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpu.uuid is not None
    for visible in ("0", gpu.uuid, gpu.uuid[:12]):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with open_gpu() or pytest.fail(why_absent()) as again:
            assert again.uuid == gpu.uuid
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-00000000-no-such")
    assert open_gpu() is None and "0 GPUs have a UUID" in why_absent()


@pytest.mark.gpu
@on_a_gpu
def test_memory_that_is_taken_is_seen(gpu: Gpu) -> None:
    torch.zeros(1, device="cuda")
    torch.cuda.empty_cache()  # or memory that earlier tests let go of would be taken again
    before = gpu.memory_used_bytes()
    taken = torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
    after = gpu.memory_used_bytes()
    del taken
    torch.cuda.empty_cache()
    assert before is not None and after is not None
    assert 3 << 30 <= after - before < (3 << 30) + (64 << 20)


@pytest.mark.gpu
@on_a_gpu
def test_the_chips_counters_tell_work_from_rest(gpu: Gpu) -> None:
    load(0.5)
    gpm = Gpm(gpu)
    gpm.begin()
    load(1.5)
    busy = gpm.end()
    if not gpm.absent:
        time.sleep(0.3)  # until the counters have heard that the work is over
        gpm.begin()
        time.sleep(0.5)
        idle = gpm.end()
        assert set(busy) == set(idle) == set(GPM_METRICS) and not gpm.absent
        assert (busy["sm_util"] or 0) > 60 and (busy["any_tensor_util"] or 0) > 30
        assert (idle["sm_util"] or 0) < 10 and (idle["any_tensor_util"] or 0) < 5
        assert all(value is not None and 0 <= value <= 100 for value in (*busy.values(), *idle.values()))
        gpm.begin()
        assert gpm.end() == dict.fromkeys(GPM_METRICS) and "between its two samples" in gpm.absent["sm_util"]
    else:
        assert torch.cuda.get_device_capability() < (9, 0), gpm.absent

"""A window measures what happened in it; what cannot be measured is absent, with a reason."""

from __future__ import annotations

import gc
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, fields

import pytest
import torch

from podium.errors import ConfigError
from podium.records.nvml import Gpu, open_gpu, why_absent
from podium.records.window import ENERGY_WINDOW_S, Reading, Window, measure_idle

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MB = 1 << 20
TAKEN = 200 * MB
BURN_S = 0.4
GPU_FIELDS = {
    *("energy_j", "energy_over_idle_j", "power_w", "power_over_idle_w", "memory_bytes", "utilisation"),
    *("sm_util", "sm_occupancy", "any_tensor_util", "dram_bw_util", "temperature_before_c", "temperature_after_c"),
}
BURN = f"""
import sys, time
while time.process_time() < {BURN_S}: pass
print("done", flush=True)
sys.stdin.readline()
"""
TAKE = f"""
import sys, time
taken = bytearray(b"x") * {TAKEN}
print("done", flush=True)
sys.stdin.readline()
"""


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "podium-window"]


def read_nothing() -> Reading:
    with Window(None) as window:
        pass
    return window.reading


def child(script: str) -> subprocess.Popen[str]:
    """A process that has done its work and waits for the word to go."""
    started = subprocess.Popen(
        [sys.executable, "-SE", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None and started.stdout.readline() == "done\n"
    return started


def dismiss(started: subprocess.Popen[str]) -> None:
    started.communicate("\n", timeout=10)


# Anywhere.


def test_without_a_board_seconds_and_the_hosts_figures_are_measured_and_the_rest_has_reasons() -> None:
    reading = read_nothing()
    assert set(reading.absent) == GPU_FIELDS and all(reading.absent.values())
    for field in fields(Reading):
        assert (getattr(reading, field.name) is None) == (field.name in reading.absent), field.name
    assert reading.energy_is_short
    json.dumps(asdict(reading))


def test_seconds_are_those_of_the_clock() -> None:
    began = time.perf_counter()
    with Window(None) as window:
        time.sleep(0.25)
    assert 0.25 <= window.reading.seconds <= time.perf_counter() - began


def test_processor_time_is_that_of_this_process() -> None:
    with Window(None) as window:
        until = time.process_time() + BURN_S
        while time.process_time() < until:
            pass
    assert window.reading.cpu_s is not None
    assert BURN_S <= window.reading.cpu_s < BURN_S + 0.2


@pytest.mark.slow
def test_processor_time_of_a_child_counts_while_it_runs_and_once_it_has_ended() -> None:
    with Window(None) as living:
        started = child(BURN)
    with Window(None) as waited_for:
        dismiss(started)
    with Window(None) as both:
        dismiss(child(BURN))
    assert living.reading.cpu_s is not None and both.reading.cpu_s is not None
    assert BURN_S - 0.03 <= living.reading.cpu_s < BURN_S + 0.3
    assert BURN_S - 0.03 <= both.reading.cpu_s < BURN_S + 0.3
    assert waited_for.reading.cpu_s is not None and waited_for.reading.cpu_s < BURN_S / 2  # it is not counted again


def test_memory_that_is_given_back_before_the_end_is_seen_at_its_peak() -> None:
    before = read_nothing().host_memory_bytes
    with Window(None) as window:
        taken = bytearray(b"x") * TAKEN
        time.sleep(0.4)
        del taken
    peak, after = window.reading.host_memory_bytes, read_nothing().host_memory_bytes
    assert before is not None and peak is not None and after is not None
    assert abs(peak - before - TAKEN) < 20 * MB
    assert after - before < 20 * MB


def test_memory_of_a_child_counts() -> None:
    before = read_nothing().host_memory_bytes
    with Window(None) as window:
        started = child(TAKE)
    dismiss(started)
    peak = window.reading.host_memory_bytes
    assert before is not None and peak is not None
    assert TAKEN <= peak - before < TAKEN + 60 * MB


def test_the_reading_thread_lives_as_long_as_the_window() -> None:
    window = Window(None)
    window.begin()
    assert len(readers()) == 1
    window.end()
    assert readers() == []


def test_an_error_in_the_body_comes_through_and_leaves_no_thread_and_a_reading() -> None:
    window = Window(None)
    with pytest.raises(ValueError, match="in the body"), window:
        raise ValueError("in the body")
    assert readers() == [] and window.reading.seconds < 1


def test_a_window_that_is_dropped_open_leaves_no_thread() -> None:
    window = Window(None)
    window.begin()
    (thread,) = readers()
    del window
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_a_window_can_be_used_again_but_not_twice_at_once() -> None:
    window = Window(None)
    with pytest.raises(ConfigError, match="end must follow begin"):
        window.end()
    with pytest.raises(ConfigError, match="once the window has ended"):
        _ = window.reading
    window.begin()
    with pytest.raises(ConfigError, match="begin must follow end"):
        window.begin()
    first = window.end()
    with window:
        time.sleep(0.05)
    assert window.reading is not first and window.reading.seconds >= 0.05


# On a GPU.


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    torch.zeros(1, device="cuda")
    found = open_gpu()
    assert found is not None, why_absent()
    with found:
        yield found


def multiply(seconds: float, gpu: Gpu) -> list[tuple[float, float]]:
    """Keep the tensor cores busy; when, and what power was read then."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b, found = torch.empty_like(a), []
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        for _ in range(30):
            torch.mm(a, a, out=b)
        torch.cuda.synchronize()
        found.append((time.perf_counter(), gpu.power_w() or 0.0))
    return found


@pytest.mark.gpu
@on_a_gpu
def test_the_energy_counter_agrees_with_power_integrated_over_time(gpu: Gpu) -> None:
    idle = measure_idle(gpu, 2.0)
    multiply(2.0, gpu)  # until the board's own average over a second is one over work alone
    with Window(gpu, idle=idle) as window:
        powers = multiply(8.0, gpu)
    reading = window.reading
    area = sum((t1 - t0) * (p0 + p1) / 2 for (t0, p0), (t1, p1) in itertools.pairwise(powers))
    integrated = area / (powers[-1][0] - powers[0][0]) * reading.seconds
    print(f"idle {idle}; counter {reading.energy_j} J, integrated {integrated:.0f} J; {reading}")
    assert idle.power_w is not None and reading.energy_j is not None and reading.power_w is not None
    assert abs(reading.energy_j - integrated) < 0.25 * integrated
    assert reading.power_w > 2 * idle.power_w
    assert reading.energy_over_idle_j == pytest.approx(reading.energy_j - idle.power_w * reading.seconds)
    assert reading.power_over_idle_w == pytest.approx(reading.power_w - idle.power_w)
    assert reading.energy_is_short and reading.seconds < ENERGY_WINDOW_S
    assert (reading.utilisation or 0) > 80 and (reading.temperature_after_c or 0) > 10


@pytest.mark.gpu
@on_a_gpu
def test_device_memory_is_measured_at_its_peak_over_the_baseline(gpu: Gpu) -> None:
    with Window(gpu, gpm=False) as window:
        taken = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
        time.sleep(0.4)
        del taken
        torch.cuda.empty_cache()
    assert window.reading.memory_bytes is not None
    assert 2 << 30 <= window.reading.memory_bytes < (2 << 30) + 64 * MB
    assert window.reading.absent["sm_util"] == "GPM was not asked for"


@pytest.mark.gpu
@on_a_gpu
def test_a_window_waits_for_the_kernels_that_were_launched_in_it(gpu: Gpu) -> None:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    torch.mm(a, a)
    torch.cuda.synchronize()
    with Window(gpu) as window:
        for _ in range(200):
            torch.mm(a, a)
    assert window.reading.seconds > 200 * 2 * 8192**3 / 1.2e15  # no faster than the chip can


@pytest.mark.gpu
@on_a_gpu
def test_a_window_on_a_hopper_tells_how_busy_the_chip_was(gpu: Gpu) -> None:
    pytest.importorskip("pynvml")
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs Hopper or newer")
    with Window(gpu) as window:
        multiply(1.5, gpu)
    reading = window.reading
    assert (reading.sm_util or 0) > 50 and (reading.any_tensor_util or 0) > 30, reading
    assert reading.sm_occupancy is not None and reading.dram_bw_util is not None
    assert reading.absent.keys() == {"energy_over_idle_j", "power_over_idle_w"}

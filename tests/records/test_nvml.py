"""A GPU's own figures: there with their source, or absent with a reason."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest
import torch

from podium.errors import ConfigError, MissingExtra, UnknownName
from podium.records.nvml import GPM_METRICS, Backend, Gpm, Gpu, open_board, visible_device, why_absent

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def has_pynvml() -> bool:
    try:
        import pynvml  # noqa: F401
    except ImportError:
        return False
    return True


# Anywhere.


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_driver_there_is_no_board_and_the_reason_says_so() -> None:
    assert open_board() is None and open_board(backend="ctypes") is None
    assert "no NVIDIA driver" in why_absent() and "libnvidia-ml.so.1" in why_absent(backend="ctypes")


def test_asking_for_a_package_that_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    with pytest.raises(MissingExtra, match=r"podium\[sweep\]"):
        open_board(backend="pynvml")
    assert why_absent() == why_absent(backend="ctypes")


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UnknownName, match="ctypes"):
        open_board(backend="ctype")  # type: ignore[arg-type]  # what a user may write
    with pytest.raises(ConfigError, match="index must be at least 0, got -1"):
        open_board(-1)


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


def backends() -> list[Backend]:
    return ["ctypes", "pynvml"] if has_pynvml() else ["ctypes"]


@pytest.fixture
def board() -> Iterator[Gpu]:
    found = open_board()
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
@pytest.mark.parametrize("backend", ["ctypes", "pynvml"])
def test_every_figure_is_there_and_within_reason(backend: Backend) -> None:
    if backend not in backends():
        pytest.skip("nvidia-ml-py is not installed")
    with open_board(backend=backend) or pytest.fail(why_absent()) as board:
        assert board.backend == backend and board.name == torch.cuda.get_device_name(0)
        assert board.driver and board.power_limit_w and 50 < board.power_limit_w < 2000
        assert (board.energy_mj() or 0) > 0 and 5 < (board.power_w() or 0) < 2000
        assert 0 < (board.memory_used_bytes() or 0) < torch.cuda.get_device_properties(0).total_memory * 1.05
        assert 0 <= (board.utilisation() or 0) <= 100 and 10 < (board.temperature_c() or 0) < 120
        clocks = board.clocks_mhz()
        assert clocks is not None and clocks.sm_mhz > 0 and clocks.memory_mhz > 0
        assert board.absent == {}
    assert board.energy_mj() is None and board.absent == {"energy_mj": "the board was closed"}


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.skipif(not has_pynvml(), reason="needs nvidia-ml-py")
def test_both_ways_to_ask_agree() -> None:
    first, second = open_board(backend="ctypes"), open_board(backend="pynvml")
    assert first is not None and second is not None
    with first, second:
        same = [(b.name, b.uuid, b.driver, b.power_limit_w, b.memory_used_bytes()) for b in (first, second)]
        assert same[0] == same[1]
        earlier, middle, later = first.energy_mj(), second.energy_mj(), first.energy_mj()
        assert earlier is not None and middle is not None and later is not None
        assert earlier <= middle <= later


@pytest.mark.gpu
@on_a_gpu
def test_a_board_is_found_by_number_by_uuid_and_by_the_beginning_of_one(
    board: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert board.uuid is not None
    for visible in ("0", board.uuid, board.uuid[:12]):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with open_board() or pytest.fail(why_absent()) as again:
            assert again.uuid == board.uuid
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-00000000-no-such")
    assert open_board() is None and "0 GPUs have a UUID" in why_absent()


@pytest.mark.gpu
@on_a_gpu
def test_memory_that_is_taken_is_seen(board: Gpu) -> None:
    torch.zeros(1, device="cuda")
    torch.cuda.empty_cache()  # or memory that earlier tests let go of would be taken again
    before = board.memory_used_bytes()
    taken = torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
    after = board.memory_used_bytes()
    del taken
    torch.cuda.empty_cache()
    assert before is not None and after is not None
    assert 3 << 30 <= after - before < (3 << 30) + (64 << 20)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.skipif(not has_pynvml(), reason="needs nvidia-ml-py")
def test_the_chips_counters_tell_work_from_rest(board: Gpu) -> None:
    load(0.5)
    gpm = Gpm(board)
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


@pytest.mark.gpu
@on_a_gpu
def test_without_the_package_the_counters_are_absent_with_a_reason() -> None:
    with open_board(backend="ctypes") or pytest.fail(why_absent()) as board:
        gpm = Gpm(board)
        assert gpm.end() == dict.fromkeys(GPM_METRICS) and gpm.absent["sm_util"] == "GPM was not begun"
        gpm.begin()
        assert gpm.end() == dict.fromkeys(GPM_METRICS)
        assert "nvidia-ml-py" in gpm.absent["sm_util"]

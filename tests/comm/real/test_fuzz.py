"""A dose of `podium bench fuzz`: frames and handshakes that nobody meant are refused, and nothing else happens."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

import podium.testing.frame_fuzz as fuzz
from podium.comm.real import frames
from podium.comm.real.arena import Arena
from podium.comm.real.frames import FrameError, Limits, encode_frame, read_frame
from podium.errors import ConfigError
from podium.testing.frame_fuzz import REASONS, Tally, Wire, bench_fuzz
from podium.testing.frame_mutations import MUTATIONS, Maker, frame_of


@pytest.fixture(scope="module")
def dose() -> dict[str, Any]:
    """In a process of its own, whose memory has a ceiling that would be another test's trouble."""
    words = ("bench", "fuzz", "--set", "frames=40000", "--set", "seconds=60", "--json")
    ran = subprocess.run(
        [sys.executable, "-m", "podium", *words], capture_output=True, text=True, timeout=100, check=True
    )
    document: dict[str, Any] = json.loads(ran.stdout)
    return document


@pytest.mark.slow
def test_forty_thousand_frames_crash_nothing_and_let_no_stranger_in(dose: dict[str, Any]) -> None:
    assert dose["crash_samples"] == [] and dose["crashes"] == 0
    assert dose["frames"] >= 40_000 and dose["handshakes"].keys() == {"refused", "cut short"}


def test_no_room_is_made_for_a_body_whose_description_is_refused(dose: dict[str, Any]) -> None:
    assert dose["largest_allocation_for_a_bad_description"]["body_bytes"] == 0
    # Python's own: the header, which may have a mebibyte under the widest limits tried, and what JSON makes of it.
    assert 0 < dose["largest_allocation_for_a_bad_description"]["python_bytes"] < 16 << 20


def test_the_lies_reach_every_check_of_the_reader(dose: dict[str, Any]) -> None:
    assert dose["by_kind"].keys() == MUTATIONS.keys()
    assert dose["refused_by_reason"].keys() == REASONS.keys()


def feed(seed: int, frames: int = 2000) -> Tally:
    tally = Tally()
    fuzz._feed(tally, random.Random(seed), frames, time.monotonic() + 60)
    return tally


def test_the_seed_decides_everything() -> None:
    first, again, other = feed(3), feed(3), feed(4)
    assert (first.digest, first.refused, first.bytes) == (again.digest, again.refused, again.bytes)
    assert first.digest != other.digest


def test_a_reader_that_lets_damage_through_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames.zlib, "crc32", lambda data, value=0: 0)
    tally = feed(5)
    assert tally.crashes and "damaged" in tally.samples[0]["error"]


def test_a_reader_that_raises_something_else_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_field", lambda fields, name, kind: fields[name])
    tally = feed(6)
    assert tally.crashes and tally.samples[0]["raw"]


def test_a_reader_that_makes_room_too_early_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    check = frames.parse_header

    def hasty(raw: bytes, body_bytes: int, limits: Limits) -> frames.Header:
        torch.empty(1000)
        return check(raw, body_bytes, limits)

    monkeypatch.setattr(frames, "parse_header", hasty)
    assert feed(7, 5000).body_bytes == 4000


def test_good_frames_are_good() -> None:
    maker = Maker(random.Random(0))
    for _ in range(200):
        assert read_frame(Wire(maker.good()), None, None, maker._attach) is not None  # type: ignore[arg-type]  # has what is used


def test_what_it_cannot_do_is_refused() -> None:
    for options in ({"peers": ("ddp",)}, {"rounds": 3}, {"frames": 0}, {"seconds": 0.0}):
        with pytest.raises(ConfigError, match="bench fuzz"):
            bench_fuzz(**options)  # type: ignore[arg-type]


# What it found.


def receive(raw: bytes, **options: Any) -> Any:
    return read_frame(Wire(raw), **options)  # type: ignore[arg-type]  # has what is used


def test_a_place_that_is_not_there_is_noticed_before_room_is_made() -> None:
    arena, asked = Arena(), list[Any]()
    shared = arena.allocate(4, torch.float32)
    raw = b"".join(encode_frame("k", 0, 0, {}, [torch.ones(8), shared], locate=arena.locate))
    with pytest.raises(FrameError, match="not shared with us"):
        receive(raw, sink=asked.append)
    assert asked == []


def test_a_body_that_memory_cannot_hold_is_refused_by_name() -> None:
    header = b'{"kind":"k","source":0,"call":0,"meta":{},"tensors":[["uint8",[%d]]]}' % 2**60
    with pytest.raises(FrameError, match=f"no memory for a body of {2**60} bytes"):
        receive(frame_of(header, b"", 2**60), limits=Limits(body_bytes=2**61))


def test_a_bool_is_0_or_1() -> None:
    raw = b"".join(encode_frame("k", 0, 0, {}, [torch.tensor([True, False])]))
    assert receive(raw).body[0].tolist() == [True, False]
    with pytest.raises(FrameError, match="a bool must"):
        receive(raw[:-1] + b"\x02")

"""`podium bench ps`: the same work from every contender, proved, and nobody left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from podium.errors import ConfigError, RankFailed, UnknownName
from podium.lab.bench.peers.script import ENVIRONMENT, PYTHON_VARIABLE, Script, end_marked, marked, need_module
from podium.lab.bench.peers.team import Team, answer
from podium.lab.bench.peers.work import LR, Pulled, Tally, pattern, units, verify
from podium.lab.bench.ps import bench_link, bench_ps
from podium.launch.rendezvous import rendezvous_folder

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


def _is_here(peer: str) -> bool:
    try:
        return bool(need_module(peer, peer))
    except ConfigError:
        return False


def test_podium_and_its_peers_do_the_same_work_in_every_round() -> None:
    (row,) = bench_ps(("rpc",), rounds=2, payloads="10k", seconds=0.05)["rows"]
    assert set(row["round_trips_per_s"]) == {"podium", "rpc_copy", "rpc_copy_reused", "rpc_live"}
    assert row["parameters"] == 11_274
    for spread in (*row["round_trips_per_s"].values(), row["limit"]):
        assert 0 < spread["min"] <= spread["median"] <= spread["max"]
    rate, gb = row["round_trips_per_s"]["podium"]["median"], row["gb_per_s"]["podium"]["median"]
    assert gb == pytest.approx(rate * 2 * 4 * row["parameters"] / 1e9)
    assert row["fastest_peer"].startswith("rpc_")
    for name in ("vs_fastest_peer", "share_of_limit"):
        low, high = row[f"{name}_interval"]
        assert 0 < low <= row[name] <= high


def test_without_peers_podium_is_measured_beside_the_limit_alone() -> None:
    (row,) = bench_ps((), rounds=1, payloads="10k", seconds=0.05)["rows"]
    assert set(row["round_trips_per_s"]) == {"podium"}
    assert "vs_fastest_peer" not in row
    assert "link" not in row  # only the large payload is measured over a link


@pytest.mark.slow
@pytest.mark.parametrize(
    ("peer", "variants"),
    [("ray", {"ray_numpy", "ray_torch"}), ("tensorflow", {"tensorflow_layers", "tensorflow_flat"})],
)
def test_a_peer_elsewhere_does_the_same_work_and_leaves_nobody_behind(peer: str, variants: set[str]) -> None:
    if not _is_here(peer):
        pytest.skip(f"the peers' environment has no {peer}: make peers")
    with rendezvous_folder() as folder:
        script = Script(peer, peer, [300, 20, 1000], folder)
        try:
            assert {*script.variants, *script.unavailable} == variants
            for variant in script.variants:
                assert script.measure(variant, 0.05) > 0
                verify(variant, script.tally(variant))
            assert len(marked(script.mark)) > 1
        finally:
            script.end()
        assert marked(script.mark) == []


@pytest.mark.slow
@pytest.mark.root
@needs_root
def test_over_shaped_links_podium_is_measured_beside_bare_sockets() -> None:
    row = bench_link(0.1, payload="10k", rounds=1, seconds={"bare": 0.3, "podium": 0.3})
    assert row["gbits"] == 0.1
    assert row["podium_gb_per_s"] > 0
    assert row["share_of_bare"] == pytest.approx(row["podium_gb_per_s"] / row["bare_gb_per_s"])


# The proof.


def test_the_proof_accepts_what_was_done_right() -> None:
    params = pattern(1000)
    params.sub_(LR * 7)
    assert units(params) == (7.0, 7.0)
    verify("it", Tally(7.0, units(params), (Pulled(3.0, 5.0, 7.0), Pulled(4.0, 7.0, 7.0))))


def test_a_push_that_missed_one_element_is_found_out() -> None:
    params = pattern(1000)
    params[:-1].sub_(LR * 7)
    with pytest.raises(RankFailed, match=r"it did other work.*7 units pushed, got 0 to 7"):
        verify("it", Tally(7.0, units(params), ()))


def test_a_push_that_was_applied_twice_is_found_out() -> None:
    with pytest.raises(RankFailed, match="7 units pushed, got 8 to 8"):
        verify("it", Tally(7.0, (8.0, 8.0), ()))


def test_parameters_that_came_back_in_another_order_are_found_out() -> None:
    params = pattern(1000).sub_(LR * 7).flip(0)
    with pytest.raises(RankFailed, match="did other work"):
        verify("it", Tally(7.0, units(params), ()))


def test_a_worker_that_never_got_its_parameters_is_found_out() -> None:
    with pytest.raises(RankFailed, match=r"worker 1's parameters must show from 4 units, its own, to 7, got 0 to 0"):
        verify("it", Tally(7.0, (7.0, 7.0), (Pulled(3.0, 7.0, 7.0), Pulled(4.0, *units(pattern(10))))))


# What cannot be.


def test_unknown_names_and_impossible_sizes_are_refused() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'ray'"):
        bench_ps(("rai",))
    with pytest.raises(UnknownName, match="payload of bench ps"):
        bench_ps((), payloads="2m")
    with pytest.raises(ConfigError, match="seconds must be above 0"):
        bench_ps((), seconds=0)


def test_a_peer_that_cannot_run_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / ENVIRONMENT / "bin" / "python"))
    with pytest.raises(ConfigError, match=r"peer ray needs ray.*does not run.*make peers"):
        bench_ps(("rpc", "ray"))
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    with pytest.raises(ConfigError, match=r"has no no_such_module: run `make peers`"):
        need_module("ray", "no_such_module")


# Processes.


def _fails_when_asked(pipe: Connection) -> None:
    answer(pipe, {"fail": partial(_raise, "the disk is full"), "pid": os.getpid})


def _fails_at_once(_pipe: Connection) -> None:
    _raise("no such place")


def _raise(words: str) -> None:
    raise RuntimeError(words)


def test_whoever_is_not_asked_is_stopped() -> None:
    team = Team("a team", [_fails_when_asked])
    try:
        (pid,) = team.ask("pid", members=[0])
        assert _state(pid) == "T"
    finally:
        team.end()
    assert not Path(f"/proc/{pid}").exists()


def test_a_member_that_fails_ends_the_bench_with_its_own_words() -> None:
    team = Team("a team", [_fails_when_asked])
    try:
        with pytest.raises(RankFailed, match="process 0 of a team failed: the disk is full"):
            team.ask("fail", members=[0])
    finally:
        team.end()
    with pytest.raises(RankFailed, match="no such place"):
        Team("a team", [_fails_when_asked, _fails_at_once])


def test_helpers_that_went_their_own_way_are_found_and_ended() -> None:
    mark = f"test-{os.getpid()}"
    line = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"
    environment = {**os.environ, "PODIUM_BENCH_MARK": mark}
    subprocess.run([sys.executable, "-c", line], env=environment, check=True, timeout=20)
    (helper,) = marked(mark)
    end_marked(mark)
    assert marked(mark) == []
    assert not _state(helper) or _state(helper) == "Z"


def _state(pid: int) -> str:
    """As the kernel shows it; a stop is noticed a moment after its signal."""
    deadline = time.monotonic() + 5.0
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return ""
        if state in "TZ" or time.monotonic() > deadline:
            return state
        time.sleep(0.01)


def test_patterns_tell_neighbours_apart() -> None:
    start = pattern(2000)
    assert bool((start[1:] != start[:-1]).all())
    assert torch.equal(pattern(2000)[500:], start[500:])

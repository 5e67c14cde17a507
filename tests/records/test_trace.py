"""Timelines and traces, from the records of real runs in virtual time."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import podium
from podium.cli import main
from podium.errors import ConfigError, RecordError
from podium.lab.report.topology import topology
from podium.records import trace as tracing
from podium.records.manifest import read_manifest
from podium.records.recorder import Record, read_records
from podium.records.timeline import KINDS, MOST_MARKS, MOST_RANKS, marks, spans, timeline
from podium.records.trace import Steps, make_trace, parse_steps, read_trace, write_trace

RUNS: dict[str, dict[str, Any]] = {
    "all-reduce": {"workers": 2, "checkpoint_every": 10},
    "parameter-server": {"workers": 2, "strategy_options": {"servers": 2}},
    "parameter-server:mode=async": {"workers": 3},
    "local-sgd": {"workers": 2},
    "strategy-switch": {"workers": 2, "epochs": 3},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("runs")
    found = {}
    for number, (strategy, fields) in enumerate(RUNS.items()):
        run_dir = str(out / str(number))
        settings = {"epochs": 1, **fields, "launcher": "virtual", "run_dir": run_dir}
        podium.train("digits-mlp", strategy=strategy, **settings)
        found[strategy] = Path(run_dir)
    return found


@pytest.fixture(params=list(RUNS))
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


def ns(us: float) -> int:
    return round(us * 1000)


@pytest.mark.slow
def test_every_event_has_what_its_kind_asks_for(folder: Path) -> None:
    trace = read_trace(write_trace(folder))
    assert trace["displayTimeUnit"] == "ms" and trace["otherData"]["clock"] == "virtual"
    kinds = set()
    for event in trace["traceEvents"]:
        kinds.add(event["ph"])
        assert isinstance(event["name"], str) and event["name"] and isinstance(event["args"], dict)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] != "M":
            assert isinstance(event["ts"], int | float) and event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] > 0 and event["cat"] in KINDS
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
    assert kinds == {"M", "X", "C", "i"}
    named = {event["pid"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert named == {event["pid"] for event in trace["traceEvents"]}, "every process has a name"


def test_spans_of_one_thread_do_not_overlap(folder: Path) -> None:
    threads = defaultdict(list)
    for event in read_trace(write_trace(folder))["traceEvents"]:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])))
    assert len(threads) >= 2
    for some in threads.values():
        some.sort()
        assert all(end <= begin for (_, end), (begin, _) in pairwise(some))


def test_computing_and_waiting_add_up_to_what_the_records_say(folder: Path) -> None:
    drawn: dict[tuple[int, str], int] = defaultdict(int)
    for event in read_trace(write_trace(folder))["traceEvents"]:
        if event["ph"] == "X":
            drawn[event["pid"] - 1, event["cat"]] += ns(event["dur"])
    told: dict[tuple[int, str], int] = defaultdict(int)
    for row in read_records(folder):
        if row["kind"] == "step":
            told[row["rank"], "compute"] += row["pass_ns"]
            told[row["rank"], "wait"] += row["wait_ns"]
            told[row["rank"], "rest"] += row["step_ns"] - row["pass_ns"] - row["wait_ns"]
        elif row["kind"] == "checkpoint":
            told[row["rank"], "checkpoint"] += row["took_ns"]
    wanted = {key: value for key, value in told.items() if value}
    assert wanted and {key: value for key, value in drawn.items() if key in told} == wanted


def test_the_same_records_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    assert write_trace(folder).read_bytes() == write_trace(folder, tmp_path / "again.json").read_bytes()


def test_switches_checkpoints_and_staleness_are_there(folders: dict[str, Path]) -> None:
    def of(strategy: str) -> list[dict[str, Any]]:
        return list(read_trace(write_trace(folders[strategy]))["traceEvents"])

    switched = [event for event in of("strategy-switch") if event["ph"] == "i" and event["name"] == "switch"]
    assert len(switched) == 1 and switched[0]["s"] == "g" and "parameter-server" in switched[0]["args"]["what"]
    saved = [event["args"]["path"] for event in of("all-reduce") if event["name"] == "checkpoint"]
    assert saved == ["step-00000010", "step-00000020", "step-00000023"]
    rows = [row for row in read_records(folders["parameter-server:mode=async"]) if row["kind"] == "update"]
    counters = [e for e in of("parameter-server:mode=async") if e["ph"] == "C" and e["name"].startswith("staleness")]
    assert [event["args"]["value"] for event in counters] == [row["staleness"] for row in rows] != []


def test_chosen_steps_are_the_only_ones(folders: dict[str, Path], tmp_path: Path) -> None:
    trace = read_trace(write_trace(folders["all-reduce"], tmp_path / "some.json", parse_steps("5:8")))
    steps = {event["args"]["step"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert steps == {5, 6, 7} and trace["otherData"]["steps"] == [5, 7]
    assert trace["otherData"]["steps_of_the_run"] == 23


@pytest.mark.parametrize("text", ["5", "8:5", "0:3", "a:b", ":0", "5:5"])
def test_steps_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="A:B"):
        parse_steps(text)


def test_steps_may_be_open_at_either_end() -> None:
    assert (parse_steps("5:"), parse_steps(":8"), parse_steps(":")) == (Steps(5, None), Steps(1, 8), Steps())


def test_steps_beyond_the_run_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="1 to 23, got 90:"):
        write_trace(folders["all-reduce"], steps=Steps(90))


def test_a_long_run_is_cut_after_a_whole_step(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders["all-reduce"]
    monkeypatch.setattr(tracing, "MOST_EVENTS", 100)
    trace = make_trace(list(read_records(folder)), read_manifest(folder))
    assert trace["otherData"]["steps"] == [1, 10] and len(trace["traceEvents"]) < 100


def test_the_command_says_what_it_wrote(folders: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "t.json"
    words = ["trace", str(folders["all-reduce"]), "--out", str(target), "--steps", ":4"]
    shown = CliRunner().invoke(main, words)
    assert shown.exit_code == 0 and "steps 1 to 3 of 23, virtual clock" in shown.stdout
    document = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)
    assert document["trace"] == str(target) and document["events"] == len(read_trace(target)["traceEvents"])


def test_a_folder_without_a_run_and_a_place_that_cannot_be_written_are_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(RecordError):
        write_trace(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot be written"):
        write_trace(folders["all-reduce"], tmp_path / "file" / "trace.json")


def test_a_timeline_shows_twelve_steps_from_the_middle(folder: Path) -> None:
    rows = list(read_records(folder))
    found = timeline(rows)
    own = [row for row in rows if row["kind"] == "step" and row["rank"] == found["window"]["of"]]
    first, last = found["window"]["steps"]
    assert last - first == 11 and abs((first + last) / 2 - (own[0]["step"] + own[-1]["step"]) / 2) <= 1
    width = (found["window"]["end_s"] - found["window"]["begin_s"]) * 1e3
    for lane in found["ranks"]:
        assert lane["spans"] and all(0 <= begin < end <= width + 1e-6 for _, begin, end in lane["spans"])
    totals = {lane["rank"]: lane["totals"]["compute"] for lane in found["ranks"]}
    for rank, seconds in totals.items():
        assert seconds == pytest.approx(
            sum(r["pass_ns"] for r in rows if r["kind"] == "step" and r["rank"] == rank) / 1e9
        )
    assert len(json.dumps(found)) < 6000


def test_a_switch_is_marked_once(folders: dict[str, Path]) -> None:
    found = timeline(list(read_records(folders["strategy-switch"])))
    assert [mark["kind"] for mark in found["marks"]] == ["switch"] and found["marks_left_out"] == 0
    assert 0 < found["marks"][0]["seconds"] < found["length_s"]


def steps_of(workers: int, steps: int = 20) -> list[Record]:
    """Worker k computes k + 1 ms in every step; all wait for the last."""
    length = (workers + 1) * 1_000_000
    return [
        {"kind": "step", "rank": rank, "t_ns": step * length, "step": step, "step_ns": length}
        | {"pass_ns": (rank + 1) * 1_000_000, "wait_ns": length - (rank + 1) * 1_000_000, "loss": 1.0}
        for step in range(1, steps + 1)
        for rank in range(workers)
    ]


def test_of_many_workers_the_fastest_the_middle_and_the_slowest_are_shown() -> None:
    found = timeline(steps_of(40))
    ranks = [lane["rank"] for lane in found["ranks"]]
    assert len(ranks) == MOST_RANKS and ranks == [*range(6), 18, 19, 20, 21, *range(34, 40)]
    assert found["workers"] == 40 and "of 40 workers" in found["shown"]
    assert timeline(steps_of(16))["shown"] == "all workers"


def test_a_record_that_reaches_back_begins_where_the_last_one_ended() -> None:
    rows = [*steps_of(1, 2), {"kind": "regroup", "rank": 0, "t_ns": 5_000_000, "took_ns": 4_000_000, "members": [0]}]
    found = spans(rows)
    assert found[-1].kind == "regroup" and (found[-1].begin_ns, found[-1].end_ns) == (4_000_000, 5_000_000)


def test_losses_are_marked_and_marks_are_bounded() -> None:
    lost: Record = {"kind": "lost", "rank": -1, "t_ns": 7, "lost": 2, "cause": "killed by SIGKILL", "generation": 0}
    assert [mark.text for mark in marks([lost])] == ["rank 2 lost: killed by SIGKILL"]
    many = [lost | {"lost": rank, "t_ns": rank} for rank in range(MOST_MARKS + 5)]
    found = timeline([*steps_of(2), *many])
    assert len(found["marks"]) == MOST_MARKS and found["marks_left_out"] == 5


def test_records_without_steps_have_no_timeline() -> None:
    assert timeline([{"kind": "begin", "rank": 0, "t_ns": 0, "role": "worker"}]) == {}


def facts_of(folder: Path) -> dict[str, Any]:
    return topology(list(read_records(folder)), read_manifest(folder))


def test_a_topology_has_the_bytes_that_ranks_counted(folder: Path) -> None:
    ends = {row["rank"]: row for row in read_records(folder) if row["kind"] == "end"}
    found = facts_of(folder)
    assert {rank["rank"]: (rank["sent"], rank["received"]) for rank in found["ranks"]} == {
        rank: (row["sent"], row["received"]) for rank, row in ends.items()
    }
    assert all(rank["whole"] for rank in found["ranks"])


def test_pushes_are_counted_where_servers_wrote_them_down_and_inferred_elsewhere(folders: dict[str, Path]) -> None:
    (stale,) = facts_of(folders["parameter-server:mode=async"])["patterns"]
    assert stale["counted"] and stale["edges"] == [[0, 3, 23], [1, 3, 23], [2, 3, 23]]
    (sync,) = facts_of(folders["parameter-server"])["patterns"]
    assert not sync["counted"] and sync["edges"] == [[0, 2, None], [0, 3, None], [1, 2, None], [1, 3, None]]
    (ring,) = facts_of(folders["all-reduce"])["patterns"]
    assert (ring["pattern"], ring["counted"], ring["edges"]) == ("a ring of workers", False, [[0, 1, None]])


def test_phases_have_a_pattern_each_and_colocated_servers_sit_with_workers(folders: dict[str, Path]) -> None:
    found = facts_of(folders["strategy-switch"])
    assert [pattern["pattern"] for pattern in found["patterns"]] == ["a ring of workers", "workers and servers"]
    assert found["colocated"] and [rank["node"] for rank in found["ranks"]] == [0, 1, 0, 1]


def test_ranks_sit_where_the_cluster_says(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        '[[node]]\nname = "a"\nup_mbit = 100\ndown_mbit = 50\n[[node]]\nname = "b"\nspeed = 0.5\n'
        '[[link]]\nbetween = ["a", "b"]\nmbit = 10\n[placement]\nworkers = ["b", "a"]\nservers = ["a"]\n'
    )
    run = podium.train(
        "digits-mlp", strategy="parameter-server", workers=2, steps=3, launcher="virtual", cluster=str(file),
        run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    found = facts_of(Path(run.run_dir))
    assert [rank["node"] for rank in found["ranks"]] == [1, 0, 0] and found["described"]
    assert (found["nodes"][0]["up_mbit"], found["nodes"][1]["speed"]) == (100, 0.5)
    assert [(link["between"], link["mbit"]) for link in found["links"]] == [(["a", "b"], 10)]

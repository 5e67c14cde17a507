"""What a process of a run is told, and how one that takes another's place goes on in its records."""

from __future__ import annotations

from pathlib import Path

import pytest

from podium.config import RunConfig
from podium.launch.base import ScriptPlan
from podium.launch.local import endpoints_of, rules_of
from podium.launch.process import NodeSpec
from podium.records.recorder import Recorder, read_records
from podium.strategies import make_strategy


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        ('{"kind":"begin"}\n{"kind":"upd', ["begin"]),
        ('{"kind":"begin"}\n', ["begin"]),
        ('{"kind":"beg', []),
        ("", []),
        (None, []),
    ],
)
def test_a_replacement_writes_on_behind_the_last_whole_record(
    tmp_path: Path, before: str | None, kept: list[str]
) -> None:
    path = tmp_path / "rank-2.jsonl"
    if before is not None:
        path.write_text(before)
    recorder = Recorder(2, path)
    recorder.write("end", 5)
    recorder.close()
    assert [row["kind"] for row in read_records(path)] == [*kept, "end"]


def planned(**options: object) -> ScriptPlan:
    config = RunConfig(**options)  # type: ignore[arg-type]  # each option has its own type
    return ScriptPlan(config, make_strategy(config.strategy, config.strategy_options, config.workers), Path("run"))


def test_the_role_of_a_process_is_that_of_its_first_endpoint() -> None:
    for placement, roles in (("dedicated", ["worker", "worker", "server"]), ("colocated", ["worker", "worker"])):
        job = planned(workers=2, strategy="parameter-server", strategy_options={"placement": placement})
        common = {"coordinator": "unix:/k", "secret": "", "store": "", "rendezvous": "/r"}
        specs = [NodeSpec.of(job, endpoints, **common) for endpoints in endpoints_of(job)]
        assert [spec.role for spec in specs] == roles
        assert {(spec.workers, spec.servers) for spec in specs} == {(2, 1)}


def test_a_process_that_is_started_again_listens_under_another_name() -> None:
    common = {"coordinator": "unix:/k", "secret": "", "store": "", "rendezvous": "/r"}
    job = planned(workers=1, strategy="parameter-server")
    names = [NodeSpec.of(job, (1,), again=again, **common).socket("c1") for again in range(3)]
    assert names == ["unix:/r/c1", "unix:/r/c1-1", "unix:/r/c1-2"]


def test_there_are_no_more_workers_than_samples_in_a_step() -> None:
    assert rules_of(planned(workers=2, batch_size=8), survives_loss=True).most_workers == 8
    assert rules_of(planned(workers=2), survives_loss=True).most_workers == 4096

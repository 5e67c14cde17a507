"""The same task, seed and strategy give the same bits whichever launcher starts the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

import podium
from podium.records.recorder import read_records

TASK = "podium.testing.toys:toy"


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        "all-reduce",
        "parameter-server",
        "parameter-server:servers=2",
        "parameter-server:servers=2,placement=colocated",
    ],
)
def test_processes_threads_and_virtual_time_agree_in_bits(strategy: str, tmp_path: Path) -> None:
    results = [
        podium.train(TASK, strategy=strategy, workers=2, launcher=launcher, run_dir=str(tmp_path / launcher), seed=3)
        for launcher in ("local", "threads", "virtual")
    ]
    hashes = {h for result in results for h in result.param_hash.values()}
    assert len(hashes) == 1
    assert len({result.loss for result in results}) == 1
    assert {(result.status, result.steps, result.samples) for result in results} == {("finished", 8, 88)}
    assert len({result.sent_bytes for result in results}) == 1, "bytes on the wire do not depend on the world"


def test_a_run_leaves_its_records_result_and_model(tmp_path: Path) -> None:
    result = podium.train(TASK, strategy="all-reduce", workers=2, launcher="threads", run_dir=str(tmp_path))
    assert {"manifest.json", "records.jsonl", "result.json", "model.safetensors"} <= {
        p.name for p in tmp_path.iterdir()
    }
    rows = list(read_records(tmp_path))
    assert [row["t_ns"] for row in rows] == sorted(row["t_ns"] for row in rows)
    assert len([row for row in rows if row["kind"] == "eval"]) == len(result.history) == 2

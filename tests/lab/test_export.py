"""Exports: what other programs read back is what was recorded."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import duckdb
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import podium
from podium.cli import main
from podium.errors import ConfigError, MissingExtra, RecordError, UnknownName
from podium.lab.report.export import export, study_tables
from podium.lab.report.export_table import Table, as_text, guarded, make_table, to_csv, unguarded, write_parquet
from podium.lab.study.store import Store
from podium.records.recorder import read_records
from tests.lab.synthetic import failed_row, make_row

HOSTILE = ("=cmd|'/C calc'!A0", "+1", "-2", "@SUM(A1)", "'quoted", "\ttab", 'a,"b"\nc', " spaced", "plain")


def read_csv(path: str | Path) -> list[dict[str, str]]:
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read_parquet(path: str | Path) -> list[dict[str, Any]]:
    with duckdb.connect() as memory:
        found = memory.execute(f"SELECT * FROM read_parquet('{path}')")
        names = [column[0] for column in found.description or ()]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def same(one: Any, other: Any) -> bool:
    """Equal in type and bits; NaN is NaN."""
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return type(one) is type(other) and one == other and repr(one) == repr(other)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Two factors, hostile names, numbers that are not finite, a failure and the try after it."""
    store = Store(tmp_path / "study")
    cells = [
        {"cell": f"{name}, {workers}", "levels": {"note": name, "workers": workers}, "settings": {"workers": workers}}
        for name in HOSTILE
        for workers in (2, 4)
    ]
    store.write_study({"name": "hostile", "task": "digits-mlp", "cells": cells, "settings": {"epochs": 8}})
    for number, cell in enumerate(cells):
        for seed in (0, 1):
            row = make_row(cell["cell"], seed, seconds=1 / (3 + number + seed), final=0.1 + 0.2 * seed)
            store.append({**row, "levels": cell["levels"], "nodes": 3, "setup_s": 0.3})
    first = cells[0]["cell"]
    store.append({**failed_row(first, 2, "=RankFailed: rank 1"), "levels": cells[0]["levels"]})
    store.append({**make_row(first, 2, metric="mae", final=math.nan), "loss": math.inf, "levels": cells[0]["levels"]})
    return store.folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run: two workers and a server that do not go in step."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    podium.train(
        "digits-mlp",
        strategy="parameter-server:mode=async",
        workers=2,
        epochs=2,
        launcher="virtual",
        run_dir=str(folder),
    )
    return folder


def test_csv_gives_back_every_number_and_text_of_a_study(study: Path) -> None:
    done = export(study, to="csv")
    rows = Store(study).rows()
    assert done.lines == {"runs": len(rows), "history": sum(len(row.get("history") or ()) for row in rows)}
    lines = read_csv(study / "export" / "runs.csv")
    for row, line in zip(rows, lines, strict=True):
        assert unguarded(line["cell"]) == row["cell"]
        assert unguarded(line["level.note"]) == row["levels"]["note"]
        assert int(line["level.workers"]) == row["levels"]["workers"]
        assert line["status"] == row["status"]
        if row["status"] == "finished":
            assert float(line["seconds"]) == row["seconds"]
            assert int(line["sent_bytes"]) == row["sent_bytes"]
            assert float(line["step_ms.p90"]) == row["step_ms"]["p90"]
            assert repr(float(line["loss"])) == repr(float(row["loss"]))
    assert unguarded(lines[-2]["error"]) == "=RankFailed: rank 1"
    assert lines[-2]["seconds"] == "" and lines[-2]["counted"] == "false"
    assert (lines[-1]["metric.mae"], lines[-1]["loss"], lines[-1]["metric.accuracy"]) == ("nan", "inf", "")


def test_parquet_gives_back_every_number_and_text_with_its_type(study: Path) -> None:
    export(study, to="parquet")
    for table in study_tables(study):
        lines = read_parquet(study / "export" / f"{table.name}.parquet")
        assert [list(line) for line in lines] == [list(table.columns)] * len(table)
        for name, values in table.columns.items():
            assert all(same(line[name], value) for line, value in zip(lines, values, strict=True)), name
    (last,) = [line for line in read_parquet(study / "export" / "runs.parquet") if line["loss"] == math.inf]
    assert math.isnan(last["metric.mae"]) and last["metric.accuracy"] is None and last["counted"] is True


def test_duckdb_reads_the_same_numbers_from_csv_as_from_parquet(study: Path, tmp_path: Path) -> None:
    for to in ("csv", "parquet"):
        export(study, to=to, out=tmp_path / "out")
    with duckdb.connect() as memory:
        where = "cell NOT LIKE '%tab%'"
        query = "SELECT seed, seconds, loss, samples_per_s FROM {} WHERE {} ORDER BY ALL"
        found = [
            memory.execute(query.format(f"{read}('{tmp_path}/out/runs.{to}')", where)).fetchall()
            for read, to in (("read_csv", "csv"), ("read_parquet", "parquet"))
        ]
    assert found[0] == found[1] and len(found[0]) > 30


def test_no_field_of_a_csv_file_begins_like_a_formula(study: Path) -> None:
    export(study, to="csv")
    lines = read_csv(study / "export" / "runs.csv")
    texts = [field for line in lines for field in line.values()]
    numbers = {field for field in texts if field and _is_number(field)}
    assert not [field for field in texts if field not in numbers and field[:1] in tuple("=+-@\t\r ")]
    assert len([line for line in lines if line["cell"].startswith("'")]) > 20


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def test_the_same_results_give_the_same_bytes(study: Path, tmp_path: Path) -> None:
    for out in ("a", "b"):
        export(study, to="csv", out=tmp_path / out)
        export(study, to="parquet", out=tmp_path / out)
    for name in ("runs.csv", "history.csv", "runs.parquet", "history.parquet"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_study_from_before_levels_takes_them_from_its_design_or_has_none(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(make_row("solo", 0))
    store.append(make_row("all-reduce", 0))
    store.write_study({"task": "digits-mlp", "cells": [{"cell": "solo", "levels": {"workers": 1}}]})
    assert study_tables(tmp_path)[0].columns["level.workers"] == [1, None]
    store.write_study({"task": "digits-mlp", "strategies": ["solo", "all-reduce"]})
    assert not [name for name in study_tables(tmp_path)[0].columns if name.startswith("level.")]


def test_a_run_is_exported_with_every_step_of_every_worker(run: Path, tmp_path: Path) -> None:
    done = export(run, to="parquet", out=tmp_path)
    steps = [record for record in read_records(run) if record["kind"] == "step"]
    assert done.lines == {"runs": 1, "history": 2, "steps": len(steps)}
    lines = read_parquet(tmp_path / "steps.parquet")
    assert lines == [{k: v for k, v in record.items() if k != "kind"} for record in steps]
    (line,) = read_parquet(tmp_path / "runs.parquet")
    result = json.loads((run / "result.json").read_text())
    assert line["metric.accuracy"] == result["metrics"]["accuracy"]
    assert line["staleness.mean"] == result["staleness"]["mean"]
    assert line["strategy"] == "parameter-server(mode=async)"


def test_a_run_that_did_not_end_is_exported_as_far_as_it_came(run: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn"
    shutil.copytree(run, torn)
    (torn / "result.json").unlink()
    records = (torn / "records.jsonl").read_text().splitlines()
    half = [line for line in records if json.loads(line)["kind"] != "end"][: len(records) // 2]
    (torn / "records.jsonl").write_text("\n".join(half) + "\n")
    export(torn, to="csv")
    (line,) = read_csv(torn / "export" / "runs.csv")
    assert (line["status"], line["task"], line["seed"]) == ("unfinished", "digits-mlp", "0")
    assert len(read_csv(torn / "export" / "steps.csv")) == sum('"kind":"step"' in text for text in half)
    failure = {"kind": "failed", "rank": -1, "t_ns": 10**12, "error": "ValueError", "message": "bad"}
    with (torn / "records.jsonl").open("a") as file:
        file.write(json.dumps(failure) + "\n")
    export(torn, to="csv")
    (line,) = read_csv(torn / "export" / "runs.csv")
    assert (line["status"], line["error"]) == ("failed", "ValueError: bad")


def test_a_sweep_is_exported_trial_by_trial(tmp_path: Path) -> None:
    found = podium.sweep(
        "digits-mlp",
        grid={"lr": [0.3, 0.1], "hidden": [[16]]},
        epochs=2,
        executor="sequential",
        device="cpu",
        keep="none",
        out=str(tmp_path / "sweep"),
    )
    export(tmp_path / "sweep", to="parquet")
    lines = read_parquet(tmp_path / "sweep" / "export" / "runs.parquet")
    assert [(line["trial"], line["level.lr"], line["level.hidden"]) for line in lines] == [
        (0, 0.3, "[16]"),
        (1, 0.1, "[16]"),
    ]
    assert [line["metric.accuracy"] for line in lines] == [o.evaluation.metrics["accuracy"] for o in found.outcomes]
    history = read_parquet(tmp_path / "sweep" / "export" / "history.parquet")
    assert [line["loss"] for line in history] == [point.loss for o in found.outcomes for point in o.history]


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_a_guarded_text_comes_back_and_is_no_formula(text: str) -> None:
    assert unguarded(guarded(text)) == text
    assert not guarded(text).startswith(("=", "+", "-", "@", "\t", "\r", "\n", " "))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.none(), st.floats(), st.integers(-(2**70), 2**70), st.booleans()), min_size=1))
def test_whatever_numbers_a_column_mixes_each_keeps_its_value(values: list[Any]) -> None:
    columns = make_table("any", [{"number": value} for value in values]).columns
    if all(value is None for value in values):
        assert not columns
        return
    kept = columns["number"]
    assert len({type(value) for value in kept if value is not None}) == 1
    for value, after in zip(values, kept, strict=True):
        assert (after is None) == (value is None)
        if value is not None:
            assert after == as_text(value) if isinstance(after, str) else after == value or math.isnan(value)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.floats(), st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=20))
def test_floats_and_integers_of_any_size_survive_csv_and_parquet(pairs: list[tuple[float, int]]) -> None:
    table = make_table("t", [{"x": x, "n": n} for x, n in pairs])
    read = list(csv.DictReader(to_csv(table).splitlines()))
    assert all(same(float(line["x"]), x) and int(line["n"]) == n for line, (x, n) in zip(read, pairs, strict=True))
    with tempfile.TemporaryDirectory() as folder:
        write_parquet(table, Path(folder) / "t.parquet")
        lines = read_parquet(Path(folder) / "t.parquet")
    assert all(same(line["x"], x) and same(line["n"], n) for line, (x, n) in zip(lines, pairs, strict=True))


def test_a_table_as_large_as_a_long_run_is_written_at_once(tmp_path: Path) -> None:
    count = 50_000
    floats = [k / 7 for k in range(count)]
    table = Table("steps", {"step": list(range(count)), "loss": list(floats)})
    write_parquet(table, tmp_path / "it's.parquet")
    with duckdb.connect() as memory:
        path = str(tmp_path / "it's.parquet").replace("'", "''")
        assert memory.execute(f"SELECT loss FROM read_parquet('{path}')").fetchall() == [(x,) for x in floats]
    assert not list(tmp_path.glob("*.partial"))


def test_what_cannot_be_exported_is_refused_with_a_reason(study: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be the folder of a run, a comparison or a sweep, got no folder"):
        export(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"got a folder without study\.json"):
        export(tmp_path)
    with pytest.raises(UnknownName, match=r"unknown format 'xlsx'.*csv, mlflow, parquet, tensorboard"):
        export(study, to="xlsx")
    (study / "results.jsonl").unlink()
    with pytest.raises(RecordError, match="must hold at least one run"):
        export(study)
    (tmp_path / "file").write_text("")
    Store(study).append(make_row("solo", 0))
    for to in ("csv", "parquet"):
        with pytest.raises(RecordError, match="cannot be written"):
            export(study, to=to, out=tmp_path / "file")


def test_parquet_without_duckdb_names_the_extra(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(MissingExtra, match=r"writing Parquet needs duckdb: pip install 'podium\[study\]'"):
        podium.export(study, to="parquet")


def test_the_verb_tells_what_it_wrote(study: Path, tmp_path: Path) -> None:
    shown = CliRunner().invoke(main, ["export", str(study), "--out", str(tmp_path / "t")])
    assert shown.exit_code == 0, shown.output
    assert [line.split() for line in shown.stdout.splitlines()] == [
        ["runs", "38", "lines", f"{tmp_path}/t/runs.csv"],
        ["history", "296", "lines", f"{tmp_path}/t/history.csv"],
    ]
    shown = CliRunner().invoke(main, ["export", str(study), "--to", "parquet", "--json"])
    assert json.loads(shown.stdout)["lines"] == {"runs": 38, "history": 296}
    assert dataclasses.is_dataclass(podium.export(study))
    assert CliRunner().invoke(main, ["export", str(tmp_path / "absent")]).exit_code == 2

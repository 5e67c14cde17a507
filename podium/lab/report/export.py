"""Results for other programs: tables as CSV or Parquet, or the same numbers for TensorBoard and MLflow.

Tables are tidy: one row per run (`runs`), per validation (`history`) and, for a single run, per step of each worker
(`steps`). Every number equals the one in the records, bit for bit. Values that are neither numbers nor texts
(histograms, divisions of steps, timelines) are not exported; they are in `result.json` and `results.jsonl`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from podium.errors import ConfigError, RecordError, UnknownName
from podium.lab.report.export_table import Table, make_table, to_csv, write_parquet
from podium.lab.study.results import finished
from podium.lab.study.store import Row, Store
from podium.records.disk import write_atomically
from podium.records.manifest import read_manifest
from podium.records.recorder import Record, read_records
from podium.records.writers.base import Run, describe, flat, when
from podium.records.writers.series import Point, costs, finals, validations

if TYPE_CHECKING:
    from podium.records.writers import Writer
    from podium.sweeps.trial import Outcome

FORMATS = ("csv", "parquet", "tensorboard", "mlflow")
Format = Literal["csv", "parquet", "tensorboard", "mlflow"]

OUTSIDE = ("history", "param_hash", "timeline", "topology")
"""Fields of a row that never become columns of `runs`."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """What was written. `podium export --json` prints it."""

    folder: str
    """The exported folder."""
    to: str
    out: str
    """The folder written to, or MLflow's URI."""
    files: tuple[str, ...] = ()
    """Of tables."""
    lines: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Rows by table."""
    runs: int = 0
    skipped: int = 0
    """Runs that MLflow already had."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Told(NamedTuple):
    """One run for a writer: what it is, its numbers, and how it ended."""

    run: Run
    points: Sequence[Point]
    status: str
    seconds: float


def export(folder: str | Path, *, to: Format | str = "csv", out: str | Path | None = None) -> Export:
    """Export the results in `folder`, which is that of a run, a comparison, a study or a sweep.

    `out` is a folder, for MLflow also a tracking URI; the default is `export` inside `folder`. Existing tables and
    TensorBoard files of an earlier export are replaced; MLflow keeps the runs that it already has.
    """
    source = find(Path(folder))
    if to not in FORMATS:
        raise UnknownName("format", to, FORMATS)
    if to in ("csv", "parquet"):
        return _write_tables(source, str(to), Path(out) if out is not None else source.folder / "export")
    return _write_runs(source, str(to), str(out) if out is not None else str(source.folder / "export" / to))


class Source(NamedTuple):
    """A folder that can be exported; its tables and runs are read on demand."""

    folder: Path
    kind: Literal["run", "study", "sweep"]

    def tables(self) -> list[Table]:
        return {"run": run_tables, "study": study_tables, "sweep": sweep_tables}[self.kind](self.folder)

    def told(self) -> Iterator[Told]:
        return {"run": _told_run, "study": _told_study, "sweep": _told_sweep}[self.kind](self.folder)


def find(folder: Path) -> Source:
    """Detect what the folder holds; raises `ConfigError` if it is none of the three."""
    if (folder / "trials.jsonl").is_file():
        return Source(folder, "sweep")
    if (folder / "study.json").is_file():
        return Source(folder, "study")
    if (folder / "manifest.json").is_file():
        return Source(folder, "run")
    came = "a folder without study.json, manifest.json or trials.jsonl" if folder.is_dir() else "no folder"
    raise ConfigError(f"export: {folder} must be the folder of a run, a comparison or a sweep, got {came}")


# Tables.


def run_tables(folder: Path) -> list[Table]:
    """`runs`, `history` and `steps` of one run, also of one that failed or is still running."""
    row, records = _run_row(folder)
    steps = [row for row in records if row["kind"] == "step"]
    keys = {"seed": row.get("seed")}
    return [
        make_table("runs", [{**_line(row), "error": row.get("error")}]),
        make_table("history", [{**keys, **_validation(point)} for point in row.get("history") or ()]),
        make_table("steps", [_step(record) for record in steps]),
    ]


def study_tables(folder: Path) -> list[Table]:
    """`runs` and `history` of a study, retries included; `counted` marks the runs that results are computed from."""
    study, rows = _read_study(folder)
    counted = {id(row) for row in finished(rows)}
    lines, history = [], []
    for row in rows:
        keys = {"cell": row["cell"], "seed": row["seed"]}
        keys |= {f"level.{name}": level for name, level in levels_of(row, study).items()}
        facts = {"counted": id(row) in counted, "error": row.get("error")}
        lines.append({**keys, **_line({k: v for k, v in row.items() if k != "levels"}), **facts})
        history += [{**keys, "counted": facts["counted"], **_validation(point)} for point in row.get("history") or ()]
    return [make_table("runs", lines), make_table("history", history)]


def sweep_tables(folder: Path) -> list[Table]:
    """`runs` (one row per finished trial) and `history` of a sweep; its options are levels."""
    outcomes, config = _read_sweep(folder)
    lines, history = [], []
    for outcome in outcomes:
        keys = _trial_keys(outcome)
        last = outcome.evaluation
        lines.append(
            {
                **keys,
                "status": outcome.status,
                "task": config["task"],
                "executor": outcome.executor,
                **({} if last is None else {f"metric.{name}": value for name, value in last.metrics.items()}),
                "loss": None if last is None else last.loss,
                "seconds": outcome.seconds,
                "steps": outcome.steps,
                "epochs": None if last is None else last.epoch,
                "samples": outcome.samples,
                "model": outcome.model or None,
                "error": outcome.why or None,
            }
        )
        history += [{**keys, **_validation(point._asdict())} for point in outcome.history]
    return [make_table("runs", lines), make_table("history", history)]


def _run_row(folder: Path) -> tuple[Row, list[Record]]:
    """A run's result and records; without a `result.json`, the result is summarised from the records."""
    manifest, records = read_manifest(folder), list(read_records(folder))
    config = manifest["config"]
    try:
        result: Row = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        from podium.records.summary import summarise

        known = {name: config.get(name) for name in ("task", "strategy", "workers", "seed", "launcher")}
        result = {**known, "run_dir": str(folder), **_ending(records, manifest), **summarise(records)}
    except (OSError, ValueError) as error:
        raise RecordError(f"{folder / 'result.json'}: not a result: {error}") from error
    return result, records


def _ending(records: Iterable[Record], manifest: Mapping[str, Any]) -> Row:
    """How a run without a result ended, from its records; the user's own script records no end."""
    failures = [row for row in records if row["kind"] == "failed"]
    if failures:
        return {"status": "failed", "error": f"{failures[-1].get('error')}: {failures[-1].get('message')}"}
    return {"status": None if "script" in manifest else "unfinished"}


def _read_study(folder: Path) -> tuple[Row, list[Row]]:
    store = Store(folder)
    return store.read_study(), store.rows()


def _read_sweep(folder: Path) -> tuple[list[Outcome], Mapping[str, Any]]:
    from podium.sweeps.queue import read_outcomes

    return read_outcomes(folder), read_manifest(folder)["config"]


def _trial_keys(outcome: Outcome) -> Row:
    trial = outcome.trial
    keys = {"trial": trial.number, "point": trial.point, "seed": trial.seed, "fold": trial.fold}
    return {**keys, **{f"level.{name}": _scalar(value) for name, value in trial.options.items()}}


def levels_of(row: Mapping[str, Any], study: Mapping[str, Any]) -> dict[str, Any]:
    """The levels of a row's cell, from the row or the design; empty in studies older than levels."""
    found = row.get("levels")
    if found is None:
        found = next((cell["levels"] for cell in study.get("cells") or () if cell["cell"] == row["cell"]), {})
    return {name: _scalar(level) for name, level in found.items()}


def _line(row: Mapping[str, Any]) -> Row:
    """A result's fields as columns: tables of scalars with dotted names; deeper values are left out."""
    line: Row = {}
    for name, value in row.items():
        if name == "lost":
            line[name] = json.dumps(value)
        elif name in OUTSIDE:
            continue
        elif isinstance(value, Mapping):
            if all(_is_scalar(inner) for inner in value.values()):
                stem = "metric" if name == "metrics" else name
                line.update({f"{stem}.{key}": inner for key, inner in value.items()})
        elif _is_scalar(value):
            line[name] = value
    return line


def _validation(point: Mapping[str, Any]) -> Row:
    """One row of `history`; metrics are named as in `runs`."""
    about = ("step", "epoch", "samples", "seconds", "loss")
    metrics = {k: v for k, v in point.items() if k not in (*about, "metrics")} | dict(point.get("metrics") or {})
    line = {name: point[name] for name in about if name in point}
    return line | {f"metric.{name}": value for name, value in metrics.items() if _is_scalar(value)}


def _step(record: Record) -> Row:
    return {name: _scalar(value) for name, value in record.items() if name != "kind"}


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _scalar(value: Any) -> Any:
    """A value that fits into one field: lists and tables become JSON."""
    return value if _is_scalar(value) else json.dumps(value)


def _write_tables(source: Source, to: str, out: Path) -> Export:
    written = {}
    for table in source.tables():
        if table.columns:
            path = out / f"{table.name}.{to}"
            write_atomically(path, to_csv(table)) if to == "csv" else write_parquet(table, path)
            written[str(path)] = table
    if not written:
        raise RecordError(f"export: {source.folder} must hold at least one run, got none")
    lines = {table.name: len(table) for table in written.values()}
    return Export(
        folder=str(source.folder), to=to, out=str(out), files=tuple(written), lines=lines, runs=lines.get("runs", 0)
    )


# Runs for writers.


def _write_runs(source: Source, to: str, out: str) -> Export:
    writer = _writer(to, out)
    written = skipped = 0
    for told in source.told():
        page = writer.open(told.run)
        if page is None:
            skipped += 1
            continue
        page.write(told.points)
        page.end(told.status, told.seconds)
        written += 1
    if not written + skipped:
        raise RecordError(f"export: {source.folder} must hold at least one run, got none")
    return Export(folder=str(source.folder), to=to, out=out, runs=written, skipped=skipped)


def _writer(to: str, out: str) -> Writer:
    from podium.records.writers import MLflow, TensorBoard

    return MLflow(out) if to == "mlflow" else TensorBoard(out, anew=True)


def _told_run(folder: Path) -> Iterator[Told]:
    row, records = _run_row(folder)
    manifest = read_manifest(folder)
    points = [*costs(records, manifest["config"]), *validations(row["history"]), *finals(row)]
    yield Told(describe(folder, manifest), points, str(row["status"]), _seconds(row))


def _told_study(folder: Path) -> Iterator[Told]:
    study, rows = _read_study(folder)
    for number, row in enumerate(rows):
        points = [*validations(row.get("history") or ()), *finals(row)]
        levels = levels_of(row, study)
        run_dir = _run_dir(folder, row)
        if run_dir is not None:
            manifest = read_manifest(run_dir)
            points = [*costs(read_records(run_dir), manifest["config"]), *points]
            run = describe(run_dir, manifest, cell=str(row["cell"]), levels=levels)
        else:
            run = _without_folder(folder, number, row, study, levels)
        tags = {**run.tags, **{f"level.{name}": str(level) for name, level in levels.items()}}
        tags |= {"error": str(row["error"])} if row.get("error") else {}
        yield Told(dataclasses.replace(run, tags=tags), points, str(row["status"]), _seconds(row))


def _without_folder(
    folder: Path, number: int, row: Mapping[str, Any], study: Mapping[str, Any], levels: Mapping[str, Any]
) -> Run:
    """A run whose folder is gone: its configuration comes from the study's design."""
    cell, seed, task = str(row["cell"]), int(row["seed"]), str(row.get("task") or study.get("task") or "study")
    asked = {name: row[name] for name in ("workers", "launcher") if name in row} | dict(study.get("settings") or {})
    of_cell = next((c.get("settings") for c in study.get("cells") or () if c["cell"] == cell), None)
    return Run(
        label=cell,
        seed=seed,
        task=Path(task).name,
        key=f"{folder.absolute()}#{number}",
        params=flat(asked | (of_cell or {})) | {f"level.{name}": level for name, level in levels.items()},
        tags={"strategy": cell, "seed": str(seed), "launcher": str(row.get("launcher", ""))},
    )


def _run_dir(folder: Path, row: Mapping[str, Any]) -> Path | None:
    """A row's run folder, if it exists: among the study's runs, or at its recorded path."""
    asked = Path(str(row.get("run_dir") or ""))
    places = (folder / "runs" / asked.name, asked)
    return next((place for place in places if asked.name and (place / "manifest.json").is_file()), None)


def _told_sweep(folder: Path) -> Iterator[Told]:
    outcomes, config = _read_sweep(folder)
    started = when(read_manifest(folder).get("started"))
    for outcome in outcomes:
        trial, task = outcome.trial, Path(str(config["task"])).name
        last = outcome.evaluation
        result = {
            "steps": outcome.steps,
            "samples": outcome.samples,
            "seconds": outcome.seconds,
            **({} if last is None else {"loss": last.loss, "metrics": last.metrics}),
        }
        keys = {name: value for name, value in _trial_keys(outcome).items() if value is not None}
        tags = {"trial": trial.number, "point": trial.point, "fold": trial.fold, "executor": outcome.executor}
        run = Run(
            label=f"trial-{trial.number:05d}",
            seed=trial.seed,
            task=task,
            key=f"{folder.absolute()}#{trial.number}",
            params=keys,
            tags={name: str(value) for name, value in tags.items() if value is not None} | {"seed": str(trial.seed)},
            started_s=started,
        )
        history = [*validations(point._asdict() for point in outcome.history)]
        # Evaluations have no timestamps: their times are interpolated over the trial by step.
        pace = outcome.seconds / outcome.steps if outcome.steps else 0.0
        points = [*(point._replace(seconds=point.step * pace) for point in history), *finals(result)]
        yield Told(run, points, outcome.status, outcome.seconds)


def _seconds(row: Mapping[str, Any]) -> float:
    value = row.get("seconds")
    return float(value) if isinstance(value, int | float) else 0.0

"""Writers: TensorBoard's and MLflow's own readers find what a run recorded."""

from __future__ import annotations

import itertools
import json
import math
import socket
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner

import podium
from podium.cli import main
from podium.errors import ConfigError, MissingExtra, RankFailed, RecordError, UnknownName
from podium.lab.study.store import Store
from podium.records.recorder import read_records
from podium.records.writers import Page, Point, Run, Together, Writer, open_log
from podium.records.writers.series import costs, global_step
from tests.lab.synthetic import failed_row, make_row

Series = dict[str, list[tuple[int, float]]]


class Kept(Writer):
    """Keeps what it is told: an implementation of the interface without a package behind it."""

    def __init__(self, breaks_at: str = "") -> None:
        super().__init__()
        self.breaks_at = breaks_at
        self.runs: list[Run] = []
        self.points: list[list[Point]] = []
        self.statuses: dict[int, str] = {}

    def open(self, run: Run) -> Page:
        self.runs.append(run)
        self.points.append([])
        return _KeptPage(self, len(self.runs) - 1)


class _KeptPage(Page):
    def __init__(self, writer: Kept, number: int) -> None:
        self.writer, self.number = writer, number

    def write(self, points: Any) -> None:
        if self.writer.breaks_at and any(point.tag == self.writer.breaks_at for point in points):
            raise OSError("the disk is full")
        self.writer.points[self.number] += points

    def end(self, status: str, seconds: float | None = None) -> None:
        self.writer.statuses[self.number] = status


def train(folder: Path, on_event: Any, strategy: str = "parameter-server:mode=async", **options: Any) -> Path:
    options = {"workers": 2, "epochs": 2, "launcher": "threads", "run_dir": str(folder), **options}
    podium.train("digits-mlp", strategy=strategy, on_event=on_event, **options)
    return folder


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All that anybody tried to reach, refused."""
    tried: list[Any] = []

    def connect(_: socket.socket, address: Any) -> None:
        tried.append(address)
        raise ConnectionRefusedError(address)

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket.socket, "connect_ex", connect)
    for name in ("PYTEST_CURRENT_TEST", "CI", "GITHUB_ACTIONS"):  # MLflow keeps quiet under these by itself
        monkeypatch.delenv(name, raising=False)
    return tried


def read_tensorboard(folder: Path) -> dict[str, Series]:
    """Each run's scalars, by TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, Series] = {}
    for place in sorted({path.parent for path in folder.rglob("events.out.*")}):
        reader = EventAccumulator(str(place), size_guidance={"scalars": 0})
        reader.Reload()
        tags = reader.Tags()["scalars"]
        found[str(place.relative_to(folder))] = {t: [(e.step, e.value) for e in reader.Scalars(t)] for t in tags}
    return found


def read_hparams(folder: Path) -> dict[str, Any]:
    """What the tab HPARAMS knows of the run in this folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    reader = EventAccumulator(str(folder))
    reader.Reload()
    content = reader.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    info = metadata.parse_session_start_info_plugin_data(content)
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in info.hparams.items()}


def expected(folder: Path) -> Series:
    """What a finished run's folder says, by names of writers."""
    result = json.loads((folder / "result.json").read_text())
    config = json.loads((folder / "manifest.json").read_text())["config"]
    found: Series = {}
    for point in costs(read_records(folder), config):
        found.setdefault(point.tag, []).append((point.step, point.value))
    for row in result["history"]:
        for name in ("loss", "accuracy"):
            found.setdefault(f"validation/{name}", []).append((row["step"], row[name]))
    for name in ("loss", "seconds", "samples_per_s", "sent_bytes", "wait_share"):
        found[f"final/{name}"] = [(result["steps"], result[name])]
    found["final/accuracy"] = [(result["steps"], result["metrics"]["accuracy"])]
    found["final/staleness_mean"] = [(result["steps"], result["staleness"]["mean"])]
    return found


def agree(found: Series, wanted: Series, tolerance: float) -> None:
    for tag, values in wanted.items():
        assert tag in found, tag
        steps, numbers = zip(*found[tag], strict=True)
        assert steps == tuple(step for step, _ in values), tag
        assert numbers == pytest.approx([value for _, value in values], rel=tolerance, abs=0), tag


class WriterContract:
    """What holds of every writer that Podium ships."""

    package: ClassVar[str]
    tolerance: ClassVar[float]

    @pytest.fixture(autouse=True)
    def needs_its_package(self) -> None:
        pytest.importorskip(self.package)

    def make(self, folder: Path) -> Writer:
        return open_log(f"{self.package}:{folder}")

    def read(self, folder: Path) -> list[tuple[str, dict[str, Any], Series]]:
        """Status, parameters and series of every run, in order of names."""
        raise NotImplementedError

    @pytest.mark.slow
    def test_a_run_that_is_followed_leaves_all_that_it_recorded(self, tmp_path: Path, no_network: list[Any]) -> None:
        with self.make(tmp_path / "log") as log:
            run = train(tmp_path / "run", log)
        ((status, params, series),) = self.read(tmp_path / "log")
        wanted = {tag: values for tag, values in expected(run).items() if tag not in ("train/loss", TRAIN_SPEED)}
        assert {"train/sent_bytes", "train/wait_share", "train/staleness", "validation/accuracy"} < set(wanted)
        agree(series, wanted, self.tolerance)
        assert series["train/loss"], "events tell the loss on the way"
        assert status == "finished"
        assert (params["strategy"], params["strategy_options.mode"]) == ("parameter-server", "async")
        assert (float(params["seed"]), float(params["batch_size"])) == (0, 64)
        assert not no_network

    def test_a_finished_run_is_exported_step_by_step(self, tmp_path: Path) -> None:
        run = train(tmp_path / "run", None, launcher="virtual")
        done = podium.export(run, to=self.package, out=tmp_path / "log")
        assert (done.runs, done.skipped) == (1, 0)
        ((status, _, series),) = self.read(tmp_path / "log")
        agree(series, expected(run), self.tolerance)
        assert status == "finished"
        podium.export(run, to=self.package, out=tmp_path / "log")
        ((_, _, again),) = self.read(tmp_path / "log")
        assert again == series, "exported twice, there once"

    def test_a_study_is_exported_run_by_run_with_its_failures(self, tmp_path: Path) -> None:
        store = Store(tmp_path / "study")
        store.write_study({"name": "s", "task": "digits-mlp", "settings": {"epochs": 8}})
        rows = [make_row("a b", seed, final=0.5 + seed / 8) for seed in (0, 1)]
        for row in (*rows, failed_row("a b", 2), make_row("a b", 2, final=0.75)):
            store.append({**row, "levels": {"link": "=slow", "workers": 2}})
        assert podium.export(store.folder, to=self.package, out=tmp_path / "log").runs == 4
        found = self.read(tmp_path / "log")
        assert sorted(status for status, _, _ in found) == ["failed", "finished", "finished", "finished"]
        whole = [(params, series) for status, params, series in found if status == "finished"]
        assert sorted(series["final/accuracy"][0][1] for _, series in whole) == [0.5, 0.625, 0.75]
        assert all(len(series["validation/accuracy"]) == 8 for _, series in whole)
        assert all(params["level.link"] == "=slow" and float(params["level.workers"]) == 2 for params, _ in whole)

    def test_a_run_that_fails_is_there_as_far_as_it_came(self, tmp_path: Path) -> None:
        with pytest.raises(RankFailed), self.make(tmp_path / "log") as log:
            podium.train(
                "tests/records/test_writers.py:breaking",
                strategy="solo",
                on_event=log,
                launcher="threads",
                run_dir=str(tmp_path / "run"),
            )
        ((status, params, series),) = self.read(tmp_path / "log")
        assert status == "failed"
        assert params["task"].endswith("breaking")
        assert len(series["train/wait_share"]) == BREAKS_AFTER

    def test_runs_of_a_study_are_told_apart_by_their_cells(self, tmp_path: Path) -> None:
        with self.make(tmp_path / "log") as log:
            for cell, batch_size in (("large", 128), ("small", 32)):
                key = {"cell": cell, "seed": 0}
                train(tmp_path / cell, _with(log, key), "all-reduce", epochs=1, batch_size=batch_size)
                log({"event": "cell-end", "status": "finished", **key})
        found = [(status, p["label"], float(p["batch_size"])) for status, p, _ in self.read(tmp_path / "log")]
        assert found == [("finished", "large", 128), ("finished", "small", 32)]

    def test_the_verb_logs_too(self, tmp_path: Path) -> None:
        words = ["train", "digits-mlp", "--epochs", "1", "--launcher", "threads", "--set", f"run_dir={tmp_path}/run"]
        shown = CliRunner().invoke(main, [*words, "--log", f"{self.package}:{tmp_path}/log", "--quiet"])
        assert shown.exit_code == 0, shown.output
        ((status, _, series),) = self.read(tmp_path / "log")
        assert status == "finished" and len(series["validation/loss"]) == 1

    def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(RecordError, match="must be a folder"):
            self.make(tmp_path / "file")


def _with(log: Writer, key: dict[str, Any]) -> Any:
    """The events of a run as a study passes them on."""
    return lambda event: log({**event, **key})


TRAIN_SPEED = "train/samples_per_s"
BREAKS_AFTER = 5


def breaking() -> podium.Task:
    """Digits, until the loss raises."""
    import dataclasses

    from podium.task import load_task

    task, calls = load_task("digits-mlp", {}, None), itertools.count(1)

    def loss(outputs: Any, targets: Any) -> Any:
        if next(calls) > BREAKS_AFTER:
            raise ValueError("broken on purpose")
        return task.loss(outputs, targets)

    return dataclasses.replace(task, loss=loss)


class TestTensorBoard(WriterContract):
    package = "tensorboard"
    tolerance = 1e-6  # single precision

    def read(self, folder: Path) -> list[tuple[str, dict[str, Any], Series]]:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.plugins.hparams import api_pb2, metadata

        found = []
        for place, series in read_tensorboard(folder).items():
            (file,) = (folder / place).glob("events.out.*")
            values = [value for event in EventFileLoader(str(file)).Load() for value in event.summary.value]
            (end,) = [v.metadata for v in values if v.tag == metadata.SESSION_END_INFO_TAG]
            how = metadata.parse_session_end_info_plugin_data(end.plugin_data.content).status
            status = "finished" if how == api_pb2.STATUS_SUCCESS else "failed"
            found.append((status, read_hparams(folder / place), series))
        return found

    def test_runs_are_named_by_strategy_and_seed_and_never_share_a_file(self, tmp_path: Path) -> None:
        for _ in range(2):
            with self.make(tmp_path / "log") as log:
                train(tmp_path / f"run{len(list(tmp_path.iterdir()))}", log, "all-reduce", epochs=1)
        assert list(read_tensorboard(tmp_path / "log")) == ["all-reduce/seed0", "all-reduce/seed0-2"]

    def test_files_of_others_are_left_alone(self, tmp_path: Path) -> None:
        run = train(tmp_path / "run", None, "solo", workers=1, epochs=1)
        place = tmp_path / "log" / "solo" / "seed0"
        place.mkdir(parents=True)
        (place / "events.out.tfevents.1.other").write_bytes(b"")
        podium.export(run, to="tensorboard", out=tmp_path / "log")
        podium.export(run, to="tensorboard", out=tmp_path / "log")
        assert len(list(place.iterdir())) == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's own, of what it uses
class TestMLflow(WriterContract):
    package = "mlflow"
    tolerance = 0.0  # to the last bit

    def read(self, folder: Path) -> list[tuple[str, dict[str, Any], Series]]:
        words = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped", "RUNNING": "running"}
        found = read_mlflow_all(f"sqlite:///{folder}/mlflow.db")
        return [(words[run.info.status], dict(run.data.params), series) for run, series in found]

    def test_runs_are_tagged_by_strategy_and_seed(self, tmp_path: Path) -> None:
        with self.make(tmp_path / "log") as log:
            train(tmp_path / "run", log, epochs=1)
        ((run, _),) = read_mlflow_all(f"sqlite:///{tmp_path}/log/mlflow.db")
        assert run.data.tags["strategy"] == "parameter-server:mode=async"
        assert (run.data.tags["seed"], run.data.tags["task"]) == ("0", "digits-mlp")
        assert run.data.tags["podium.run"] == str(tmp_path / "run")

    def test_only_a_folder_or_a_uri_will_do(self) -> None:
        with pytest.raises(ConfigError, match="must be a folder or a URI with ://, got 'sqlite:x'"):
            open_log("mlflow:sqlite:x")
        with pytest.raises(RecordError, match="must be a store that can be opened"):
            open_log("mlflow:nothing://x")


def read_mlflow_all(uri: str) -> list[tuple[Any, Series]]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    found = []
    for run in client.search_runs([e.experiment_id for e in client.search_experiments()]):
        keys = run.data.metrics
        series = {k: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, k)] for k in keys}
        found.append((run, {tag: sorted(values) for tag, values in series.items()}))
    return sorted(found, key=lambda pair: (pair[0].info.run_name, pair[0].info.status))


# What needs neither package.


def test_a_writer_that_breaks_is_told_of_once_and_training_goes_on(tmp_path: Path) -> None:
    log, other = Kept(breaks_at="validation/loss"), Kept()
    with pytest.warns(RuntimeWarning, match=r"Kept of .* stops writing: OSError: the disk is full") as told:
        train(tmp_path / "run", Together(log, other), "solo", workers=1)
    assert len(told) == 1
    assert (tmp_path / "run" / "result.json").is_file()
    assert other.statuses == {0: "finished"} and log.statuses == {}


def test_a_run_that_says_nothing_more_has_failed_when_the_next_begins(tmp_path: Path) -> None:
    run = train(tmp_path / "run", None, "solo", workers=1, epochs=1)
    log = Kept()
    log({"event": "start", "run_dir": str(run), "cell": "x", "seed": 0})
    log({"event": "start", "run_dir": str(run), "cell": "y", "seed": 0})
    log({"event": "cell-end", "status": "finished", "cell": "y", "seed": 0})
    log({"event": "cell-end", "status": "finished", "cell": "y", "seed": 0})
    assert log.statuses == {0: "failed", 1: "finished"}
    assert [run.label for run in log.runs] == ["x", "y"]


@pytest.mark.parametrize("strategy", ["all-reduce", "local-sgd", "parameter-server:mode=async", "async-local-sgd"])
def test_whoever_made_a_step_its_samples_and_bytes_are_counted_once(tmp_path: Path, strategy: str) -> None:
    uneven = {"shares": (3.0, 1.0)} if strategy == "all-reduce" else {}
    run = train(tmp_path / "run", None, strategy, launcher="virtual", **uneven)
    steps = [record for record in read_records(run) if record["kind"] == "step"]
    points = costs(read_records(run), {"batch_size": 64})
    by_tag = {tag: [p for p in points if p.tag == f"train/{tag}"] for tag in ("sent_bytes", "loss", "wait_share")}
    assert [p.step for p in by_tag["loss"]] == list(range(1, 47)), "two epochs of 23 steps, one point each"
    assert sum(p.value for p in by_tag["sent_bytes"]) == sum(record["sent"] for record in steps)
    # The means by samples, weighted by the samples of each step, are the mean over all samples.
    sizes = [64] * 22 + [30]
    mean = math.fsum(p.value * n for p, n in zip(by_tag["loss"], sizes * 2, strict=True)) / 2876
    assert mean == pytest.approx(math.fsum(r["loss"] * r["samples"] for r in steps) / 2876, rel=1e-12)
    assert all(0 <= p.value <= 1 for p in by_tag["wait_share"])


def test_a_loss_that_is_no_number_stays_none() -> None:
    step = {"kind": "step", "rank": 0, "t_ns": 5, "position": 4, "samples": 4, "step_ns": 2, "wait_ns": 1, "sent": 3}
    begin = {"kind": "begin", "role": "worker", "rank": 0, "t_ns": 1, "samples": 8}
    found = {p.tag: p.value for p in costs([begin, {**step, "loss": "nan"}], {"batch_size": 4})}
    assert math.isnan(found["train/loss"]) and found["train/wait_share"] == 0.5


@pytest.mark.parametrize(
    ("position", "step"), [(0, 0), (1, 1), (64, 1), (65, 2), (1408, 22), (1409, 23), (1438, 23), (1439, 24)]
)
def test_a_global_step_is_what_the_samples_make_up(position: int, step: int) -> None:
    assert global_step(position, 1438, 64) == step


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_missing_package_names_its_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [key for key in sys.modules if key.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=rf"needs {name}: pip install 'podium\[{name}\]'"):
        open_log(f"{name}:{tmp_path}/log")
    shown = CliRunner().invoke(main, ["train", "--log", f"{name}:{tmp_path}/log", "--quiet"])
    assert shown.exit_code == 2 and not (tmp_path / "log").exists()


def test_an_unknown_log_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"unknown log 'tensorbord'. Did you mean 'tensorboard'"):
        open_log("tensorbord:x")


def test_the_writers_are_where_the_documentation_has_them() -> None:
    assert {"TensorBoard", "MLflow", "Together", "open_log"} < set(podium.writers.__all__)

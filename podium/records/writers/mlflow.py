"""MLflow: an experiment per task, an MLflow run per run, in its own database file. Needs `podium[mlflow]`.

Nothing leaves the machine unless the user gives the URI of a server: by default, or with a folder, the store is an
SQLite file; MLFLOW_TRACKING_URI is ignored; and MLflow's own telemetry is switched off, unless the environment sets it
or the program has imported MLflow before.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from podium.errors import ConfigError, MissingExtra, RecordError
from podium.records.writers.base import Page, Run, Writer
from podium.records.writers.series import Point

FLUSH_S = 2.0
"""Numbers are written at most this late."""
BATCH = 500
"""Numbers per request, and the size of the buffer; MLflow takes up to 1000."""
PARAMS = 100
"""Parameters or tags per request, at most."""
LONGEST_PARAM, LONGEST_TAG = 6000, 5000
"""Characters of a value; MLflow refuses more, so longer ones are cut."""
KEY = "podium.run"
"""The tag with the run's key; a run that is already in the store, and over, is not written again."""
_STATUS = {"finished": "FINISHED", "stopped": "KILLED"}
_ENDED = ("FINISHED", "FAILED", "KILLED")


@final
class MLflow(Writer):
    """Writes to the store at `where`: a folder (an `mlflow.db` in it), or a tracking URI such as `sqlite:///x.db`.

    MLflow has no infinity: it stores the largest double instead.
    """

    def __init__(self, where: str | Path) -> None:
        super().__init__()
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when mlflow is imported
        try:
            import alembic  # noqa: F401  # needed for a store in a file; mlflow-skinny does not depend on it
            import sqlalchemy  # noqa: F401
            from mlflow import MlflowClient
            from mlflow.exceptions import MlflowException
        except ImportError as error:
            raise MissingExtra(error.name or "mlflow", "mlflow", "writing for MLflow") from None
        self.uri, self._artifacts = _uri(where)
        self._experiments: dict[str, str] = {}
        try:
            self._client = MlflowClient(self.uri)
            self._client.search_experiments(max_results=1)
        except MlflowException as error:
            raise RecordError(f"MLflow: {self.uri} must be a store that can be opened, got: {error}") from error

    def open(self, run: Run) -> Page | None:
        experiment = self._experiment(run.task)
        known = self._client.search_runs([experiment], f"tags.`{KEY}` = '{_quoted(run.key)}'")
        if any(old.info.status in _ENDED for old in known):
            return None
        for old in known:  # an unfinished run whose writer was killed
            self._client.delete_run(old.info.run_id)
        tags = {KEY: _quoted(run.key), **{name: value[:LONGEST_TAG] for name, value in run.tags.items() if value}}
        name = f"{run.label}, seed {run.seed}"
        began = round((run.started_s or time.time()) * 1000)
        made = self._client.create_run(experiment, start_time=began, tags=tags, run_name=name)
        return _Page(self._client, made.info.run_id, run)

    def _experiment(self, name: str) -> str:
        if name not in self._experiments:
            found = self._client.get_experiment_by_name(name)
            self._experiments[name] = (
                found.experiment_id
                if found is not None
                else self._client.create_experiment(name, artifact_location=self._artifacts)
            )
        return self._experiments[name]


@final
class _Page(Page):
    def __init__(self, client: Any, run_id: str, run: Run) -> None:
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client, self._run_id, self._run = client, run_id, run
        self._kept: list[Any] = []
        self._flushed = time.monotonic()
        params = [Param(_name(name), str(value)[:LONGEST_PARAM]) for name, value in run.about.items()]
        for at in range(0, len(params), PARAMS):
            client.log_batch(run_id, params=params[at : at + PARAMS])

    def write(self, points: Sequence[Point]) -> None:
        self._kept += [self._metric(_name(p.tag), p.value, self._time_ms(p.seconds), p.step) for p in points]
        if len(self._kept) >= BATCH or time.monotonic() - self._flushed > FLUSH_S:
            self._flush()

    def end(self, status: str, seconds: float | None = None) -> None:
        self._flush()
        self._client.set_terminated(self._run_id, _STATUS.get(status, "FAILED"), self._time_ms(seconds))

    def _flush(self) -> None:
        kept, self._kept, self._flushed = self._kept, [], time.monotonic()
        for at in range(0, len(kept), BATCH):
            self._client.log_batch(self._run_id, metrics=kept[at : at + BATCH])

    def _time_ms(self, seconds: float | None) -> int:
        return round((time.time() if seconds is None else self._run.started_s + seconds) * 1000)


def _uri(where: str | Path) -> tuple[str, str | None]:
    """The tracking URI, and for a folder the place of artifacts."""
    text = str(where)
    if "://" in text:
        return text, None
    if ":" in text.partition("/")[0]:
        raise ConfigError(f"MLflow: the place must be a folder or a URI with ://, got {text!r}")
    folder = Path(text).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(f"MLflow: {folder} must be a folder, got: {error.strerror}") from error
    return f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()


def _name(text: str) -> str:
    """A name that MLflow takes: letters, digits and a few signs."""
    return re.sub(r"[^\w\-./: ]", "_", text)[:250]


def _quoted(text: str) -> str:
    """A run's key, safe between quotes in a search."""
    return text.replace("'", "_")[:LONGEST_TAG]

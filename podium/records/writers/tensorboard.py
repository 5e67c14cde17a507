"""TensorBoard: event files in a folder, with a subfolder for each run. Needs `podium[tensorboard]`.

Scalars are single precision, as most readers of event files expect; `podium export` writes exact numbers as CSV or
Parquet. A run's configuration is in the tab HPARAMS.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from podium.errors import MissingExtra, RecordError
from podium.records.writers.base import Page, Run, Writer
from podium.records.writers.series import Point

SUFFIX = ".podium"
"""Suffix of Podium's own files: no others are ever removed."""
FLUSH_S = 5.0


@final
class TensorBoard(Writer):
    """Writes event files below `folder`; TensorBoard shows them with `tensorboard --logdir FOLDER`.

    A run whose name is taken gets a number appended. With `anew`, earlier files under that name are removed, so that a
    second export does not mix with the first.
    """

    def __init__(self, folder: str | Path, *, anew: bool = False) -> None:
        super().__init__()
        self.folder, self._anew = Path(folder), anew
        self._taken: set[Path] = set()
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise MissingExtra("tensorboard", "tensorboard", "writing for TensorBoard") from None
        self._make_file = EventFileWriter
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordError(f"TensorBoard: {self.folder} must be a folder, got: {error.strerror}") from error

    def open(self, run: Run) -> Page:
        folder = self._place(run)
        self._taken.add(folder)
        file = self._make_file(str(folder), flush_secs=FLUSH_S, filename_suffix=SUFFIX)
        return _Page(file, run)

    def _place(self, run: Run) -> Path:
        first = self.folder / run.place
        place, tries = first, 1
        while place in self._taken or (not self._anew and any(place.glob("events.out.*"))):
            tries += 1
            place = first.with_name(f"{first.name}-{tries}")
        for old in place.glob(f"events.out.*{SUFFIX}"):
            old.unlink()
        return place


@final
class _Page(Page):
    def __init__(self, file: Any, run: Run) -> None:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        self._file, self._run = file, run
        start = run.started_s or None
        self._add(hparams_pb(run.about, start_time_secs=start), 0, 0.0 if start else None)

    def write(self, points: Sequence[Point]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for point in points:
            value = Summary.Value(tag=point.tag, simple_value=point.value)
            self._add(Summary(value=[value]), point.step, point.seconds)

    def end(self, status: str, seconds: float | None = None) -> None:
        self._add(self._over(status, seconds), 0, seconds)
        self._file.close()

    def _over(self, status: str, seconds: float | None) -> Any:
        """The summary of the run's end for the tab HPARAMS; TensorBoard's own function for it needs TensorFlow."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE, STATUS_SUCCESS
        from tensorboard.plugins.hparams.metadata import SESSION_END_INFO_TAG, create_summary_metadata
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

        how = STATUS_SUCCESS if status == "finished" else STATUS_FAILURE
        info = HParamsPluginData(session_end_info=SessionEndInfo(status=how, end_time_secs=self._time(seconds)))
        return Summary(value=[Summary.Value(tag=SESSION_END_INFO_TAG, metadata=create_summary_metadata(info))])

    def _add(self, summary: Any, step: int, seconds: float | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        # Where TensorFlow is installed, a summary may be of TensorFlow's class, which an Event does not take.
        own = Summary.FromString(summary.SerializeToString())
        self._file.add_event(Event(wall_time=self._time(seconds), step=step, summary=own))

    def _time(self, seconds: float | None) -> float:
        return time.time() if seconds is None else self._run.started_s + seconds

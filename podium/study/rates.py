"""Rate against accuracy: what each codec costs in accuracy for the bytes that it saves.

    rates.jsonl    one row per run, appended as runs end; all else is made from it
    rates.md       the answer, its limits, the tables
    rates.svg      the figure: bytes against accuracy, one panel per task

Each run is a process of its own with one thread, several at a time: what is measured are bytes and accuracy, not time.
Workers live in virtual time, so that bytes are those of a cluster whose nodes share nothing. A run that diverged is a
result and stays; one that failed for another reason is tried again when the study is asked for again.

*Ratio* is bytes sent by all workers over bytes sent by all workers with `dense`, with the same task and seed. It holds
for this number of workers: wires that are gathered go to everybody, so their ratio grows with the number of workers,
while wires that are summed keep theirs.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import podium
from podium.errors import ConfigError, MissingExtra, PodiumError, TrainingError, UnknownName
from podium.measure.manifest import versions
from podium.measure.records import read_records, to_json
from podium.study.format import ABSENT, plain, spread
from podium.study.rows import deciding_rows, number
from podium.study.statistics import Mean, mean_interval
from podium.study.store import Row, Store, write_whole

if TYPE_CHECKING:
    from podium.reducing import Packing

CODECS = (
    "dense",
    "fp16",
    "bf16",
    "int8",
    "sign",
    "ef-sign",
    "vote",
    "one-bit",
    "top-k:ratio=0.1",
    "top-k:ratio=0.01",
    "top-k:ratio=0.001",
    "top-k:ratio=0.01;feedback=false",
    "random-k:ratio=0.1",
    "random-k:ratio=0.01",
    "dgc",
    "power-sgd:rank=1",
    "power-sgd:rank=2",
    "power-sgd:rank=4",
    "power-sgd:rank=1;feedback=false",
)
"""What is compared with `dense`, in the order of the tables."""

PAIRS = (
    ("top-k:ratio=0.01", "top-k:ratio=0.01;feedback=false"),
    ("power-sgd:rank=1", "power-sgd:rank=1;feedback=false"),
    ("ef-sign", "sign"),
)
"""The same wire with error feedback and without."""

TITLES = {
    "mnist-lenet5": "MNIST, LeNet-5",
    "cifar10-resnet20": "CIFAR-10, ResNet-20",
    "digits-cnn": "Digits, two convolutions",
}
FULL_SETS = {"mnist-lenet5": 60_000, "cifar10-resnet20": 50_000}
"""Training images of the whole data sets: with fewer, accuracies are not those of the literature."""

POINT = 1.0
"""How far below dense, in points of a hundred, a codec may lie to be called close to it."""

_POLL_S = 0.2
_KILL_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained, and for how long."""

    task: str
    epochs: int
    folder: str | None = None
    """Of its files, inside the folder that holds all data."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the task's function."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The design: every codec on every task with every seed."""

    workloads: tuple[Workload, ...] = (
        Workload(task="mnist-lenet5", epochs=10, folder="mnist"),
        Workload(task="cifar10-resnet20", epochs=15, folder="cifar10"),
    )
    codecs: tuple[str, ...] = CODECS
    seeds: tuple[int, ...] = (0, 1, 2)
    workers: int = 4
    device: str = "cpu"
    data_dir: str = "data"
    """Holds a folder for each task that reads files."""
    deadline_s: float = 3600.0
    """A run that takes longer is ended, and has failed."""

    def __post_init__(self) -> None:
        if "dense" not in self.codecs:
            raise ConfigError(f"rates: codecs must hold dense, which the others are held against, got {self.codecs}")
        if not self.seeds or not self.workloads:
            raise ConfigError("rates: seeds and workloads must name at least one each, got none")
        if self.deadline_s <= 0:
            raise ConfigError(f"rates: deadline_s must be above 0, got {self.deadline_s}")

    def only(self, tasks: Sequence[str]) -> Rates:
        """The study of these tasks alone; of all of them where none is named."""
        known = {load.task: load for load in self.workloads}
        for task in tasks:
            if task not in known:
                raise UnknownName("task of the study", task, known)
        return replace(self, workloads=tuple(known[task] for task in tasks)) if tasks else self

    def cells(self) -> list[Cell]:
        """All runs, seed by seed, so that a study that was cut short has some of everything."""
        return [Cell(load, codec, seed) for seed in self.seeds for load in self.workloads for codec in self.codecs]

    def options(self, cell: Cell) -> dict[str, Any]:
        """The arguments of `podium.train` for one run."""
        return {
            "task": cell.load.task,
            "task_options": dict(cell.load.options),
            "data_dir": str(Path(self.data_dir) / cell.load.folder) if cell.load.folder else None,
            "epochs": cell.load.epochs,
            "codec": cell.codec,
            "seed": cell.seed,
            "workers": self.workers,
            "device": self.device,
        }


QUICK = Rates(
    workloads=(Workload(task="digits-cnn", epochs=1),),
    codecs=("dense", "fp16", "ef-sign", "sign", "top-k:ratio=0.01", "power-sgd:rank=1"),
    seeds=(0, 1),
)
"""Shows in half a minute that everything works, and nothing else."""


class Cell(NamedTuple):
    """One run of the design."""

    load: Workload
    codec: str
    seed: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.load.task, self.codec, self.seed


# Running.


def run(study: Rates, out: Path, *, jobs: int, say: Callable[[str], None] = print) -> int:
    """Run what has not been run, so many at a time, then draw; returns how many runs want another try."""
    if jobs < 1:
        raise ConfigError(f"rates: jobs must be at least 1, got {jobs}")
    _require_drawing()
    store = open_store(out)
    _check_same(study, store)
    done = {_key(row) for row in store.rows() if is_final(row)}
    cells = study.cells()
    waiting = [cell for cell in cells if cell.key not in done]
    _check_data(study, waiting)
    if len(waiting) < len(cells):
        say(f"{len(cells) - len(waiting)} of {len(cells)} runs are in {store.results} already")
    again = _run_all(study, waiting, store, jobs, say)
    draw(out)
    return again


def _run_all(study: Rates, cells: Sequence[Cell], store: Store, jobs: int, say: Callable[[str], None]) -> int:
    from podium.cluster.ending import termination_unwinds

    waiting, running, ended, again = list(cells), list[_Running](), 0, 0
    with tempfile.TemporaryDirectory(prefix="podium-rates-") as scratch, termination_unwinds():
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    cell = waiting.pop(0)
                    folder = Path(scratch) / f"{len(cells) - len(waiting)}"
                    running.append(_Running(cell, study.options(cell), folder, study.deadline_s))
                for one in [one for one in running if one.is_over()]:
                    running.remove(one)
                    row = one.row()
                    store.append(row)
                    ended, again = ended + 1, again + (not is_final(row))
                    say(f"[{ended}/{len(cells)}] {_told(row)}")
                time.sleep(_POLL_S)
        finally:
            for one in running:
                one.kill()
    return again


class _Running:
    """One run's process, and the folder that it works in."""

    def __init__(self, cell: Cell, options: Mapping[str, Any], folder: Path, deadline_s: float) -> None:
        self.cell, self.folder, self.deadline_s = cell, folder, deadline_s
        self.options = dict(options)
        folder.mkdir()
        (folder / "options.json").write_text(to_json(self.options))
        self.began = time.monotonic()
        with (folder / "said").open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "podium.study.rates", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=_environment(),
            )

    def is_over(self) -> bool:
        """Whether its process has ended; it is ended when it takes too long."""
        if self.process.poll() is None and time.monotonic() - self.began > self.deadline_s:
            self.kill()
        return self.process.returncode is not None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=_KILL_S)

    def row(self) -> Row:
        """What it left; where it left nothing, a failure that says how it ended."""
        path = self.folder / "row.json"
        if path.is_file():
            row: Row = json.loads(path.read_text(encoding="utf-8"))
            return row
        took = time.monotonic() - self.began
        if took > self.deadline_s:
            return failure(self.options, f"took longer than {plain(self.deadline_s)} s")
        said = (self.folder / "said").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = said[-1] if said else "it said nothing"
        return failure(self.options, f"its process ended with {self.process.returncode}: {last}")


def _environment() -> dict[str, str]:
    """One thread per process, and this Podium, installed or not."""
    path = os.pathsep.join(filter(None, [str(Path(podium.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def train_one(options: Mapping[str, Any], folder: Path) -> Row:
    """One run in this process, its records under `folder`; a run that fails is a row that says so."""
    from podium.reducing import make_packing
    from podium.task import load_task

    began = time.monotonic()
    try:
        task = load_task(options["task"], options["task_options"], options["data_dir"])
        data, packing = task.data(), make_packing(options["codec"])
        fixed: dict[str, Any] = {"strategy": "all-reduce", "launcher": "virtual", "threads": 1, "eval_every": 0}
        result = podium.train(**options, **fixed, run_dir=str(folder / "run"))
    except PodiumError as error:
        return failure(options, f"{type(error).__name__}: {error}")
    return {
        **_identity(options),
        "status": "finished",
        "accuracy": result.metrics["accuracy"],
        "loss": result.loss,
        "sent_bytes": result.sent_bytes,
        "feedback": _feedback(packing),
        "reduction": packing.codec.reduction,
        "replicas_equal": len(set(result.param_hash.values())) == 1,
        "parameters": _parameters(folder / "run"),
        "train": len(data.train),
        "test": len(data.test),
        "batch_size": task.batch_size,
        "steps": result.steps,
        "wall_s": round(time.monotonic() - began, 1),
        "versions": versions(),
    }


def _feedback(packing: Packing) -> str:
    if packing.codec.exact:
        return ABSENT  # nothing is lost that could be fed back
    return "own" if packing.codec.keeps_residual else "on" if packing.feedback else "off"


def failure(options: Mapping[str, Any], error: str) -> Row:
    return {**_identity(options), "status": "failed", "accuracy": None, "sent_bytes": None, "error": error}


def is_final(row: Mapping[str, Any]) -> bool:
    """Whether this run need not be tried again: it finished, or training itself could not go on."""
    return row["status"] == "finished" or str(row.get("error")).startswith(f"{TrainingError.__name__}:")


def open_store(out: Path) -> Store:
    store = Store(out)
    store.results = out / "rates.jsonl"
    return store


def _identity(options: Mapping[str, Any]) -> Row:
    same = {name: options[name] for name in ("task", "seed", "epochs", "workers", "device", "task_options")}
    return {"cell": options["codec"], **same}


def _key(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return str(row["task"]), str(row["cell"]), int(row["seed"])


def _parameters(run_dir: Path) -> int | None:
    begins = (row for row in read_records(run_dir) if row["kind"] == "begin")
    return next(begins, {}).get("parameters")


def _told(row: Mapping[str, Any]) -> str:
    name = f"{row['task']} {row['cell']} seed {row['seed']}"
    if row["status"] == "failed":
        return f"{name}: failed: {row['error']}"
    return f"{name}: {100 * row['accuracy']:.2f} %, {row['sent_bytes'] / 1e6:,.1f} MB, {row['wall_s']:.0f} s"


def _check_same(study: Rates, store: Store) -> None:
    """Refuse to mix runs of two designs of one task in one file; tasks that are not asked for stay as they are."""
    wanted = {load.task: (load.epochs, study.workers, study.device, dict(load.options)) for load in study.workloads}
    for row in store.rows():
        found = (row["epochs"], row["workers"], row["device"], row["task_options"])
        if found != wanted.get(row["task"], found):
            raise ConfigError(
                f"rates: {store.results} holds other runs of {row['task']}, with (epochs, workers, device, options) "
                f"{found}; wanted {wanted[row['task']]}. Give another --out"
            )


def _check_data(study: Rates, cells: Sequence[Cell]) -> None:
    """Find out about data that are not there before the first run."""
    from podium.task import load_task

    for load in {cell.load.task: cell for cell in cells}.values():
        options = study.options(load)
        load_task(options["task"], options["task_options"], options["data_dir"]).data()


# Tables.


@dataclass(frozen=True, kw_only=True)
class Line:
    """One codec on one task, over the seeds that finished."""

    codec: str
    tried: int
    """How many seeds."""
    finished: int
    feedback: str
    reduction: str
    ratio: float | None
    """Bytes sent over dense's bytes sent."""
    accuracy: Mean | None
    """In percent."""
    gap: Mean | None
    """Minus dense's with the same seed, in points of a hundred."""

    @property
    def failed(self) -> int:
        return self.tried - self.finished

    @property
    def close(self) -> bool:
        """Whether it trained with every seed and lies, on average, at most a point below dense."""
        return self.gap is not None and not self.failed and self.gap.mean >= -POINT

    @property
    def settled(self) -> bool:
        """Whether the whole interval lies on the side of the line where the mean lies."""
        if self.gap is None or self.gap.low is None or self.gap.high is None:
            return False
        return self.gap.low >= -POINT or self.gap.high < -POINT


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One task."""

    task: str
    lines: tuple[Line, ...]
    facts: Mapping[str, Any]
    """Sizes and settings, as a finished row has them."""
    feedback: tuple[tuple[str, str, Mean], ...]
    """What feedback adds, in points: with it, without it, the difference paired by seed."""

    @property
    def title(self) -> str:
        return TITLES.get(self.task, self.task)

    @property
    def dense(self) -> Line:
        return self.lines[0]


def tabulate(rows: Sequence[Row]) -> list[Panel]:
    """One panel per task that has a finished run with `dense`; tasks and codecs in the design's order."""
    panels = [_panel(task, deciding_rows([row for row in rows if row["task"] == task])) for task in _tasks(rows)]
    return [panel for panel in panels if panel is not None]


def _tasks(rows: Sequence[Row]) -> list[str]:
    """Those of the design in its order, then others by name."""
    known = [*TITLES]
    return sorted({str(row["task"]) for row in rows}, key=lambda t: (known.index(t) if t in known else len(known), t))


def _panel(task: str, rows: Sequence[Row]) -> Panel | None:
    done = [row for row in rows if row["status"] == "finished"]
    dense = {int(row["seed"]): row for row in done if row["cell"] == "dense"}
    if not dense:
        return None
    names = {str(row["cell"]) for row in rows}
    codecs = [codec for codec in CODECS if codec in names] + sorted(names - set(CODECS))
    accuracy = {codec: _accuracies(done, codec) for codec in codecs}
    worth = [(on, off, _gap(accuracy.get(on, {}), accuracy.get(off, {}))) for on, off in PAIRS]
    return Panel(
        task=task,
        lines=tuple(_line(codec, rows, dense) for codec in codecs),
        facts=next(iter(dense.values())),
        feedback=tuple((on, off, gap) for on, off, gap in worth if gap is not None),
    )


def _line(codec: str, rows: Sequence[Row], dense: Mapping[int, Row]) -> Line:
    mine = [row for row in rows if row["cell"] == codec]
    done = [row for row in mine if row["status"] == "finished"]
    ratios = [row["sent_bytes"] / dense[row["seed"]]["sent_bytes"] for row in done if row["seed"] in dense]
    values = _accuracies(done, codec)
    return Line(
        codec=codec,
        tried=len(mine),
        finished=len(done),
        feedback=done[0]["feedback"] if done else ABSENT,
        reduction=done[0]["reduction"] if done else ABSENT,
        ratio=math.fsum(ratios) / len(ratios) if ratios else None,
        accuracy=mean_interval(list(values.values())),
        gap=_gap(values, _accuracies(list(dense.values()), "dense")),
    )


def _accuracies(done: Sequence[Row], codec: str) -> dict[int, float]:
    """In percent, by seed."""
    found = {int(row["seed"]): number(row["accuracy"]) for row in done if row["cell"] == codec}
    return {seed: 100 * value for seed, value in found.items() if value is not None}


def _gap(first: Mapping[int, float], second: Mapping[int, float]) -> Mean | None:
    return mean_interval([first[seed] - second[seed] for seed in sorted(set(first) & set(second))])


# The page.


def draw(out: Path) -> None:
    """Make the page and the figure from `rates.jsonl` alone."""
    _require_drawing()
    rows = open_store(out).rows()
    panels = tabulate(rows)
    if not panels:
        raise ConfigError(f"rates: {out / 'rates.jsonl'} must hold a finished run with dense, got {len(rows)} rows")
    write_whole(out / "rates.svg", figure(panels))
    write_whole(out / "rates.md", page(panels, rows))


def page(panels: Sequence[Panel], rows: Sequence[Row]) -> str:
    """The page as Markdown: the answer, its limits, the figure, the tables, how to make it again."""
    parts = ["# What codecs cost in accuracy for the bytes they save", answer(panels), _limits(panels)]
    parts += ["![Bytes sent against accuracy, one panel per task](rates.svg)", _LEGEND]
    parts += [_table(panel) for panel in panels]
    parts += filter(None, [_worth(panels), _failures(rows), _unequal(rows), _sizes(panels), _again(panels, rows)])
    return "\n\n".join(parts) + "\n"


def answer(panels: Sequence[Panel]) -> str:
    """Which codecs are close to dense and at what ratio, and which are not: a sentence for all, then one per task."""
    return "\n\n".join([_cheapest(panels), *map(_verdict, panels)])


def _cheapest(panels: Sequence[Panel]) -> str:
    """The codec that sends least among those close to dense on every task; by its largest ratio."""
    where = "on every task" if len(panels) > 1 else f"on {panels[0].title}"
    found: dict[str, list[tuple[Panel, Line]]] = {}
    for panel in panels:
        for line in panel.lines[1:]:
            if line.close and line.ratio is not None:
                found.setdefault(line.codec, []).append((panel, line))
    everywhere = {codec: places for codec, places in found.items() if len(places) == len(panels)}
    if not everywhere:
        return f"**No codec stays within one point of dense {where}.**"
    best = min(everywhere, key=lambda codec: max(line.ratio or 0.0 for _, line in everywhere[codec]))
    told = [f"{plain(line.ratio)} ({panel.title}, {_signed(line.gap)} points)" for panel, line in everywhere[best]]
    return (
        f"**Within one point of dense accuracy {where}, `{best}` sends least: {' and '.join(told)} of dense's bytes.**"
    )


def _verdict(panel: Panel) -> str:
    others = sorted(panel.lines[1:], key=lambda line: line.ratio if line.ratio is not None else math.inf)
    close = [_placed(line) for line in others if line.close]
    below = [_placed(line) for line in others if line.gap is not None and line.gap.mean < -POINT]
    failed = [f"`{line.codec}` ({line.failed} of {line.tried} seeds)" for line in others if line.failed]
    text = f"*{panel.title}*, dense {_percent(panel.dense.accuracy)}. Within one point (ratio, points above or below "
    text += f"dense): {_join(close)}. Further below: {_join(below)}."
    return f"{text} Failed to train: {_join(failed)}." if failed else text


def _placed(line: Line) -> str:
    """Where a codec lies; with a question mark where that is not settled."""
    assert line.gap is not None
    gap = f"{round(line.gap.mean, 1) + 0.0:+.1f}".replace("-", "−")
    return f"`{line.codec}` ({plain(line.ratio, 2)}, {gap}{'' if line.settled else '?'})"


_LEGEND = (
    "Points are means over seeds, bars 95 % t intervals. Hollow points have no error feedback. Accuracy is spaced by "
    "the logarithm of the error, so that both a tenth of a point at the top and half the test set at the bottom show."
)


def _limits(panels: Sequence[Panel]) -> str:
    seeds = max(line.tried for panel in panels for line in panel.lines)
    workers = panels[0].facts["workers"]
    others = max(len(panel.lines) for panel in panels) - 1
    said = [
        "A question mark: the interval of the difference reaches over the line of one point, so these seeds do not "
        "settle on which side of it the codec lies.",
        f"{seeds} seeds show large differences only. Each interval is of its codec alone; among {others} of them, one "
        "in twenty misses by chance.",
        "All codecs use the learning rate and the schedule that suit dense. A codec that does badly here may do better "
        "with its own.",
        f"Ratios hold for {workers} workers. Gathered wires reach every other worker, so with p workers their ratio is "
        f"p/2 times that of one wire ({plain(workers / 2)} here); summed wires have the same ratio with any number.",
        "Ratios count all that workers send: also the first parameters and buffers such as BatchNorm's statistics, "
        "which no codec packs. Bytes are not time: whether fewer make a run faster depends on the network.",
    ]
    said += filter(None, map(_sampling, panels))
    return "What may not be concluded:\n\n" + "\n".join(f"- {line}" for line in said)


def _sampling(panel: Panel) -> str:
    """How small the data are, and what that does to one accuracy."""
    facts, mean = panel.facts, panel.dense.accuracy
    assert mean is not None
    p = min(1.0, mean.mean / 100)
    error = 196 * math.sqrt(p * (1 - p) / facts["test"])
    text = f"{panel.title}: {facts['test']:,} test images leave an accuracy uncertain by ±{plain(error, 2)} points, "
    text += "the same images for all codecs."
    whole = FULL_SETS.get(panel.task)
    if whole is not None and facts["train"] < whole:
        text += f" It was trained on {facts['train']:,} of {whole:,} images for {facts['epochs']} epochs: not to be "
        text += "compared with published accuracies."
    return text


def _table(panel: Panel) -> str:
    head = ["codec", "feedback", "wires are", "ratio", "accuracy, %", "minus dense, points", "seeds"]
    ways = {"sum": "summed", "gather": "gathered"}
    rows = [
        [
            f"`{line.codec}`",
            line.feedback,
            ways.get(line.reduction, line.reduction),
            plain(line.ratio) if line.ratio != 1 else "1",
            _percent(line.accuracy, unit="") if line.accuracy else "failed",
            ABSENT if line.codec == "dense" else _signed(line.gap),
            f"{line.finished} of {line.tried}" if line.failed else f"{line.finished}",
        ]
        for line in panel.lines
    ]
    return f"## {panel.title}\n\n" + _markdown(head, rows, left=3)


def _worth(panels: Sequence[Panel]) -> str:
    rows = [[p.title, f"`{on}`", f"`{off}`", _signed(gap)] for p in panels for on, off, gap in p.feedback]
    if not rows:
        return ""
    head = ["task", "with feedback", "without", "with minus without, points"]
    text = "What error feedback is worth, paired by seed, where both trained:"
    return f"## Error feedback\n\n{text}\n\n" + _markdown(head, rows, left=3)


def _failures(rows: Sequence[Row]) -> str:
    """All of them, also of a task that no panel shows because dense itself did not train."""
    last = [row for task in _tasks(rows) for row in deciding_rows([row for row in rows if row["task"] == task])]
    said = [
        f"- {TITLES.get(row['task'], row['task'])}, `{row['cell']}`, seed {row['seed']}: {row['error']}"
        for row in last
        if row["status"] == "failed"
    ]
    return "## Runs that failed\n\n" + "\n".join(said) if said else ""


def _unequal(rows: Sequence[Row]) -> str:
    """Replicas of a synchronous run must end equal; where they did not, the numbers are of the first worker's."""
    bad = [row for row in rows if row["status"] == "finished" and not row["replicas_equal"]]
    said = [f"- {TITLES.get(row['task'], row['task'])}, `{row['cell']}`, seed {row['seed']}" for row in bad]
    return "## Runs whose replicas did not end equal\n\n" + "\n".join(said) if said else ""


def _sizes(panels: Sequence[Panel]) -> str:
    head = ["task", "parameters", "training images", "test images", "epochs", "steps", "global batch", "workers"]
    names = ("parameters", "train", "test", "epochs", "steps", "batch_size", "workers")
    rows = [[panel.title, *(f"{panel.facts[name]:,}" for name in names)] for panel in panels]
    return "## Sizes\n\n" + _markdown(head, rows, left=1)


def _again(panels: Sequence[Panel], rows: Sequence[Row]) -> str:
    done = [row for row in rows if row["status"] == "finished"]
    text = (
        f"{len(done)} runs, several at a time: {'; '.join(_where(panel, done) for panel in panels)}. The workers of a "
    )
    text += "run are simulated: their gradients are real, the network is not. The tasks' files are in folders of "
    text += "DIR, `mnist` and `cifar10`. A study that was cut short goes on when asked for again; `--draw` only makes "
    text += "this page again from `rates.jsonl`."
    return f"## Make it again\n\n```\n{_commands(panels)}\n```\n\n{text}"


def _where(panel: Panel, done: Sequence[Row]) -> str:
    facts, walls = panel.facts, [row["wall_s"] for row in done if row["task"] == panel.task]
    where = {"cuda": "one GPU", "cpu": "a CPU core each"}.get(facts["device"], facts["device"])
    used = ", ".join(f"{name} {facts['versions'][name]}" for name in ("python", "torch"))
    return f"{panel.title} on {where} ({used}), {plain(math.fsum(walls) / len(walls), 2)} s a run on average"


def _commands(panels: Sequence[Panel]) -> str:
    """One command for all tasks, or one for each where devices differ."""
    if {panel.task for panel in panels} <= {load.task for load in QUICK.workloads}:
        return "python studies/rates.py --quick"
    start = "python studies/rates.py --data-dir DIR --jobs N"
    devices = {panel.facts["device"] for panel in panels}
    if len(devices) == 1:
        return f"{start} --device {devices.pop()}"
    return "\n".join(f"{start} --device {panel.facts['device']} --task {panel.task}" for panel in panels)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
    """A table; all but the first columns are set to the right."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, rule, *rows])


def _percent(mean: Mean | None, unit: str = " %") -> str:
    return ABSENT if mean is None else spread(mean.mean, mean.low, mean.high) + unit


def _signed(mean: Mean | None) -> str:
    """A difference, with its sign."""
    if mean is None:
        return ABSENT
    text = spread(mean.mean, mean.low, mean.high)
    return f"+{text}" if mean.mean > 0 else text.replace("-", "−")


def _join(parts: Sequence[str]) -> str:
    return ", ".join(parts) if parts else "none"


# The figure.

_FAMILIES = {
    "dense": ("#000000", "*"),
    "fp16": ("#7f7f7f", "o"),
    "bf16": ("#7f7f7f", "s"),
    "int8": ("#7f7f7f", "D"),
    "sign": ("#d55e00", "o"),
    "ef-sign": ("#d55e00", "s"),
    "vote": ("#d55e00", "D"),
    "one-bit": ("#d55e00", "^"),
    "top-k": ("#0072b2", "o"),
    "random-k": ("#56b4e9", "s"),
    "dgc": ("#cc79a7", "D"),
    "power-sgd": ("#009e73", "^"),
}
"""Colour and marker by name: one colour per idea, of Okabe and Ito's, which colour-blind readers can tell apart."""

_SIZE = (320.0, 270.0)
"""Of a panel's inside, in typographic points, near enough to keep names apart."""

_LEAST_ERROR = 0.1
"""Percent; where an interval reaches over 100 %, it is cut here."""


def figure(panels: Sequence[Panel]) -> str:
    """An SVG with one panel per task: ratio on a logarithmic axis against accuracy."""
    matplotlib = importlib.import_module("matplotlib")
    backend = importlib.import_module("matplotlib.backends.backend_svg")
    figures = importlib.import_module("matplotlib.figure")
    settings = {"svg.fonttype": "none", "svg.hashsalt": "podium", "font.size": 9, "axes.spines.top": False}
    settings |= {"axes.spines.right": False, "font.family": "DejaVu Sans"}
    with matplotlib.rc_context(settings):
        canvas = figures.Figure(figsize=(5.2 * len(panels) + 0.4, 4.6), layout="constrained")
        backend.FigureCanvasSVG(canvas)
        for place, panel in enumerate(panels, 1):
            _draw_panel(canvas.add_subplot(1, len(panels), place), panel)
        out = io.StringIO()
        canvas.savefig(out, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _draw_panel(axes: Any, panel: Panel) -> None:
    """Errors on an inverted logarithmic axis, named by the accuracies that they leave."""
    points = [
        (line, line.ratio, line.accuracy)
        for line in panel.lines
        if line.ratio is not None and line.accuracy is not None
    ]
    errors = [_error(mean.mean) for _, _, mean in points]
    ratios = [ratio for _, ratio, _ in points]
    left, right, low, high = min(ratios) / 1.5, max(ratios) * 2.5, min(errors) / 1.25, min(100, max(errors) * 1.25)
    across, up = _SIZE[0] / math.log(right / left), _SIZE[1] / math.log(high / low)
    spots = [(across * math.log(r / left), up * math.log(high / e)) for r, e in zip(ratios, errors, strict=True)]
    names = [_short(line.codec) for line, _, _ in points]
    for (line, ratio, mean), name, offset in zip(points, names, place_names(spots, names), strict=True):
        _draw_point(axes, ratio, mean, line, name, offset)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.set_ylim(high, low)
    ticks = [e for e in (0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90) if low <= e <= high]
    axes.set_yticks(ticks, [f"{100 - e:g}" for e in ticks])
    axes.set_yticks([], minor=True)
    failed = [line.codec for line in panel.lines if line.failed]
    axes.set_title(panel.title + (f"\nfailed with some seeds: {', '.join(failed)}" if failed else ""), fontsize=9)
    axes.set(xlabel="bytes sent over dense's bytes sent", ylabel="test accuracy, %")
    axes.grid(alpha=0.25, linewidth=0.5)


def _draw_point(axes: Any, ratio: float, mean: Mean, line: Line, name: str, offset: tuple[float, float]) -> None:
    colour, marker = _FAMILIES.get(line.codec.partition(":")[0], ("#8c6d31", "v"))
    error = _error(mean.mean)
    fill = "none" if line.feedback == "off" else colour
    if mean.low is not None and mean.high is not None:
        ends = [[error - _error(mean.high)], [_error(mean.low) - error]]
        axes.errorbar(ratio, error, yerr=ends, color=colour, linewidth=0.8, capsize=2, alpha=0.7)
    axes.plot(ratio, error, marker, color=colour, markerfacecolor=fill, markersize=6)
    far = {"arrowprops": {"arrowstyle": "-", "color": colour, "linewidth": 0.3}} if math.hypot(*offset) > 40 else {}
    axes.annotate(name, (ratio, error), offset, textcoords="offset points", fontsize=6, color=colour, **far)


def place_names(spots: Sequence[tuple[float, float]], names: Sequence[str]) -> list[tuple[float, float]]:
    """Where each name begins, from its point, in typographic points: the nearest place that is free, if there is one.

    A name keeps clear of all points and of the names placed before it; it may cross intervals.
    """
    taken = [(x - 3, y - 3, x + 3, y + 3) for x, y in spots]
    offsets = []
    for (x, y), name in zip(spots, names, strict=True):
        width, height = 3.5 * len(name), 7.0
        tries = [
            (dx, float(dy)) for ring in range(0, 84, 4) for dx in (5.0, -width - 5) for dy in (ring + 1, -ring - 8)
        ]
        free = (t for t in tries if not any(_meet(_box(x + t[0], y + t[1], width, height), box) for box in taken))
        dx, dy = next(free, tries[0])
        taken.append(_box(x + dx, y + dy, width, height))
        offsets.append((dx, dy))
    return offsets


_Box = tuple[float, float, float, float]


def _box(x: float, y: float, width: float, height: float) -> _Box:
    return x, y, x + width, y + height


def _meet(one: _Box, other: _Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _short(codec: str) -> str:
    """What tells a point from its neighbours: the options, without those that its look tells."""
    name, _, options = codec.partition(":")
    kept = [part.partition("=")[2] for part in options.split(";") if part and not part.startswith("feedback")]
    return " ".join([name, *kept])


def _error(accuracy: float) -> float:
    return max(_LEAST_ERROR, min(100.0, 100 - accuracy))


def _require_drawing() -> None:
    """Find out about missing packages before hours of runs, not after."""
    for module in ("scipy.stats", "matplotlib.figure"):
        try:
            importlib.import_module(module)
        except ImportError:
            raise MissingExtra(module.partition(".")[0], "study", "the study of rates") from None


def _main(folder: Path) -> None:
    """What the process of one run does."""
    options = json.loads((folder / "options.json").read_text(encoding="utf-8"))
    write_whole(folder / "row.json", to_json(train_one(options, folder)))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))

"""What a sweep came to: points with means and intervals, the best one, what it cost, and the answer in words.

All of it is worked out from the sweep's folder, so a sweep can be read again at any time, also while it runs.

A point's trials (one per fold and seed) that ran to their end make its mean; trials that a rule stopped early were
judged at another epoch and do not count. Points of which all trials finished stand before those of which some did not,
and of these the ones with more finished trials first: one lucky fold is not the best of five.

Two points are compared fold by fold and seed by seed. Folds share training samples, so their scores are not
independent and a plain paired t-test finds differences that are not there; the variance is therefore multiplied by
(1/n + validation/training samples) instead of 1/n (Nadeau and Bengio, 2003, https://doi.org/10.1023/A:1024068626366).
Where the gap is the same in every pair there is no t. The sign test takes its place, p = 2**(1 - n), with the n pairs
that are worth as much under the same correction, 1/(1/n + validation/training samples).

The best is compared with all others, but the same scores made it the best: it might have been any of them. So p is
multiplied by the number of all pairs of points (Bonferroni), not by that of the others.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor

from podium.engine.files import load_tensors
from podium.errors import ConfigError, RecordError
from podium.records.manifest import read_manifest
from podium.records.recorder import read_records
from podium.sweeps.queue import read_outcomes
from podium.sweeps.trial import Outcome, Trial

ALPHA = 0.05
"""Two points are told apart when the corrected p is below this."""

_SMALL = 1e-6
"""Below this, numbers are told with an exponent."""

_ROUNDING = 2.0**-21
"""Of a score: a metric may have been worked out in single precision, and a gap is the difference of two."""

Row = dict[str, Any]


class Score(NamedTuple):
    """What one finished trial of a point came to."""

    trial: int
    fold: int | None
    seed: int
    value: float


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of the search, over its folds and seeds."""

    number: int
    options: Mapping[str, Any]
    """As they were asked for; population based training may have changed them on the way."""
    n: int
    """How many of its trials finished with a score that is a number, and make the mean."""
    mean: float | None = None
    sd: float | None = None
    """Between its trials; None with fewer than two."""
    low: float | None = None
    high: float | None = None
    """The 95 % t-interval of the mean; None with fewer than two."""
    statuses: Mapping[str, int] = field(default_factory=dict)
    """How many of its trials ended how."""
    is_whole: bool = False
    """Whether all its trials finished, with a score that is a number."""
    scores: Sequence[Score] = ()

    @property
    def name(self) -> str:
        return tell_options(self.options)

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "scores": [score._asdict() for score in self.scores]}


@dataclass(frozen=True, kw_only=True)
class Rival:
    """The best point held against another, in pairs of trials with the same fold and seed."""

    point: int
    pairs: int
    gap: float
    """How much better the best is, on average over the pairs; below 0 where the other has more in fewer trials."""
    p: float | None
    """Of the corrected paired t-test, times the number of all pairs of points; None with fewer than two pairs."""

    @property
    def is_distinct(self) -> bool:
        """Whether the best is better, beyond what luck explains."""
        return self.p is not None and self.p < ALPHA and self.gap > 0

    @property
    def is_better(self) -> bool:
        """Whether the other is, in the trials that both finished: it is not the best for having finished fewer."""
        return self.p is not None and self.p < ALPHA and self.gap < 0


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What a sweep came to. `podium sweep --json` prints it."""

    folder: str
    status: Literal["finished", "stopped"]
    """`stopped` when it ended before all its trials were over; asking for the same one again goes on."""
    task: str
    metric: str
    maximize: bool
    answer: str
    """The answer, then on a second line what may not be concluded."""
    points: tuple[Point, ...]
    """The best first."""
    rivals: tuple[Rival, ...]
    """The best point against every other that has trials to compare, in the order of `points`."""
    outcomes: tuple[Outcome, ...]
    """Every trial that is over, in the order they ended."""
    seconds: float
    """From the first trial's preparation to the last one's end: probing, choosing and compiling included."""
    trials_per_s: float | None
    samples_per_s: float | None
    """Training samples of all trials together; None where no whole session was measured."""
    reading: Mapping[str, Any] | None
    """What was measured meanwhile (`podium.records.window.Reading`), of the last session that trained anything."""
    choices: tuple[Row, ...] = ()
    """What `auto` chose for each group of trials, and why."""
    probes: tuple[Row, ...] = ()
    """Whether trials could be fused, and why not."""
    turns: tuple[Row, ...] = ()
    """What happened to arrays on the way: `narrowed` (from `before` to `rows`), `not narrowed`, `fell back` (`why`)."""
    sessions: tuple[Row, ...] = ()
    """One for each time it came to its end or was asked to stop: `trained`, `samples`, `seconds`, `executor` …"""
    copies: bool = False
    """Whether trials were copied onto each other (population based training): `points` have what they began with."""
    report: str = ""
    table: str = ""
    """Where the points are, as CSV."""

    @property
    def best(self) -> Point | None:
        """The point with the best mean; None where none has one."""
        return self.points[0] if self.points and self.points[0].mean is not None else None

    @property
    def best_trial(self) -> Outcome | None:
        """The best point's best trial."""
        if self.best is None:
            return None
        wanted = _best_score(self.best, maximize=self.maximize).value
        equal = {score.trial for score in self.best.scores if score.value == wanted}
        found = [outcome for outcome in self.outcomes if outcome.trial.number in equal]
        return next((outcome for outcome in found if outcome.model), found[0])  # of equal ones, the one that was kept

    def best_state(self) -> dict[str, Tensor]:
        """The parameters and buffers of the best point's best trial: an ordinary `state_dict`, on the CPU."""
        found = self.best_trial
        if found is None:
            raise RecordError(f"{self.folder}: no trial has finished, so there is no best model")
        if not found.model:
            raise RecordError(
                f"{self.folder}: the model of trial {found.trial.number} must be there, but models were not kept "
                "(keep='none'), or another point was the best until trials that had failed were trained again"
            )
        return load_tensors(Path(self.folder) / found.model)

    @property
    def failed(self) -> int:
        return sum(outcome.status == "failed" for outcome in self.outcomes)

    @property
    def widths(self) -> list[list[int]]:
        """How many rows arrays had, one after another, wherever they were made narrower."""
        found: list[list[int]] = []
        for turn in self.turns:
            if turn["event"] == "narrowed":
                if not found or found[-1][-1] != turn["before"]:
                    found.append([turn["before"]])
                found[-1].append(turn["rows"])
        return found

    def to_dict(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        best, trial = self.best, self.best_trial
        return {
            **plain,
            "points": [point.to_dict() for point in self.points],
            "rivals": [dataclasses.asdict(rival) for rival in self.rivals],
            "best": None if best is None else best.to_dict(),
            "best_trial": None if trial is None else trial.to_dict(),
            "outcomes": [outcome.to_dict() for outcome in self.outcomes],
        }


def read_sweep(folder: str | Path) -> Sweep:
    """The sweep in this folder, as far as it has come."""
    folder = Path(folder)
    config = read_manifest(folder)["config"]
    if "maximize" not in config:
        raise ConfigError(f"{folder}: must hold a sweep, got the folder of something else")
    asked = [Trial(**row) for row in _rows(folder / "trials.jsonl")]
    outcomes = read_outcomes(folder)
    sessions, events = _rows(folder / "sessions.jsonl"), _rows(folder / "events.jsonl")
    points = find_points(asked, outcomes, config["metric"], maximize=config["maximize"])
    rivals = find_rivals(points, config)
    seconds = sum(session["seconds"] for session in sessions)
    trained, samples = (sum(session[name] for session in sessions) for name in ("trained", "samples"))
    measured = [session["reading"] for session in sessions if session["trained"]]
    return Sweep(
        folder=str(folder),
        status=sessions[-1]["status"] if sessions else "stopped",
        task=config["task"],
        metric=config["metric"],
        maximize=config["maximize"],
        answer=tell(points, rivals, outcomes, config),
        points=tuple(points),
        rivals=tuple(rivals),
        outcomes=tuple(outcomes),
        seconds=seconds,
        trials_per_s=trained / seconds if trained and seconds else None,
        samples_per_s=samples / seconds if samples and seconds else None,
        reading=measured[-1] if measured else None,
        choices=tuple(event for event in events if event["event"] == "chose"),
        probes=tuple(event for event in events if event["event"] == "probe"),
        turns=tuple(event for event in events if event["event"] in ("narrowed", "not narrowed", "fell back")),
        sessions=tuple(sessions),
        copies=config.get("copies", False),
    )


def find_points(asked: Sequence[Trial], outcomes: Sequence[Outcome], metric: str, *, maximize: bool) -> list[Point]:
    """The points of these trials, the best first."""
    by_number = {outcome.trial.number: outcome for outcome in outcomes}
    trials: dict[int, list[Trial]] = {}
    for trial in asked:
        trials.setdefault(trial.point, []).append(trial)
    points = [_point(number, some, by_number, metric) for number, some in trials.items()]
    sign = -1 if maximize else 1
    return sorted(points, key=lambda p: (p.mean is None, not p.is_whole, -p.n, sign * (p.mean or 0.0), p.number))


def _point(number: int, trials: Sequence[Trial], outcomes: Mapping[int, Outcome], metric: str) -> Point:
    scores, statuses = [], Counter[str]()
    for trial in trials:
        outcome = outcomes.get(trial.number)
        if outcome is None:
            continue
        statuses[outcome.status] += 1
        if outcome.status == "finished" and outcome.evaluation is not None:
            value = outcome.evaluation.value_of(metric)
            if math.isfinite(value):
                scores.append(Score(trial.number, trial.fold, trial.seed, value))
    values = [score.value for score in scores]
    blank = Point(number=number, options=trials[0].options, n=len(values), statuses=dict(statuses))
    if not values:
        return blank
    mean = math.fsum(values) / len(values)
    sd = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else None
    low, high = _interval(mean, sd, len(values))
    is_whole = len(values) == len(trials)
    return dataclasses.replace(blank, mean=mean, sd=sd, low=low, high=high, is_whole=is_whole, scores=tuple(scores))


def _best_score(point: Point, *, maximize: bool) -> Score:
    return (max if maximize else min)(point.scores, key=lambda score: score.value)


def _interval(mean: float, sd: float | None, n: int) -> tuple[float | None, float | None]:
    if sd is None:
        return None, None
    if sd == 0.0:
        return mean, mean
    from scipy import stats

    low, high = stats.t.interval(0.95, n - 1, loc=mean, scale=sd / math.sqrt(n))
    return float(low), float(high)


def find_rivals(points: Sequence[Point], config: Mapping[str, Any]) -> list[Rival]:
    """The best point (the first) against all others; none where trials copied each other, and are no others."""
    if not points or points[0].mean is None or config.get("copies"):
        return []
    sign = 1 if config["maximize"] else -1
    overlap = (config.get("folds") or {}).get("overlap", 0.0)
    best = {(score.fold, score.seed): score.value for score in points[0].scores}
    found = []
    for point in points[1:]:
        theirs = {(score.fold, score.seed): score.value for score in point.scores}
        pairs = [(best[key], theirs[key]) for key in best if key in theirs]
        if pairs:
            gaps = [sign * (one - other) for one, other in pairs]
            resolution = _ROUNDING * max(abs(value) for pair in pairs for value in pair)
            p = _paired_p(gaps, overlap, resolution)
            found.append(Rival(point=point.number, pairs=len(gaps), gap=math.fsum(gaps) / len(gaps), p=p))
    return [r if r.p is None else dataclasses.replace(r, p=min(1.0, r.p * count_pairs(points))) for r in found]


def count_pairs(points: Sequence[Point]) -> int:
    """How many pairs of points could have been compared: what p is multiplied by."""
    return math.comb(sum(point.mean is not None for point in points), 2)


def _paired_p(gaps: Sequence[float], overlap: float, resolution: float) -> float | None:
    """Two-sided, of a paired t-test; `overlap` is validation by training samples where these are folds, else 0.

    Gaps that differ by less than `resolution` are the same, and less than that is no gap.
    """
    n = len(gaps)
    if n < 2:
        return None
    mean = math.fsum(gaps) / n
    variance = math.fsum((gap - mean) ** 2 for gap in gaps) / (n - 1)
    if variance <= resolution**2:
        # Scores that count samples often have the same gap in a few pairs, by luck.
        return 1.0 if abs(mean) <= resolution else min(1.0, 2.0 ** (1 - 1 / (1 / n + overlap)))
    from scipy import stats

    return float(2 * stats.t.sf(abs(mean) / math.sqrt(variance * (1 / n + overlap)), n - 1))


# The answer in words.


def tell(
    points: Sequence[Point], rivals: Sequence[Rival], outcomes: Sequence[Outcome], config: Mapping[str, Any]
) -> str:
    """The answer first, then on a line of its own what may not be concluded."""
    if not points or points[0].mean is None:
        return f"{_nothing(outcomes)}\nNothing can be concluded."
    best, metric = points[0], config["metric"]
    lead = f"Best of {len(points)} points" if len(points) > 1 else "One point"
    lead += ", as it began" if config.get("copies") else ""
    text = f"{lead}: {best.name}, {metric} {tell_mean(best)} over {tell_trials(best, config)}"
    if config.get("copies"):
        return f"{text}. {_ended(best, outcomes, config)}{_unfinished(outcomes, points)}\n{_caution(best, config)}"
    text += _against(points, rivals, config) + "."
    if not best.is_whole:
        text += " Not all of its trials came to a score, nor did all of any other point's: most trials come first."
    return f"{text}{_unfinished(outcomes, points)}\n{_caution(best, config)}"


def _ended(best: Point, outcomes: Sequence[Outcome], config: Mapping[str, Any]) -> str:
    """Of a rule that copies trials onto each other: what the best point's best trial came to be."""
    top = _best_score(best, maximize=config["maximize"])
    options = next(outcome.trial.options for outcome in outcomes if outcome.trial.number == top.trial)
    who = f"Its best trial ({top.trial}, {number(top.value)})"
    if options == best.options:
        return f"{who} kept these options."
    return f"{who} took over another's model on the way and ended with {tell_options(options)}."


def _against(points: Sequence[Point], rivals: Sequence[Rival], config: Mapping[str, Any]) -> str:
    """What may be said of the best beside the others."""
    if len(points) < 2:
        return ""
    by_number = {point.number: point for point in points}
    if not rivals:
        return "; no other point has a finished trial with the same fold and seed"
    second = by_number[rivals[0].point]
    next_one = f"{second.name} ({tell_mean(second)})"
    if all(rival.p is None for rival in rivals):
        few = "One trial of each has no interval" if points[0].n == 1 else "One pair of trials is no test"
        return f"; next is {next_one}. {few}: close points may be in this order by luck"
    level = [rival for rival in rivals if not rival.is_distinct]
    what, pairs = _what(config), count_pairs(points)
    corrected = f", corrected for all {pairs} pairs of points" if pairs > 1 else ""
    test = f"paired t-test, p {tell_p(rivals[0].p)}{corrected}"
    if rivals[0].is_better:
        return f"; next is {next_one}, which is better in the {rivals[0].pairs} trials that both finished ({test})"
    if not rivals[0].is_distinct:
        text = f"; the best two cannot be told apart by these {what}: {next_one} ({test})"
        return text if len(level) == 1 else f"{text}, nor can {len(level) - 1} more"
    text = f"; better than the next, {next_one}, by {number(rivals[0].gap)} ({test})"
    return f"{text}; not told apart from {len(level)} of the others" if level else text


def _nothing(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return "No trial is over yet."
    counts = ", ".join(f"{n} {status}" for status, n in Counter(o.status for o in outcomes).items())
    why = next((f" The first one said: {outcome.why}" for outcome in outcomes if outcome.why), "")
    return f"No trial finished with a score that is a number ({counts}).{why}"


def _unfinished(outcomes: Sequence[Outcome], points: Sequence[Point]) -> str:
    counts = Counter[str](outcome.status for outcome in outcomes)
    said = {"stopped": "stopped early", "diverged": "diverged", "failed": "failed"}
    parts = [f"{counts[status]} {words}" for status, words in said.items() if counts[status]]
    scored = sum(point.n for point in points)
    if counts["finished"] > scored:
        parts.append(f"{counts['finished'] - scored} finished with a score that is no number")
    return f" Of {len(outcomes)} trials {', '.join(parts)}; no mean includes them." if parts else ""


def _caution(best: Point, config: Mapping[str, Any]) -> str:
    text = "The best point was chosen by the scores that are shown for it, so expect a little less of it on new data."
    if config.get("copies"):
        text += (
            " Trials copied each other and changed their options on the way: they are not independent, so none are "
            "tested against others, and training with any one set of options need not give this score."
        )
    if config.get("folds"):
        text += " Folds share training samples; the test allows for that, the interval of a mean does not."
    else:
        text += " It was chosen by the task's test data, which are thereby used up: with folds they would not be."
    if 1 < best.n < 6:
        text += f" So few {_what(config)} show large differences only."
    return text


def _what(config: Mapping[str, Any]) -> str:
    return "folds" if config.get("folds") else "seeds"


def tell_trials(point: Point, config: Mapping[str, Any]) -> str:
    """How many trials a mean is over, as folds and seeds."""
    folds, seeds = (config.get("folds") or {}).get("count", 1), len(config["seeds"])
    if not point.is_whole or folds * seeds != point.n or point.n == 1:
        return f"{point.n} trial{'s' * (point.n != 1)}"
    parts = [f"{n} {what}" for n, what in ((folds, "folds"), (seeds, "seeds")) if n > 1]
    return " × ".join(parts)


def tell_options(options: Mapping[str, Any]) -> str:
    """Options on one line, numbers to four digits."""
    return ", ".join(f"{name}={tell_value(value)}" for name, value in options.items()) or "the task as it is"


def tell_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return tell_value(value[0]) if len(value) == 1 else f"[{','.join(map(tell_value, value))}]"
    return str(value)


def tell_mean(point: Point) -> str:
    """`0.971 ± 0.008`: the mean and half of its interval, where there is one."""
    if point.mean is None:
        return "–"
    if point.low is None or point.high is None:
        return number(point.mean)
    half = (point.high - point.low) / 2
    if half == 0:
        return f"{number(point.mean)} ± 0"
    if half < _SMALL:
        return f"{number(point.mean, 8)} ± {number(half, 2)}"
    places = _places(half, 2)
    return f"{point.mean:,.{places}f} ± {half:,.{places}f}"


def tell_p(p: float | None) -> str:
    """With its sign, and never `0`."""
    if p is None:
        return "–"
    return "< 0.001" if p < 0.001 else f"= {p:.3f}" if p < 0.1 else f"= {p:.2f}"


def number(value: float | None, digits: int = 4) -> str:
    """A number to so many significant digits, without an exponent unless it is very small."""
    if value is None:
        return "–"
    if 0 < abs(value) < _SMALL:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{_places(value, digits)}f}" if math.isfinite(value) else str(value)


def _places(value: float, digits: int) -> int:
    size = math.floor(math.log10(abs(value))) if value else 0
    return min(8, max(0, digits - 1 - size))


def _rows(path: Path) -> list[Row]:
    return list(read_records(path)) if path.is_file() else []

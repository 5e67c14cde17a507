"""The comparison of two sets of results as sentences, and as lines for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from podium.lab.report.format import plain, probability, spread
from podium.lab.report.versus.base import FEW, NAMED, Change, FromZero, Set, Side, Versus
from podium.lab.stats.statistics import Mean
from podium.records.metrics import lower_is_better


def answer(found: Versus, shared: Sequence[str]) -> str:
    if not shared:
        return f"Nothing to compare: {found.a.name} and {found.b.name} have no cell in common."
    said = [_told(found, measure) for measure in found.measures]
    for measure in dict.fromkeys(one.measure for one in found.zeros):
        said.append(_without_ratio(found, measure))
    same, known = found.same_parameters
    if known:
        which = "no pair" if not same else f"all {known} pairs" if same == known else f"{same} of {known} pairs"
        said.append(f"Parameters at the end: the same bit by bit in {which}.")
    left = len(found.a.only) + len(found.b.only)
    if left:
        said.append(f"{left} cell{'s' * (left != 1)} with finished runs in one set only {_are(left)} left out.")
    return " ".join(said)


def _told(found: Versus, measure: str) -> str:
    """One measure in a sentence: how many cells changed, in which direction and by how much."""
    changes = found.of(measure)
    name = measure.capitalize()
    if measure == "seconds to target":
        name = f"Seconds to {plain(found.target)} {found.metric}"
    total = f"{len(changes)} cell{'s' * (len(changes) != 1)}"
    if all(change.verdict == "the same in every pair" for change in changes):
        return f"{name}: the same in every pair of {total}."
    if all(change.verdict == "not tested" for change in changes):
        return f"{name}: {_range(changes)} in {total}; too few runs to test anything."
    parts = []
    for verdict in ("larger", "smaller"):
        some = [change for change in changes if change.verdict == verdict]
        if some:
            which = (
                f" ({', '.join(change.cell for change in some)})" if len(some) <= min(NAMED, len(changes) - 1) else ""
            )
            word = worded(found, measure, verdict)
            begin = f"{len(some)} of {total}" if len(changes) > 1 else changes[0].cell
            parts.append(f"{begin} became {word}{which}, by {_range(some)}")
    if not parts:
        return f"{name}: no difference that we can detect in {total}."
    rest = sum(change.verdict == "no difference detected" for change in changes)
    equal = sum(change.verdict == "the same in every pair" for change in changes)
    parts += [f"in {rest} no difference that we can detect"] if rest else []
    parts += [f"{equal} the same in every pair"] if equal else []
    untested = sum(change.verdict == "not tested" for change in changes)
    parts += [f"{untested} not tested"] if untested else []
    return f"{name}: {'; '.join(parts)}."


def _without_ratio(found: Versus, measure: str) -> str:
    """The cells without a ratio in one measure: both values of the first `NAMED` cells."""
    some = [one for one in found.zeros if one.measure == measure]
    told = [f"{one.cell} from {size(one, one.first)} to {size(one, one.second)}" for one in some[:NAMED]]
    rest = f" and {len(some) - NAMED} more, listed below" if len(some) > NAMED else ""
    name = heading(found, measure)
    return f"{name[0].upper()}{name[1:]}: {', '.join(told)}{rest}; 0 has no ratio."


def worded(found: Versus, measure: str, verdict: str) -> str:
    """A verdict in the words of its measure, such as slower or better."""
    if verdict not in ("larger", "smaller"):
        return verdict
    up = verdict == "larger"
    if measure.startswith("seconds"):
        return "slower" if up else "faster"
    if measure == f"final {found.metric}":
        return "better" if up != lower_is_better(found.metric, found.maximize) else "worse"
    return verdict


def _range(changes: Sequence[Change]) -> str:
    """The smallest and largest change; ratios are inverted if all are below 1."""
    values = [change.value for change in changes]
    sign = "×" if changes[0].ratio else ""
    if changes[0].ratio and all(0 < value < 1 for value in values):
        values = [1 / value for value in values]
    elif all(value < 0 for value in values):
        values = [-value for value in values]
    ends = list(dict.fromkeys(f"{plain(x)}{sign}" for x in (min(values), max(values))))
    return " to ".join(ends)


def limits(found: Versus, a: Set, b: Set) -> str:
    said = ["Runs with the same seed have samples and initial parameters in common, not the machine's noise."]
    virtual = [row.get("launcher") == "virtual" for row in (*a.done, *b.done)]
    if not all(virtual):
        said.append(
            "One set was made after the other, so load, heat or anything else that lasted through one of them counts "
            "as a difference of seconds, and no test on seeds can tell."
        )
    kinds = {difference.kind for difference in found.differences} - {"seeds"}
    causes = len([difference for difference in found.differences if difference.kind != "seeds"])
    if causes > 1:
        said.append(
            f"{causes} recorded things differ (listed below): no difference in results can be attributed to one alone."
        )
    elif not causes:
        said.append("No recorded fact differs, so a difference has an unrecorded cause or is chance.")
    if "hardware" in kinds:
        said.append("The machines differ: seconds compare machines as much as anything else.")
    commits = [str(one.study.machine.commit or "") for one in (a, b)]
    if any(commit.endswith("+") for commit in commits):
        said.append("A commit marked + had changes that were not committed, so the code may differ from what it names.")
    if any(virtual):
        said.append("Seconds are simulated where the launcher is virtual, not measured.")
    pairs = [change.n for change in found.changes if change.test == "paired"]
    if pairs and min(pairs) < FEW:
        said.append("So few seeds detect large differences only; a difference may exist where none was detected.")
    if any(change.test == "Welch" for change in found.changes):
        said.append("Cells that share fewer than two seeds are compared without pairs (Welch).")
    return " ".join(said)


def _are(count: int) -> str:
    return "are" if count != 1 else "is"


# For the terminal and for the page.


def amount(change: Change) -> str:
    """How much it changed, with its interval."""
    sign = "× " if change.ratio else "+" if change.value > 0 else ""
    between = "" if change.low is None else f" ({plain(change.low)} to {plain(change.high)})"
    return f"{sign}{plain(change.value)}{between}"


def size(change: Change | FromZero, mean: Mean) -> str:
    """A mean with its half-width; bytes in 10⁶."""
    scale = 1e-6 if change.measure == "bytes sent" else 1.0
    ends = [None if x is None else x * scale for x in (mean.mean, mean.low, mean.high)]
    return spread(*ends)


def heading(found: Versus, measure: str) -> str:
    """The heading of a measure's table."""
    if measure == "seconds to target":
        return f"seconds to {plain(found.target)} {found.metric}"
    return "MB sent by all ranks" if measure == "bytes sent" else measure


def lines(found: Versus) -> list[str]:
    """The whole comparison except `answer` and `limits`, as lines for a terminal."""
    told = [f"A  {found.a.folder}: {_runs(found.a)}", f"B  {found.b.folder}: {_runs(found.b)}"]
    for measure in found.measures:
        changes = found.of(measure)
        told += ["", f"{heading(found, measure)}, {'B over A' if changes[0].ratio else 'B minus A'}"]
        width = min(30, max(len(change.cell) for change in changes))
        for change in changes:
            p = "" if change.p_holm is None or change.exact else f", Holm p {probability(change.p_holm)}"
            told.append(
                f"  {change.cell:<{width}}  {size(change, change.first)} → {size(change, change.second)}   "
                f"{amount(change)}   {worded(found, measure, change.verdict)}{p}"
            )
    if found.zeros:
        told += ["", "from 0 or to 0, without a ratio"]
        told += [
            f"  {one.cell}, {heading(found, one.measure)}  {size(one, one.first)} → {size(one, one.second)}"
            for one in found.zeros
        ]
    if found.differences:
        told += ["", "What differs, A → B"]
        width = min(30, max(len(difference.what) for difference in found.differences))
        told += [f"  {one.what:<{width}}  {one.first} → {one.second}" for one in found.differences]
    for letter, side in (("A", found.a), ("B", found.b)):
        told += [f"  only in {letter}: {cell}" for cell in side.only]
    return told


def _runs(side: Side) -> str:
    failed = f", {side.failed} failed" if side.failed else ""
    return f"{side.runs} run{'s' * (side.runs != 1)}{failed}"

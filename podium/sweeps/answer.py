"""The answer of a sweep in words: which point is best, beside which others, and what may not be concluded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from podium.sweeps.formats import format_mean, format_number, format_options, format_p, format_trials
from podium.sweeps.ranking import Point, Rival, best_score, count_pairs
from podium.sweeps.trial import Outcome


def answer_of(
    points: Sequence[Point], rivals: Sequence[Rival], outcomes: Sequence[Outcome], config: Mapping[str, Any]
) -> str:
    """The answer, then on a second line what may not be concluded."""
    if not points or points[0].mean is None:
        return f"{_nothing(outcomes)}\nNothing can be concluded."
    best, metric = points[0], config["metric"]
    lead = f"Best of {len(points)} points" if len(points) > 1 else "One point"
    lead += ", as it began" if config.get("copies") else ""
    text = f"{lead}: {best.name}, {metric} {format_mean(best)} over {format_trials(best, config)}"
    if config.get("copies"):
        return f"{text}. {_ended(best, outcomes, config)}{_unfinished(outcomes, points)}\n{_caution(best, config)}"
    text += _against(points, rivals, config) + "."
    if not best.is_whole:
        text += " Some of its trials have no score, as in all other points: points with more scores come first."
    return f"{text}{_unfinished(outcomes, points)}\n{_caution(best, config)}"


def _ended(best: Point, outcomes: Sequence[Outcome], config: Mapping[str, Any]) -> str:
    """For a rule that copies trials onto each other: the options with which the best trial ended."""
    top = best_score(best, maximize=config["maximize"])
    options = next(outcome.trial.options for outcome in outcomes if outcome.trial.number == top.trial)
    who = f"Its best trial ({top.trial}, {format_number(top.value)})"
    if options == best.options:
        return f"{who} kept these options."
    return f"{who} took over another trial's model on the way and ended with {format_options(options)}."


def _against(points: Sequence[Point], rivals: Sequence[Rival], config: Mapping[str, Any]) -> str:
    """How the best point compares with the other points."""
    if len(points) < 2:
        return ""
    by_number = {point.number: point for point in points}
    if not rivals:
        return "; no other point has a finished trial with the same fold and seed"
    second = by_number[rivals[0].point]
    next_one = f"{second.name} ({format_mean(second)})"
    if all(rival.p is None for rival in rivals):
        few = "One trial of each has no interval" if points[0].n == 1 else "One pair of trials is no test"
        return f"; next is {next_one}. {few}: close points may be in this order by luck"
    level = [rival for rival in rivals if not rival.is_distinct]
    what, pairs = _what(config), count_pairs(points)
    corrected = f", corrected for all {pairs} pairs of points" if pairs > 1 else ""
    test = f"paired t-test, p {format_p(rivals[0].p)}{corrected}"
    if rivals[0].is_better:
        return f"; next is {next_one}, which is better in the {rivals[0].pairs} trials that both finished ({test})"
    if not rivals[0].is_distinct:
        text = f"; the best two are tied by these {what}: {next_one} ({test})"
        return text if len(level) == 1 else f"{text}, and so are {len(level) - 1} more"
    text = f"; better than the next, {next_one}, by {format_number(rivals[0].gap)} ({test})"
    return f"{text}; tied with {len(level)} of the others" if level else text


def _nothing(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return "No trial is over yet."
    counts = ", ".join(f"{n} {status}" for status, n in Counter(o.status for o in outcomes).items())
    why = next((f" The first one reported: {outcome.why}" for outcome in outcomes if outcome.why), "")
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

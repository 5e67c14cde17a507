"""The answer of a comparison in sentences: the fastest strategy, whether that is more than chance, and the limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podium.lab.report.format import plain, probability, spread
from podium.lab.stats.anova import anova
from podium.lab.stats.anova import tell as tell_anova
from podium.lab.stats.statistics import Contrast, Mean, Summary, contrasts, summarise
from podium.lab.stats.winners import tell as tell_winners
from podium.lab.stats.winners import winners
from podium.lab.study.responses import is_ratio
from podium.lab.study.results import (
    by_setting,
    crossed,
    deciding_rows,
    default_target,
    finished,
    first_level,
    metric_name,
)
from podium.lab.study.store import Row
from podium.lab.study.study import Study
from podium.records.metrics import lower_is_better


@dataclass(frozen=True)
class Findings:
    """The results of a study, computed once; tables, sentences and figures are made from them."""

    metric: str
    target: float | None
    table: list[Summary]
    contrasts: list[Contrast]
    maximize: bool | None = None
    """Whether a higher metric is better; None if the study does not say."""

    @property
    def lower(self) -> bool:
        """Whether a lower metric is better."""
        return lower_is_better(self.metric, self.maximize)

    @property
    def speed_measure(self) -> str:
        """The measure of speed: time to target if in 80 % of cells every run reached it, else the training time."""
        reached = [line for line in self.table if line.runs and line.reached == line.runs]
        able = self.target is not None and len(reached) >= 0.8 * len(self.table)
        return "seconds to target" if able else "seconds"

    def pairs(self, measure: str, cell: str) -> list[Contrast]:
        """The contrasts of one cell with the others in one measure."""
        return [c for c in self.contrasts if c.measure == measure and cell in (c.first, c.second)]


def find(rows: Sequence[Row], target: float | None = None, maximize: bool | None = None) -> Findings:
    """Evaluate all rows. Without a target, one is chosen from the results (`results.default_target`).

    `maximize`: whether a higher metric is better; None decides by its name (`podium.records.metrics`).
    """
    metric = metric_name(rows)
    goal = default_target(rows, metric, maximize) if target is None else target
    table, pairs = summarise(rows, metric, goal, maximize), contrasts(rows, metric, goal, maximize)
    return Findings(metric, goal, table, pairs, maximize)


def answer(
    rows: Sequence[Row],
    target: float | None = None,
    study: Study | None = None,
    maximize: bool | None = None,
) -> str:
    """The answer, then on a second line what may not be concluded. `study` is read from study.json."""
    return tell(find(rows, target, maximize), rows, study)


def tell(findings: Findings, rows: Sequence[Row], study: Study | None = None) -> str:
    """`answer` from findings already computed."""
    done = finished(rows)
    verdict = _by_setting(findings, done) if len(by_setting(done)) > 1 else _verdict(findings) if done else []
    parts = [*verdict, *_failures(rows), *_losses(rows)] if done else [_nothing(rows)]
    return " ".join(parts) + "\n" + limits(rows, study)


def limits(rows: Sequence[Row], study: Study | None = None) -> str:
    """What may not be concluded from the comparison."""
    done = finished(rows)
    seeds = len({row["seed"] for row in done})
    sizes = [row["parameters"] for row in done if isinstance(row.get("parameters"), int)]
    where = _where(study)
    model = f"a model of {sizes[0]:,} parameters" if sizes else "this model"
    told = f"with {model} and {seeds} seed{'s' * (seeds != 1)}: this says nothing about other"
    computed = sum(row.get("launcher") == "virtual" for row in done)
    if done and computed == len(done) and not any(row.get("seconds") for row in done):
        text = f"The network is simulated, {told} networks or larger models. Gradients and accuracies are real."
    elif done and computed == len(done):
        text = (
            f"Seconds are simulated, not measured: they are what the described machines and links would take, {told} "
        )
        text += "machines, larger models or slower networks. Gradients and accuracies are real."
    else:
        text = f"Measured on {where}, {told} hardware, larger models or slower networks."
        if computed:
            text += f" {computed} of {len(done)} runs are simulated: their seconds are not measured."
    text += "".join(f" {sentence}" for sentence in _rules(done))
    if 1 < seeds < 6:
        text += " So few seeds detect large differences only; a difference may exist where none was detected."
    return text


def _rules(done: Sequence[Row]) -> list[str]:
    """A sentence per rule of a phase that did not fire in every run, and whether it could have."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in done:
        for rule in row.get("rules") or ():
            if rule["in_force"]:
                found.setdefault((str(rule["rule"]), first_level(row)), []).append(rule)
        judged = {rule["rule"] for rule in row.get("rules") or () if rule["in_force"]}
        for switch in row.get("switches") or ():
            if switch["rule"] not in judged:  # its phase ended before the rule's first evaluation
                found.setdefault((str(switch["rule"]), first_level(row)), []).append({"step": None})
    said = []
    for (name, strategy), rules in found.items():
        fired = sum(rule["step"] is not None for rule in rules)
        if fired < len(rules):
            idle = [one for one in rules if not any(r["value"] is not None for r in one.get("readings") or ())]
            never = fired == 0 and len(idle) == len(rules)
            why = ", and could not: its phase ended before the rule had a value" if never else ""
            said.append(f"The rule {name} of {strategy} fired in {fired} of {len(rules)} runs{why}.")
    return said


def _where(study: Study | None) -> str:
    """The hardware of the runs: GPUs if the study requested any, and CPU cores."""
    hardware = study.machine.hardware if study else {}
    cores, gpus = hardware.get("cores"), hardware.get("gpus") or []
    settings = [{**study.settings, **cell.settings} for cell in study.cells] if study else []
    asked = [one.get("device") for one in settings or [{}]]
    devices = {name.strip().partition(":")[0] for device in asked for name in str(device or "cpu").split(",")}
    found = []
    if "cuda" in devices or ("auto" in devices and gpus):
        found += list(dict.fromkeys(gpus)) or ["a GPU"]
    if cores:
        found.append(f"{cores} CPU core{'s' * (cores != 1)}")
    return " and ".join(found) or "this machine"


def _by_setting(findings: Findings, done: Sequence[Row]) -> list[str]:
    """Several factors: which level wins in which settings. The numbers of each setting are in the report."""
    if not findings.contrasts:  # a fraction, or a hypercube: no two cells differ in the first factor alone
        found = [anova(done, name, ratio=is_ratio(name)) for name in (findings.metric, "seconds")]
        return [tell_anova(one) for one in found if one is not None] or ["No two cells can be compared."]

    def told(measure: str, claim: str) -> str:
        found = winners(done, findings.table, findings.contrasts, findings.metric, measure, maximize=findings.maximize)
        return tell_winners(found, claim, len(by_setting(crossed(done))))

    goal = f"{plain(findings.target)} {findings.metric}"
    measure = findings.speed_measure
    timed = any(line.seconds for line in findings.table)
    speed = [told(measure, "Shortest training time" if measure == "seconds" else f"Fastest to {goal}")] if timed else []
    quality = [c for c in findings.contrasts if c.measure == f"final {findings.metric}"]
    if quality and not any(c.distinct for c in quality):
        return [
            *speed,
            *_alone(findings, done),
            f"Final {findings.metric}: no difference that we can detect within any setting.",
        ]
    return [*speed, *_alone(findings, done), told(f"final {findings.metric}", f"Best final {findings.metric}")]


def _alone(findings: Findings, done: Sequence[Row]) -> list[str]:
    """For a cell outside the settings, such as a baseline: in how many of them it beats the fastest cell."""
    inside = {str(row["cell"]) for row in crossed(done)}
    seconds = {line.cell: line.seconds.mean for line in findings.table if line.seconds}
    settings = [[str(row["cell"]) for row in some] for some in by_setting(crossed(done)).values()]
    fastest = [min(times) for some in settings if (times := [seconds[cell] for cell in some if cell in seconds])]
    said = []
    for cell in dict.fromkeys(str(row["cell"]) for row in done):
        if cell not in inside and cell in seconds:
            beaten = sum(seconds[cell] < best for best in fastest)
            some = f"{beaten} of {len(fastest)} settings"
            which = {0: "no setting", len(fastest): "every setting"}.get(beaten, some)
            said.append(f"{cell} alone takes less time than the fastest in {which}.")
    return said


def _verdict(findings: Findings) -> list[str]:
    if len([line for line in findings.table if line.runs]) < 2:
        return [_only_one(findings)]
    return [_speed(findings), _quality(findings)]


def _speed(findings: Findings) -> str:
    able = [line for line in findings.table if line.runs and line.reached == line.runs and line.to_target]
    if able and findings.target is not None:
        goal = f"{plain(findings.target)} {findings.metric}"
        times = {line.cell: line.to_target for line in able}
        return _ranked(findings, "seconds to target", f"Fastest to {goal}", times)
    lead = f"No strategy reached {plain(findings.target)} {findings.metric} in every seed. " if findings.target else ""
    timed = {line.cell: line.seconds for line in findings.table if line.seconds}
    if not timed:
        return lead + "No training times were recorded."
    return lead + _ranked(findings, "seconds", "Shortest training time", timed)


def _ranked(findings: Findings, measure: str, claim: str, times: Mapping[str, Mean | None]) -> str:
    """Name the fastest, and say which others it differs from."""
    known = {cell: mean for cell, mean in times.items() if mean is not None}
    best = min(known, key=lambda cell: known[cell].mean)
    first = f"{claim}: {best}, {_seconds(known[best])}"
    pairs = [c for c in findings.pairs(measure, best) if {c.first, c.second} <= set(known)]
    if not pairs:
        return f"{first}; no other strategy has a time to compare it with."
    if all(c.n < 2 for c in pairs):
        return f"{first}; with one seed there is no interval, so this is no more than one observation."
    faster = sorted((c for c in pairs if c.distinct), key=lambda c: known[_other(c, best)].mean)
    apart = {_other(c, best) for c in faster}
    level = [cell for cell in known if cell != best and cell not in apart]  # untested cells, too
    if not faster:
        return f"{first}, but no difference that we can detect from {_join(level)}."
    text = f"{first}: {_times_faster(faster[0], best)}"
    if faster[1:]:
        text += f", and faster than {_join([_other(c, best) for c in faster[1:]])}"
    return f"{text}; not distinguishable from {_join(level)}." if level else f"{text}."


def _times_faster(contrast: Contrast, best: str) -> str:
    """How many times longer the other took: inverts the ratio if the best is its first cell."""
    ends = [contrast.value, contrast.low, contrast.high]
    if contrast.first == best:
        ends = [None if x is None else 1 / x for x in (contrast.value, contrast.high, contrast.low)]
    value, low, high = (plain(x) for x in ends)
    if contrast.exact:
        return f"{value}× faster than {_other(contrast, best)}, the same in every seed"
    return f"{value}× faster than {_other(contrast, best)} (95 % CI {low}–{high}, Holm p {_p(contrast)})"


def _quality(findings: Findings) -> str:
    measure = f"final {findings.metric}"
    pairs = [c for c in findings.contrasts if c.measure == measure]
    name = f"Final {findings.metric}"
    if not pairs:
        return f"{name}: not comparable, fewer than two strategies reported it."
    if all(c.value == 0 for c in pairs) and all(c.low in (0, None) for c in pairs):
        return f"{name}: the same for all."
    if all(c.n < 2 for c in pairs):
        return f"{name}: {_values(findings)}, one run each."
    if not any(c.distinct for c in pairs):
        return f"{name}: no difference that we can detect ({_values(findings)})."
    return f"{name}: {_against_best(findings, measure)}."


def _against_best(findings: Findings, measure: str) -> str:
    lower = findings.lower
    known = {line.cell: line.metric for line in findings.table if line.metric}
    best = (min if lower else max)(known, key=lambda cell: known[cell].mean)
    pairs = findings.pairs(measure, best)
    worse = [f"{_other(c, best)} by {plain(abs(c.value), 2)} ({_sure(c)})" for c in pairs if c.distinct]
    level = [_other(c, best) for c in pairs if not c.distinct]
    text = f"best is {best} with {_interval(known[best])}"
    if worse:
        text += f", {'higher' if lower else 'lower'} is {_join(worse)}"
    if level:
        text += f"; not distinguishable from the best: {_join(level)}"
    return text if worse else f"{text}; other pairs do differ, see Statistics"


def _values(findings: Findings) -> str:
    return ", ".join(f"{line.cell} {plain(line.metric.mean)}" for line in findings.table if line.metric)


def _only_one(findings: Findings) -> str:
    line = next(line for line in findings.table if line.runs)
    value = f"{findings.metric} {_interval(line.metric)}" if line.metric else f"no {findings.metric}"
    time = f" in {_seconds(line.seconds)}" if line.seconds else ""
    return f"Only {line.cell} has finished runs, so nothing is compared: {value}{time}."


def _failures(rows: Sequence[Row]) -> list[str]:
    final = deciding_rows(rows)
    failed = [row for row in final if row.get("status") == "failed"]
    if not failed:
        return []
    names = _join(list(dict.fromkeys(str(row["cell"]) for row in failed)))
    return [f"{len(failed)} of {len(final)} runs failed ({names}); no number here includes them."]


def _losses(rows: Sequence[Row]) -> list[str]:
    """Runs that lost a rank, or had a server restored, do count: their times and updates include it."""
    done = finished(rows)
    hit = [row for row in done if row.get("lost") or row.get("restored")]
    if not hit:
        return []
    names = _join(list(dict.fromkeys(str(row["cell"]) for row in hit)))
    return [f"{len(hit)} of {len(done)} finished runs lost ranks on the way ({names}); they are counted as they are."]


def _nothing(rows: Sequence[Row]) -> str:
    failed = [row for row in deciding_rows(rows) if row.get("status") == "failed"]
    if not failed:
        return "No run has finished yet, so there is nothing to compare."
    error = str(failed[0].get("error", "")).strip().splitlines() or ["no message"]
    return f"No run finished: {len(failed)} failed. The first one, {failed[0]['cell']}, said: {error[-1]}"


def _seconds(mean: Mean) -> str:
    return f"{spread(mean.mean, mean.low, mean.high)} s"


def _interval(mean: Mean) -> str:
    return spread(mean.mean, mean.low, mean.high)


def _other(contrast: Contrast, cell: str) -> str:
    return contrast.second if contrast.first == cell else contrast.first


def _sure(contrast: Contrast) -> str:
    return "the same in every seed" if contrast.exact else f"Holm p {_p(contrast)}"


def _p(contrast: Contrast) -> str:
    text = probability(contrast.p_holm)
    return text if text.startswith("<") else f"= {text}"


def _join(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]

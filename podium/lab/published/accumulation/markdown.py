"""The page as Markdown: the answer, its limits, design, times, factors, models of time, predicted against real.

Every number stands in a line that links to the records it comes from, or to the table whose lines do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

from podium.lab.published.accumulation.design import EPOCH
from podium.lab.published.accumulation.rows import failures, profile_rows, runs, study_row
from podium.lab.published.accumulation.tables import Check, Line, Panel, checks, median_error, other_link
from podium.lab.published.switching.text import table
from podium.lab.report.format import ABSENT, percent, plain, probability, spread
from podium.lab.report.links import INTERVALS, Records, mark, place, to
from podium.lab.stats.anova import tell
from podium.lab.stats.regress import Coefficient, Extrapolation, Judgement
from podium.lab.stats.statistics import Mean
from podium.lab.study.store import Row

NAME = "accumulation.jsonl"
DESIGN = "../../podium/lab/published/accumulation/design.py"
PROFILE = "../../podium/lab/published/accumulation/profile.py"
"""Where numbers of the design are set, as a page in `docs/studies/` links to it."""

FORMS = {
    "linear": "a constant and a slope for each of parameters, batch, nodes, batches per exchange",
    "quadratic": "squares and products besides",
    "power": "the quadratic model of logarithms, for the logarithm of seconds",
    "physical": "samples, passes, updates, bytes over the link and messages, none below zero",
    "overlapped": "the same, but an exchange hides behind the backward pass and only what sticks out counts",
}


def page(rows: Sequence[Row], panels: Sequence[Panel]) -> str:
    """All of it, from the records alone."""
    records = Records(NAME, rows)
    parts = ["# An exchange every batch, or every 4: gradient accumulation on slow links"]
    parts += [_answer(panels, rows, records), _limits(rows), _design(rows, records)]
    parts += ["![An epoch's time by cell, and errors of models of it](accumulation.svg)"]
    parts += [_times(panel, rows, records) for panel in panels]
    parts += [_factors(panel, records) for panel in panels]
    parts += [_models(panel, records) for panel in panels]
    parts += [_coefficients(panels, rows, records), _beyond(panels, rows), _real(rows, records)]
    parts += [_failed(rows, records), _again(rows)]
    return "\n\n".join(filter(None, parts)) + "\n"


def titles_of(rows: Sequence[Row]) -> dict[str, str]:
    networks = study_row(rows).get("networks", {})
    return {name: str(facts["title"]) for name, facts in networks.items()}


# The answer.


def _answer(panels: Sequence[Panel], rows: Sequence[Row], records: Records) -> str:
    told = [_effect(panel, titles_of(rows)) for panel in panels]
    told += [_worth(panel) for panel in panels if len({line.nodes for line in panel.lines}) > 1]
    told += [_best(panel) for panel in panels if panel.judged]
    found = checks(rows)
    if found:
        count = len(found)
        told.append(
            f"Virtual time against {to(f'{count} cells run for real', _slug(_REAL))} on shaped links: median error "
            f"{_percent(median_error(found))}, worst {_percent(max(abs(one.error) for one in found))}."
        )
    lead = f"**{_headline(panels)}**"
    return "\n\n".join([lead, "\n".join(f"- {text}" for text in told)])


def _headline(panels: Sequence[Panel]) -> str:
    several = [line for panel in panels for line in panel.lines if line.nodes > 1]
    if not several:
        return "There are no runs on several nodes yet."
    best, least = (pick(several, key=lambda line: line.contrast.value) for pick in (min, max))
    text = f"With an exchange every {best.every} batches instead of every batch, an epoch on several nodes takes "
    text += f"between {_part(best, best.mbit)} and {_part(least, least.mbit)} of the time"
    trends = _trends(several)
    return f"{text}; {', '.join(trends)} gain more." if trends else f"{text}."


def _trends(lines: Sequence[Line]) -> list[str]:
    """What makes the gain larger in every pair of cells that differ in nothing else."""
    wanted = {"smaller batches": ("batch", 1), "more nodes": ("nodes", -1), "slower links": ("mbit", 1)}
    found = []
    for words, (name, sign) in wanted.items():
        rest = [other for other in ("model", "batch", "nodes", "mbit") if other != name]
        pairs = [
            sign * (getattr(a, name) - getattr(b, name)) * (a.contrast.value - b.contrast.value)
            for a, b in combinations(lines, 2)
            if all(getattr(a, other) == getattr(b, other) for other in rest)
        ]
        if pairs and min(pairs) > 0:
            found.append(words)
    return found


def _part(line: Line, mbit: int) -> str:
    return to(f"{line.contrast.value:.2f}", _spot(line)) + f" ({line.model} at {mbit} Mbit/s)"


def _effect(panel: Panel, titles: dict[str, str]) -> str:
    parts = []
    for model in dict.fromkeys(line.model for line in panel.lines):
        mine = [line for line in panel.lines if line.model == model]
        several, alone = [line for line in mine if line.nodes > 1], [line for line in mine if line.nodes == 1]
        text = f"{titles.get(model, model)}: {_range(several)} of the time on {_nodes(several)}"
        if alone:
            text += f", {_range(alone)} on one, where only updates are saved"
        parts.append(text)
    undetected = [line for line in panel.lines if not line.contrast.distinct]
    doubt = f" (in {len(undetected)} of {len(panel.lines)} pairs no difference can be detected)" if undetected else ""
    return f"{to(f'{panel.mbit} Mbit/s', _times_spot(panel))}: {'; '.join(parts)}{doubt}."


def _worth(panel: Panel) -> str:
    """Whether several nodes are worth it at all: one node's time over that of the most nodes."""
    most, fewest = (pick(line.nodes for line in panel.lines) for pick in (max, min))
    alone = {(line.model, line.batch): line for line in panel.lines if line.nodes == fewest}
    pairs = [(line, alone[line.model, line.batch]) for line in panel.lines if line.nodes == most]
    often = [one.often_s.mean / line.often_s.mean for line, one in pairs]
    seldom = [one.seldom_s.mean / line.seldom_s.mean for line, one in pairs]
    slower = sum(ratio < 1 for ratio in often), sum(ratio < 1 for ratio in seldom)
    text = f"{most} nodes against {fewest} at {to(f'{panel.mbit} Mbit/s', _times_spot(panel))}: {min(often):.2f} to "
    text += f"{max(often):.2f} times as fast with an exchange every batch, {min(seldom):.2f} to {max(seldom):.2f} with "
    text += f"one every {pairs[0][0].every}"
    if any(slower):
        text += f"; slower than {fewest} in {slower[0]} and {slower[1]} of {len(pairs)} combinations of model and batch"
    return f"{text}."


def _range(lines: Sequence[Line]) -> str:
    if not lines:
        return ABSENT
    low, high = (pick(line.contrast.value for line in lines) for pick in (min, max))
    return f"{low:.3f}" if f"{low:.3f}" == f"{high:.3f}" else f"{low:.3f} to {high:.3f}"


def _nodes(lines: Sequence[Line]) -> str:
    counts = sorted({line.nodes for line in lines})
    return " and ".join(map(str, counts)) + " nodes" if counts else "several nodes"


def _best(panel: Panel) -> str:
    ranked = sorted(panel.judged, key=lambda one: one.median_error)
    told = ", ".join(
        f"`{one.model}` {_percent(one.median_error)} (worst {_percent(one.worst_error)})" for one in ranked
    )
    lead = to(f"Models of the time at {panel.mbit} Mbit/s", _models_spot(panel))
    return f"{lead}, by the median error for configurations left out: {told}."


def _limits(rows: Sequence[Row]) -> str:
    lines = [
        "These are times of an epoch, not of reaching an accuracy. Accumulating over four batches makes the global "
        + "batch four times as large and updates a quarter as many; how many more epochs that needs was not measured.",
        "All but the real cells are virtual: they train stand-ins, which have a model's parameters and next to none of "
        + "its work, on synthetic images (as the real cells do); compute time comes from passes measured on one core "
        + "of one machine, nodes "
        + "are equal, nobody shares their links, and the only noise is that of passes. Intervals say how steady that "
        + "is, not how much real clusters vary.",
        "Runs with one seed share their noise in all cells, and virtual noise is small, so nearly every difference is "
        + "detected. That a p-value is small does not make a difference large: read the ratios.",
        "The models with physical terms have the form of what virtual time computes, so they must do well there. That "
        + "shows what the others' forms miss; how well any of them predicts real clusters, only real cells can say.",
        "One core computes slower than a GPU by orders of magnitude. What decides is seconds of exchange over seconds "
        + "of a pass: a GPU on a given link behaves like these cores on a link that is as much slower.",
        "At most three nodes. A ring's time per byte grows by a third from two to three and by at most a half beyond.",
    ]
    if study_row(rows).get("size") == "small":
        lines.insert(0, "This is the small size, which shows that everything works and nothing else.")
    return "What may not be concluded:\n\n" + "\n".join(f"- {line}" for line in lines)


# The design.


def _design(rows: Sequence[Row], records: Records) -> str:
    facts, done = study_row(rows), runs(rows, "virtual")
    factors = facts["factors"]
    cells = len({row["cell"] for row in done})
    text = f"Every combination of model ({', '.join(factors['model'])}), batch of a node ({_list(factors['batch'])}), "
    text += f"nodes ({_list(factors['nodes'])}), batches per exchange ({_list(factors['every'])}) and link "
    text += f"({_list(factors['mbit'])} Mbit/s, both ways), {len(facts['seeds'])} seeds each: {cells} cells, "
    text += f"{len(done)} runs ({records.link('the design', facts)}, {records.whole('all records')}). An "
    text += "exchange every so many batches is one after that many on each node, whose gradients add up meanwhile. "
    text += "Gradients are summed by a ring in buckets that leave while the backward pass still runs. Each node goes "
    text += f"through {facts['passes']} batches in a run, whatever the cell; an epoch is {EPOCH:,} images at that pace "
    text += f"([set here]({DESIGN})). A seed is a block: all cells share its parameters and its noise, so cells are "
    text += "compared seed by seed."
    lines = []
    for name, row in profile_rows(rows).items():
        fixed, per_sample = row["per_pass_s"], row["per_sample_s"]
        idle = sum(one[2] for one in row["passes"]) / sum(one[1] for one in row["passes"])
        lines.append(
            [
                mark(place("profile", name)) + records.link(name, row),
                _milli(per_sample),
                _milli(fixed),
                percent(row["cv"]),
                plain(1e3 * row["update_s"]),
                plain(row["bytes"] / 1e6),
                f"{len(row['passes'])}",
                f"{idle:.2f}",
            ]
        )
    head = ["profile", "ms per sample", "ms per pass besides", "variation", "update, ms", "gradients, MB", "passes"]
    head += ["wall / processor"]
    about = "Measured on one core: processor time of a pass, fitted as fixed + per sample × samples, with "
    about += f"[95 % intervals]({PROFILE}). *Variation*: coefficient of variation of passes alike. *Wall / processor* "
    about += "is one on an idle machine. *Beside*: while other processes did the same; used to predict the cells that "
    about += "were run for real on one machine."
    hardware = facts.get("hardware", {})
    machine = f"Machine: {hardware.get('cores')} cores, {hardware.get('cpu')}; versions: "
    machine += ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())
    machine += f" ({records.link('record', facts)})."
    return f"## Design\n\n{text}\n\n{about}\n\n{table(head, lines, left=1)}\n\n{machine}"


def _milli(ends: Sequence[float | None]) -> str:
    value, low, high = ends
    scaled = [None if x is None else 1e3 * x for x in (value, low, high)]
    return spread(*scaled)


def _list(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


# Times.


def _times_title(panel: Panel) -> str:
    return f"Times at {panel.mbit} Mbit/s"


def _models_title(panel: Panel) -> str:
    return f"Models of the time at {panel.mbit} Mbit/s"


_REAL = "Virtual time against real runs"


def _times_spot(panel: Panel) -> str:
    return _slug(_times_title(panel))


def _models_spot(panel: Panel) -> str:
    return _slug(_models_title(panel))


def _slug(heading: str) -> str:
    """What a heading is called in links to it."""
    return "".join(c for c in heading.lower() if c.isalnum() or c in " -_").replace(" ", "-")


def _spot(line: Line) -> str:
    return place("cell", line.model, line.mbit, line.nodes, line.batch)


def _times(panel: Panel, rows: Sequence[Row], records: Records) -> str:
    titles, lines = titles_of(rows), []
    for line in panel.lines:
        contrast = line.contrast
        ends = ABSENT if contrast.low is None else f"{contrast.low:.3f} to {contrast.high:.3f}"
        lines.append(
            [
                mark(_spot(line)) + titles.get(line.model, line.model),
                f"{line.nodes}",
                f"{line.batch}",
                _interval(line.often_s),
                _interval(line.seldom_s),
                f"{contrast.value:.3f}",
                ends,
                probability(contrast.p_holm),
                f"{_waiting(line.often)} / {_waiting(line.seldom)}",
                records.links(line.rows),
            ]
        )
    every = panel.lines[0].every
    head = ["model", "nodes", "batch", "every batch, s", f"`every {every}`, s", "ratio", "interval", "p (Holm)"]
    head += ["waiting", "records"]
    text = f"Seconds of an epoch, mean over seeds with half of the [95 % interval]({INTERVALS}). *Ratio*: "
    text += (
        f"`every {every}` over every batch, seed by seed, with its interval. *Waiting*: share of a step that a node "
    )
    text += "waits for others and the link, for the one and the other."
    return f"## {_times_title(panel)}\n\n{text}\n\n{table(head, lines, left=1)}"


def _interval(mean: Mean) -> str:
    return spread(mean.mean, mean.low, mean.high)


def _waiting(rows: Sequence[Row]) -> str:
    return percent(sum(row["wait_share"] for row in rows) / len(rows))


# Which factors matter.


def _factors(panel: Panel, records: Records) -> str:
    found = panel.anova
    if found is None:
        return ""
    here, made_from = to("cells", _times_spot(panel)), records.links(panel.rows)
    lines = [
        [term.name, made_from, f"{term.df}", plain(term.f), probability(term.p_holm), _share(term.omega_squared)]
        for term in sorted(found.terms, key=lambda term: -(term.omega_squared or 0.0))
    ]
    head = ["term", "made from", "df", "F", "p (Holm)", "ω²"]
    text = f"Analysis of variance of the logarithm of an epoch's seconds, {found.runs} runs, seeds as blocks, "
    text += f"{found.residual_df} degrees of freedom left ({here}). *ω²*: share of all variation."
    notes = "".join(f"\n- ({here}) {note}" for note in (tell(found), *found.notes))
    title = f"## Which factors matter at {panel.mbit} Mbit/s"
    return f"{title}\n\n{text}\n\n{table(head, lines, left=2)}\n{notes}"


def _share(value: float | None) -> str:
    return ABSENT if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


# Models of the time.


def _models(panel: Panel, records: Records) -> str:
    if not panel.judged:
        return ""
    here, made_from = to("cells", _times_spot(panel)), records.links(panel.rows)
    lines = [_judged(one, made_from) for one in sorted(panel.judged, key=lambda one: one.median_error)]
    head = ["model", "made from", "parameters", "median error", "worst error", "worst cell", "PRESS R²", "R²", "AIC"]
    head += ["lack of fit, F", "p", "leverage", "not above zero"]
    text = f"Models of an epoch's seconds at {panel.mbit} Mbit/s ({here}). Errors are of configurations that were left "
    text += (
        "out, one at a time with all their runs, and predicted from the others; *PRESS R²* is of these predictions, "
    )
    text += "*R²* of the runs that a model was fitted to. *Lack of fit*: how much further configurations lie from the "
    text += "model than runs of one lie apart. *Leverage*: the largest of a configuration. *Not above zero*: left-out "
    text += "configurations that were predicted to take no time or less."
    forms = "\n".join(f"- `{one.model}`: {FORMS[one.model]}" for one in panel.judged)
    return f"## {_models_title(panel)}\n\n{text}\n\n{forms}\n\n{table(head, lines, left=2)}\n\n{_verdict(panel, here)}"


def _judged(one: Judgement, made_from: str) -> list[str]:
    lack = one.fit.lack
    return [
        f"`{one.model}`",
        made_from,
        f"{one.parameters}",
        _percent(one.median_error),
        _percent(one.worst_error),
        one.worst_cell,
        f"{one.press_r2:.4f}",
        f"{one.fit.r2:.4f}",
        ABSENT if one.fit.aic is None else f"{one.fit.aic:,.0f}",
        ABSENT if lack is None else plain(lack.f),
        ABSENT if lack is None else probability(lack.p),
        plain(one.fit.leverage, 2),
        f"{one.negative}",
    ]


def _verdict(panel: Panel, here: str) -> str:
    by_name = {one.model: one for one in panel.judged}
    best = min(panel.judged, key=lambda one: one.median_error)
    text = f"`{best.model}` predicts best ({here})"
    if "quadratic" in by_name and by_name["quadratic"] is not best:
        times = by_name["quadratic"].median_error / best.median_error
        text += f": its median error is {plain(times, 2)} times smaller than that of `quadratic`"
    text += (
        ". What a polynomial cannot express: S samples in batches of B on N nodes are S / (B N) passes and a quarter "
    )
    text += (
        "as many exchanges or all of them; that is a ratio, and sums of squares and products follow a ratio only over "
    )
    text += (
        "a short range. Nor can it express that an exchange hides behind a pass until it is the longer of the two, nor "
    )
    text += "that a node alone has no exchange at all. Logarithms (`power`) mend the ratio, but a sum of computing and "
    text += "exchanging is no product."
    return text


def _percent(share: float) -> str:
    return f"{100 * share:,.1f} %" if share < 1 else f"{100 * share:,.0f} %"


def _coefficients(panels: Sequence[Panel], rows: Sequence[Row], records: Records) -> str:
    lines = []
    for panel in panels:
        for one in panel.judged:
            if one.fit.model.positive:
                lines += [_coefficient(panel, one, c, rows) for c in one.fit.coefficients]
    if not lines:
        return ""
    head = ["model of", "at", "term", "value", "interval (bootstrap over configurations)", "measured in the profile"]
    text = (
        "*Samples*, *passes* and *updates*: seconds each. *Exchange* is one where the link is used in full. *Hidden*: "
    )
    text += "the part of a pass that an exchange can hide behind; *last*: the part of an exchange that cannot begin "
    text += "before the pass ends. What these runs do not determine is left out."
    return f"## What the physical terms come to\n\n{text}\n\n{table(head, lines, left=3)}"


def _coefficient(panel: Panel, one: Judgement, found: Coefficient, rows: Sequence[Row]) -> list[str]:
    low, high = found.low, found.high
    ends = ABSENT if low is None or high is None else f"{_small(low)} to {_small(high)}"
    what, _, model = found.name.partition(" of ")
    name = f"{model}, alone"
    known = profile_rows(rows).get(name)
    measured = ABSENT
    if known is not None and what in ("samples", "passes", "updates"):
        fields = {"samples": known["per_sample_s"][0], "passes": known["per_pass_s"][0], "updates": known["update_s"]}
        measured = to(plain(fields[what]), place("profile", name))
    return [
        f"`{one.model}`",
        to(f"{panel.mbit} Mbit/s", _times_spot(panel)),
        found.name,
        _small(found.value),
        ends,
        measured,
    ]


def _small(value: float) -> str:
    """A coefficient; what a solver leaves next to its bound is zero."""
    return plain(0.0 if abs(value) < 1e-7 else value)


def _beyond(panels: Sequence[Panel], rows: Sequence[Row]) -> str:
    lines = [
        _extrapolated(one, to(f"fewer nodes → most, {panel.mbit} Mbit/s", _times_spot(panel)))
        for panel in panels
        for one in panel.beyond
    ]
    if len(panels) > 1:
        link = to(f"{panels[0].mbit} Mbit/s → other links", _times_spot(panels[0]))
        lines += [_extrapolated(one, link) for one in other_link(rows)]
    if not lines:
        return ""
    head = ["from → to", "model", "fitted", "predicted", "median error", "worst error", "median bias", "leverage"]
    head += ["could not be told apart"]
    text = "Fitted to a part of the configurations, predicting the rest: with fewer nodes for the most nodes, and with "
    text += "one link for the other, which only models that know of links can do. *Leverage* above one: outside of "
    text += "what was fitted."
    return f"## Beyond what was fitted\n\n{text}\n\n{table(head, lines, left=2)}"


def _extrapolated(one: Extrapolation, where: str) -> list[str]:
    bias = f"{100 * one.bias:+,.1f} %".replace("-", "−")
    return [
        where,
        f"`{one.model}`",
        f"{one.fitted}",
        f"{one.predicted}",
        _percent(one.median_error),
        _percent(one.worst_error),
        bias,
        plain(one.leverage, 2),
        ", ".join(one.aliased) or ABSENT,
    ]


# Predicted and real.


def _real(rows: Sequence[Row], records: Records) -> str:
    found = checks(rows)
    title = f"## {_REAL}"
    if not found:
        return f"{title}\n\nNo cell has been run for real yet; `--part real` does so on an idle machine."
    head = ["cell", "real, s per batch", "predicted", "error", "real records", "predicted records"]
    text = "Real models on links shaped by the kernel, one node with one thread per core of this machine; seconds per "
    text += "batch of a node, mean over runs with half of the [95 % interval]"
    text += f"({INTERVALS}), the first step left out. Predictions are "
    text += "virtual runs made of profiles; those for several nodes were measured beside other processes."
    return f"{title}\n\n{text}\n\n{table(head, [_checked(one, records) for one in found], left=1)}"


def _checked(one: Check, records: Records) -> list[str]:
    return [
        one.cell,
        _interval(one.real),
        _interval(one.predicted),
        f"{100 * one.error:+.1f} %".replace("-", "−"),
        records.links(one.real_rows),
        records.links(one.predicted_rows),
    ]


def _failed(rows: Sequence[Row], records: Records) -> str:
    gone = failures(rows)
    if not gone:
        return ""
    told = "\n".join(f"- {records.link(row['cell'], row)}, seed {row['seed']}: {row['error']}" for row in gone)
    return f"## Runs that failed\n\n{told}"


def _again(rows: Sequence[Row]) -> str:
    small = study_row(rows).get("size") == "small"
    size = " --size small" if small else ""
    commands = [
        f"python studies/accumulation.py{size} --part virtual",
        f"python studies/accumulation.py{size} --part real",
    ]
    commands.append(f"python studies/accumulation.py{size} --part report")
    text = (
        "What is in the records is not run again: a study that was ended goes on with the same command. The profile is "
    )
    text += (
        "measured once, before the first virtual run; remove its record and the runs made of it to measure it again. "
    )
    text += "Real runs need root and an idle machine."
    listed = "\n".join(commands)
    return f"## Make it again\n\n```\n{listed}\n```\n\n{text}"

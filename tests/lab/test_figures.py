from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from podium.errors import MissingExtra
from podium.lab.report.drawing import plotly_script, to_pdf, to_plotly, to_svg
from podium.lab.report.drawing.files import write_figures
from podium.lab.report.figures import (
    Figure,
    Interaction,
    convergence,
    convergence_panels,
    cost_bars,
    energy_said,
    interactions,
    phase_stacks,
    staleness_bars,
    staleness_histograms,
    timeline_items,
    timelines,
    topologies,
)
from podium.lab.report.report import _environment
from podium.lab.stats.statistics import mean_interval
from podium.lab.study.store import Row
from podium.records.timeline import timeline
from tests.lab.synthetic import failed_row, make_row, make_rows, phased, stale, write_study

TIMES = {"solo": [1.0, 2.0, 4.0], "parameter-server:mode=async": [0.5, 0.6, 0.7]}
ORDER = {cell: place for place, cell in enumerate(TIMES)}


def test_a_curve_is_the_median_of_its_seeds_inside_their_band() -> None:
    rows = make_rows(TIMES, {"solo": [0.9, 0.95, 0.99], "parameter-server:mode=async": [0.9, 0.9, 0.9]})
    panel = convergence(rows, "accuracy", "seconds")
    assert panel is not None and [curve.cell for curve in panel.curves] == list(TIMES)
    solo = panel.curves[0]
    assert (solo.x[-1], solo.y[-1], solo.low[-1], solo.high[-1]) == (2.0, 0.95, 0.9, 0.99)
    assert [line.seed for line in solo.lines] == [0, 1, 2]


def test_a_median_ends_where_the_shortest_run_does() -> None:
    rows = make_rows({"solo": [1.0, 1.0]})
    rows[1]["history"] = rows[1]["history"][:3]
    panel = convergence(rows, "loss", "step")
    assert panel is not None and panel.log
    assert len(panel.curves[0].x) == 3 and len(panel.curves[0].lines[0].x) == 8


def test_bytes_are_those_recorded_or_else_spread_over_samples() -> None:
    row = make_row("all-reduce", 0)
    spread_out = convergence([row], "loss", "mb")
    assert spread_out is not None and spread_out.assumed
    assert spread_out.curves[0].x[0] == pytest.approx(0.5) and spread_out.curves[0].x[-1] == pytest.approx(4.0)
    history = [{**point, "sent_bytes": 1_000_000 * point["epoch"]} for point in row["history"]]
    recorded = convergence([{**row, "history": history}], "loss", "mb")
    assert recorded is not None and not recorded.assumed and recorded.curves[0].x[0] == 1.0


def test_a_strategy_that_sends_nothing_is_not_drawn_against_bytes() -> None:
    assert convergence(make_rows({"solo": [1.0]}), "loss", "mb") is None


def test_panels_leave_out_what_nobody_recorded() -> None:
    names = [panel.name for panel in convergence_panels(make_rows(TIMES), "accuracy")]
    assert len(names) == 8 and "accuracy against epoch" in names
    assert convergence_panels([failed_row("solo", 0), make_row("solo", 1, history=[])], "accuracy") == []


def test_bars_hold_means_intervals_and_points() -> None:
    seconds = next(bars for bars in cost_bars(make_rows(TIMES)) if bars.name.startswith("seconds"))
    wanted = mean_interval(TIMES["solo"])
    assert wanted is not None
    assert (seconds.bars[0].mean, seconds.bars[0].low, seconds.bars[0].high) == (wanted.mean, wanted.low, wanted.high)
    assert seconds.bars[0].points == (1.0, 2.0, 4.0)
    moved = next(bars for bars in cost_bars(make_rows(TIMES)) if bars.name.startswith("MB"))
    assert [bar.mean for bar in moved.bars] == pytest.approx([0.0, 4.0])


def test_staleness_is_drawn_only_where_there_is_any() -> None:
    (figure,) = staleness_bars(make_rows(TIMES))
    assert [bar.cell for bar in figure.bars] == ["parameter-server:mode=async"]
    assert staleness_bars(make_rows({"solo": [1.0, 2.0]})) == []


def test_a_histogram_has_a_layer_per_worker_and_sums_over_seeds() -> None:
    cell = "parameter-server:mode=async"
    rows = [make_row(cell, seed, staleness_by=stale(2, most=2)) for seed in range(3)]
    (found,) = staleness_histograms(rows).values()
    assert (found.cell, found.columns) == (cell, ("0", "1", "2"))
    assert [layer.name for layer in found.layers] == ["worker 0", "worker 1"]
    assert found.layers[0].updates == (6, 6, 6), "three seeds, two servers"


def test_more_than_eight_workers_are_drawn_as_one() -> None:
    cell = "parameter-server:mode=async"
    (eight,) = staleness_histograms([make_row(cell, 0, staleness_by=stale(8))]).values()
    (nine,) = staleness_histograms([make_row(cell, 0, staleness_by=stale(9))]).values()
    assert len(eight.layers) == 8 and [layer.name for layer in nine.layers] == ["all workers"]
    assert nine.layers[0].updates == (18, 18, 18, 18)


def test_a_gap_between_values_shows_and_large_values_share_columns() -> None:
    tables = stale(1, most=300)
    for spread in (tables["overall"], *tables["workers"]):
        spread["histogram"] = [bin for bin in spread["histogram"] if bin[0] not in range(3, 63)]
    (found,) = staleness_histograms([make_row("parameter-server:mode=async", 0, staleness_by=tables)]).values()
    assert found.columns[:65] == tuple(map(str, range(65)))
    assert found.columns[65:] == ("65–128", "129–256", "257–512")
    assert found.layers[0].updates[2:5] == (2, 0, 0)


def test_rows_without_updates_have_no_histogram() -> None:
    assert staleness_histograms([*make_rows(TIMES), failed_row("solo", 3)]) == {}


def test_a_histogram_is_drawn_on_paper_and_on_the_screen_from_the_same_numbers() -> None:
    cell = "parameter-server:mode=async"
    (found,) = staleness_histograms([make_row(cell, 0, staleness_by=stale(2))]).values()
    plot = json.loads(json.dumps(to_plotly(found, ORDER)))
    assert [(trace["name"], trace["y"]) for trace in plot["data"]] == [
        (layer.name, list(layer.updates)) for layer in found.layers
    ]
    assert len({trace["marker"]["color"] for trace in plot["data"]}) == 2
    svg = to_svg(found, ORDER)
    assert svg is not None and "worker 1" in svg and svg == to_svg(found, ORDER)


PHASED = "strategy-switch"


def test_a_stack_has_the_metric_and_the_loss_over_the_rule_with_a_mark_per_switch() -> None:
    rows = [
        make_row(PHASED, 0, **phased(None, 0.5, 0.05)),
        make_row(PHASED, 1, **phased(None, 0.05)),
        make_row("solo", 0),
    ]
    (stack,) = phase_stacks(rows, "accuracy").values()
    assert stack.cell == PHASED and stack.marks == ((0, 3.0), (1, 2.0))
    assert [panel.quantity for panel in stack.panels] == ["accuracy", "loss", "plateau"]
    metric, loss, rule = stack.panels
    assert [line.seed for line in metric.lines] == [0, 1] and metric.lines[0].x == tuple(range(1, 9))
    assert (loss.log, loss.threshold, rule.threshold) == (True, None, 0.1)
    assert [(line.x, line.y) for line in rule.lines] == [((2.0, 3.0), (0.5, 0.05)), ((2.0,), (0.05,))]
    assert not rule.log, "a factor of ten at most"


def test_a_rule_is_drawn_by_phase_and_on_a_logarithmic_scale_where_its_values_ask_for_it() -> None:
    fields = phased(2.0, 0.5, 0.05)
    fields["rules"][0]["readings"][2]["phase"] = 2
    (stack,) = phase_stacks([make_row(PHASED, 0, **fields)], "accuracy").values()
    assert stack.panels[-1].log and [line.x for line in stack.panels[-1].lines] == [(1.0, 2.0), (3.0,)]
    (zero,) = phase_stacks([make_row(PHASED, 0, **phased(2.0, 0.0))], "accuracy").values()
    assert not zero.panels[-1].log


def test_a_rule_that_nobody_evaluated_has_no_panel_and_rows_without_phases_no_stack() -> None:
    (stack,) = phase_stacks([make_row(PHASED, 0, **phased(None, None, latest=True))], "accuracy").values()
    assert [panel.quantity for panel in stack.panels] == ["accuracy", "loss"] and stack.marks == ((0, 2.0),)
    assert phase_stacks([*make_rows(TIMES), failed_row(PHASED, 0)], "accuracy") == {}


@pytest.mark.slow
def test_a_stack_is_drawn_on_paper_and_on_the_screen_from_the_same_numbers() -> None:
    (stack,) = phase_stacks([make_row(PHASED, 0, **phased(2.0, 0.5, 0.05))], "accuracy").values()
    plot = json.loads(json.dumps(to_plotly(stack, {PHASED: 0})))
    assert [trace["y"] for trace in plot["data"]] == [list(line.y) for panel in stack.panels for line in panel.lines]
    assert [trace["yaxis"] for trace in plot["data"]] == ["y", "y2", "y3"]
    marks = [shape for shape in plot["layout"]["shapes"] if shape.get("yref") == "paper"]
    bounds = [shape for shape in plot["layout"]["shapes"] if shape.get("yref") == "y3"]
    assert [mark["x0"] for mark in marks] == [3.0] and [bound["y0"] for bound in bounds] == [0.1]
    domains = [plot["layout"][name]["domain"] for name in ("yaxis3", "yaxis2", "yaxis")]
    assert domains == sorted(domains) and domains[0][0] == 0 and domains[-1][1] == 1
    svg = to_svg(stack, {PHASED: 0})
    assert svg is not None and "plateau" in svg and "accuracy" in svg and svg == to_svg(stack, {PHASED: 0})


def test_a_long_name_leaves_its_bar_room() -> None:
    cell = "phases:run=all-reduce until plateau:window=3 | parameter-server:mode=async until epoch:after=2 | all-reduce"
    figure = cost_bars([make_row(cell, 0), make_row("all-reduce", 0)])[0]
    shown = to_plotly(figure, {cell: 0, "all-reduce": 1})["layout"]["yaxis"]
    assert shown["tickvals"] == [cell, "all-reduce"] and shown["ticktext"][1] == "all-reduce"
    assert max(map(len, shown["ticktext"][0].split("<br>"))) <= 28
    assert to_svg(figure, {cell: 0, "all-reduce": 1}) is not None, "and no warning, which would be an error"


@pytest.mark.slow
def test_paper_is_one_svg_element_without_date_or_outside_reference() -> None:
    panel = convergence(make_rows(TIMES), "loss", "seconds")
    assert panel is not None
    svg = to_svg(panel, ORDER)
    assert svg is not None and svg.startswith("<svg ") and svg.rstrip().endswith("</svg>")
    assert "http" not in svg and "<metadata" not in svg and "currentColor" in svg
    assert svg == to_svg(panel, ORDER)


def test_the_screen_shows_the_same_numbers_as_the_data() -> None:
    panel = convergence(make_rows(TIMES), "accuracy", "epoch")
    assert panel is not None
    traces = json.loads(json.dumps(to_plotly(panel, ORDER)))["data"]
    assert sum(trace["y"] == list(panel.curves[0].y) for trace in traces) >= 1


def test_missing_packages_leave_figures_out(monkeypatch: pytest.MonkeyPatch) -> None:
    panel = convergence(make_rows(TIMES), "loss", "seconds")
    assert panel is not None
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert to_svg(panel, ORDER) is None and plotly_script() is None


def factorial(seeds: int = 3, **value: Any) -> list[Row]:
    """Strategy × workers × link: seconds halve with the workers under all-reduce only; slow links take three times."""
    return [
        make_row(
            f"{strategy}, {workers}, {link}",
            seed,
            seconds=(16 / workers if strategy == "all-reduce" else 6.0) * (3 if link == "slow" else 1) + seed,
            levels={"strategy": strategy, "workers": workers, "link": link},
            **value,
        )
        for strategy in ("all-reduce", "async")
        for workers in (8, 2)
        for link in ("slow", "fast")
        for seed in range(seeds)
    ]


def seconds_of(row: Row) -> float | None:
    return float(row["seconds"])


def test_an_interaction_averages_other_factors_out_before_it_counts_seeds() -> None:
    rows = factorial()
    figure = interactions(rows, "seconds", seconds_of)[0]
    assert (figure.by, figure.factor, figure.levels, figure.numeric) == ("strategy", "workers", (2, 8), True)
    assert [thread.level for thread in figure.threads] == ["all-reduce", "async"]
    spot = figure.threads[0].spots[0]
    wanted = mean_interval([(24 + 8) / 2 + seed for seed in range(3)])
    assert wanted is not None
    assert (spot.x, spot.seeds, spot.mean, spot.low, spot.high) == (2, 3, wanted.mean, wanted.low, wanted.high)


def test_numeric_factors_go_along_the_axis_and_the_first_factor_on_lines() -> None:
    pairs = [(figure.by, figure.factor) for figure in interactions(factorial(), "seconds", seconds_of)]
    assert pairs == [("strategy", "workers"), ("strategy", "link"), ("link", "workers")]


def test_there_are_at_most_three_interactions_and_none_of_one_factor() -> None:
    rows = [row | {"levels": row["levels"] | {"more": row["seed"]}} for row in factorial()]
    assert len(interactions(rows, "seconds", seconds_of)) == 3
    assert interactions([row | {"levels": {"a": row["seed"]}} for row in rows], "seconds", seconds_of) == []
    assert interactions(make_rows(TIMES), "seconds", seconds_of) == [], "old rows know no levels"


def test_a_seed_that_lacks_a_cell_does_not_count_at_that_point() -> None:
    rows = [row for row in factorial() if (row["cell"], row["seed"]) != ("all-reduce, 2, slow", 2)]
    figure = interactions([*rows, failed_row("all-reduce, 2, slow", 2)], "seconds", seconds_of)[0]
    assert [spot.seeds for thread in figure.threads for spot in thread.spots] == [2, 3, 3, 3]


def test_ratio_responses_are_drawn_on_a_logarithmic_axis_where_all_is_above_zero() -> None:
    rows = factorial()
    assert interactions(rows, "seconds", lambda row: 10 + row["seconds"])[0].log
    assert not interactions(rows, "accuracy", lambda row: 10 + row["seconds"])[0].log
    assert not interactions(rows, "seconds", lambda row: row["seconds"] - 6)[0].log


@pytest.mark.slow
def test_an_interaction_is_drawn_on_paper_and_on_the_screen_from_the_same_numbers() -> None:
    for figure in interactions(factorial(), "seconds", seconds_of):
        plot = json.loads(json.dumps(to_plotly(figure, {})))
        assert [trace["y"] for trace in plot["data"]] == [[s.mean for s in thread.spots] for thread in figure.threads]
        svg = to_svg(figure, {})
        assert svg is not None and figure.factor in svg and figure.by in svg and svg == to_svg(figure, {})
    (one,) = interactions([row for row in factorial(1) if row["levels"]["link"] == "slow"], "seconds", seconds_of)
    assert isinstance(one, Interaction) and one.threads[0].spots[0].low is None and to_svg(one, {}) is not None


def test_convergence_is_drawn_against_joules_only_where_they_were_measured() -> None:
    rows = make_rows({"solo": [1.0, 2.0]})
    assert convergence(rows, "loss", "joules") is None and energy_said(rows) == "Energy was not measured."
    history = [{**point, "joules": 5.0 * point["epoch"]} for point in rows[0]["history"]]
    some = [{**rows[0], "history": history}, rows[1]]
    panel = convergence(some, "loss", "joules")
    assert panel is not None and panel.curves[0].x == tuple(5.0 * k for k in range(1, 9))
    assert "joules" in panel.name and energy_said(some) == "Energy: 1 of 2 runs measured."


def ran(workers: int, *, servers: int = 0, fields: dict[str, Any] | None = None) -> Row:
    """A run whose worker k computes k + 1 ms in each of 30 steps, with a switch after the tenth."""
    length = (workers + 1) * 1_000_000
    records: list[Row] = [
        {"kind": "step", "rank": rank, "t_ns": step * length, "step": step, "step_ns": length}
        | {"pass_ns": (rank + 1) * 1_000_000, "wait_ns": (workers - rank) * 1_000_000, "loss": 1.0}
        for step in range(1, 31)
        for rank in range(workers)
    ]
    change = {"before": "all-reduce until epoch", "after": "solo", "why": "<settled>", "step": 10}
    records.append({"kind": "switch", "rank": 0, "t_ns": 10 * length, **change})
    ranks = [
        {"rank": rank, "role": "worker" if rank < workers else "server", "node": rank}
        for rank in range(workers + servers)
    ]
    pairs = [[worker, workers + server, 30] for worker in range(workers) for server in range(servers)]
    ring = [[rank, rank + 1, None] for rank in range(workers - 1)]
    pattern = {"phase": "x", "pattern": "some <shape>", "counted": bool(servers), "edges": pairs or ring, "pairs": 1}
    facts = {
        "nodes": [
            {"name": f"node-{k}", "speed": 1.0, "up_mbit": 100.0, "down_mbit": 100.0} for k in range(workers + servers)
        ],
        "links": [],
        "described": True,
        "colocated": False,
        "ranks": [{**rank, "sent": 1_500_000, "received": None if rank["rank"] else 500_000} for rank in ranks],
        "patterns": [pattern],
    }
    return make_row("all-reduce", 0, timeline=timeline(records), topology=facts, launcher="virtual", **(fields or {}))


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "servers"), [(2, 0), (2, 1), (16, 4), (16, 0), (40, 20)])
def test_timelines_and_topologies_are_drawn_for_few_and_many_ranks(workers: int, servers: int) -> None:
    row = ran(workers, servers=servers)
    (time,), (place,) = timelines([row]).values(), topologies([row]).values()
    plot = json.loads(json.dumps(to_plotly(time, {})))
    drawn = [(trace["name"], sum(trace["x"])) for trace in plot["data"] if trace.get("type") == "bar"]
    computed = sum(s.end_ms - s.begin_ms for lane in time.lanes for s in lane.stretches if s.kind == "compute")
    assert drawn[0][0] == "computing" and math.isclose(drawn[0][1], computed)
    assert plot["data"][-1]["x"] == [event.seconds for event in time.events] != []
    assert len(place.stations) == min(16, workers) + min(16, servers) == len({(s.x, s.y) for s in place.stations})
    assert place.left_out == workers + servers - len(place.stations)
    for figure in (time, place):
        svg = to_svg(figure, {})
        assert svg is not None and svg == to_svg(figure, {}) and to_plotly(figure, {})["layout"]["height"] > 100
    assert "simulated clock" in time.caption and "was not, so it is drawn last" in time.caption
    assert ("counted" if servers else "inferred") in place.caption and "each with 100 Mbit/s" in place.caption


def test_the_section_on_timelines_tells_of_each_cell_and_links_to_the_trace() -> None:
    def drawn(figures: Sequence[Figure]) -> list[dict[str, Any]]:
        return [{"name": figure.name, "svg": None, "json": "{}"} for figure in figures]

    assert timeline_items([ran(3)], drawn)[0]["place"] is None
    items = timeline_items([ran(3, fields={"trace": "runs/a b/trace.json"}), make_row("solo", 0)], drawn)
    assert [item["cell"] for item in items] == ["all-reduce"] and items[0]["place"] == "runs/a b/trace.json"
    assert items[0]["workers"][0]["shares"] == pytest.approx([1 / 4, 3 / 4])
    page = _environment().get_template("timeline.html.j2").module.show_timeline(items)
    assert all(caption in page for caption in ("drawn last", "3 nodes"))
    assert 'href="runs/a%20b/trace.json"' in page and "timeline, all-reduce, seed 0" in page
    assert "&lt;settled&gt;" in page and "<settled>" not in page and "25 %" in page.replace("\u00a0", " ")


def test_rows_without_facts_have_neither_timeline_nor_topology() -> None:
    rows = [make_row("solo", 0), failed_row("all-reduce", 0), make_row("x", 0, timeline={}, topology={})]
    assert timelines(rows) == {} and topologies(rows) == {} and timeline_items(rows, lambda figures: []) == []


@pytest.mark.slow
def test_a_pdf_is_one_and_holds_no_date() -> None:
    panel = convergence(make_rows(TIMES), "loss", "seconds")
    assert panel is not None
    pdf = to_pdf(panel, ORDER)
    assert pdf is not None and pdf.startswith(b"%PDF") and b"CreationDate" not in pdf and pdf == to_pdf(panel, ORDER)


@pytest.mark.slow
def test_every_figure_of_a_study_is_written_as_svg_and_pdf_with_the_same_bytes_each_time(tmp_path: Path) -> None:
    lean: dict[str, Any] = {"history": [{"epoch": 1, "accuracy": 0.5}], "samples_per_s": None}
    rows = [ran(2) | {**lean, "sent_bytes": 0, "wait_share": 0.0, "seed": 1}]
    first, again = (write_study(tmp_path / name, rows).folder for name in ("first", "again"))
    written = write_figures(first)
    names = [path.name for path in written]
    assert {"accuracy-against-epoch.svg", "accuracy-against-epoch.pdf", "timeline-all-reduce-seed-1.pdf"} <= {*names}
    assert len(set(names)) == len(names) and sum(name.endswith(".pdf") for name in names) * 2 == len(names)
    assert [path.read_bytes() for path in written] == [path.read_bytes() for path in write_figures(again)]
    assert b'xmlns="http://www.w3.org/2000/svg"' in written[0].read_bytes()


def test_without_matplotlib_figures_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_study(tmp_path, [make_row("solo", 0)]).folder
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"podium\[study\]"):
        write_figures(folder)


@pytest.mark.slow
def test_a_name_with_dollars_is_a_name_and_no_formula() -> None:
    rows = [make_row("2 $ and $\\alpha_$", seed) for seed in range(2)]
    for figure in [*cost_bars(rows), *convergence_panels(rows, "accuracy")]:
        svg = to_svg(figure, {"2 $ and $\\alpha_$": 0})
        assert svg is not None

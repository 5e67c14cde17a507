from __future__ import annotations

import json
import sys

import pytest

from podium.study.drawing import plotly_script, to_plotly, to_svg
from podium.study.figures import (
    convergence,
    convergence_panels,
    cost_bars,
    phase_stacks,
    staleness_bars,
    staleness_histograms,
)
from podium.study.statistics import mean_interval
from tests.study.synthetic import failed_row, make_row, make_rows, phased, stale

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

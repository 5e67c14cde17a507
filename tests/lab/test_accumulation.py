"""The study of accumulation: design, profile, runs that go on where they were ended, and a page whose numbers link."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from podium.errors import ConfigError
from podium.lab.published.accumulation import (
    CORE,
    SMALL,
    Cell,
    Network,
    Profile,
    Study,
    draw,
    measure_profile,
    open_store,
    page,
    run_one,
    run_virtual,
)
from podium.lab.published.accumulation.profile import Estimate, Pass, summarise
from podium.lab.published.accumulation.rows import identity, profile_name, runs
from podium.lab.published.accumulation.tables import Panel, checks, lines, other_link, panels
from podium.lab.study.store import Row
from podium.launch.clusters.description import read_cluster

TINY = Study(
    size="small",
    networks=(
        Network(name="resnet50", title="A narrow one", task="tiny-imagenet-resnet50", options={"width": 4}),
        Network(name="efficientnet-b0", title="B0", task="tiny-imagenet-efficientnet-b0"),
    ),
    batches=(2,),
    nodes=(2,),
    every=(1, 4),
    mbits=(100,),
    seeds=(0, 1),
)
PROFILE = Profile(
    per_sample_s=Estimate(0.02),
    per_pass_s=Estimate(0.1),
    cv=0.0,
    update_s=0.005,
    bytes=431_600,
    beside=0,
    passes=(Pass(2, 0.14, 0.14),),
)


class TestDesign:
    def test_it_is_the_sources_36_cells_on_each_link_with_5_seeds(self) -> None:
        for mbit in CORE.mbits:
            assert sum(cell.mbit == mbit for cell in CORE.cells()) == 36
        assert len(CORE.runs()) == 2 * 180
        assert len({(cell.name, seed) for cell, seed in CORE.runs()}) == 360

    @pytest.mark.parametrize("study", [CORE, SMALL])
    def test_cells_that_differ_in_how_often_they_exchange_use_the_same_samples(self, study: Study) -> None:
        used: dict[tuple[Any, ...], set[int]] = {}
        for cell in study.cells():
            options = study.options(cell, 0, real=False)
            assert options["batch_size"] == options["accumulate"] * cell.batch * cell.nodes
            assert options["task_options"]["samples"] % options["batch_size"] == 0
            used.setdefault((cell.model, cell.batch, cell.nodes), set()).add(options["task_options"]["samples"])
        assert {len(counts) for counts in used.values()} == {1}

    def test_real_cells_are_of_the_design_but_for_the_small_ones_batches(self) -> None:
        assert {cell.name for cell in CORE.real} <= {cell.name for cell in CORE.cells()}

    def test_the_cluster_file_says_what_the_profile_measured(self, tmp_path: Path) -> None:
        file = tmp_path / "cluster.toml"
        file.write_text(CORE.cluster(Cell("resnet50", 32, 3, 1, 100), PROFILE, real=True), encoding="utf-8")
        cluster = read_cluster(file)
        assert (cluster.seconds_per_sample, cluster.seconds_per_step, cluster.jitter) == (0.02, 0.1, 0)
        assert len(cluster.nodes) == 3
        assert cluster.nodes[0].cpus == 1 and cluster.nodes[0].up_mbit == 100
        assert cluster.nodes[0].memory_gbs == pytest.approx(431_600 / 0.005 / 1e9, rel=1e-5)

    def test_batches_that_do_not_make_whole_exchanges_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="every must divide 8 batches, got 3"):
            dataclasses.replace(CORE, every=(1, 3))


class TestProfile:
    def test_fixed_and_per_sample_parts_are_found(self) -> None:
        passes = [Pass(b, (0.1 + 0.02 * b) * f, 1.0) for b in (8, 16, 32) for f in (0.98, 1.0, 1.02)]
        found = summarise(passes, bytes=4, update_s=0.1, beside=0)
        assert found.per_pass_s.value == pytest.approx(0.1, rel=0.02)
        assert found.per_sample_s.value == pytest.approx(0.02, rel=0.02)
        assert found.per_sample_s.low is not None and found.per_sample_s.high is not None
        assert found.per_sample_s.low < 0.02 < found.per_sample_s.high
        assert found.cv == pytest.approx(0.02, rel=0.01)

    def test_a_fixed_part_below_zero_is_held_at_zero(self) -> None:
        passes = [Pass(b, 0.001 * b**1.3, 1.0) for b in (8, 16, 32) for _ in range(2)]
        found = summarise(passes, bytes=4, update_s=0.1, beside=0)
        assert found.per_pass_s == Estimate(0.0)
        assert found.per_sample_s.value > 0

    @pytest.mark.slow
    def test_it_is_measured_and_survives_being_written_down(self) -> None:
        found = measure_profile("tiny-imagenet-resnet50", {"width": 4}, batches=(2, 6), repeats=2)
        assert len(found.passes) == 4 and {one.batch for one in found.passes} == {2, 6}
        assert found.seconds(6) > 0 and found.update_s > 0
        again = Profile.of(json.loads(json.dumps(found.to_dict())))
        assert (again.per_sample_s, again.bytes) == (found.per_sample_s, found.bytes)

    def test_one_size_of_batch_cannot_tell_two_parts(self) -> None:
        with pytest.raises(ConfigError, match="2 batch sizes, got 2 and 1"):
            measure_profile("tiny-imagenet-resnet50", batches=(4, 4), repeats=2)


class TestRuns:
    @pytest.mark.parametrize("every", [1, 4])
    def test_a_node_alone_takes_its_passes_and_updates(self, every: int) -> None:
        cell = Cell("resnet50", 2, 1, every, 100)
        who = identity(TINY, cell, 0, part="virtual", profile="x")
        row = run_one(who, TINY.options(cell, 0, real=False), TINY.cluster(cell, PROFILE, real=False))
        assert row["status"] == "finished", row
        assert row["steps"] == len(row["step_s"]) == 8 // every
        update_s = 4 * row["parameters"] / PROFILE.memory_gbs / 1e9
        assert row["seconds"] == pytest.approx(8 * PROFILE.seconds(2) + row["steps"] * update_s, rel=1e-3)
        assert row["epoch_s"] == pytest.approx(row["seconds"] / 16 * 100_000, rel=1e-5)

    @pytest.mark.slow
    def test_a_quarter_of_the_exchanges_sends_a_quarter_of_the_bytes(self) -> None:
        found = []
        for every in (1, 4):
            cell = Cell("resnet50", 2, 2, every, 100)
            who = identity(TINY, cell, 0, part="virtual", profile="x")
            found.append(run_one(who, TINY.options(cell, 0, real=False), TINY.cluster(cell, PROFILE, real=False)))
        often, seldom = found
        assert often["step_bytes"] == seldom["step_bytes"] >= 4 * often["parameters"]
        assert (often["steps"], seldom["steps"]) == (8, 2)
        assert often["samples"] == seldom["samples"] == 32
        assert often["seconds"] > seldom["seconds"]

    def test_a_run_that_cannot_be_is_a_row_that_says_so(self) -> None:
        cell = Cell("resnet50", 2, 1, 1, 100)
        options = {**TINY.options(cell, 0, real=False), "collective": "rign"}
        row = run_one(identity(TINY, cell, 0, part="virtual", profile="x"), options, "[[node]]\nname = 'a'\n")
        assert row["status"] == "failed" and "rign" in row["error"]

    @pytest.mark.slow
    def test_what_was_ended_goes_on_and_nothing_is_run_twice(self, tmp_path: Path) -> None:
        one = dataclasses.replace(TINY, networks=TINY.networks[:1], every=(1,))
        store = open_store(tmp_path)
        plan = {"kind": "profile", "name": profile_name("resnet50", "alone"), "model": "resnet50", **PROFILE.to_dict()}
        store.append(plan)
        said: list[str] = []
        assert run_virtual(one, tmp_path, say=said.append) == 0
        whole = store.results.read_bytes()
        assert [row["seed"] for row in runs(store.rows(), "virtual")] == [0, 1]
        store.results.write_bytes(whole[: whole.rindex(b"\n", 0, -1) + 20])  # the last row torn
        assert run_virtual(one, tmp_path, say=said.append) == 0
        keys = [(row["cell"], row["seed"]) for row in store.rows() if row["kind"] == "run"]
        assert len(keys) == len(set(keys)) == 2
        assert len(said) == 3
        seconds = {row["seed"]: row["seconds"] for row in runs(store.rows(), "virtual")}
        before = {row["seed"]: row["seconds"] for row in map(json.loads, whole.splitlines()) if row["kind"] == "run"}
        assert seconds == before

    def test_another_design_is_refused_in_the_same_file(self, tmp_path: Path) -> None:
        store = open_store(tmp_path)
        store.append({"kind": "study", "name": "accumulation", **_facts(SMALL)})
        with pytest.raises(ConfigError, match="holds another study, with size"):
            run_virtual(CORE, tmp_path)


def _facts(study: Study) -> Row:
    networks = {one.name: {"title": one.title, "task": one.task, "options": one.options} for one in study.networks}
    facts = {"size": study.size, "factors": study.factors, "seeds": list(study.seeds), "passes": study.passes}
    return {**facts, "networks": networks, "versions": {}, "hardware": {}}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Results as the formula of an exchange that hides behind a pass would give them, and two real cells."""
    study = dataclasses.replace(CORE, seeds=(0, 1))
    sizes = {"resnet50": 24_000_000, "efficientnet-b0": 4_200_000}
    found: list[Row] = [{"kind": "study", "name": "accumulation", **_facts(study)}]
    for model in sizes:
        found.append({"kind": "profile", "name": f"{model}, alone", "model": model, **PROFILE.to_dict()})
    for cell, seed in study.runs():
        found.append(_row(study, cell, seed, "virtual", sizes[cell.model], 1 + 0.002 * seed))
    for cell in CORE.real[:2]:
        for seed in range(3):
            found.append(_row(study, cell, seed, "predicted", sizes[cell.model], 1.0))
            found.append(_row(study, cell, seed, "real", sizes[cell.model], 1.25 + 0.01 * seed))
    return found


def _row(study: Study, cell: Cell, seed: int, part: str, parameters: int, slow: float) -> Row:
    one_pass = PROFILE.seconds(cell.batch) * slow
    wire = 2 * (cell.nodes - 1) / cell.nodes * 4 * parameters / (cell.mbit * 1e6 / 8)
    step = cell.every * one_pass + 0.01 + max(0.1 * wire, wire - 0.6 * one_pass)
    steps = study.passes // cell.every
    return {
        **identity(study, cell, seed, part=part, profile=f"{cell.model}, alone"),
        "status": "finished",
        "seconds": steps * step,
        "epoch_s": steps * step / (study.passes * cell.batch * cell.nodes) * 100_000,
        "samples": study.passes * cell.batch * cell.nodes,
        "steps": steps,
        "parameters": parameters,
        "step_s": [step] * steps,
        "wait_share": 0.1,
        "wall_s": 1.0,
    }


@pytest.fixture(scope="module")
def found(rows: list[Row]) -> list[Panel]:
    return panels(rows, resamples=2)


@pytest.fixture(scope="module")
def text(rows: list[Row], found: list[Panel]) -> str:
    return page(rows, found)


class TestPage:
    def test_pairs_are_told_apart_and_every_pair_is_there(self, rows: list[Row]) -> None:
        found = lines(rows)
        assert len(found) == 36
        for line in found:
            # One node saves updates only; several save exchanges, too.
            assert line.contrast.value < (1.0 if line.nodes > 1 else 1.001)
            assert len(line.rows) == 4

    @pytest.mark.slow
    def test_the_form_that_made_the_rows_predicts_best(self, rows: list[Row], found: list[Panel]) -> None:
        for panel in found:
            by_name = {one.model: one.median_error for one in panel.judged}
            assert by_name["overlapped"] < 0.01
            assert by_name["overlapped"] < by_name["physical"] < by_name["quadratic"] < by_name["linear"]
        beyond = {one.model: one for one in other_link(rows)}
        assert beyond["overlapped"].median_error < beyond["physical"].median_error

    def test_real_cells_are_held_against_their_predictions(self, rows: list[Row]) -> None:
        for one in checks(rows):
            assert -0.25 < one.error < 0
            assert len(one.real_rows) == len(one.predicted_rows) == 3

    def test_links_lead_to_lines_and_places_that_exist(self, text: str, rows: list[Row]) -> None:
        linked: set[int] = set()
        for first, last in re.findall(r"accumulation\.jsonl#L(\d+)(?:-L(\d+))?", text):
            linked |= set(range(int(first), int(last or first) + 1))
        assert linked == set(range(1, len(rows) + 1))
        headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        places = {*re.findall(r'<a id="([^"]+)">', text), *slugs}
        assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= places

    def test_every_row_of_a_table_links_to_what_it_was_made_from(self, text: str) -> None:
        body = [
            line for line in text.splitlines() if line.startswith("|") and re.search(r"\d", re.sub("`.+?`", "", line))
        ]
        assert len(body) > 100
        assert all("](" in line for line in body)

    def test_the_answer_comes_first_and_its_limits_follow(self, text: str) -> None:
        first = text.splitlines()[2]
        assert first.startswith("**With an exchange every 4 batches instead of every batch")
        assert text.index("What may not be concluded") < text.index("## Design")

    @pytest.mark.slow
    def test_page_and_figure_come_out_the_same_every_time(
        self, rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Without the bootstrap, which is seeded, and takes seconds.
        monkeypatch.setattr("podium.lab.published.accumulation.output.panels", lambda rows: panels(rows, resamples=0))
        store = open_store(tmp_path)
        for row in rows:
            if row.get("levels", {}).get("mbit") != 1000:  # one link is enough
                store.append(row)
        made = [path.read_bytes() for path in draw(tmp_path)]
        assert made == [path.read_bytes() for path in draw(tmp_path)]

    def test_without_runs_there_is_nothing_to_draw(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="must hold finished virtual runs"):
            draw(tmp_path)

"""What README, pages and report claim is what the committed records say, and what the examples print."""

from __future__ import annotations

import json
import math
import re
import statistics
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import podium
from podium.exchange.codecs import CODECS
from podium.exchange.collectives import COLLECTIVES
from podium.lab.report.answer import limits
from podium.launch.backend import backend_of
from podium.strategies import STRATEGIES, find_strategy

ROOT = Path(__file__).parent.parent
STUDIES = ROOT / "docs" / "studies"
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
REPORT, TOUR, ABOUT, PERFORMANCE, LIMITS = (
    PAGES[f"{name}.md"] for name in ("report", "tour", "strategies", "performance", "limits")
)


@cache
def records(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (STUDIES / name).read_text(encoding="utf-8").splitlines()]


def said(text: str) -> str:
    """A text with its line breaks and the targets of its links gone."""
    return " ".join(re.sub(r"\]\([^)]*\)", "", text).replace("[", "").split())


class TestTheStrategiesStudy:
    rows = staticmethod(lambda: records("strategies/results.jsonl"))

    def of(self, strategy: str, workers: int, link: str) -> dict[int, dict[str, Any]]:
        wanted = {"strategy": strategy, "workers": workers, "link": link}
        return {row["seed"]: row for row in self.rows() if row["levels"] == wanted}

    def slower(self, strategy: str) -> float:
        """How many times longer 16 machines take on the slow link than one."""
        alone, many = self.of("solo", 2, "10 Mbit/s"), self.of(strategy, 16, "10 Mbit/s")
        return math.exp(sum(math.log(many[seed]["seconds"] / alone[seed]["seconds"]) for seed in alone) / len(alone))

    def test_no_switch_came_by_its_rule_and_report_page_and_review_say_so(self) -> None:
        mine = [row for row in self.rows() if row["levels"]["strategy"] == "strategy-switch"]
        rules = [rule for row in mine for rule in row["rules"] if rule["in_force"]]
        assert len(rules) == len(mine) == 24
        assert not any(rule["step"] for rule in rules)
        assert not any(reading["value"] for rule in rules for reading in rule["readings"]), "the rule had a value"
        told = "The rule plateau of strategy-switch fired in 0 of 24 runs, and could not"
        assert told in limits(self.rows())
        assert told in (STUDIES / "strategies" / "README.md").read_text(encoding="utf-8")
        assert "it fired in 0 of 24 runs and could not" in said(REPORT)
        assert "in its 24 runs of Strategy-Switch the rule did not fire and could not" in said(PAGES["related-work.md"])

    def test_machines_have_the_servers_that_the_report_says(self) -> None:
        assert {row["nodes"] for row in self.of("parameter-server", 16, "1 Gbit/s").values()} == {17}
        switch = self.of("strategy-switch", 16, "1 Gbit/s").values()
        assert {row["nodes"] for row in switch} == {16}
        assert all("servers=16;placement=colocated" in row["switches"][0]["after"] for row in switch)
        assert "It has a server beside each worker where the parameter server is one machine" in said(REPORT)

    def test_how_much_slower_sixteen_machines_are(self) -> None:
        ring, switch = self.slower("all-reduce"), self.slower("strategy-switch")
        servers = [self.slower(f"parameter-server{mode}") for mode in ("", ":mode=async", ":mode=ssp,staleness=4")]
        text = f"{ring:.1f} times slower than one with all-reduce, {switch:.1f} with Strategy-Switch, and "
        assert text + f"{min(servers):.0f} to {max(servers):.0f} through one server" in said(REPORT)

    def test_how_many_bounded_runs_are_asynchronous_ones(self) -> None:
        pairs = [
            (row, self.of("parameter-server:mode=async", row["workers"], row["levels"]["link"])[row["seed"]])
            for row in self.rows()
            if row["levels"]["strategy"] == "parameter-server:mode=ssp,staleness=4"
        ]
        same = sum(one["param_hash"] == two["param_hash"] and one["seconds"] == two["seconds"] for one, two in pairs)
        assert f"{same} of {len(pairs)} pairs of an SSP and an asynchronous run are the same to the bit" in said(REPORT)


class TestTheSwitchingStudy:
    rows = staticmethod(lambda: records("switching/results.jsonl"))

    def step_ms(self, arm: str, setting: str) -> float:
        (row,) = (row for row in self.rows() if row["levels"] == {"arm": arm, "setting": setting})
        return float(row["global_step_ms"])

    def switched(self, setting: str, before: str, after: str, against: str) -> float:
        """Time of a run that switches where CIFAR-10's runs did, over that of one that does not, by short timings."""
        cifar = [row for row in self.rows() if row["levels"]["setting"] == "cifar" and "switch_share" in row]
        share = statistics.median(row["switch_share"] for row in cifar)
        mixed = share * self.step_ms(before, setting) + (1 - share) * self.step_ms(after, setting)
        return mixed / self.step_ms(against, setting)

    def test_the_headline_is_told_with_what_its_baseline_lacks(self) -> None:
        small, settings = "all-reduce, small buckets", ("timed-cifar", "timed-cifar-core")
        overlap, on_core = (self.switched(setting, small, "async", small) for setting in settings)
        names = ("all-reduce", "all-reduce, equal-finish", "all-reduce, equal-finish, small buckets")
        plain, even, both = (self.step_ms(name, "timed-cifar") for name in names)
        for text in (said(ABOUT), said(REPORT)):
            assert f"{overlap:.3f}" in text and f"{on_core:.3f}" in text
            assert f"{even:.0f} ms a step instead of {plain:.0f}" in text
            assert f"{both:.0f} with small buckets" in text
        assert f"takes {even / plain:.2f} of it without any switch" in said(ABOUT)

    def test_ratio_and_accuracy_are_those_of_the_records(self) -> None:
        seconds: dict[str, dict[int, float]] = {"all-reduce": {}, "strategy-switch": {}}
        for row in self.rows():
            if row["levels"]["setting"] == "cifar" and row["levels"]["arm"] in seconds:
                seconds[row["levels"]["arm"]][row["seed"]] = row["seconds"]
        base, switch = seconds["all-reduce"], seconds["strategy-switch"]
        assert f"{statistics.fmean(switch[seed] / base[seed] for seed in base):.3f}" == "0.596"
        assert "0.596 ± 0.027" in REPORT and "| 0.60 | 75.0 % |" in ABOUT

    def test_the_number_of_runs(self) -> None:
        assert f"{len(self.rows())} runs, most with 8 workers" in said(REPORT)


class TestCounts:
    def test_strategies(self) -> None:
        presets = {"phases", "strategy-switch", "sync-switch", "post-local-sgd"}
        count = len(STRATEGIES.keys() - presets - {"solo"})
        assert count == 11, f"{count} strategies: change the number here and the word in docs/report.md"
        assert "any of eleven distribution strategies" in REPORT

    def test_those_that_take_no_codec_and_survive_no_loss_are_named(self) -> None:
        found = {name: find_strategy(name)() for name in STRATEGIES.keys() - {"phases", "strategy-switch", "solo"}}
        assert {name for name, kind in found.items() if not kind.payload.can_be_packed} == {"gossip", "ad-psgd"}
        assert "all but `gossip` and `ad-psgd` any codec" in said(ABOUT)
        fragile = {name for name, kind in found.items() if not kind.cadence.survives_loss}
        assert fragile == {"gossip", "ad-psgd"}, (
            "declare survives_loss in Cadence, or name it in docs/limits.md and here"
        )
        assert "`gossip` and `ad-psgd` end with an error when a worker" in LIMITS

    def test_codecs(self) -> None:
        count = len(CODECS.keys() - {"auto", "dense"})
        assert count == 11, f"{count} codecs: change the number here and the word in README.md and docs/performance.md"
        assert "ten collectives, eleven codecs" in (ROOT / "README.md").read_text(encoding="utf-8")
        assert "Eleven codecs with error feedback" in PERFORMANCE

    def test_collectives(self) -> None:
        count = len(COLLECTIVES.keys() - {"default", "auto"})
        assert count == 10, f"{count} collectives: change the number here and the word in docs/performance.md"
        assert "ten ways for workers to add them up" in PERFORMANCE


def test_nccl_is_chosen_where_every_worker_has_a_gpu_of_its_own_on_one_host_or_many() -> None:
    assert backend_of(["one 0", "one 1"]) == backend_of(["one 0", "two 0"]) == "nccl"
    assert backend_of(["one 0", "one 0"]) == "gloo"
    assert "nccl is chosen where every worker has a GPU of its own, on one host or on many" in said(LIMITS)


class TestFilesThatAreNamed:
    @pytest.mark.parametrize("name", ["README.md", *(f"docs/{name}" for name in sorted(PAGES))])
    def test_every_file_of_ours_that_a_command_names_is_there(self, name: str) -> None:
        text = (ROOT / name).read_text(encoding="utf-8")
        for word in re.findall(r"(?:--cluster|compare|run|python) ((?:examples|studies)/[\w./-]+)", text):
            assert (ROOT / word).is_file(), word


MADE_WITH = ("2.13.0", "AVX512")
"""Hashes in the tour: another version of torch, or another CPU, may round otherwise."""
same_rounding = pytest.mark.skipif(
    (torch.__version__.partition("+")[0], torch.backends.cpu.get_cpu_capability()) != MADE_WITH,
    reason="the tour's hashes are of another torch or CPU",
)


class TestHashes:
    def block(self, command: str) -> str:
        """What the tour shows below a command, up to the next one."""
        found = re.search(rf"^\$ {re.escape(command)}.*\n((?:(?!\$ |```).*\n)*)", TOUR, re.MULTILINE)
        assert found, f"the tour has no {command}"
        return found[1]

    def shown(self, command: str) -> str:
        found = re.search(r"replicas   all \d+ equal \((\w+)\)", self.block(command))
        assert found, self.block(command)
        return found[1]

    @pytest.mark.slow
    @same_rounding
    def test_four_workers_end_with_what_the_tour_shows(self, tmp_path: Path) -> None:
        result = podium.train("digits-mlp", strategy="all-reduce", workers=4, launcher="threads", out=str(tmp_path))
        shown = self.shown("podium train digits-mlp --strategy all-reduce --workers 4")
        assert result.param_hash["0"].startswith(shown)
        assert f"{result.metrics['accuracy']:.4f}" in self.block("podium train digits-mlp --strategy all-reduce")

    @same_rounding
    def test_a_strategy_of_ones_own(self, tmp_path: Path) -> None:
        strategy = f"{ROOT / 'examples' / 'my_strategy.py'}:LocalSteps:every=4"
        result = podium.train(
            "digits-mlp", strategy=strategy, workers=2, epochs=5, launcher="threads", out=str(tmp_path)
        )
        assert TOUR.count(f"replicas   all 2 equal ({result.param_hash['0'][:12]})") == 3


def test_every_hop_of_a_walk_is_defined_in_its_file() -> None:
    """Lines move with every change; `tools/walk.py` refreshes them."""
    hops = re.findall(r"`([\w/]+\.py):\d+` \(`(?:\w+\.)?(\w+)`\)", PAGES["architecture.md"])
    assert hops
    for path, name in hops:
        text = (ROOT / "podium" / path).read_text(encoding="utf-8")
        assert re.search(rf"(def|class) {name}\b", text), f"podium/{path} does not define {name}"


def test_every_link_leads_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text):
            found = (page.parent / target).resolve() if target else page
            assert "://" in target or found.exists(), f"{page.name}: {target}"
            if anchor and found.suffix == ".md":
                assert anchor in anchors(found), f"{page.name}: {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links, and the names it gives itself."""
    text = page.read_text(encoding="utf-8")
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
    return made | set(re.findall(r'<a (?:id|name)="([^"]+)"', text))


def test_the_readme_can_be_finished() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150

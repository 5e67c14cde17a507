"""What the summary says of staleness, of phases and of what happened on the way."""

from __future__ import annotations

import shlex
from typing import Any

from podium.cli.summary import next_command, summary
from podium.config import RunConfig, RunResult, parse_strategy
from podium.strategies import make_strategy
from tests.lab.synthetic import phased


def _result(launcher: str = "local", **fields: Any) -> RunResult:
    return RunResult(
        run_dir="runs/one",
        status="finished",
        task="digits-mlp",
        strategy="parameter-server(mode=async)",
        workers=2,
        seed=0,
        launcher=launcher,
        metrics={"accuracy": 0.9},
        loss=0.3,
        param_hash={"0": "00", "1": "00"},
        steps=10,
        samples=640,
        epochs=1.0,
        seconds=1.0,
        samples_per_s=640.0,
        sent_bytes=1000,
        **fields,
    )


def told(**fields: Any) -> str:
    return summary(_result(**fields), RunConfig(strategy="parameter-server", workers=2))


def names(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines()[1:]]


def test_nothing_is_said_of_what_did_not_happen() -> None:
    assert {"staleness", "dropped", "lost", "restored"}.isdisjoint(names(told()))


def test_it_says_how_stale_updates_were_and_how_many_pushes_were_dropped() -> None:
    text = told(staleness={"mean": 1.25, "max": 4.0, "count": 8.0}, dropped=1200)
    assert "mean 1.25, at most 4" in text and "1,200 pushes, too stale" in text
    assert "1 push, too stale" in told(dropped=1)


def test_it_says_which_servers_were_restored_from_what_and_what_was_lost_with_them() -> None:
    first = {"server": 4, "source": "snapshot", "took_s": 0.5, "lost_updates": 12}
    second = {"server": 5, "source": "replica at 4", "took_s": None, "lost_updates": 0}
    text = told(lost=[4, 5], restored=[first, second])
    assert "rank 4, 5" in text
    assert "server 4 from snapshot in 0.50 s, 12 updates lost" in text
    assert "server 5 from replica at 4, no update lost" in text
    assert names(text).count("restored") == 2


def test_it_says_when_it_switched_why_and_what_that_cost() -> None:
    lines = [" ".join(line.split()) for line in told(**phased(None, 0.5, 0.05)).splitlines()]
    place = lines.index("switch all-reduce → parameter-server:mode=async")
    assert lines[place + 1] == "at step 30, epoch 3, 0.30 s: settled (plateau: 0.0500, threshold 0.100)"
    assert lines[place + 2] == "cost 3.5 ms: drain 0.50, home 1.0, hand over 0.25, begin 2.0"


def test_other_rules_stand_in_a_table_with_those_marked_that_saw_another_run() -> None:
    lines = told(**phased(None, 0.05)).splitlines()
    early, late = (next(line for line in lines if name in line) for name in ("share:at=0.125", "share:at=0.5 "))
    assert early.index("step") == late.index("step") and early.index("epoch") == late.index("epoch")
    assert "after the switch" in late and "after the switch" not in early
    (silent,) = [line for line in lines if "not fired:" in line]
    (unmeasured,) = [line for line in lines if "not measured:" in line]
    assert "rate-decay" in silent and "plateau," not in silent, "the rule in force is told of above"
    assert unmeasured.split(": ")[1].split(", ") == ["noise", "straggler", "advice"]


def test_a_rule_in_force_that_would_have_fired_later_is_told_of() -> None:
    fields = phased(None, 0.5, latest=True)
    fields["rules"].append({**fields["rules"][-1], "rule": "plateau", "step": 60, "epoch": 6.0})
    text = told(**fields)
    assert "too late (plateau)" in text
    assert any("plateau" in line and "step 60" in line and "after the switch" in line for line in text.splitlines())


def test_what_was_measured_for_the_rule_in_force_others_have_seen_too() -> None:
    fields = phased(2.0)
    fields["rules"][0]["rule"] = "straggler:patience=2"
    text = told(**fields)
    assert "not measured: noise\n" in text and "advice" in text


def test_a_run_that_did_not_switch_says_so_and_one_with_many_switches_tells_of_some() -> None:
    fields = phased(None, 0.5, latest=True)
    assert "none; the rule did not fire: plateau" in told(**{**fields, "switches": []})
    many = told(**{**fields, "switches": fields["switches"] * 9})
    assert names(many).count("switch") == 4 and "and 5 more" in many


def test_nothing_is_said_of_phases_where_there_are_none() -> None:
    assert {"switch", "other"}.isdisjoint(names(told()))


def test_the_next_command_names_the_phases_so_that_they_are_understood_again() -> None:
    run = "all-reduce until epoch:after=1 | parameter-server:mode=async,servers=2 until epoch:after=1"
    for options, text in (({"run": run.rpartition(" until")[0]}, None), ({"run": run, "repeat": "true"}, "repeat")):
        command = next_command(_result(), RunConfig(strategy="phases", strategy_options=options, workers=2))
        words = shlex.split(command)
        name, given = parse_strategy(words[len(words) - words[::-1].index("--strategy")])
        found = make_strategy(name, given, 2)
        assert found.server_spec.count == 2 and bool(text) == found.repeat


def test_bytes_that_no_network_carried_and_seconds_that_nobody_measured_are_called_so() -> None:
    here, nowhere, real = told(), told(launcher="virtual"), told(launcher="shaped")
    assert "1.0 kB by all ranks together, which stayed on this host" in here and "simulated" not in here
    assert "640 samples/s, simulated" in nowhere and "over simulated links" in nowhere
    assert "stayed" not in real and "simulated" not in real


def test_what_was_said_before_the_run_is_said_again() -> None:
    assert "note       the rule cannot fire" in told(notices=("the rule cannot fire",))

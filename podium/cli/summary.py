"""The result of a run as text, and its configuration as a run file."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from podium.cli.progress import format_bytes, format_number, format_seconds
from podium.config import RunConfig, RunResult, format_value
from podium.lab.report.balance import MOST_PARTS, advice, division, is_told
from podium.lab.report.format import change, pushes, reason, restoration, switch_cost
from podium.lab.study.results import other_rules

MOST_SWITCHES = 4
"""How many switches are shown: a run that repeats its phases has too many."""


def summary(result: RunResult, config: RunConfig) -> str:
    """A few aligned lines: metrics, time, bytes, whether the replicas agree, the folder, the next command."""
    lines = [(name, format_number(value)) for name, value in result.metrics.items()]
    lines.append(("loss", format_number(result.loss)))
    lines += _not_finite(result)
    only = " (this run)" if config.resume is not None else ""  # steps and epochs count from the beginning
    clock = ", simulated" if result.launcher == "virtual" else ""
    lines.append(("time", f"{format_seconds(result.seconds)}, {result.samples_per_s:,.0f} samples/s{clock}{only}"))
    done = f"{result.steps:,} steps, {round(result.epochs, 2):g} epochs"
    lines.append(("work", f"{done}, {result.samples:,} samples{only}"))
    lines.append(("sent", _sent(result) + only))
    if result.codec_choice:
        lines.append(("codec", result.codec_choice["why"]))
        if check := result.codec_choice.get("check"):
            verdict = "kept" if check["keeps"] else "given up"
            lines.append(("", f"exchanges took {check['measured_ms']:.3g} ms, so packing was {verdict}"))
    lines.append(("replicas", agreement(result.param_hash)))
    if result.staleness:
        mean, top = result.staleness["mean"], result.staleness["max"]
        lines.append(("staleness", f"mean {mean:.2f}, at most {top:.0f}"))
    if result.dropped:
        lines.append(("dropped", f"{pushes(result.dropped)}, too stale; the samples were lent again"))
    if result.lost:
        lines.append(("lost", "rank " + ", ".join(str(rank) for rank in result.lost)))
    lines += [("restored", restoration(facts)) for facts in result.restored]
    lines += [*_switches(result), *_other_rules(result), *_balance(result.balance)]
    lines += [("note", text) for text in result.notices]
    lines.append(("run", result.run_dir))
    lines.append(("next", next_command(result, config)))
    workers = "1 worker" if result.workers == 1 else f"{result.workers} workers"
    width = max(10, *(len(name) for name, _ in lines))
    head = f"{result.task} · {result.strategy} · {workers} · seed {result.seed} · {result.status}"
    return "\n".join([head, *(f"  {name:<{width}} {text}" for name, text in lines)])


def _not_finite(result: RunResult) -> list[tuple[str, str]]:
    """A warning where the last validation is not finite; training itself stops at a loss that is not finite."""
    if not result.history:  # no validation
        return []
    values = {"loss": result.loss, **result.metrics}
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    if not bad:
        return []
    what = f"the last validation's {', '.join(bad)} {'is' if len(bad) == 1 else 'are'} not finite"
    return [("warning", f"{what}: check the test data, and the rate if training diverged in its last steps")]


def _balance(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The workers' speeds, how steps were divided, and advice; empty where workers are equally fast."""
    lines = [("advice", line) for line in advice(facts)]
    if not is_told(facts):
        return lines
    count = len(facts["changes"])
    said = "1 change" if count == 1 else f"{count:,} changes" if count else "no change"
    if facts["balancer"] == "steal":
        said = "as they drew them"
    whole = "step" if facts["unit"] == "samples" else "round"
    parts = f"{division(list(facts['division'].values()))} {facts['unit']} of a {whole}, {said}"
    return [("speed", _speeds(facts["workers"])), ("division", parts), *lines]


def _speeds(workers: Sequence[Mapping[str, Any]]) -> str:
    """Samples per second and waiting share of each worker by rank; of many workers the slowest and the fastest."""
    shown = workers
    if len(workers) > MOST_PARTS:
        by_speed = sorted(workers, key=lambda worker: float(worker["samples_per_s"]))
        shown = [by_speed[0], by_speed[-1]]
    sign = "/" if shown is workers else " to "
    speeds = sign.join(f"{worker['samples_per_s']:,.0f}" for worker in shown)
    waits = sign.join(f"{100 * worker['wait_share']:.0f}" for worker in shown)
    who = "by worker" if shown is workers else f"(workers {shown[0]['rank']} and {shown[1]['rank']})"
    return f"{speeds} samples/s {who} while computing, {waits} % of step time spent waiting"


def _switches(result: RunResult) -> list[tuple[str, str]]:
    """When the run went from one phase to the next, why, and what that cost."""
    own = [rule["rule"] for rule in result.rules if rule["in_force"]]
    if not result.switches:
        return [("switch", f"none; the rule did not fire: {', '.join(own)}")] if own else []
    lines = []
    for facts in result.switches[:MOST_SWITCHES]:
        when = f"step {facts['step']:,}, epoch {round(facts['epoch'], 2):g}, {format_seconds(facts['seconds'])}"
        lines += [("switch", change(facts)), ("", f"at {when}: {reason(facts, result.rules)}")]
        lines.append(("", f"cost {switch_cost(facts)}"))
    more = len(result.switches) - MOST_SWITCHES
    return [*lines, ("", f"and {more:,} more, in result.json")] if more > 0 else lines


def _other_rules(result: RunResult) -> list[tuple[str, str]]:
    """When rules that were not in force would have fired, as a small table."""
    told = other_rules({"rules": result.rules})
    if not any(told):
        return []
    width = max((len(rule["rule"]) for rule in told.fired), default=0)
    steps = max((len(f"{rule['step']:,}") for rule in told.fired), default=0)
    lines = [
        f"{rule['rule']:<{width}}  step {rule['step']:>{steps},}  epoch {round(rule['epoch'], 2):<5g}"
        + ("  after the switch" if rule["after_switch"] else "")
        for rule in told.fired
    ]
    lines += [f"not fired: {', '.join(told.silent)}"] if told.silent else []
    lines += [f"not measured: {', '.join(told.unmeasured)}"] if told.unmeasured else []
    if any(rule["after_switch"] for rule in told.fired):
        lines.append("(after the switch, a rule sees a run that has already changed strategy)")
    return [("other rules" if i == 0 else "", line.rstrip()) for i, line in enumerate(lines)]


def agreement(hashes: Mapping[str, str]) -> str:
    """Whether all workers ended with the same parameters, by their hashes."""
    different = set(hashes.values())
    if len(hashes) == 1:
        return f"one ({min(different)[:12]})"
    if len(different) == 1:
        return f"all {len(hashes)} equal ({min(different)[:12]})"
    return f"{len(different)} different among {len(hashes)} workers"


def next_command(result: RunResult, config: RunConfig) -> str:
    """The command that the user most likely needs next."""
    if result.status == "stopped":
        return f"podium train --resume {shlex.quote(result.run_dir)}"
    if config.strategy_options:
        text = _phases(config.strategy_options) if config.strategy == "phases" else _with_options(config)
        named = f"--strategy solo --strategy {shlex.quote(text)}"
        return f"podium compare {config.task} {named} --workers {max(2, config.workers)}"
    others = ["solo", config.strategy] if config.strategy != "solo" else ["solo", "all-reduce"]
    return f"podium compare {config.task} --strategies {','.join(others)} --workers {max(2, config.workers)}"


def _with_options(config: RunConfig) -> str:
    """The strategy with its options, as on the command line."""
    return f"{config.strategy}:{','.join(f'{name}={value}' for name, value in config.strategy_options.items())}"


def _phases(options: Mapping[str, Any]) -> str:
    """Phases as on the command line, with semicolons, since commas would end an option."""
    run = str(options["run"]).replace(",", ";")
    more = "".join(f",{name}={value}" for name, value in options.items() if name != "run")
    return f"phases:run={run}{more}" if more else run


def _sent(result: RunResult) -> str:
    if not result.sent_bytes:
        return "nothing"
    wait = f", {100 * result.wait_share:.0f} % of step time spent waiting" if result.wait_share else ""
    # The bytes of collectives are counted as a ring would send them, under every transport.
    how = {
        "local": ", which stayed on this host",
        "threads": ", which stayed in this process",
        "virtual": " over simulated links",
    }
    return f"{format_bytes(result.sent_bytes)} by all ranks together{how.get(result.launcher, '')}{wait}"


def to_toml(config: RunConfig) -> str:
    """A run file that `--config` reads back to the same configuration."""
    values = config.to_dict()
    tables: dict[str, dict[str, Any]] = {
        "run": {},
        "task": {"name": values.pop("task"), **values.pop("task_options")},
        "strategy": {"name": values.pop("strategy"), **values.pop("strategy_options")},
    }
    tables["run"] = {name: value for name, value in values.items() if value is not None}
    lines: list[str] = []
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {format_value(value)}" for key, value in table.items())]
    return "\n".join(lines[1:])

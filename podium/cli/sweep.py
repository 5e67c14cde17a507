"""`podium sweep`: many trials of one task on one device, and the best of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from podium.cli.interrupt import stop_on_interrupt
from podium.cli.options import options
from podium.cli.output import Output, wrapped
from podium.cli.sweep_progress import chosen, sweep_progress
from podium.errors import ConfigError

if TYPE_CHECKING:
    from podium.sweeps.result import Sweep

ASKED = "stopping, finished trials are kept… (Ctrl-C again stops at once)"


@click.command(short_help="Train many trials of a task on one device; find the best.")
@click.argument("task", required=False, default="digits-mlp")
@click.option("--grid", multiple=True, metavar="NAME=A,B,…", help="Values of an option; all combinations are trained.")
@click.option("--space", multiple=True, metavar="NAME=A..B[:log]", help="A range, for --random and --optuna.")
@click.option("--random", type=click.IntRange(min=1), metavar="N", help="Draw N points at random.")
@click.option("--optuna", type=click.IntRange(min=1), metavar="N", help="Let Optuna suggest N points.")
@click.option("--trials", metavar="FILE", help="Points from a file: JSON, CSV or TOML.")
@click.option("--search", metavar="NAME[:K=V,…]", help="Another source of points, or one with options.")
@click.option("--folds", metavar="[KIND:]K", help="Cross-validate: 5, stratified:5, shuffle:10 … [test data]")
@click.option("--seeds", type=click.IntRange(min=1), default=1, metavar="N", help="Trainings of each point. [1]")
@click.option("--random-seed", type=int, default=0, metavar="N", help="Fixes folds and draws. [0]")
@click.option("--executor", default="auto", metavar="NAME[:K=V,…]", help="How trials share the device. [auto]")
@click.option("--stop", "stopping", metavar="RULE[:K=V,…]", help="When trials are stopped early: asha, median, pbt …")
@click.option("--metric", metavar="NAME", help="The metric that ranks points. [accuracy, or the task's first]")
@click.option("--maximize/--minimize", default=None, help="Which way is better. [by the metric's name]")
@click.option("--precision", default="fp32", metavar="NAME", help="fp32, tf32 or bf16. [fp32]")
@click.option("--eval-every", type=int, default=1, metavar="EPOCHS", help="0: at the end only, which is faster. [1]")
@click.option("--keep", default="best", metavar="WHICH", help="Models to keep: best, all or none. [best]")
@click.option("--device", default="auto", metavar="NAME", help="cpu, cuda or auto. [auto]")
@options("epochs")
@click.option("--batch-size", type=int, metavar="N", help="Samples per step of each trial.")
@click.option(
    "--set", "overrides", multiple=True, metavar="task.NAME=VALUE", help="An option of all trials: task.hidden=64."
)
@options("data_dir", "out", "dry_run", "quiet", "json")
@click.pass_obj
def sweep(out: Output, /, task: str, overrides: tuple[str, ...], dry_run: bool, quiet: bool, **given: Any) -> int:
    """Train TASK once for each point, fold and seed, all on one device; print a table and write a report.

    A name is an option of the task, of its optimizer, or dropout, label_smoothing, batch_size, epochs. Ctrl-C once
    keeps finished trials; the same command with the same --out resumes. `podium list` has the names of
    executors, stopping rules and searches.

    \b
    podium sweep digits-mlp --grid lr=0.3,0.1 --grid 'hidden=32|64' --folds 5
    podium sweep digits-mlp --space lr=1e-3..1:log --random 40 --stop asha
    podium sweep digits-mlp --space lr=1e-3..1:log --optuna 30 --seeds 3
    podium sweep digits-mlp --trials points.csv --executor fused:width=32
    """
    asked = {**given, "task": task, "options": task_options(overrides)}
    asked["seed"] = asked.pop("random_seed")
    if dry_run:
        plan = plan_of(**asked)
        out.document(plan)
        out.say(*(f"{name}: {value}" for name, value in plan.items() if value not in (None, {}, [])))
        return 0
    with stop_on_interrupt(ASKED) as stop, sweep_progress(quiet=quiet or out.json) as on_event:
        from podium.lab.sweeps import sweep as run_sweep

        found = run_sweep(**asked, on_event=on_event, stop=stop)
    out.document(found.to_dict())
    out.say(*describe(found))
    return exit_code(found)


def task_options(overrides: Sequence[str]) -> dict[str, Any]:
    """Parse `--set task.NAME=VALUE`, with values as in a search."""
    from podium.sweeps.search.space import read_value

    found = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        head, _, name = key.strip().partition(".")
        if not equals or head != "task" or not name:
            raise ConfigError(f"sweep: --set takes task.NAME=VALUE, got {text!r}; all else has an option of its own")
        found[name.replace("-", "_")] = read_value(value.strip())
    return found


def plan_of(**asked: Any) -> dict[str, Any]:
    from podium.sweeps.plan import plan

    return plan(**{name: value for name, value in asked.items() if name != "out"}).to_dict()


def describe(found: Sweep) -> list[Any]:
    """The table, the answer with its limits, how trials were trained, and the paths of files."""
    from podium.lab.sweeps.table import MOST, format_table

    lines: list[Any] = []
    if found.points:
        lines += ["", format_table(found)]
        if len(found.points) > MOST:
            lines.append(f"… {len(found.points) - MOST} more in {found.table}")
    lines += ["", wrapped(found.answer), ""]
    lines += [wrapped(text) for text in told(found)]
    best = found.best_trial
    if best is not None and best.model:
        lines.append(f"model    {found.folder}/{best.model} (trial {best.trial.number})")
    if found.status == "stopped":
        lines.append(f"stopped early; the same command with --out {found.folder} resumes")
    return [*lines, f"table    {found.table}", f"report   {found.report}"]


def told(found: Sweep) -> Iterator[str]:
    """How trials were trained: the executor chosen, why others were not, speed, energy."""
    from podium.cli.progress import format_seconds

    for choice in dict.fromkeys(map(chosen, found.choices)):
        yield f"chosen   {choice}"
    for why in dict.fromkeys(probe["why"] for probe in found.probes if not probe["fuses"]):
        yield f"not fused: {why}"
    for why in dict.fromkeys(turn["why"] for turn in found.turns if turn["event"] == "fell back"):
        yield f"fell back to one by one: {why}"
    for widths in found.widths:
        yield f"rows     {', then '.join(map(str, widths))}, as trials ended"
    if found.trials_per_s is not None:
        trained = sum(session["trained"] for session in found.sessions)
        speed = f"{found.trials_per_s:,.3g} trials/s, {found.samples_per_s or 0:,.0f} samples/s"
        yield f"time     {format_seconds(found.seconds)} for {trained} trials: {speed}"
    if found.reading is not None and found.sessions[-1]["device"] != "cpu":
        yield from _energy(found.reading)


def _energy(reading: Mapping[str, Any]) -> Iterator[str]:
    if reading["energy_j"] is None:
        yield f"energy   absent: {reading['absent'].get('energy_j') or 'not measured'}"
    else:
        short = " (a window of less than a minute: a hint, not a result)" if reading["energy_is_short"] else ""
        yield f"energy   {reading['energy_j']:,.0f} J of the whole board{short}"


def exit_code(found: Sweep) -> int:
    """130 when the sweep was stopped, 1 when a trial failed or none has a score."""
    return 130 if found.status == "stopped" else 1 if found.failed or found.best is None else 0

"""`podium trace`: a run as a trace for chrome://tracing and Perfetto."""

from __future__ import annotations

import click

from podium.cli.options import options
from podium.cli.output import Output
from podium.errors import as_request


@click.command(short_help="Write a run as a trace that a browser shows.")
@click.argument("run_dir", metavar="RUN_DIR")
@click.option("--out", metavar="FILE", help="Where to write it. [RUN_DIR/trace.json]")
@click.option("--steps", metavar="A:B", help="From step A up to, and without, B. [all that fit]")
@options("json")
@click.pass_obj
def trace(out: Output, /, run_dir: str, steps: str | None, **given: str | None) -> None:
    """Write a timeline of the ranks of a run as a trace; open it in chrome://tracing or on ui.perfetto.dev.

    \b
    podium trace runs/digits-mlp-all-reduce-20261115-090427-61a2c4 --steps 100:150
    """
    from podium.records.trace import parse_steps, read_trace, write_trace

    with as_request():
        path = write_trace(run_dir, given["out"], parse_steps(steps) if steps is not None else None)
    written = read_trace(path)
    said, events = written["otherData"], len(written["traceEvents"])
    out.document({"trace": str(path), "events": events, **said})
    here = f", steps {said['steps'][0]} to {said['steps'][1]} of {said['steps_of_the_run']}" if said["steps"] else ""
    out.say(f"trace: {path}", f"{events:,} events{here}, {said['clock']} clock")

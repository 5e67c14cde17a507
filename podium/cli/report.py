"""`podium report`: the page of a comparison or a sweep, made anew from its results."""

from __future__ import annotations

import click

from podium.cli.options import options
from podium.cli.output import Output


@click.command(short_help="Write a comparison's or a sweep's report anew.")
@click.argument("folder", metavar="DIR")
@options("json")
@click.pass_obj
def report(out: Output, folder: str) -> None:
    """Write report.html anew from the results in DIR, the folder of a comparison or of a sweep."""
    path = _write(folder)
    out.document({"report": str(path)})
    out.say(f"report: {path}")


def _write(folder: str) -> str:
    from pathlib import Path

    if (Path(folder) / "trials.jsonl").is_file():
        from podium.study.sweeps import write_all

        return write_all(folder).report
    from podium.study.report import write_report

    return str(write_report(folder))

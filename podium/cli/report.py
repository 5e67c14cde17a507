"""`podium report`: a comparison's page, made anew from its results."""

from __future__ import annotations

import click

from podium.cli.options import options
from podium.cli.output import Output


@click.command(short_help="Write a comparison's report anew.")
@click.argument("folder", metavar="DIR")
@options("json")
@click.pass_obj
def report(out: Output, folder: str) -> None:
    """Write report.html anew from the results in DIR, a comparison's folder."""
    from podium.study.report import write_report

    path = write_report(folder)
    out.document({"report": str(path)})
    out.say(f"report: {path}")

"""`podium doctor`: what works on this machine, and a fix for each failure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from podium.cli.options import options
from podium.cli.output import Output

if TYPE_CHECKING:
    from podium.cli.checkup import Check

MARKS = {"ok": "✓", "failed": "✗", "skipped": "–"}


@click.command()
@options("json")
@click.pass_obj
def doctor(out: Output) -> int:
    """Try what Podium needs on this machine. A tick means that it was executed, not only found."""
    from podium.cli.checkup import checks, to_dict

    found = checks()
    failed = [check.name for check in found if check.status == "failed"]
    out.document(to_dict(found))
    out.say(*map(line_of, found))
    out.say(f"\n{len(failed)} failed: {', '.join(failed)}" if failed else "\nall that was tried works")
    return 1 if failed else 0


def line_of(check: Check, width: int = 14) -> str:
    """A check with its mark, and below a cross what to do; `width`: columns of names."""
    line = f"{MARKS[check.status]} {check.name:<{width}} {check.detail}"
    return f"{line}\n  {'':<{width}} fix: {check.fix}" if check.fix and check.status != "ok" else line

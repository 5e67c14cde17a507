"""`podium scale`: more or fewer workers and servers, during the run."""

from __future__ import annotations

import click

from podium.cli.options import options
from podium.cli.output import Output


@click.command(short_help="Add or retire workers and servers of a run in progress.")
@click.argument("run_dir", metavar="RUN_DIR")
@click.option("--workers", "-n", type=int, metavar="N", help="The new number of workers.")
@click.option("--servers", type=int, metavar="N", help="The new number of servers.")
@click.option(
    "--host", "hosts", multiple=True, metavar="'HOST slots=N'", help="Add a host to a run on hosts. Repeatable."
)
@options("json")
@click.pass_obj
def scale(out: Output, run_dir: str, workers: int | None, servers: int | None, hosts: tuple[str, ...]) -> None:
    """Continue the run in RUN_DIR with more or fewer workers and servers.

    New ranks take part once they are ready; until then no worker waits for them. Ranks with the highest numbers retire
    first, after their current step.

    \b
    podium scale runs/digits-mlp-all-reduce-20261115-090427-61a2c4 --workers 4
    podium scale runs/… --host 'trainer@10.0.0.14 slots=2'
    """
    from podium.launch.scale import scale as ask

    asked = ask(run_dir, workers=workers, servers=servers, hosts=hosts)
    out.document(asked._asdict())
    out.say(*_lines(asked.workers, asked.servers, asked.starting, asked.retiring))


def _lines(workers: int, servers: int, starting: tuple[int, ...], retiring: tuple[int, ...]) -> list[str]:
    aim = _count(workers, "worker") + (f" and {_count(servers, 'server')}" if servers else "")
    if not starting and not retiring:
        return [f"nothing to do: there are {aim}"]
    moves = {"starting": starting, "retiring": retiring}
    listed = [f"{verb} {', '.join(map(str, ranks))}" for verb, ranks in moves.items() if ranks]
    return [f"to {aim}: {'; '.join(listed)}"]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"

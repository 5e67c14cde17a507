"""The command line: one file per verb, each a few lines over the Python API.

Help must be fast, so nothing here or in a verb's module imports torch, numpy or rich at the top; a verb's body does.
`main` is the click group, and is called as a function by the installed script.
"""

from __future__ import annotations

import click

import podium
from podium.cli.bench import bench
from podium.cli.certs import certs
from podium.cli.cluster import cluster
from podium.cli.compare import compare
from podium.cli.demo import demo
from podium.cli.doctor import doctor
from podium.cli.export import export
from podium.cli.group import Program
from podium.cli.listing import list_names
from podium.cli.report import report
from podium.cli.run import run
from podium.cli.scale import scale
from podium.cli.sweep import sweep
from podium.cli.trace import trace
from podium.cli.train import train

__all__ = ["main"]


@click.group(
    "podium", cls=Program, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(podium.__version__, prog_name="podium", message="%(prog)s %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Train a PyTorch model under any distribution strategy, and compare strategies on equal terms.

    New here? `podium demo` needs no network and takes under a minute. `podium doctor` shows what works on this machine.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


for _verb in (
    train,
    compare,
    sweep,
    report,
    export,
    trace,
    demo,
    run,
    scale,
    list_names,
    doctor,
    cluster,
    bench,
    certs,
):
    main.add_command(_verb)

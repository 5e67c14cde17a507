"""`podium export`: results as tables, or for TensorBoard and MLflow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from podium.cli.options import options
from podium.cli.output import Output
from podium.errors import as_request

if TYPE_CHECKING:
    from podium.lab.report.export import Export


@click.command(short_help="Write results as CSV or Parquet, or for TensorBoard or MLflow.")
@click.argument("folder", metavar="DIR")
@click.option("--to", default="csv", metavar="FORMAT", help="csv, parquet, tensorboard or mlflow. [csv]")
@click.option("--out", metavar="PATH", help="A folder; for mlflow also a tracking URI. [DIR/export]")
@options("json")
@click.pass_obj
def export(out_: Output, /, folder: str, to: str, out: str | None) -> None:
    """Write the results in DIR, the folder of a run, a comparison, a study or a sweep, for another program.

    Tables have one line per run, per validation and, of a single run, per step. Nothing leaves the machine unless
    --out is the URI of a server.

    \b
    podium export runs/compare-digits-mlp-20261115-093836-7d01b9
    podium export runs/… --to parquet --out tables
    podium export runs/… --to tensorboard --out tb && tensorboard --logdir tb
    """
    from podium.lab.report.export import export as write

    with as_request():
        done = write(folder, to=to, out=out)
    out_.document(done.to_dict())
    out_.say(*describe(done))


def describe(done: Export) -> list[str]:
    """What was written, and where."""
    if done.files:
        width = max(map(len, done.lines))
        named = zip(done.lines.items(), done.files, strict=True)
        return [f"{name:<{width}}  {count:>7,} lines  {path}" for (name, count), path in named]
    again = f", {done.skipped} were there already" if done.skipped else ""
    how = f"tensorboard --logdir {done.out}" if done.to == "tensorboard" else done.out
    return [f"{done.runs} run{'s' * (done.runs != 1)} written{again}: {how}"]

"""`podium run`: the user's own script, on several ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from podium.cli.interrupt import ASKED as FINISHING
from podium.cli.interrupt import stop_on_interrupt
from podium.cli.options import options, resolve_run
from podium.cli.output import Output
from podium.config import RunConfig
from podium.errors import ConfigError


@click.command(
    short_help="Start a script of your own on every rank.", context_settings={"ignore_unknown_options": True}
)
@click.argument("script", type=click.Path())
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@options(
    "workers",
    "strategy",
    "codec",
    "collective",
    "balance",
    "launcher",
    "hosts",
    "nodes",
    "cluster",
    "out",
    "set",
    "dry_run",
    "quiet",
    "json",
)
@click.pass_obj
def run(
    out: Output,
    /,
    script: str,
    args: tuple[str, ...],
    overrides: tuple[str, ...],
    dry_run: bool,
    quiet: bool,
    **given: Any,
) -> int:
    """Start SCRIPT, with its own training loop, on every rank.

    The options below are Podium's in any position; all others go to SCRIPT, and so does everything after `--`.

    \b
    podium run my_loop.py --workers 4 --lr 0.1
    podium run --workers 4 my_loop.py -- --workers 8  # the second is SCRIPT's
    """
    from pathlib import Path

    from podium.config import check_script, named_in

    config = resolve_run(None, overrides, given)
    check_script(config)
    if not Path(script).is_file():
        raise ConfigError(f"{script}: no such file")
    asked = {"script": script, "args": list(args), "workers": config.workers, "strategy": config.strategy}
    if dry_run:
        return _dry_run(out, config, script, args, named_in(overrides, given))
    from podium.cli.progress import progress
    from podium.launch.run import is_batch_job, run_script

    said = "the job stays in the queue" if is_batch_job(config) else FINISHING
    with stop_on_interrupt(said) as stop, progress(quiet=quiet or out.json) as shown:
        code = run_script(config, script, args, on_event=shown, stop=stop, given=named_in(overrides, given))
    out.document({**asked, "exit_code": code})
    return 130 if stop.is_set() else code


def _dry_run(out: Output, config: RunConfig, script: str, args: tuple[str, ...], given: frozenset[str]) -> int:
    asked = {"script": script, "args": list(args), "workers": config.workers, "strategy": config.strategy}
    if config.launcher == "slurm":
        from podium.launch.prepare import plan_script  # with torch
        from podium.launch.run import is_batch_job

        if is_batch_job(config):
            from podium.launch.hosts.sbatch import BatchJob, batch_script

            plan = plan_script(dataclasses.replace(config, task=script), place=False)
            text = batch_script(BatchJob(plan, script, args, given))
            out.document({**asked, "config": config.to_dict(), "batch_script": text})
            out.say(text.rstrip())
            return 0
    from podium.cli.summary import to_toml

    out.document({**asked, "config": config.to_dict()})
    out.say(f"# {script} {' '.join(args)}".rstrip(), to_toml(config))
    return 0

"""`podium train`: one run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from podium.cli.interrupt import stop_on_interrupt
from podium.cli.options import code_of_earlier_run, options, resolve_run
from podium.cli.output import Output
from podium.config import RunConfig, RunResult
from podium.errors import as_request

if TYPE_CHECKING:
    from podium.engine.build import Job


@click.command(short_help="Train one task with one strategy.")
@click.argument("task", required=False)
@options(
    "strategy",
    "codec",
    "collective",
    "balance",
    "workers",
    "seed",
    "epochs",
    "steps",
    "batch_size",
    "launcher",
    "hosts",
    "nodes",
    "cluster",
)
@options(
    "device",
    "data_dir",
    "out",
    "resume",
    "replay",
    "checkpoint_every",
    "config",
    "set",
    "log",
    "dry_run",
    "quiet",
    "json",
)
@click.pass_obj
def train(
    out: Output,
    /,
    config_file: str | None,
    overrides: tuple[str, ...],
    logs: tuple[str, ...],
    dry_run: bool,
    quiet: bool,
    **given: Any,
) -> int:
    """Train TASK: a built-in name, FILE.py:FUNCTION or MODULE:FUNCTION. [digits-mlp]

    Ctrl-C once finishes the step, saves and reports; twice stops at once.

    \b
    podium train digits-mlp --strategy all-reduce --workers 4
    podium train my.py:make_task --strategy parameter-server:mode=async -n 2
    """
    with code_of_earlier_run(config_file, overrides, given):
        config = resolve_run(config_file, overrides, given)
        from podium.launch.prepare import resolve_job  # with torch

        job = resolve_job(config)
        if dry_run:
            return _dry_run(out, config, job)
        from podium.launch.run import is_batch_job

        return _submit(out, config, job) if is_batch_job(config) else _run(out, config, job, logs, quiet)


def _dry_run(out: Output, config: RunConfig, job: Job) -> int:
    from podium.cli.summary import to_toml
    from podium.launch.notices import notices
    from podium.launch.run import is_batch_job

    if is_batch_job(config):
        from podium.launch.hosts.sbatch import BatchJob, batch_script

        script = batch_script(BatchJob(job, settings=config))
        out.document({**config.to_dict(), "script": script})
        out.say(script.rstrip())
    else:
        out.document(config.to_dict())
        out.say(to_toml(config))
    out.note(*notices(job))
    return 0


def _submit(out: Output, config: RunConfig, job: Job) -> int:
    """Run as a batch job of SLURM's, and wait for it."""
    from podium.launch.hosts.sbatch import BatchJob, run_as_batch_job

    with stop_on_interrupt("the job stays in the queue") as stop:
        submission = run_as_batch_job(BatchJob(job, settings=config), out.note, stop)
    result = submission.result()
    if result is None:
        out.document({"job": submission.number, "run_dir": str(submission.run_dir)})
        out.say(f"job {submission.number} has ended well; its folder, on its first node: {submission.run_dir}")
        return 0
    return _report(out, config, result)


def _run(out: Output, config: RunConfig, job: Job, logs: tuple[str, ...], quiet: bool) -> int:
    from podium.cli.progress import progress
    from podium.launch.run import launch_job
    from podium.records.writers import Together, open_log

    with as_request():
        writers = [open_log(text, config.out) for text in logs]
    with stop_on_interrupt() as stop, progress(quiet=quiet or out.json) as shown, Together(shown, *writers) as told:
        result = launch_job(job, on_event=told, stop=stop)
    return _report(out, config, result)


def _report(out: Output, config: RunConfig, result: RunResult) -> int:
    from podium.cli.summary import summary

    out.document(result.to_dict())
    out.say(summary(result, config))
    return 130 if result.status == "stopped" else 0

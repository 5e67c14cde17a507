"""A run as a batch job of SLURM's: outside an allocation, `--launcher slurm` writes a script and submits it.

The script asks for nodes and starts `podium train` with the same settings on the first of them; there, inside the
allocation, the run is one like any other (`podium.launch.hosts.slurm`). A person can read the script, edit it and
submit it again: the run's folder has the job's number in its name.

This process only waits for the job; without it, the job goes on.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import podium
from podium.config import RunConfig, RunResult, to_overrides
from podium.engine.build import Job
from podium.errors import CommError, ConfigError, Interrupted, RankFailed, RecordError
from podium.launch.base import RunPlan
from podium.launch.hosts.slurm import complaint, need_slurm, scontrol
from podium.launch.local import endpoints_of
from podium.records.folder_name import new_folder

Tell = Callable[[str], None]

JOB = "$SLURM_JOB_ID"
_SAVE_S = 60
_SUBMIT_S = 60.0
_POLL_S = 2.0
_SEEN_S = 10.0
_LAST_LINES = 5
_UNDER_WAY = (
    "PENDING",
    "CONFIGURING",
    "RUNNING",
    "COMPLETING",
    "SUSPENDED",
    "STOPPED",
    "SIGNALING",
    "STAGE_OUT",
    "RESIZING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "RESV_DEL_HOLD",
    "SPECIAL_EXIT",
)


# The script.


@dataclasses.dataclass(frozen=True)
class BatchJob:
    """A run to submit."""

    plan: RunPlan
    script: str | None = None
    """The user's own script, where the training loop is its own, and its arguments."""
    args: tuple[str, ...] = ()
    given: frozenset[str] = frozenset()
    """Settings that the user set, even to their default."""
    settings: RunConfig | None = None
    """The configuration as the user gave it: the plan's has the task's own numbers filled in."""

    @property
    def name(self) -> str:
        config = self.plan.config
        task = Path(config.task.partition(":")[0]).stem
        return re.sub(r"[^\w.]+", "-", f"{task}-{config.strategy.rpartition(':')[2]}").strip("-")

    @property
    def folder(self) -> Path:
        """Where the script, the job's output and the run's folder are."""
        config = self.plan.config
        return Path(config.run_dir).resolve().parent if config.run_dir else Path(config.out).resolve()

    @property
    def run_dir(self) -> str:
        """The run's folder; with `JOB` in its name, unless the user has chosen one."""
        chosen = self.plan.config.run_dir
        return str(Path(chosen).resolve()) if chosen else f"{self.folder / self.name}-{JOB}"

    @property
    def output(self) -> str:
        """The file that the job writes to; `%j` stands for its number."""
        return f"{str(self.folder / self.name).replace('%', '%%')}-%j.out"


def batch_script(job: BatchJob) -> str:
    """The script, which begins with what is asked of SLURM and ends with one command."""
    if isinstance(job.plan, Job) and not job.plan.task_is_named:
        raise ConfigError(
            f"task {job.plan.config.task}: a Task object cannot be sent to a batch job; name the function that makes "
            "it ('file.py:make_task')"
        )
    config, processes = job.plan.config, len(endpoints_of(job.plan))
    asked = [f"--job-name={job.name}", *_size(config, processes)]
    asked += [f"--chdir={_quoted(os.getcwd())}", f"--output={_quoted(job.output)}"]
    lines = [
        "#!/bin/bash",
        f"# {config.task} with {config.strategy} on {config.workers} workers, by Podium {podium.__version__}.",
        "# Edit what you like, and submit it again: sbatch FILE",
        *(f"#SBATCH {option}" for option in asked),
        "# The loss of a node ends the ranks there, not the job; and a job that ran is not started again.",
        "#SBATCH --no-kill --no-requeue",
        f"# {_SAVE_S} s before the time limit: finish the step, save and end.",
        f"#SBATCH --signal=B:TERM@{_SAVE_S}",
        *([f"#SBATCH {config.slurm}"] if config.slurm else []),
        "",
        "# `exec`: the signal must reach Podium itself.",
        " \\\n    ".join(_command(job)),
    ]
    return "\n".join(lines) + "\n"


def _size(config: RunConfig, processes: int) -> list[str]:
    """Options for the number of nodes and tasks; a task is a process of the run."""
    size = [f"--ntasks={processes}"]
    if config.nodes is not None:
        nodes = min(config.nodes, processes)
        size += [f"--nodes={nodes}", f"--ntasks-per-node={-(-processes // nodes)}"]  # as a maximum
    if config.threads is not None:
        size.append(f"--cpus-per-task={config.threads}")
    return size


def _command(job: BatchJob) -> list[str]:
    """The lines of the command that runs inside the allocation."""
    config = dataclasses.replace(job.settings or job.plan.config, run_dir=None)
    settings = to_overrides(config, also=job.given)
    words = [f"--set {shlex.quote(s)}" for s in settings if not s.startswith("task=")]
    before, _, number = job.run_dir.partition(JOB)
    end = f'"{JOB}"' if JOB in job.run_dir else ""
    words.append(f"--set {shlex.quote(f'run_dir={before}')}{end}{number}")
    program = f"exec {shlex.quote(sys.executable)} -m podium"
    if job.script is None:
        return [f"{program} train {shlex.quote(config.task)}", *words]
    return [f"{program} run", *words, shlex.join([job.script, "--", *job.args])]


def _quoted(text: str) -> str:
    """A value in a line of sbatch options."""
    return text if re.fullmatch(r"[\w./%+:@=,-]+", text) else '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


# Submission.


class Submission(NamedTuple):
    """A job in SLURM's queue."""

    number: str
    output: Path
    run_dir: Path

    def result(self) -> RunResult | None:
        """The run's result; None where its folder is on a disk that this machine does not see."""
        path = self.run_dir / "result.json"
        if not path.exists():
            return None
        try:
            return RunResult(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise RecordError(f"{path}: not a result: {error}") from error


def run_as_batch_job(job: BatchJob, tell: Tell, stop: threading.Event | None) -> Submission:
    """Submit the run and wait for its end; raises when it failed.

    Setting `stop` ends the waiting, and not the job: `Interrupted` is raised.
    """
    submission = submit(job, tell)
    wait_for(submission, tell, stop or threading.Event())
    return submission


def submit(job: BatchJob, tell: Tell) -> Submission:
    """Write the script and put it into SLURM's queue."""
    need_slurm("sbatch", "scontrol")
    text = batch_script(job)
    job.folder.mkdir(parents=True, exist_ok=True)
    path = new_folder(job.folder, job.name).with_suffix(".sbatch")
    path.write_text(text, encoding="utf-8")
    number = _sbatch(path)
    output = Path(job.output.replace("%j", number).replace("%%", "%"))
    tell(f"job {number} submitted with {path}")
    tell(f"its output: {output}; to watch it: squeue --job {number}; tail -f {shlex.quote(str(output))}")
    tell(f"Ctrl-C leaves it in the queue; to save and end it: scancel {number}")
    return Submission(number, output, Path(job.run_dir.replace(JOB, number)))


def _sbatch(path: Path) -> str:
    words = ("sbatch", "--parsable", str(path))
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SUBMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise CommError(f"sbatch: no answer from SLURM's controller within {_SUBMIT_S:g} s") from error
    if done.returncode != 0:
        raise ConfigError(f"SLURM did not accept {path}: {complaint(done)}; edit it and try: sbatch {path}")
    return done.stdout.strip().partition(";")[0]  # NUMBER or NUMBER;CLUSTER


# Waiting.


class _State(NamedTuple):
    name: str
    why: str
    nodes: str
    code: int

    @classmethod
    def of(cls, shown: str) -> _State:
        """From what `scontrol show job --oneliner` prints."""
        found = dict(re.findall(r"(?:^| )(JobState|Reason|NodeList|ExitCode)=(\S*)", shown))
        code, signal = map(int, found["ExitCode"].split(":"))
        return cls(found["JobState"], found["Reason"], found["NodeList"], code or (signal and 128 + signal))

    def __str__(self) -> str:
        if self.name == "RUNNING":
            return f"running on {self.nodes}"
        return self.name.lower() + (f" ({self.why})" if self.why not in ("None", "") else "")


def wait_for(job: Submission, tell: Tell, stop: threading.Event) -> None:
    """Wait until the job has ended; raises when it failed."""
    said = ""
    while True:
        try:
            state = _State.of(scontrol("show", "job", job.number, "--oneliner"))
        except CommError as error:
            _raise_forgotten(job, error)
            text = f"{error}; it is asked again"
        else:
            if state.name not in _UNDER_WAY:
                return _conclude(job, state)
            text = f"job {job.number}: {state}"
        if text != said:
            tell(text)
            said = text
        if stop.wait(_POLL_S):
            raise Interrupted(
                f"job {job.number} stays in the queue; its output: {job.output}; to save and end it: "
                f"scancel {job.number}"
            )


def _raise_forgotten(job: Submission, error: CommError) -> None:
    if "Invalid job id" in str(error):
        raise RankFailed(
            f"SLURM does not know job {job.number} any more, so how it ended is not known; its output: {job.output}"
        ) from error


def _conclude(job: Submission, state: _State) -> None:
    _wait_for_file(job.output)  # a shared disk may be late
    found = job.result()
    if state.name == "COMPLETED" or (found is not None and found.status == "stopped"):
        return
    failed = RankFailed("\n  ".join([f"job {job.number} ended: {state}; its output: {job.output}", *_last(job.output)]))
    failed.exit_code = state.code or 1
    raise failed


def _wait_for_file(path: Path) -> None:
    pause = threading.Event()
    for _ in range(int(_SEEN_S / _POLL_S)):
        if path.exists() or not path.parent.is_dir():
            return
        pause.wait(_POLL_S)


def _last(output: Path) -> list[str]:
    """The last lines of a job's output, where it can be seen from here."""
    try:
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.strip()][-_LAST_LINES:]

"""What is asked of SLURM, and what its answers mean."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from podium.config import RunConfig, resolve
from podium.engine.build import Job
from podium.errors import CommError, ConfigError
from podium.launch.hosts.entries import HostEntry
from podium.launch.hosts.invitation import Invitation
from podium.launch.hosts.sbatch import BatchJob, Submission, _State, batch_script
from podium.launch.hosts.slurm import Slurm, need_slurm, spread, step_command, task_numbers, tasks_per_node
from podium.launch.prepare import plan_script, resolve_job
from podium.tasks.digits import digits_mlp

HOSTNAMES = """#!/bin/sh
case "$2" in
  hostnames) printf 'n1\\nn2\\nn3\\n';;
  nodes) echo "NodeName=n1 NodeAddr=127.0.0.1 NodeHostName=n1"; echo "NodeName=n2 NodeAddr=127.0.0.2 State=IDLE";;
esac
"""


@pytest.fixture
def allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An allocation of three nodes, as far as the environment and two programs tell."""
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text(HOSTNAMES)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "1(x3)"}.items():
        monkeypatch.setenv(name, value)
    for name in ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


class TestNumbers:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [("2", [2]), ("2(x3)", [2, 2, 2]), ("2(x2),1", [2, 2, 1]), ("4,1(x2),3", [4, 1, 1, 3])],
    )
    def test_tasks_of_each_node(self, text: str, expected: list[int]) -> None:
        assert tasks_per_node(text) == expected

    def test_what_is_no_count_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"SLURM_TASKS_PER_NODE must be like 2\(x3\),1, got '2x3'"):
            tasks_per_node("2x3")

    @pytest.mark.parametrize(("text", "expected"), [("3", {3}), ("0-2", {0, 1, 2}), ("0-1,4,6-7", {0, 1, 4, 6, 7})])
    def test_tasks_that_srun_names(self, text: str, expected: set[int]) -> None:
        assert task_numbers(text) == expected


class TestAllocation:
    def test_nodes_share_the_ranks_where_nobody_asked_for_tasks(self, allocation: pytest.MonkeyPatch) -> None:
        assert Slurm().entries(6) == [HostEntry("n1"), HostEntry("n2"), HostEntry("n3")]

    def test_tasks_that_were_asked_for_are_the_slots(self, allocation: pytest.MonkeyPatch) -> None:
        allocation.setenv("SLURM_NTASKS", "4")
        allocation.setenv("SLURM_TASKS_PER_NODE", "2,1(x2)")
        assert [entry.slots for entry in Slurm().entries(4)] == [2, 1, 1]
        with pytest.raises(ConfigError, match=r"needs 5 processes, and job 7 has 4 tasks on 3 nodes: .*--ntasks=5"):
            Slurm().entries(5)

    def test_nodes_with_more_tasks_than_needed_share_the_ranks_evenly(self) -> None:
        assert spread([2, 2, 2], 4) == [2, 1, 1]
        assert spread([1, 4, 4], 6) == [1, 3, 2]
        assert spread([4, 4, 4], 2) == [1, 1, 0]

    def test_the_head_is_reached_at_the_interface_to_the_nodes(self, allocation: pytest.MonkeyPatch) -> None:
        assert Slurm().head_address([HostEntry("n1"), HostEntry("n2")]) == "127.0.0.1"

    def test_without_its_commands_the_error_says_which(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(ConfigError, match="launcher slurm needs the command `sbatch`"):
            need_slurm("sbatch", "scontrol")

    def test_a_controller_that_is_down_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'Slurmctld(primary) at n1 is DOWN'\nexit 1\n")
        (tmp_path / "scontrol").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        with pytest.raises(CommError, match=r"controller does not answer: Slurmctld\(primary\) at n1 is DOWN"):
            need_slurm("scontrol")


class TestStep:
    def test_one_step_has_a_task_on_each_node_and_none_ends_the_others(self) -> None:
        words = step_command([HostEntry("n1"), HostEntry("n3")])
        assert words[0] == "srun" and words[-3:-1] == ["sh", "-c"] and words[-1].count("-m podium.node --join") == 2
        options = words[1:-3]
        assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=n1,n3"} <= set(options)
        assert {"--overlap", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"} <= set(options)

    def test_an_agent_finds_its_number_by_the_name_of_its_node(self, monkeypatch: pytest.MonkeyPatch) -> None:
        invitation = Invitation("tcp:10.0.0.1:5", b"s" * 32, None, None, 60.0)
        line = invitation.for_nodes({"n1": 4, "n3": 5})
        monkeypatch.setenv("SLURMD_NODENAME", "n3")
        assert Invitation.from_line(line).number == 5
        assert json.loads(invitation.numbered(2))["number"] == 2


def script_of(tmp_path: Path, **fields: Any) -> tuple[str, list[str]]:
    """The batch script for these settings: its text, and the options in it."""
    config = RunConfig(launcher="slurm", out=str(tmp_path), **fields)
    text = batch_script(BatchJob(resolve_job(config), settings=config))
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    return text, [word for line in lines for word in shlex.split(line)]


class TestBatchScript:
    def test_it_asks_for_nodes_and_tasks(self, tmp_path: Path) -> None:
        _, asked = script_of(tmp_path, workers=4, nodes=3)
        assert {"--nodes=3", "--ntasks=4", "--ntasks-per-node=2", "--no-kill", "--no-requeue"} <= set(asked)
        assert f"--output={tmp_path}/digits-mlp-all-reduce-%j.out" in asked
        _, asked = script_of(tmp_path, workers=2, threads=8, strategy="parameter-server", nodes=9)
        assert {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--cpus-per-task=8"} <= set(asked)
        assert not [option for option in script_of(tmp_path, workers=2)[1] if option.startswith("--nodes")]

    def test_the_users_options_come_last_as_they_are(self, tmp_path: Path) -> None:
        text, asked = script_of(tmp_path, slurm="-p gpu --time=2:00:00 --comment='my run'")
        assert asked[-4:] == ["-p", "gpu", "--time=2:00:00", "--comment=my run"]
        assert "#SBATCH -p gpu --time=2:00:00 --comment='my run'\n" in text

    def test_an_option_cannot_bring_a_line_of_its_own(self) -> None:
        with pytest.raises(ConfigError, match="slurm must be options of sbatch, on one line"):
            RunConfig(slurm="--time=1\nrm -rf /")

    def test_the_command_gives_the_same_configuration(self, tmp_path: Path) -> None:
        fields: dict[str, Any] = {
            "task_options": {"lr": 0.05},
            "strategy": "phases",
            "strategy_options": {"run": "all-reduce until epoch:at=2 | local-sgd:period=4"},
            "workers": 3,
            "nodes": 2,
            "slurm": "--time=1:00:00",
            "steps": 40,
            "data_dir": "a folder's",
            "shares": (1.0, 2.0, 1.0),
        }
        text, _ = script_of(tmp_path, **fields)
        command = text[text.index("exec ") :].replace('"$SLURM_JOB_ID"', "12")
        words = shlex.split(command.replace("\\\n", " "))
        assert words[2:5] == ["-m", "podium", "train"] and words[5] == "digits-mlp"
        overrides = words[7::2]
        assert words[6::2] == ["--set"] * len(overrides)
        found = resolve(None, overrides)
        assert found == RunConfig(
            launcher="slurm", out=str(tmp_path), run_dir=f"{tmp_path}/digits-mlp-phases-12", **fields
        )

    def test_bash_reads_it(self, tmp_path: Path) -> None:
        path = tmp_path / "job.sbatch"
        path.write_text(script_of(tmp_path, workers=2, data_dir="$HOME `x` 'y'")[0])
        subprocess.run(["bash", "-n", str(path)], check=True, timeout=20)

    def test_a_chosen_folder_is_the_runs(self, tmp_path: Path) -> None:
        text, _ = script_of(tmp_path, run_dir=str(tmp_path / "mine"))
        assert text.rstrip().endswith(f"--set run_dir={tmp_path}/mine")

    def test_a_script_of_the_users_own_gets_its_arguments(self, tmp_path: Path) -> None:
        (tmp_path / "loop.py").write_text("")
        config = RunConfig(launcher="slurm", task=str(tmp_path / "loop.py"), workers=2)
        plan = plan_script(config, place=False)
        text = batch_script(BatchJob(plan, config.task, ("--lr", "a b"), frozenset({"seed"})))
        assert " -m podium run \\\n" in text and "--set seed=0" in text
        assert text.rstrip().endswith(f"{tmp_path}/loop.py -- --lr 'a b'")

    def test_a_task_without_a_name_is_refused(self, tmp_path: Path) -> None:
        job: Job = resolve_job(RunConfig(launcher="slurm"), digits_mlp())
        with pytest.raises(ConfigError, match="a Task object cannot be sent to a batch job"):
            batch_script(BatchJob(job))


SHOWN = "JobId=3 JobName=x JobState={} Reason={} ExitCode={} ReqNodeList=(null) NodeList={} BatchHost=n1"


class TestWaiting:
    @pytest.mark.parametrize(
        ("shown", "text", "code"),
        [
            (("PENDING", "Resources", "0:0", "(null)"), "pending (Resources)", 0),
            (("RUNNING", "None", "0:0", "n[1-3]"), "running on n[1-3]", 0),
            (("FAILED", "NonZeroExitCode", "2:0", "n1"), "failed (NonZeroExitCode)", 2),
            (("TIMEOUT", "TimeLimit", "0:15", "n1"), "timeout (TimeLimit)", 143),
            (("COMPLETED", "None", "0:0", "n1"), "completed", 0),
        ],
    )
    def test_states(self, shown: tuple[str, ...], text: str, code: int) -> None:
        state = _State.of(SHOWN.format(*shown))
        assert (str(state), state.code) == (text, code)

    def test_a_folder_on_another_machine_has_no_result_here(self, tmp_path: Path) -> None:
        assert Submission("3", tmp_path / "out", tmp_path / "run").result() is None

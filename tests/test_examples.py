"""The examples run as the README says, small."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import podium
from podium.engine.files import load_tensors
from podium.launch.clusters.description import read_cluster

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
ROUNDS_AS_SHOWN = torch.__version__.startswith("2.13.0") and torch.backends.cpu.get_cpu_capability() == "AVX512"
"""Whether this machine rounds as the one did that the README's hashes are from."""
LOCAL_STEPS = f"{EXAMPLES / 'my_strategy.py'}:LocalSteps"


def run_python(*words: str, cwd: Path) -> str:
    """What a Python process printed; it must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, *words], check=False, cwd=cwd, env=environment, capture_output=True, text=True, timeout=100
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def accuracy_in(output: str) -> float:
    found = re.search(r"accuracy (0\.\d+)", output)
    assert found, output
    return float(found[1])


class TestTheUsersOwnLoop:
    @pytest.mark.slow
    def test_the_plain_script_learns_without_podium(self, tmp_path: Path) -> None:
        assert accuracy_in(run_python(str(EXAMPLES / "train_torch.py"), cwd=tmp_path)) > 0.85

    @pytest.mark.slow
    def test_the_podium_script_comes_to_the_same_by_itself_and_on_two_workers(self, tmp_path: Path) -> None:
        script = str(EXAMPLES / "train_podium.py")
        alone = run_python(script, cwd=tmp_path)
        words = ("-m", "podium", "run", script, "--workers", "2", "--out", str(tmp_path), "--quiet")
        together = run_python(*words, cwd=tmp_path)
        assert "on 1 workers" in alone and "on 2 workers" in together
        if ROUNDS_AS_SHOWN:
            readme = (ROOT / "README.md").read_text(encoding="utf-8")
            assert alone.strip() in readme and together.strip() in readme
        assert accuracy_in(alone) > 0.85
        assert accuracy_in(together) == pytest.approx(accuracy_in(alone), abs=0.01)

    def test_the_readme_shows_the_real_difference_between_the_two_scripts(self) -> None:
        block = re.search(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
        assert block
        scripts = {sign: (EXAMPLES / name).read_text(encoding="utf-8").splitlines() for sign, name in SIDES.items()}
        shown = [line for line in block[1].splitlines() if line[:3] not in ("---", "+++") and line[:1] in SIDES]
        assert len(shown) > 10
        for line in shown:
            assert line[1:] in scripts[line[0]], line


SIDES = {"-": "train_torch.py", "+": "train_podium.py"}


def test_the_task_of_ones_own_learns(tmp_path: Path) -> None:
    spec = f"{EXAMPLES / 'my_task.py'}:make_task"
    result = podium.train(spec, workers=2, launcher="threads", task_options={"lr": 0.2}, out=str(tmp_path))
    assert result.metrics["accuracy"] > 0.9


class TestTheStrategyOfOnesOwn:
    def train(self, folder: Path, strategy: str = f"{LOCAL_STEPS}:every=4", **options: Any) -> podium.RunResult:
        values = {"workers": 2, "launcher": "threads", "steps": 30, "out": str(folder), **options}
        return podium.train("digits-mlp", strategy=strategy, **values)

    def test_threads_processes_and_virtual_time_give_the_same_bits(self, tmp_path: Path) -> None:
        results = [self.train(tmp_path, launcher=launcher) for launcher in ("threads", "local", "virtual")]
        assert len({hash_ for result in results for hash_ in result.param_hash.values()}) == 1

    def test_replicas_agree_at_the_end_of_a_round_cut_short(self, tmp_path: Path) -> None:
        result = self.train(tmp_path, steps=30, workers=3)
        assert 30 % 4 and len(set(result.param_hash.values())) == 1

    def test_averaging_every_step_is_all_reduce(self, tmp_path: Path) -> None:
        ours, theirs = self.train(tmp_path, f"{LOCAL_STEPS}:every=1"), self.train(tmp_path, "all-reduce")
        for name, tensor in load_tensors(Path(theirs.model)).items():
            torch.testing.assert_close(load_tensors(Path(ours.model))[name], tensor, rtol=1e-4, atol=1e-6)

    def test_averaging_seldom_sends_less(self, tmp_path: Path) -> None:
        seldom, often = self.train(tmp_path, f"{LOCAL_STEPS}:every=10"), self.train(tmp_path, f"{LOCAL_STEPS}:every=1")
        assert seldom.sent_bytes < often.sent_bytes / 3

    def test_all_workers_stop_after_the_same_average(self, tmp_path: Path) -> None:
        stop = threading.Event()

        def ask(event: dict[str, Any]) -> None:
            if event["event"] == "progress":
                stop.set()

        result = self.train(tmp_path, steps=400, workers=3, on_event=ask, stop=stop)
        assert result.status == "stopped" and result.steps % 4 == 0
        assert len(set(result.param_hash.values())) == 1

    def test_a_wrong_option_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(podium.PodiumError, match="every must be at least 1, got 0"):
            self.train(tmp_path, f"{LOCAL_STEPS}:every=0")


@pytest.mark.parametrize("path", sorted((EXAMPLES / "clusters").glob("*.toml")), ids=lambda path: path.stem)
def test_the_cluster_files_run_in_virtual_time(path: Path, tmp_path: Path) -> None:
    workers = min(8, len(read_cluster(path).nodes))
    result = podium.train(
        "digits-mlp", workers=workers, launcher="virtual", cluster=str(path), steps=3, out=str(tmp_path)
    )
    assert result.steps == 3 and result.seconds > 0


def test_a_rule_of_ones_own_ends_a_phase(tmp_path: Path) -> None:
    rule = f"{EXAMPLES / 'my_rule.py'}:good_enough"
    strategy = f"all-reduce until {rule} | local-sgd:period=8"
    result = podium.train("digits-mlp", strategy=strategy, workers=2, launcher="threads", out=str(tmp_path))
    (switch,) = result.switches
    before = [row for row in result.history if row["epoch"] <= switch["epoch"]]
    assert before[-1]["accuracy"] > 0.9 >= before[0]["accuracy"]
    assert result.audit == {"missing": 0, "repeated": 0}


@pytest.mark.slow
def test_the_sweep_ends_with_a_model_that_can_be_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    said = run_python(str(EXAMPLES / "my_sweep.py"), str(folder), cwd=tmp_path)
    assert said.startswith("Best of 12 points") and "60 trials" in said
    assert accuracy_in(said) > 0.85 and (folder / "report.html").is_file()

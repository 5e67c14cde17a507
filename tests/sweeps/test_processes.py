"""Trials in other processes: what they come to, and what happens when one dies, raises, hangs or is to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from podium.errors import ConfigError, TrainingError
from podium.sweeps.executors.base import State
from podium.sweeps.executors.mps import Mps
from podium.sweeps.executors.processes import Processes
from podium.sweeps.fused.device_data import DeviceData
from podium.sweeps.recipe import Recipe
from podium.sweeps.reference import ReferenceTrainer, train_trial
from podium.sweeps.trial import GO, Evaluation, Outcome, Trial, Verdict
from podium.task import Task, load_task

ROOT = Path(__file__).resolve().parents[2]
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TRAPPED = '''
import os, signal, time
import torch
from podium.data.base import ArrayDataset, Data
from podium.task import Task
from torch import nn
from torch.nn.functional import cross_entropy

def data():
    inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    rows = ArrayDataset(inputs, inputs[:, :3].argmax(dim=1))
    return Data(train=rows, test=rows)

def net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Linear(8, 3))

def task(*, trap="", at=5, epochs=3, lr=0.1):
    """Falls into the trap at its step number `at`."""
    seen = [0]
    def loss(outputs, targets):
        seen[0] += outputs.requires_grad
        if seen[0] == at and outputs.requires_grad:
            if trap == "raise":
                raise ZeroDivisionError("nothing to divide by")
            if trap == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if trap == "exit":
                print("enough of this", flush=True)
                os._exit(3)
            if trap == "hang":
                time.sleep(3600)
        return cross_entropy(outputs, targets)
    return Task(name="trapped", model=net, data=data, loss=loss, batch_size=16, epochs=epochs,
                optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))
'''


class ListQueue:
    """Gives out a list of trials, and keeps all that it hears."""

    def __init__(self, trials: list[Trial], verdict: Callable[[Trial, Evaluation], Verdict] | None = None) -> None:
        self.trials, self.verdict = list(trials), verdict
        self.outcomes: dict[int, Outcome] = {}
        self.states: dict[int, State | None] = {}
        self.reports: list[tuple[int, Evaluation]] = []
        self.events: list[dict[str, Any]] = []
        self.stop_at = float("inf")

    def take(self) -> Trial | None:
        return self.trials.pop(0) if self.trials else None

    def expects_more(self) -> bool:
        return bool(self.trials)

    def report(self, trial: Trial, evaluation: Evaluation) -> Verdict:
        self.reports.append((trial.number, evaluation))
        return GO if self.verdict is None else self.verdict(trial, evaluation)

    def hand_in(self, outcome: Outcome, state: State | None) -> None:
        assert outcome.trial.number not in self.outcomes, "handed in twice"
        self.outcomes[outcome.trial.number], self.states[outcome.trial.number] = outcome, state

    def stop_requested(self) -> bool:
        return time.monotonic() >= self.stop_at

    def pids(self) -> list[int]:
        return [event["pid"] for event in self.events if event["event"] == "process started"]


def alone(recipe: Recipe, queue: ListQueue) -> ListQueue:
    """The oracle: the same trials, one after the other, in this process."""
    while (trial := queue.take()) is not None:
        runner = ReferenceTrainer(recipe, trial, DeviceData(recipe.data_of(recipe.task_of(trial)), recipe.torch_device))
        outcome = train_trial(runner, queue.report, "sequential", lambda: False)
        assert outcome is not None
        queue.hand_in(outcome, runner.state())
    return queue


def assert_same(found: ListQueue, expected: ListQueue, executor: str) -> None:
    """In bits, whatever else there was."""
    for number, outcome in expected.outcomes.items():
        got, state, ours = found.outcomes[number], found.states[number], expected.states[number]
        assert got.executor == executor
        assert repr((got.status, got.why, got.steps, got.samples)) == repr(
            (outcome.status, outcome.why, outcome.steps, outcome.samples)
        )
        assert repr(got.history) == repr(outcome.history)  # as text: one that diverged ends with no number
        assert got.evaluation is got.history[-1]
        assert state is not None and ours is not None and list(state) == list(ours)
        assert all(state[k].equal(ours[k]) or not ours[k].isfinite().all() for k in ours)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def stops_third_report_of_2(trial: Trial, evaluation: Evaluation) -> Verdict:
    stop = trial.number == 2 and evaluation.epoch >= 2
    return Verdict(action="stop", why="as the test says") if stop else GO


DIGITS = [
    Trial(number=0, options={"lr": 0.3}),
    Trial(number=1, options={"lr": 0.05, "momentum": 0.9}, seed=3, fold=1),
    Trial(number=2, options={"lr": 0.1, "hidden": [32, 16], "batch_size": 100}, seed=1, fold=0),
    Trial(number=3, options={"lr": 1e30}, seed=2),
    Trial(number=4, options={"lr": 0.2, "label_smoothing": 0.1, "epochs": 2}, fold=1),
]


def digits(device: str) -> Recipe:
    rows = np.random.default_rng(0).permutation(1437)
    folds = [(rows[500:], rows[:500]), (rows[:900], rows[900:])]
    return Recipe(task="digits-mlp", options={"epochs": 3}, folds=folds, device=device, eval_every=1)


@pytest.fixture
def trapped(tmp_path: Path) -> Recipe:
    path = tmp_path / "trapped.py"
    path.write_text(TRAPPED)
    return Recipe(task=f"{path}:task", device="cpu", eval_every=1)


def run(executor: Any, recipe: Recipe, queue: ListQueue) -> ListQueue:
    """Run to the end; nobody is left after it."""
    try:
        executor.run(recipe, queue, queue.events.append)
    finally:
        assert not [pid for pid in queue.pids() if is_alive(pid)]
    return queue


def test_trials_in_processes_come_to_the_same_bits_as_alone() -> None:
    recipe = digits("cpu")
    expected = alone(recipe, ListQueue(DIGITS, stops_third_report_of_2))
    assert [o.status for o in expected.outcomes.values()] == ["finished", "finished", "stopped", "diverged", "finished"]
    found = run(Processes(count=2, threads=1), recipe, ListQueue(DIGITS, stops_third_report_of_2))
    assert_same(found, expected, "processes")
    key = lambda told: (told[0], told[1].step)  # noqa: E731
    assert sorted(found.reports, key=key) == sorted(expected.reports, key=key)
    assert len(found.pids()) == 2


@pytest.mark.slow
def test_one_that_is_killed_or_raises_fails_with_the_cause_and_harms_no_other(trapped: Recipe) -> None:
    options: list[dict[str, Any]] = [
        {},
        {"trap": "kill"},
        {"lr": 0.2},
        {"trap": "raise"},
        {"trap": "exit"},
        {"lr": 0.3},
    ]
    trials = [Trial(number=i, options=own, seed=i) for i, own in enumerate(options)]
    found = run(Processes(count=2, threads=1), trapped, ListQueue(trials))
    assert found.outcomes[1].status == found.outcomes[3].status == found.outcomes[4].status == "failed"
    assert found.outcomes[1].why == "its process was killed by signal 9 (SIGKILL)"
    assert found.outcomes[3].why == "ZeroDivisionError: nothing to divide by"
    assert found.outcomes[4].why == "its process ended with exit code 3 (enough of this)"
    assert [found.outcomes[i].steps for i in (1, 3, 4)] == [4, 4, 4]
    assert [found.states[i] for i in (1, 3, 4)] == [None] * 3
    assert_same(found, alone(trapped, ListQueue([trials[i] for i in (0, 2, 5)])), "processes")
    (told,) = [event for event in found.events if event["event"] == "trial failed"]
    assert "trapped.py" in told["traceback"]
    assert 3 <= len(found.pids()) <= 4  # two that began, and one for each that was lost while trials were left


def test_a_death_is_noticed_though_a_process_of_the_tasks_own_holds_the_connection(tmp_path: Path) -> None:
    path, own = tmp_path / "forks.py", tmp_path / "own"
    fork = f"own = os.fork()\n    time.sleep(60) if own == 0 else open({str(own)!r}, 'w').write(str(own))"
    path.write_text(TRAPPED.replace("seen = [0]", f"seen = [0]\n    {fork}"))
    recipe = Recipe(task=f"{path}:task", device="cpu", eval_every=1)
    began = time.monotonic()
    try:
        found = run(Processes(count=1, threads=1), recipe, ListQueue([Trial(number=0, options={"trap": "kill"})]))
    finally:
        if own.is_file():
            os.kill(int(own.read_text()), signal.SIGKILL)
    assert found.outcomes[0].why == "its process was killed by signal 9 (SIGKILL)"
    assert time.monotonic() - began < 30


def test_one_without_progress_is_taken_for_dead(trapped: Recipe) -> None:
    trials = [Trial(number=0, options={"trap": "hang"}), Trial(number=1)]
    began = time.monotonic()
    found = run(Processes(count=1, threads=1, deadline_s=1.5), trapped, ListQueue(trials))
    assert "no progress within 1.5 s" in found.outcomes[0].why
    assert found.outcomes[1].status == "finished"
    assert time.monotonic() - began < 20


def test_a_request_to_stop_is_met_between_steps(trapped: Recipe) -> None:
    queue = ListQueue([Trial(number=i, options={"epochs": 10**6}) for i in range(2)])
    queue.stop_at = time.monotonic() + 1.5
    run(Processes(count=2, threads=1), Recipe(task=trapped.task, device="cpu"), queue)
    assert time.monotonic() - queue.stop_at < 4
    assert queue.outcomes == {} and len(queue.pids()) == 2


def test_an_interrupt_leaves_nobody_behind(trapped: Recipe) -> None:
    def interrupted(trial: Trial, evaluation: Evaluation) -> Verdict:
        raise KeyboardInterrupt

    queue = ListQueue([Trial(number=i, options={"epochs": 10**6}) for i in range(2)], interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(Processes(count=2, threads=1), trapped, queue)
    assert queue.pids()


@pytest.mark.slow
def test_it_gives_up_when_every_process_dies(trapped: Recipe) -> None:
    queue = ListQueue([Trial(number=i, options={"trap": "kill", "at": 1}) for i in range(40)])
    with pytest.raises(TrainingError, match=r"lost one after the other.*signal 9"):
        run(Processes(count=2, threads=1), trapped, queue)
    assert 8 < len(queue.outcomes) < 12


@pytest.mark.slow
def test_processes_end_when_their_parent_is_killed(trapped: Recipe) -> None:
    script = f"""
from podium.sweeps.executors.processes import Processes
from podium.sweeps.recipe import Recipe
from podium.sweeps.trial import Trial
from tests.sweeps.test_processes import ListQueue

queue = ListQueue([Trial(number=0, options={{"epochs": 10**6}})])
recipe = Recipe(task={trapped.task!r}, device="cpu")
Processes(count=1).run(recipe, queue, lambda event: print(event["pid"], flush=True))
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    with parent, parent.stdout as said:
        child = int(said.readline())
        assert is_alive(child)
        parent.send_signal(signal.SIGKILL)
        until = time.monotonic() + 10
        while is_alive(child):
            assert time.monotonic() < until, "it lives on"
            time.sleep(0.02)


def test_what_cannot_be_is_refused_before_anything_starts(trapped: Recipe) -> None:
    queue = ListQueue([Trial(number=0)])
    with pytest.raises(ConfigError, match="count must be at least 1, got 0"):
        Processes(count=0)
    with pytest.raises(ConfigError, match="mode must be one of eager, graph, compiled"):
        Processes(mode="swift")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at most 48"):
        Mps(count=49)
    with pytest.raises(ConfigError, match="mode=graph needs a GPU"):
        Processes(mode="graph").run(trapped, queue, print)
    with pytest.raises(ConfigError, match="MPS needs a GPU"):
        Mps(count=1).run(trapped, queue, print)
    task = load_task("digits-mlp")
    assert isinstance(task, Task)
    with pytest.raises(ConfigError, match="name it"):
        Processes(count=1).run(Recipe(task=task, device="cpu"), queue, print)
    with pytest.raises(ConfigError, match="plain values"):
        Processes(count=1).run(trapped, ListQueue([Trial(number=0, options={"lr": Tensor([0.1])})]), print)


def test_a_copy_between_trials_is_refused(trapped: Recipe) -> None:
    queue = ListQueue([Trial(number=0)], lambda trial, evaluation: Verdict(action="become", source=0))
    with pytest.raises(ConfigError, match="executor must be fused"):
        run(Processes(count=1), trapped, queue)


@pytest.mark.parametrize("executor", [Processes(count=2, threads=1), Mps(count=2, threads=1)], ids=["processes", "mps"])
class TestOnGpu:
    pytestmark = needs_gpu

    def test_trials_come_to_the_same_bits_as_alone(self, executor: Any) -> None:
        recipe = digits("cuda")
        expected = alone(recipe, ListQueue(DIGITS, stops_third_report_of_2))
        found = run(executor, recipe, ListQueue(DIGITS, stops_third_report_of_2))
        assert_same(found, expected, executor.name)

    def test_one_that_raises_harms_no_other(self, executor: Any, trapped: Recipe) -> None:
        trials = [Trial(number=0, options={"trap": "raise"}), Trial(number=1)]
        recipe = Recipe(task=trapped.task, device="cuda", eval_every=1)
        found = run(executor, recipe, ListQueue(trials))
        assert [found.outcomes[i].status for i in range(2)] == ["failed", "finished"]

    def test_a_request_to_stop_is_met_between_steps(self, executor: Any, trapped: Recipe) -> None:
        queue = ListQueue([Trial(number=i, options={"epochs": 10**6}) for i in range(2)])
        queue.stop_at = time.monotonic() + 6
        run(executor, Recipe(task=trapped.task, device="cuda"), queue)
        assert time.monotonic() - queue.stop_at < 15
        assert queue.outcomes == {} and os.getpid() not in queue.pids()

"""A trial in a fused array is the same trial as alone; its neighbours do not matter to it."""

from __future__ import annotations

import dataclasses
import gc
import random
import time
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from podium import Task
from podium.errors import ConfigError
from podium.sweeps.executors.auto import Auto
from podium.sweeps.executors.candidate import REPEATS, Candidate
from podium.sweeps.executors.choice import decide
from podium.sweeps.executors.fused import Fused
from podium.sweeps.executors.sequential import Sequential
from podium.sweeps.executors.streams import Streams
from podium.sweeps.executors.timing import Timing, step_timings
from podium.sweeps.fused import slots
from podium.sweeps.fused.array import Array
from podium.sweeps.fused.probe import TOLERANCE, ProbeResult, probe
from podium.sweeps.fused.stacked_optim import Place, spans_of
from podium.sweeps.trial import GO, Evaluation, Trial, Verdict
from podium.tasks import TASKS
from tests.sweeps import nets
from tests.sweeps.nets import Queue, alone_after, apart, array_of, recipe_of
from tests.tasks.test_tasks import make as make_task

ROUNDING = 1e-12


def trials_of(*options: dict[str, Any]) -> list[Trial]:
    return [Trial(number=i, seed=i, options=one) for i, one in enumerate(options)]


def assert_equals_alone(task: Any, trials: list[Trial], steps: int = 12, **settings: Any) -> None:
    recipe = recipe_of(task)
    array = array_of(recipe, trials, **settings)
    for _ in range(steps):
        array.step()
    for row, trial in enumerate(trials):
        alone = alone_after(recipe, trial, steps)
        assert apart(alone.state(), array.save(row)) < ROUNDING, trial
        mine, theirs = array.evaluate([row], [steps])[0], alone.evaluate()
        assert mine.metrics == theirs.metrics
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-9)


class TestOneRow:
    """Whatever may differ between trials differs in the fused array too."""

    def test_learning_rate_momentum_decay_dropout_smoothing_and_seed(self) -> None:
        assert_equals_alone(
            nets.toy,
            trials_of(
                {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "dropout": 0.0, "label_smoothing": 0.0},
                {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2, "dropout": 0.5, "label_smoothing": 0.1},
                {"lr": 0.2, "momentum": 0.5, "weight_decay": 1e-3, "dropout": 0.9, "label_smoothing": 0.3},
            ),
        )

    @pytest.mark.parametrize(
        ("optimizer", "options"),
        [
            (torch.optim.SGD, [{"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "nesterov": True}]),
            (torch.optim.SGD, [{"momentum": 0.9, "dampening": 0.5}, {"momentum": 0.9, "dampening": 0.1}]),
            (torch.optim.Adam, [{"betas": [0.9, 0.99]}, {"betas": [0.5, 0.9], "eps": 1e-3}]),
            (torch.optim.Adam, [{"amsgrad": True, "weight_decay": 0.1}, {"amsgrad": True, "weight_decay": 0.0}]),
            (torch.optim.AdamW, [{"weight_decay": 0.1}, {"weight_decay": 0.5}]),
            (torch.optim.RMSprop, [{"alpha": 0.9, "momentum": 0.5}, {"alpha": 0.99, "momentum": 0.1}]),
            (torch.optim.RMSprop, [{"centered": True}, {"centered": True, "lr": 0.001}]),
            (torch.optim.Adagrad, [{"lr_decay": 0.1}, {"lr_decay": 0.0}]),
            (torch.optim.NAdam, [{"lr": 0.01}, {"lr": 0.02}]),  # no stacked form: torch's own, row by row
            (torch.optim.Adamax, [{"lr": 0.01}, {"lr": 0.02}]),
        ],
    )
    def test_every_optimizer(self, optimizer: Any, options: list[dict[str, Any]]) -> None:
        task = nets.task_of(partial(nets.net, norm=False), optimizer, lr=0.01)
        assert_equals_alone(task, trials_of(*options))

    def test_initial_accumulator_of_adagrad(self) -> None:
        def make(*, start: float) -> Task:
            return nets.task_of(nets.net, torch.optim.Adagrad, initial_accumulator_value=start)

        assert_equals_alone(make, trials_of({"start": 0.1}, {"start": 1.0}))
        task = nets.task_of(nets.net, torch.optim.Adagrad)
        assert_equals_alone(task, trials_of({"initial_accumulator_value": 0.1}, {"initial_accumulator_value": 1.0}))

    @pytest.mark.parametrize(
        "bad",
        [{"lr": -0.1}, {"lr": "0.1"}, {"lr": None}, {"momentum": float("nan")}, {"nesterov": 1}, {"order_seed": 2**64},
         {"init_seed": "x"}, {"dropout": "x"}, {"label_smoothing": 2}, {"clip_norm": "a"}, {"batch_size": 0}],
    )  # fmt: skip
    def test_an_option_that_cannot_be_is_refused_with_its_name(self, bad: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=next(iter(bad))):
            recipe_of(nets.task_of(nets.net)).make(Trial(number=0, options=bad))

    def test_what_else_an_optimizer_was_given_stays_when_a_trial_changes_a_number(self) -> None:
        class Scaled(torch.optim.SGD):
            def __init__(self, params: Any, lr: float, factor: float = 1.0) -> None:
                super().__init__(params, lr)
                self.factor = factor

        task = dataclasses.replace(nets.task_of(nets.net), optimizer=lambda m: Scaled(m.parameters(), 0.1, factor=9.0))
        made = recipe_of(task).make(Trial(number=0, options={"lr": 0.2})).optimizer
        assert isinstance(made, Scaled) and made.factor == 9.0 and made.param_groups[0]["lr"] == 0.2

    def test_a_number_that_groups_differ_in_is_refused(self) -> None:
        def optimizer(model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD([{"params": model[0].parameters(), "weight_decay": 0.0},
                                    {"params": model[3].parameters()}], lr=0.1, weight_decay=0.01)  # fmt: skip

        recipe = recipe_of(dataclasses.replace(nets.task_of(partial(nets.net, norm=False)), optimizer=optimizer))
        made = recipe.make(Trial(number=0, options={"lr": 0.2})).optimizer
        assert [(g["lr"], g["weight_decay"]) for g in made.param_groups] == [(0.2, 0.0), (0.2, 0.01)]
        with pytest.raises(ConfigError, match="weight_decay differs between the optimizer's groups"):
            recipe.make(Trial(number=0, options={"weight_decay": 0.5}))

    def test_a_model_that_is_given_out_twice_is_refused(self) -> None:
        shared = nets.net()
        recipe = recipe_of(nets.task_of(lambda: shared))
        for number in (0, 1):
            with pytest.raises(ConfigError, match="must make a new module at each call"):
                recipe.make(Trial(number=number))
        assert next(shared.parameters()).dtype == torch.float32

    def test_initial_parameters_drawn_from_numpy_come_from_the_seed_too(self) -> None:
        import numpy as np

        def model() -> nn.Module:
            made = nets.net()
            made[0].weight.data.copy_(torch.from_numpy(np.random.randn(16, nets.FEATURES)))
            return made

        recipe = recipe_of(nets.task_of(model))
        one, two = (recipe.make(Trial(number=i, seed=5)).model.state_dict() for i in range(2))
        assert all(torch.equal(one[name], two[name]) for name in one)

    def test_an_optimizer_of_other_parameters_than_the_models_is_refused(self) -> None:
        stray = nn.Parameter(torch.ones(1))
        task = dataclasses.replace(
            nets.task_of(nets.net), optimizer=lambda m: torch.optim.SGD([*m.parameters(), stray], 0.1)
        )
        with pytest.raises(ConfigError, match="of its model only"):
            recipe_of(task).make(Trial(number=0))

    def test_a_function_that_takes_any_option_and_lets_it_lie_does_not_decide_over_the_sweeps_own(self) -> None:
        def make(**given: Any) -> Task:
            return nets.task_of(nets.net)

        parts = recipe_of(make).make(Trial(number=0, options={"epochs": 5, "batch_size": 10}))
        assert parts.batch_size == 10 and parts.steps == 5 * 12

    def test_numbers_of_other_kinds_are_numbers(self) -> None:
        import numpy as np

        parts = recipe_of(nets.toy).make(Trial(number=0, options={"lr": 0.2, "momentum": np.float32(0.5)}))
        assert parts.optimizer.param_groups[0]["momentum"] == 0.5

    @pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.NAdam])
    def test_a_schedule_that_refuses_to_go_on_beyond_its_end(self, optimizer: Any) -> None:
        task = dataclasses.replace(nets.task_of(nets.net, optimizer), schedule=nets.plain_one_cycle)
        trials = trials_of({"epochs": 3}, {"epochs": 1}, {"epochs": 2})
        recipe, heard = recipe_of(task), []
        queue, alone = Queue(trials), Queue(trials)
        Fused().run(recipe, queue, heard.append)
        Sequential().run(recipe, alone, lambda event: None)
        assert not any(event["event"] == "fell back" for event in heard)
        assert all(event["fuses"] for event in heard if event["event"] == "probe")
        # A bias before BatchNorm has no true gradient: NAdam makes steps of rounding there.
        assert all(apart(queue.states[i], alone.states[i]) < 1e-6 for i in range(3))

    def test_a_schedule_that_moves_rate_and_momentum(self) -> None:
        task = dataclasses.replace(nets.task_of(nets.net, torch.optim.SGD, momentum=0.9), schedule=nets.one_cycle)
        assert_equals_alone(task, trials_of({"epochs": 2}, {"epochs": 3}), steps=14)

    def test_gradients_are_clipped_by_each_trials_own_norm(self) -> None:
        assert_equals_alone(nets.toy, trials_of({"clip_norm": 0.01}, {"clip_norm": 1.0}, {"clip_norm": 100.0}))

    def test_parameter_groups_of_different_rates(self) -> None:
        def optimizer(model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD([{"params": model[3].parameters(), "lr": 0.01}, {"params": model[0].parameters()}],
                                   lr=0.1, momentum=0.9)  # fmt: skip

        task = dataclasses.replace(nets.task_of(partial(nets.net, norm=False)), optimizer=optimizer)
        assert_equals_alone(task, trials_of({"weight_decay": 0.0}, {"weight_decay": 0.01}))

    def test_frozen_and_unused_parameters_stay_as_they_are(self) -> None:
        assert_equals_alone(nets.task_of(nets.Partly, weight_decay=0.1), trials_of({"lr": 0.1}, {"lr": 0.2}))

    def test_padding_of_an_embedding_gets_no_gradient_in_any_row(self) -> None:
        trials = trials_of({"lr": 0.1}, {"lr": 0.2}, {"lr": 0.3})
        assert_equals_alone(nets.task_of(nets.Words), trials)
        recipe = recipe_of(nets.task_of(nets.Words))
        found = probe(recipe, trials, nets.device_data_of(recipe, trials[0]))
        assert found.fuses, found.why

    def test_schedules_of_different_kinds_in_one_array(self) -> None:
        def make(*, kind: str) -> Task:
            schedule = {"cycle": nets.plain_one_cycle, "fall": nets.falling, "cycle all": nets.one_cycle}[kind]
            return dataclasses.replace(nets.task_of(partial(nets.net, norm=False), momentum=0.9), schedule=schedule)

        assert_equals_alone(make, trials_of({"kind": "cycle"}, {"kind": "fall"}, {"kind": "cycle all"}))

    def test_a_schedule_is_run_once_for_trials_with_the_same_numbers(self) -> None:
        asked: list[int] = []

        def counting(optimizer: Any, steps: int, drop: float = 0.5) -> LambdaLR:
            return LambdaLR(optimizer, lambda step: asked.append(step) or drop**step)  # type: ignore[func-returns-value]

        def task(drop: float = 0.5) -> Task:
            return dataclasses.replace(nets.toy(), schedule=partial(counting, drop=drop))

        options = [{"lr": 0.1}, {"lr": 0.1}, {"lr": 0.1, "drop": 0.9}, {"lr": 0.2}, {"lr": 0.1, "epochs": 2}]
        recipe, trials = recipe_of(task), trials_of(*options)
        array = array_of(recipe, trials)
        assert len({id(timetable) for timetable in array._timetables}) == 4
        steps = recipe.make(trials[0]).steps
        assert asked.count(min(5, steps - 1)) == 4
        for _ in range(5):
            array.step()
        for row, trial in enumerate(trials):
            assert apart(alone_after(recipe, trial, 5).state(), array.save(row)) < ROUNDING

    def test_decay_that_a_schedule_brings_in_later(self) -> None:
        class Later(torch.optim.lr_scheduler.LRScheduler):
            def get_lr(self) -> list[float]:
                for group in self.optimizer.param_groups:
                    group["weight_decay"] = 0.5 if self.last_epoch > 5 else 0.0
                return [group["lr"] for group in self.optimizer.param_groups]

        task = nets.task_of(partial(nets.net, norm=False))
        task = dataclasses.replace(task, schedule=lambda optimizer, steps: Later(optimizer))
        assert_equals_alone(task, trials_of({"lr": 0.1}, {"lr": 0.2}))

    def test_recurrent_nets_go_through_the_gradient(self) -> None:
        trials = trials_of({"lr": 0.1}, {"lr": 0.2})
        recipe = recipe_of(nets.task_of(nets.Recurrent))
        found = probe(recipe, trials, nets.device_data_of(recipe, trials[0]))
        assert found.fuses and found.mode == "gradient"
        assert_equals_alone(nets.task_of(nets.Recurrent), trials, mode="gradient")

    def test_with_the_layers_that_a_gpu_would_get(self) -> None:
        assert_equals_alone(nets.toy, trials_of({"lr": 0.1}, {"lr": 0.2}), fast=True)
        assert_equals_alone("digits-cnn", trials_of({"lr": 0.1}, {"lr": 0.2}), steps=3, fast=True)


class TestSilentTraps:
    """Four ways in which stacking models goes wrong without a word."""

    def test_a_rate_of_dropout_is_the_trials_own(self) -> None:
        recipe = recipe_of(nets.toy)
        trials = trials_of({"dropout": 0.0}, {"dropout": 0.9})
        array = array_of(recipe, trials)
        array.step()
        kept = [float(array.buffers["3.rate"][row]) for row in range(2)]
        assert kept == pytest.approx([0.0, 0.9])
        assert_equals_alone(nets.toy, trials)

    def test_an_attribute_that_differs_makes_another_group(self) -> None:
        def make(*, slope: float) -> Task:
            return nets.task_of(lambda: nn.Sequential(nn.Linear(12, 4), nn.LeakyReLU(slope)))

        recipe = recipe_of(make)
        one, two = (recipe.make(t).structure for t in trials_of({"slope": 0.1}, {"slope": 0.2}))
        assert one.model != two.model
        array = array_of(recipe, [Trial(number=0, options={"slope": 0.1})])
        with pytest.raises(ConfigError, match="must be like the array it joins, differs in"):
            array.load(0, recipe.make(Trial(number=1, options={"slope": 0.2})))

    def test_functions_are_told_apart_by_what_they_hold_and_not_by_their_names(self) -> None:
        class Bent(nn.Module):
            def __init__(self, slope: float) -> None:
                super().__init__()
                self.layer, self.bend = nn.Linear(nets.FEATURES, nets.CLASSES), lambda x: x * slope

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = self.bend(self.layer(x))
                return out

        def make(*, slope: float, lr: float = 0.1) -> Task:
            def data() -> Any:
                return nets.data()

            return dataclasses.replace(nets.task_of(lambda: Bent(slope), lr=lr), data=data)

        recipe = recipe_of(make)
        options = ({"slope": 1.0}, {"slope": 2.0}, {"slope": 1.0, "lr": 0.2})
        one, other, same = (recipe.make(trial).structure for trial in trials_of(*options))
        assert one != other and one.data == other.data
        assert one.model == same.model and one.data == same.data

    def test_tied_weights_stay_tied(self) -> None:
        assert_equals_alone(nets.task_of(nets.Tied), trials_of({"lr": 0.1}, {"lr": 0.2}))
        recipe = recipe_of(nets.task_of(nets.Tied))
        array = array_of(recipe, trials_of({}, {}))
        array.step()
        saved = array.save(0)
        assert torch.equal(saved["one.weight"], saved["two.weight"])
        nets.Tied().double().load_state_dict(saved)  # an ordinary state dict

    @pytest.mark.parametrize("model", [nets.Counting, nets.Noisy, nets.Looking])
    def test_state_in_python_chance_and_branches_are_refused(self, model: type[nn.Module]) -> None:
        trials = trials_of({"lr": 0.1}, {"lr": 0.2})
        recipe = recipe_of(nets.task_of(model))
        found = probe(recipe, trials, nets.device_data_of(recipe, trials[0]))
        assert not found.fuses and found.why

    def test_running_statistics_move_in_rows_that_were_copied(self) -> None:
        recipe = recipe_of(nets.toy)
        array = array_of(recipe, trials_of({"lr": 0.1}, {"lr": 0.2}))
        array.step()
        array.copy_row(0, 1)
        assert all(buffer.is_contiguous() for buffer in array.buffers.values())
        before = array.buffers["1.running_mean"].clone()
        array.step()
        moved = (array.buffers["1.running_mean"] - before).abs().amax(dim=1)
        assert (moved > 0).all()


def test_what_a_model_draws_itself_comes_from_its_trials_seed() -> None:
    """Whoever trained before it, and whatever the generator stood at."""
    trials = trials_of({"lr": 0.1}, {"lr": 0.2})
    recipe = recipe_of(nets.task_of(nets.Noisy))
    both, second = Queue(trials), Queue(trials[1:])
    Sequential().run(recipe, both, lambda event: None)
    torch.manual_seed(77)
    before = torch.get_rng_state()
    Sequential().run(recipe, second, lambda event: None)
    assert torch.equal(torch.get_rng_state(), before)
    assert apart(both.states[1], second.states[1]) == 0


def test_values_that_are_no_tensors_are_left_out_of_a_state() -> None:
    trials = trials_of({"lr": 0.1}, {"lr": 0.2})
    recipe = recipe_of(nets.task_of(nets.Extra))
    for executor in (Sequential(), Fused()):
        queue = Queue(trials)
        executor.run(recipe, queue, lambda event: None)
        assert {o.status for o in queue.outcomes.values()} == {"finished"}
        assert set(queue.states[0]) == {"layer.weight", "layer.bias"}


class TestNeighbours:
    def test_a_poisoned_row_changes_no_bit_of_the_others(self) -> None:
        recipe = recipe_of(nets.toy, dtype="float32")
        trials = trials_of(*[{"lr": 0.1, "momentum": 0.9, "dropout": 0.2, "clip_norm": 1.0}] * 3)
        clean, poisoned = array_of(recipe, trials), array_of(recipe, trials)
        poisoned.flat[1, ::7] = float("nan")
        poisoned.flat[1, 3] = float("inf")
        for _ in range(10):
            clean.step()
            poisoned.step()
        for row in (0, 2):
            assert torch.equal(clean.flat[row], poisoned.flat[row])
            assert torch.equal(clean.loss[row], poisoned.loss[row])
            assert all(torch.equal(a[row], b[row]) for a, b in zip(clean.tensors(), poisoned.tensors(), strict=True))
        assert poisoned.loss[1].isnan()

    def test_nine_trials_through_four_slots_equal_nine_alone(self) -> None:
        trials = [
            Trial(number=i, seed=i, options={"lr": 0.02 * (i + 1), "dropout": 0.1 * (i % 4), "epochs": 1 + i % 3})
            for i in range(9)
        ]
        recipe = recipe_of(nets.toy, eval_every=1)
        fused, alone, branches = Queue(trials), Queue(trials), Queue(trials)
        Fused(width=4).run(recipe, fused, lambda event: None)
        Streams(width=4).run(recipe, branches, lambda event: None)
        Sequential().run(recipe, alone, lambda event: None)
        for queue in (fused, branches):
            for trial in trials:
                mine, theirs = queue.outcomes[trial.number], alone.outcomes[trial.number]
                assert (mine.status, mine.steps) == ("finished", theirs.steps)
                assert [e.metrics for e in mine.history] == [e.metrics for e in theirs.history]
                assert apart(queue.states[trial.number], alone.states[trial.number]) < ROUNDING

    def test_a_trial_that_is_stopped_makes_room_and_harms_nobody(self) -> None:
        trials = trials_of(*[{"lr": 0.05 * (i + 1)} for i in range(6)])

        def stop_odd(trial: Trial, evaluation: Evaluation) -> Verdict:
            return Verdict(action="stop", why="odd") if trial.number % 2 else GO

        recipe = recipe_of(nets.toy, eval_every=1)
        fused, alone = Queue(trials, stop_odd), Queue(trials, stop_odd)
        Fused(width=2).run(recipe, fused, lambda event: None)
        Sequential().run(recipe, alone, lambda event: None)
        for number, outcome in alone.outcomes.items():
            assert fused.outcomes[number].status == outcome.status == ("stopped" if number % 2 else "finished")
            assert fused.outcomes[number].steps == outcome.steps
            assert apart(fused.states[number], alone.states[number]) < ROUNDING

    @pytest.mark.parametrize(
        ("optimizer", "schedule"),
        [(torch.optim.SGD, None), (torch.optim.SGD, nets.plain_one_cycle), (torch.optim.AdamW, nets.falling)],
        ids=["constant", "one-cycle", "adamw"],
    )
    def test_trials_that_move_into_narrower_arrays_stay_what_they_were(
        self, optimizer: Any, schedule: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(slots, "_NARROW_S", -1e9)  # whatever it costs
        make = partial(nets.net, dropout=0.2)
        task = dataclasses.replace(nets.task_of(make, optimizer), schedule=schedule)
        epochs = (1, 1, 1, 1, 1, 2, 2, 4, 1)  # the ninth comes into a free row
        trials = trials_of(*[{"lr": 0.01 * (i + 1), "clip_norm": 1.0, "epochs": n} for i, n in enumerate(epochs)])
        recipe, heard = recipe_of(task, eval_every=1), []
        fused, alone = Queue(trials), Queue(trials)
        Fused(width=8).run(recipe, fused, heard.append)
        Sequential().run(recipe, alone, lambda event: None)
        assert [(e["before"], e["rows"]) for e in heard if e["event"] == "narrowed"] == [(8, 4), (4, 2)]
        assert not any(e["event"] in ("fell back", "not narrowed") for e in heard)
        for trial in trials:
            mine, theirs = fused.outcomes[trial.number], alone.outcomes[trial.number]
            assert (mine.status, mine.steps) == ("finished", theirs.steps)
            assert [e.metrics for e in mine.history] == [e.metrics for e in theirs.history]
            # A bias before BatchNorm has no true gradient: AdamW makes steps of rounding there.
            assert apart(fused.states[trial.number], alone.states[trial.number]) < (1e-6 if schedule else ROUNDING)

    def test_branches_that_nobody_needs_any_more_are_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(slots, "_NARROW_S", -1e9)
        trials = trials_of(*[{"lr": 0.05 * (i + 1), "epochs": 1 + 2 * (i == 3)} for i in range(4)])
        recipe, heard, queue, alone = recipe_of(nets.toy), [], Queue(trials), Queue(trials)
        Streams(width=4).run(recipe, queue, heard.append)
        Sequential().run(recipe, alone, lambda event: None)
        assert [(e["before"], e["rows"]) for e in heard if e["event"] == "narrowed"] == [(4, 1)]
        assert all(apart(queue.states[i], alone.states[i]) < ROUNDING for i in range(4))

    @pytest.mark.slow
    @pytest.mark.parametrize("made", [False, True], ids=["fused", "timed before"])
    def test_an_array_that_was_left_is_gone(self, made: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        left: list[weakref.ref[Array]] = []
        narrower = Array.narrower

        def noted(array: Array, rows: Any, steps: Any) -> Array:
            left.append(weakref.ref(array))
            return narrower(array, rows, steps)

        def look(trial: Trial, evaluation: Evaluation) -> Verdict:
            gc.collect()
            alive.append([ref() is not None for ref in left])
            return GO

        monkeypatch.setattr(slots, "_NARROW_S", -1e9)
        monkeypatch.setattr(Array, "narrower", noted)
        alive: list[list[bool]] = []
        trials = trials_of(*[{"epochs": 1 + 2 * (i == 0)} for i in range(5)])
        recipe, queue = recipe_of(nets.toy), Queue(trials, look)
        if made:
            taken = [recipe.make(trial) for trial in trials]
            timing = Timing(recipe, taken, recipe.device_data_of(taken[0].task), ProbeResult(fuses=True), 0.01)
            captured_step = timing.made_for(timing.fused(5).executor)
            assert captured_step is not None
            queue.waiting = []
            Fused(width=5).run_in(captured_step, recipe, queue, taken, lambda event: None)
        else:
            Fused(width=5).run(recipe, queue, lambda event: None)
        assert len(left) == 1 and alive[-1] == [False]

    def test_another_width_of_a_compiled_array_is_expected_to_be_compiled_anew(self) -> None:
        recipe, trials = recipe_of(nets.toy), trials_of({}, {})
        assert array_of(recipe, trials).compile_s == 0 and array_of(recipe, trials, compiled=True).compile_s > 20

    def test_an_array_stays_wide_while_more_may_come(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(slots, "_NARROW_S", -1e9)
        trials, heard = trials_of(*[{"epochs": 1 + 3 * (i == 0)} for i in range(6)]), []
        queue = Queue(trials)
        monkeypatch.setattr(queue, "expects_more", lambda: True)
        Fused(width=6).run(recipe_of(nets.toy), queue, heard.append)
        assert len(queue.outcomes) == 6 and not any(event["event"] == "narrowed" for event in heard)

    def test_a_source_that_has_more_after_all_finds_no_array_that_stands_still(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(slots, "_NARROW_S", -1e9)
        trials = trials_of(*[{"lr": 0.05 * (i + 1), "epochs": 1 + 3 * (i == 0)} for i in range(5)])
        recipe, queue, alone = recipe_of(nets.toy, eval_every=1), Queue(trials[:4]), Queue(trials)
        later = iter([*[None] * 3, trials[4]])
        monkeypatch.setattr(queue, "take", lambda: queue.waiting.pop(0) if queue.waiting else next(later, None))
        Streams(width=4).run(recipe, queue, lambda event: None)
        Sequential().run(recipe, alone, lambda event: None)
        assert queue.outcomes.keys() == alone.outcomes.keys()
        assert all(apart(queue.states[i], alone.states[i]) < ROUNDING for i in range(5))

    def test_what_evaluations_take_does_not_pay_for_a_narrower_array(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def slowly(outputs: Any, targets: Any) -> float:
            time.sleep(0.1)
            return 0.5

        task = dataclasses.replace(nets.task_of(nets.net), metrics={"slow": slowly})
        trials, heard = trials_of(*[{"epochs": 1 + 5 * (i == 0)} for i in range(4)]), []
        monkeypatch.setattr(slots, "_NARROW_S", 0.5)  # steps take a few milliseconds
        Fused(width=4).run(recipe_of(task, eval_every=1), Queue(trials), heard.append)
        assert not any(event["event"] == "narrowed" for event in heard)

    def test_an_array_stays_wide_where_that_is_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(slots, "_NARROW_S", -1e9)
        trials, heard = trials_of(*[{"epochs": 1 + 3 * (i == 0)} for i in range(6)]), []
        Fused(width=6, narrows=False).run(recipe_of(nets.toy), Queue(trials), heard.append)
        assert not any(event["event"] == "narrowed" for event in heard)

    def test_an_array_that_cannot_be_made_narrower_goes_on_as_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(array: Array, rows: Any, steps: Any) -> Array:
            raise torch.OutOfMemoryError("no room")

        monkeypatch.setattr(slots, "_NARROW_S", -1e9)
        monkeypatch.setattr(Array, "narrower", full)
        trials, heard = trials_of(*[{"epochs": 1 + 3 * (i == 0)} for i in range(6)]), []
        queue, alone = Queue(trials), Queue(trials)
        Fused(width=6).run(recipe_of(nets.toy), queue, heard.append)
        Sequential().run(recipe_of(nets.toy), alone, lambda event: None)
        assert [event["why"] for event in heard if event["event"] == "not narrowed"] == ["OutOfMemoryError: no room"]
        assert all(apart(queue.states[i], alone.states[i]) < ROUNDING for i in range(6))

    def test_a_trial_that_diverges_ends_alone(self) -> None:
        trials = trials_of({"lr": 0.1}, {"lr": 1e30}, {"lr": 0.2})
        recipe = recipe_of(nets.toy, eval_every=1, dtype="float32")
        queue = Queue(trials)
        Fused(width=3).run(recipe, queue, lambda event: None)
        assert [queue.outcomes[i].status for i in range(3)] == ["finished", "diverged", "finished"]

    @pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.NAdam])
    def test_a_row_whose_rate_is_changed_goes_on_along_the_new_rates_schedule(self, optimizer: Any) -> None:
        task = dataclasses.replace(nets.task_of(partial(nets.net, norm=False), optimizer), schedule=nets.falling)
        recipe, trial = recipe_of(task), Trial(number=0, options={"lr": 0.01})
        array = array_of(recipe, [trial, Trial(number=1, seed=1, options={"lr": 0.01})])
        for _ in range(4):
            array.step()
        array.change_numbers(0, recipe.make(dataclasses.replace(trial, options={"lr": 0.002})), 4)
        array.refill([4, 4])
        array.step()
        expected = alone_after(recipe, trial, 4)
        for group in expected.optimizer.param_groups:
            group["lr"] = 0.002 * 0.5**4
        expected.step()
        assert apart(expected.state(), array.save(0)) < ROUNDING

    def test_a_row_that_takes_over_anothers_state_takes_its_frozen_layers_too(self) -> None:
        recipe = recipe_of(nets.task_of(nets.Partly))
        array = array_of(recipe, trials_of({"lr": 0.1}, {"lr": 0.1}))
        array.step()
        array.copy_row(0, 1)
        assert apart(array.save(0), array.save(1)) == 0

    def test_a_population_goes_on_where_the_one_to_copy_from_has_ended(self) -> None:
        def copy_the_short_one(trial: Trial, evaluation: Evaluation) -> Verdict:
            if trial.number == 0 and evaluation.step == 7:
                return Verdict(action="become", source=1, options={"lr": 0.3, "width": 99})
            if trial.number == 2 and evaluation.step == 7:
                return Verdict(action="become", source=0, options={"lr": 0.3, "width": 99})
            return GO

        trials = trials_of({"epochs": 2, "width": 16}, {"epochs": 1, "width": 16}, {"epochs": 2, "width": 16})
        queue, heard = Queue(trials, copy_the_short_one), []
        Fused().run(recipe_of(nets.toy, eval_every=1), queue, heard.append)
        assert {o.status for o in queue.outcomes.values()} == {"finished"}
        assert {"event": "not copied", "trial": 0, "source": 1} in heard
        assert {"event": "not changed", "trial": 2, "option": "width"} in heard
        assert queue.outcomes[2].trial.options == {"epochs": 2, "width": 16, "lr": 0.3}

    def test_a_row_takes_over_anothers_state_and_goes_on_with_its_own_numbers(self) -> None:
        recipe = recipe_of(nets.task_of(partial(nets.net, norm=False), torch.optim.Adam))
        trials = trials_of({"lr": 0.01}, {"lr": 0.02})
        array = array_of(recipe, trials)
        for _ in range(3):
            array.step()
        array.copy_row(0, 1)
        array.change_numbers(1, recipe.make(Trial(number=1, seed=1, options={"lr": 0.05})), 3)
        array.refill([3, 3])
        array.step()
        expected = alone_after(recipe, trials[0], 3)  # the source, stepped once more with the target's batch and rate
        other = alone_after(recipe, trials[1], 3)
        for group in expected.optimizer.param_groups:
            group["lr"] = 0.05
        expected.batch = other.batch  # type: ignore[method-assign]  # the target's next samples
        expected.step()
        assert apart(expected.state(), array.save(1)) < ROUNDING


class TestWhatMustNotShareAnArray:
    """Models that only look alike: each pair must be two structures, or its second trial would train as the first."""

    @pytest.mark.parametrize(
        "kind", ["hook", "numpy", "tensor", "sparse", "loss tuple", "loss inside", "autocast", "hooked gradient"]
    )
    def test_trials_that_differ_in(self, kind: str) -> None:
        recipe = recipe_of(partial(nets.odd, kind=kind))
        trials = trials_of({"k": 0.0}, {"k": 3.0}, {"k": 0.0, "lr": 0.2})
        one, other, same = (recipe.make(trial).structure for trial in trials)
        assert one != other
        assert one == same

    @pytest.mark.parametrize("kind", ["parametrized", "local class", "recursive"])
    def test_but_trials_that_differ_in_nothing_do_share_one(self, kind: str) -> None:
        recipe = recipe_of(partial(nets.odd, kind=kind))
        trials = trials_of({"k": 0.0}, {"k": 0.0, "lr": 0.2})
        one, two = (recipe.make(trial).structure for trial in trials)
        assert one == two
        assert_equals_alone(partial(nets.odd, kind=kind), trials, steps=3)


class TestProbe:
    def verify(self, model: Any, rows: int = 2, **settings: Any) -> Any:
        trials = trials_of({"lr": 0.1}, {"lr": 0.2})
        task = model if isinstance(model, Task) else nets.task_of(model)
        recipe = recipe_of(task, **{"dtype": "float32", **settings})
        return probe(recipe, trials, nets.device_data_of(recipe, trials[0]), rows=rows)

    @pytest.mark.parametrize("rows", [1, 2])
    @pytest.mark.parametrize("model", [nets.Counting, nets.Late, nets.Judging, nets.Reassigning])
    def test_state_in_python_is_seen_before_it_does_anything(self, model: Any, rows: int) -> None:
        assert not self.verify(model, rows).fuses

    @pytest.mark.parametrize("rows", [1, 2])
    def test_chance_from_python_is_seen_whatever_it_did_this_time(self, rows: int) -> None:
        for seed in (0, 1, 7):  # with 1 and 7 a step of a single row leaves the layer out, and raises
            random.seed(seed)
            found = self.verify(nets.Dropping, rows)
            assert not found.fuses and "generator" in found.why
        found = self.verify(nets.DroppingByItsOwn, rows)
        assert not found.fuses and "chance" in found.why

    @pytest.mark.parametrize("where", ["parameter", "optimizer"])
    def test_hooks_that_rows_would_not_call_are_refused(self, where: str) -> None:
        def optimizer(model: nn.Module) -> torch.optim.Optimizer:
            made = torch.optim.SGD(model.parameters(), 0.1)
            if where == "optimizer":
                made.register_step_post_hook(lambda *given: None)
            else:
                next(model.parameters()).register_hook(lambda grad: grad.clamp(-100, 100))
            return made

        found = self.verify(dataclasses.replace(nets.task_of(nets.net), optimizer=optimizer))
        assert not found.fuses and "hooks" in found.why

    @pytest.mark.parametrize(("model", "right"), [(nets.net, True), (nets.Shortened, False)])
    def test_in_the_sweeps_own_precision_a_wrong_kernel_is_seen(self, model: Any, right: bool) -> None:
        from podium.sweeps.fused.probe import ProbeResult, _in_own_precision, _Yardstick

        trials = trials_of({"lr": 0.1}, {"lr": 0.2})
        recipe = recipe_of(nets.task_of(model), dtype="float32")
        device_data = nets.device_data_of(recipe, trials[0])
        found = _in_own_precision(recipe, _Yardstick(recipe, trials, device_data), device_data, ProbeResult(fuses=True))
        assert found.fuses is right, found.why

    def test_a_request_to_stop_is_heard_between_its_steps(self) -> None:
        trials = trials_of({"lr": 0.1}, {"lr": 0.2})
        recipe = recipe_of(nets.toy)
        found = probe(recipe, trials, nets.device_data_of(recipe, trials[0]), stop=lambda: True)
        assert not found.fuses and "asked to stop" in found.why

    def test_a_nan_in_one_row_is_not_forgotten(self) -> None:
        from podium.sweeps.fused.probe import _apart

        nan, one = torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 1.0])
        assert _apart(nan, one) == float("inf") == _apart(one, nan)
        assert _apart(nan, nan) == 0.0

    def test_a_table_that_is_made_once_is_no_state(self) -> None:
        assert self.verify(nets.Caching).fuses

    def test_a_model_that_minds_the_size_of_its_batch_is_probed_with_its_own(self) -> None:
        assert self.verify(nets.Fussy).fuses

    def test_a_model_that_converts_its_input_is_held_against_single_precision(self) -> None:
        assert self.verify(nets.Converting).fuses

    def test_a_model_that_asks_its_layers_for_their_sizes_and_rates(self) -> None:
        assert self.verify(nets.Asking).fuses
        trials = trials_of({"lr": 0.1}, {"lr": 0.2})
        assert_equals_alone(nets.task_of(nets.Asking), trials, fast=True)

    def test_a_frozen_backbone_whose_parameters_the_optimizer_holds_too(self) -> None:
        def all_of_them(model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), 0.1)

        task = dataclasses.replace(nets.task_of(nets.Partly), optimizer=all_of_them)
        assert self.verify(task).fuses and self.verify(task, rows=1).fuses


class TestFallBack:
    @pytest.mark.parametrize("executor", [Fused(), Auto(seconds=0.01)], ids=["fused", "auto"])
    def test_what_cannot_be_fused_is_trained_all_the_same_and_the_reason_said(self, executor: Any) -> None:
        trials = trials_of(*[{"lr": 0.1 * (i + 1), "epochs": 6} for i in range(3)])
        recipe, heard = recipe_of(nets.task_of(nets.Looking)), []
        queue, alone = Queue(trials), Queue(trials)
        executor.run(recipe, queue, heard.append)
        Sequential().run(recipe, alone, lambda event: None)
        assert {o.status for o in queue.outcomes.values()} == {"finished"}
        assert all(apart(queue.states[i], alone.states[i]) < ROUNDING for i in range(3))
        refusal = next(event for event in heard if event["event"] == "probe")
        assert not refusal["fuses"] and "vmap" in refusal["why"]

    def test_a_step_that_raises_later_on_is_gone_on_from_one_by_one_and_reports_count_once(self) -> None:
        seen = {"calls": 0}

        class Tired(nn.Module):
            """Fails once, as memory does."""

            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(nets.FEATURES, nets.CLASSES)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                seen["calls"] += torch.is_grad_enabled() and len(x) == 16
                if seen["calls"] == 12:
                    seen["calls"] += 1
                    raise MemoryError("no room")
                out: torch.Tensor = self.layer(x)
                return out

        trials = trials_of({"epochs": 1}, {"epochs": 2}, {"epochs": 1})  # 7 and 14 steps
        queue, heard = Queue(trials), []
        Fused(probed=False).run(recipe_of(nets.task_of(Tired), eval_every=1), queue, heard.append)
        assert [queue.outcomes[i].status for i in range(3)] == ["finished"] * 3, queue.outcomes[0].why
        assert any(event["event"] == "fell back" and "no room" in event["why"] for event in heard)
        assert [number for number, _ in queue.reports].count(1) == 2  # an epoch each, once

    @pytest.mark.parametrize("executor", [Fused(), Sequential()], ids=["fused", "sequential"])
    def test_a_metric_that_raises_fails_its_own_trial_only(self, executor: Any) -> None:
        def fussy(outputs: torch.Tensor, targets: torch.Tensor) -> float:
            if float(outputs.abs().max()) > 1e3:
                raise ValueError("too large")
            return 1.0

        task = dataclasses.replace(nets.task_of(partial(nets.net, norm=False)), metrics={"fussy": fussy})
        queue = Queue(trials_of({"lr": 0.1}, {"lr": 40.0}, {"lr": 0.2}))
        executor.run(recipe_of(task), queue, lambda event: None)
        assert [queue.outcomes[i].status for i in range(3)] == ["finished", "failed", "finished"]
        assert queue.outcomes[1].why == "ValueError: too large"

    def test_auto_does_not_time_what_is_sooner_done(self) -> None:
        recipe = recipe_of(nets.toy)
        choice = Auto().choose(recipe, [recipe.make(t) for t in trials_of({"epochs": 1}, {"epochs": 2})])
        assert choice.executor == Sequential() and not choice.candidates and "21 steps in all" in choice.why

    def test_auto_fuses_recurrent_nets_in_the_way_that_they_need(self) -> None:
        trials, heard = trials_of(*[{"lr": 0.01 * (i + 1)} for i in range(6)]), []
        recipe = recipe_of(nets.task_of(nets.Recurrent))
        choice = Auto(seconds=0.01).choose(recipe, [recipe.make(trial) for trial in trials])
        fused = next(c.executor for c in choice.candidates if c.executor.name == "fused")
        queue = Queue(trials)
        fused.run(recipe, queue, heard.append)
        assert not any(event["event"] == "fell back" for event in heard)
        assert {outcome.executor for outcome in queue.outcomes.values()} == {"fused"}

    def test_auto_times_an_array_however_long_one_after_another_took(self) -> None:
        recipe = recipe_of(nets.toy)
        taken = [recipe.make(trial) for trial in trials_of(*[{"epochs": 3}] * 8)]
        choice = Auto(seconds=5.0).choose(recipe, taken)  # half a second for the first, far more than the trials take
        assert [c.executor.name for c in choice.candidates][:2] == ["sequential", "fused"]

    @pytest.mark.slow
    def test_auto_holds_no_array_of_a_group_while_it_looks_at_the_next(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[int] = []

        def look(executor: Auto, recipe: Any, taken: Any, *more: Any) -> Any:
            gc.collect()
            seen.append(sum(type(one) is Array for one in gc.get_objects()) - before)
            return choose(executor, recipe, taken, *more)

        choose, recipe = Auto.choose, recipe_of(nets.toy)
        gc.collect()
        before = sum(type(one) is Array for one in gc.get_objects())
        monkeypatch.setattr(Auto, "choose", look)
        groups = [Queue(trials_of(*[{"epochs": 4, "width": width}] * 6)) for width in (8, 16)]
        Auto(seconds=0.01).run_groups(recipe, groups, lambda event: None)
        assert seen == [0, 0] and all(len(queue.outcomes) == 6 for queue in groups)

    def test_what_auto_has_timed_leaves_no_trace_in_what_is_trained_in_the_same_array(self) -> None:
        trials = trials_of(*[{"lr": 0.01 * (i + 1), "dropout": 0.1, "momentum": 0.9, "epochs": 3} for i in range(5)])
        recipe = recipe_of(nets.toy, eval_every=1)
        taken = [recipe.make(trial) for trial in trials[:3]]
        timing = Timing(recipe, taken, recipe.device_data_of(taken[0].task), ProbeResult(fuses=True), 0.01)
        timed = timing.fused(3)
        timing.sequential()
        captured_step = timing.made_for(timed.executor)
        assert captured_step is not None and captured_step.arrays[0].loss.count_nonzero() == 3  # it has taken steps
        queue, alone = Queue(trials[3:]), Queue(trials)
        timed.executor.run_in(captured_step, recipe, queue, taken, lambda event: None)
        Sequential().run(recipe, alone, lambda event: None)
        assert queue.outcomes.keys() == alone.outcomes.keys()
        assert all(apart(queue.states[i], alone.states[i]) < ROUNDING for i in range(5))
        timing.fused(2)
        assert timing.made_for(timed.executor) is None

    def test_auto_says_what_it_chose_and_from_what(self) -> None:
        trials, heard = trials_of(*[{"lr": 0.01 * (i + 1)} for i in range(8)]), []
        queue = Queue(trials)
        Auto(seconds=0.01).run(recipe_of(nets.toy), queue, heard.append)
        chosen = next(event for event in heard if event["event"] == "chose")
        assert len(queue.outcomes) == 8
        assert chosen["executor"].split(":")[0] in ("fused", "sequential", "processes")
        assert {row["executor"].split(":")[0] for row in chosen["table"]} >= {"fused", "sequential"}
        assert "µs per model-step" in chosen["why"] or "do not share" in chosen["why"]

    def test_a_ratio_comes_with_its_range_and_how_it_was_timed(self) -> None:
        one, best = self.candidates([1000.0, 1010.0, 990.0], [250.0, 260.0, 240.0])
        choice = decide([one, best], ProbeResult(fuses=True), 30)
        said = "predicted 4.0× (3.8 to 4.2 by 3 short timings of each) as fast as one after another over the 30 trials"
        assert said in choice.why and choice.executor.name == "fused"

    @pytest.mark.parametrize("held_up", [0, 1])
    def test_timings_that_a_busy_machine_held_up_give_no_ratio(self, held_up: int) -> None:
        times = [[1000.0] * 3, [250.0] * 3]
        times[held_up][1] *= 40
        choice = decide(self.candidates(*times), ProbeResult(fuses=True), 30)
        assert "busy" in choice.why and "× as fast" not in choice.why
        assert "no ratio: timings differed by up to 40.0×" in choice.why

    def candidates(self, alone: list[float], fused: list[float]) -> list[Candidate]:
        recipe = recipe_of(nets.toy)
        taken = [recipe.make(trial) for trial in trials_of(*[{"epochs": 3}] * 8)]
        timing = Timing(recipe, taken, recipe.device_data_of(taken[0].task), ProbeResult(fuses=True), 0.01)
        rows = Fused(width=8)
        return [timing._candidate(Sequential(), 1, 0.0, alone, 1.0), timing._candidate(rows, 8, 0.0, fused, 1.0)]

    def test_each_candidate_is_timed_several_times_in_a_row(self) -> None:
        calls: list[int] = []

        def run(steps: int) -> None:
            calls.append(steps)
            time.sleep(0.001 * steps if len(calls) != 2 else 0.1)  # the second try is held up

        found = step_timings(run, lambda: None, 0.02)
        assert len(found) == REPEATS and len(set(calls[-REPEATS:])) == 1
        assert min(found) == pytest.approx(0.001, rel=0.9)


LARGE = ("wide-mlp", "tiny-imagenet-resnet50", "tiny-imagenet-efficientnet-b0")
"""Of 4 to 25 million parameters: in float64, twice over, they would take the test machine's patience."""


@pytest.mark.parametrize("name", sorted(set(TASKS) - set(LARGE)))
def test_every_built_in_task_fuses_to_rounding(name: str) -> None:
    task = make_task(name)
    trials = [Trial(number=i, seed=i, options={"lr": 0.01 * (i + 1)}) for i in range(2)]
    recipe = recipe_of(task, dtype="float32")
    found = probe(recipe, trials, nets.device_data_of(recipe, trials[0]))
    assert found.fuses, found.why
    assert found.worst <= TOLERANCE


def test_a_hundred_steps_in_single_precision_stay_within_what_another_kernel_would_do() -> None:
    """The yardstick is the same trial alone with another summation: rows in batches of another order of threads."""
    trials = trials_of(
        {"lr": 0.05, "momentum": 0.9, "dropout": 0.2, "weight_decay": 1e-3, "epochs": 20},
        {"lr": 0.1, "momentum": 0.5, "dropout": 0.4, "weight_decay": 0.0, "epochs": 20},
    )
    single = recipe_of(nets.toy, dtype="float32")
    array = array_of(single, trials)
    for _ in range(100):
        array.step()
    for row, trial in enumerate(trials):
        alone = alone_after(single, trial, 100).state()
        exact = alone_after(recipe_of(nets.toy), trial, 100).state()
        rounding = apart(exact, alone)  # what single precision itself does to this trial
        assert apart(exact, array.save(row)) < 5 * max(rounding, 1e-7)


def test_a_compiled_step_is_not_cut_where_a_parameter_is_large() -> None:
    """A compiler makes of each cut a pass over the whole row."""
    places = [Place(f"p{i}", i << 20, (i + 1) << 20, torch.Size([1 << 20]), group=i // 2) for i in range(4)]
    flat = torch.empty(1, 4 << 20, device="meta").expand(1, -1)
    plain = torch.empty(1, 4 << 20)
    assert [s.start >> 20 for s in spans_of(places, plain)] == [0, 1, 2, 3]
    assert [(s.start >> 20, s.group) for s in spans_of(places, flat, compiled=True)] == [(0, 0), (2, 1)]

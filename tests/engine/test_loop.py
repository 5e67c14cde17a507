"""The user's own loop, alone in its process."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR

import podium
from podium.engine.own_loop import Run
from podium.errors import ConfigError, TrainingError
from podium.testing.toys import BATCH, SAMPLES, assert_same_bits, plain_model, toy_data


def joined() -> Run:
    torch.manual_seed(0)
    model = plain_model()
    return podium.join(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def trained(run: Run, **options: int) -> int:
    """Steps done in one go through `run.batches`."""
    steps = 0
    for x, y in run.batches(toy_data(SAMPLES).train, batch_size=BATCH, **options):
        run.step(lambda x=x, y=y: cross_entropy(run.worker.model(x), y))
        steps += 1
    return steps


def test_epochs_may_be_the_users_own_loop() -> None:
    at_once, one_by_one = joined(), joined()
    assert trained(at_once, epochs=3) == sum(trained(one_by_one) for _ in range(3)) == 3 * 4
    assert_same_bits(dict(one_by_one.worker.model.state_dict()), dict(at_once.worker.model.state_dict()))


def test_breaking_out_of_the_loop_ends_the_segment_and_another_may_follow() -> None:
    run = joined()
    for n, (x, y) in enumerate(run.batches(toy_data(SAMPLES).train, batch_size=BATCH)):
        run.step(lambda x=x, y=y: cross_entropy(run.worker.model(x), y))
        if n == 1:
            break
    assert run.worker.position == 2 * BATCH
    assert trained(run) == 4
    assert run.worker.position == 2 * BATCH + SAMPLES


def test_a_schedule_follows_the_steps() -> None:
    torch.manual_seed(0)
    model = plain_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run = podium.join(model, optimizer, schedule=StepLR(optimizer, step_size=2, gamma=0.1))
    trained(run)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_a_batch_without_a_step_is_refused() -> None:
    run = joined()
    with pytest.raises(ConfigError, match="every batch needs one call"):
        for _ in run.batches(toy_data(SAMPLES).train, batch_size=BATCH):
            pass


def test_a_step_without_a_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="no batch in hand"):
        joined().step(lambda: torch.zeros(()))


def test_other_data_in_the_middle_are_refused() -> None:
    run = joined()
    trained(run)
    with pytest.raises(ConfigError, match="the data must stay the same"):
        next(iter(run.batches(toy_data(SAMPLES + 1).train, batch_size=BATCH)))


def test_a_model_that_was_cast_after_joining_is_noticed() -> None:
    run = joined()
    run.worker.model.double()
    with pytest.raises(TrainingError, match="left its flat buffer"):
        next(iter(run.batches(toy_data(SAMPLES).train, batch_size=BATCH)))


def test_a_model_that_joins_again_belongs_to_the_newer_run() -> None:
    first = joined()
    model, optimizer = first.worker.model, first.worker.optimizer
    assert trained(podium.join(model, optimizer)) == 4

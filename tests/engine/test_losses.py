"""A loss that is no mean over samples is noticed in the first step, and the user is told the remedy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import podium
from podium.data.base import ArrayDataset, Data
from podium.engine.losses import changes_with_cut
from podium.errors import TrainingError
from podium.records.recorder import read_records
from podium.strategies.all_reduce import AllReduce
from podium.testing.toys import plain_model, toy, train

WEIGHTS = torch.tensor([0.2, 1.0, 5.0])
IGNORED = -100


def outputs_and(classes: bool = True) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    outputs = torch.randn(12, 3, generator=draw)
    return outputs, torch.randint(0, 3, (12,), generator=draw) if classes else torch.randn(12, 3, generator=draw)


def ignoring(loss: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    outputs, targets = outputs_and()
    targets[[0, 1, 2, 7]] = IGNORED
    return outputs, targets


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


MEANS: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "cross entropy": (F.cross_entropy, True),
    "label smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), True),
    "mean square": (F.mse_loss, False),
    "smooth l1": (F.smooth_l1_loss, False),
    "own mean": (lambda a, b: (a - b).square().sum(1).mean(), False),
    "constant": (lambda a, b: (a * 0).mean() + 1, False),
}


@pytest.mark.parametrize("what", MEANS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_means_over_samples_are_left_alone(what: str, dtype: torch.dtype) -> None:
    loss, classes = MEANS[what]
    outputs, targets = outputs_and(classes)
    outputs, targets = outputs.to(dtype), targets if classes else targets.to(dtype)
    assert changes_with_cut(loss, None, outputs, targets, loss(outputs, targets)) is None


def test_a_sum_is_noticed() -> None:
    outputs, targets = outputs_and()
    loss = nn.CrossEntropyLoss(reduction="sum")
    assert "a sum over samples" in (changes_with_cut(loss, None, outputs, targets, loss(outputs, targets)) or "")


def test_class_weights_are_noticed_and_weigh_is_the_remedy() -> None:
    outputs, targets = outputs_and()
    loss = lambda a, b: F.cross_entropy(a, b, WEIGHTS)  # noqa: E731
    whole = loss(outputs, targets)
    assert "weigh=lambda y: class_weights[y].sum()" in (changes_with_cut(loss, None, outputs, targets, whole) or "")
    assert changes_with_cut(loss, lambda y: float(WEIGHTS[y].sum()), outputs, targets, whole) is None
    wrong = changes_with_cut(loss, lambda y: float(len(y)), outputs, targets, whole)
    assert wrong is not None and "weigh must say what the loss divides by" in wrong


def test_ignored_targets_are_noticed_and_weigh_is_the_remedy() -> None:
    outputs, targets = ignoring(F.cross_entropy)
    whole = F.cross_entropy(outputs, targets)
    assert "weigh" in (changes_with_cut(F.cross_entropy, None, outputs, targets, whole) or "")
    assert changes_with_cut(F.cross_entropy, lambda y: float((y != IGNORED).sum()), outputs, targets, whole) is None


def test_samples_that_are_compared_with_each_other_are_noticed() -> None:
    outputs, targets = outputs_and()
    assert changes_with_cut(contrastive, None, outputs, targets, contrastive(outputs, targets)) is not None


def test_what_cannot_be_cut_is_left_alone() -> None:
    outputs, targets = outputs_and()
    whole = torch.tensor(1.0)
    assert changes_with_cut(lambda a, b: a.sum(), None, outputs[0], targets, whole) is None
    assert changes_with_cut(lambda a, b: a.view(12, 3).sum(), None, outputs, targets, whole) is None
    assert changes_with_cut(lambda a, b: a.sum(), None, outputs, targets, torch.tensor(float("nan"))) is None


def test_trying_changes_no_state_of_the_loss() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            self.seen += 1
            return F.cross_entropy(outputs, targets) + torch.rand(()) * 0

    loss, (outputs, targets) = Centred(), outputs_and()
    before = torch.get_rng_state()
    whole = loss(outputs, targets)
    drawn = torch.get_rng_state()
    assert not torch.equal(before, drawn)
    assert changes_with_cut(loss, None, outputs, targets, whole) is None
    assert loss.seen == 1 and torch.equal(torch.get_rng_state(), drawn)


def test_trying_counts_no_call_of_a_class_of_the_users_own() -> None:
    class Annealed:
        calls = 0

        def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
            self.calls += 1
            return F.cross_entropy(outputs, targets)

    loss, (outputs, targets) = Annealed(), outputs_and()
    assert changes_with_cut(loss, None, outputs, targets, loss(outputs, targets)) is None
    assert loss.calls == 1


def test_a_loss_that_draws_numbers_is_left_alone() -> None:
    def noisy(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs + torch.randn_like(outputs), targets)

    outputs, targets = outputs_and()
    assert changes_with_cut(noisy, None, outputs, targets, noisy(outputs, targets)) is None


@pytest.mark.parametrize("error", [AssertionError, TypeError, KeyError, ZeroDivisionError])
def test_a_loss_that_refuses_a_part_is_left_alone(error: type[Exception]) -> None:
    def of_pairs(outputs: Tensor, targets: Tensor) -> Tensor:
        if len(outputs) % 2:
            raise error("pairs are wanted")
        return F.cross_entropy(outputs, targets)

    outputs, targets = outputs_and()
    assert changes_with_cut(of_pairs, None, outputs, targets, of_pairs(outputs, targets)) is None


# In a run.


def task(loss: Callable[..., Tensor], **options: Any) -> podium.Task:
    inputs, targets = torch.randn(48, 3, generator=torch.Generator().manual_seed(1)), torch.arange(48) % 3
    held = ArrayDataset(inputs, targets)
    return podium.Task(
        name="weighed",
        model=lambda: nn.Linear(3, 3),
        data=lambda: Data(held, held),
        loss=loss,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        batch_size=16,
        epochs=1,
        **options,
    )


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, WEIGHTS)


@pytest.mark.parametrize("launcher", ["threads", "virtual"])
def test_a_run_tells_of_it_once(launcher: str, tmp_path: Path) -> None:
    told: list[Any] = []
    result = podium.train(
        task(weighted), workers=3, launcher=launcher, run_dir=str(tmp_path), on_event=lambda e: told.append(dict(e))
    )
    (warning,) = [event["text"] for event in told if event["event"] == "warning"]
    assert warning.startswith("task weighed: the loss of the first batch is") and "weigh=lambda" in warning
    assert warning in result.notices
    assert [row["text"] for row in read_records(tmp_path) if row["kind"] == "warning"] == [warning]


@pytest.mark.parametrize("options", [{"workers": 1}, {"workers": 2, "weigh": True}])
def test_nothing_is_said_where_nothing_is_wrong(options: dict[str, Any], tmp_path: Path) -> None:
    told: list[Any] = []
    weigh = {"weigh": lambda y: float(WEIGHTS[y].sum())} if options.get("weigh") else {}
    podium.train(
        task(weighted, **weigh),
        workers=options["workers"],
        launcher="threads",
        run_dir=str(tmp_path),
        on_event=lambda e: told.append(dict(e)),
    )
    assert not [event for event in told if event["event"] == "warning"]


class SpoilsItsLastGradient(nn.Module):
    """Finite losses throughout; the gradient of the last training step is not."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.inner, self.steps, self.passes = plain_model(), steps, 0
        next(self.inner.parameters()).register_hook(self._spoil)

    def _spoil(self, gradient: Tensor) -> Tensor:
        return gradient * float("nan") if self.passes == self.steps else gradient

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        out: Tensor = self.inner(x)
        return out


@pytest.mark.parametrize("workers", [1, 2])
def test_a_gradient_that_is_no_number_in_the_last_step_ends_the_run(workers: int) -> None:
    with pytest.raises(TrainingError, match=r"parameter inner.0.weight is not finite after step 8"):
        train(toy(model=partial(SpoilsItsLastGradient, 8)), AllReduce(), workers)

"""Built-in tasks: each can be made, takes a step in plain PyTorch, and the small ones learn what they promise."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

from podium.data.base import Dataset
from podium.data.cifar import SAMPLE_BYTES
from podium.data.order import GlobalOrder
from podium.errors import ConfigError, DataError, UnknownName
from podium.task import Task, load_task
from podium.tasks import TASKS, describe_tasks, find_task
from podium.tasks.digits import digits
from podium.tasks.regression import mae, mse, r2
from tests.shared_data import shared_data

FOLDERS = {"mnist-lenet5": "mnist", "mnist-mlp": "mnist", "mnist-cnn": "mnist", "cifar10-resnet20": "cifar10"}
PARAMETERS = {"mnist-lenet5": 61_706, "cifar10-resnet20": 269_722, "wide-mlp": 24_939_530}


SMALL: dict[str, dict[str, object]] = {
    "tiny-imagenet-resnet50": {"width": 8, "batch_size": 4, "samples": 20},
    "tiny-imagenet-efficientnet-b0": {"batch_size": 4, "samples": 20},
}
"""Options with which the largest can be tried at all; `test_images64.py` looks at them in full."""


def make(name: str, **options: object) -> Task:
    folder = str(shared_data(FOLDERS[name])) if name in FOLDERS else None
    return load_task(name, {**SMALL.get(name, {}), **options}, data_dir=folder)


def train_plainly(task: Task, *, seed: int = 0, steps: int | None = None) -> tuple[torch.nn.Module, list[float]]:
    """The loop anyone would write, in the global order."""
    torch.manual_seed(seed)
    model, train = task.model(), task.data().train
    optimizer, order = task.optimizer(model), GlobalOrder(len(train), seed)
    total, position, losses = steps or order.steps(task.batch_size, task.epochs), 0, []
    schedule = task.schedule(optimizer, total) if task.schedule else None
    for _ in range(total):
        piece = order.slice_at(position, task.batch_size)
        inputs, targets = train.gather(order.indices(piece), order.keys(piece))
        optimizer.zero_grad()
        loss = task.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        position += piece.count
        losses.append(loss.item())
    return model, losses


def measure(task: Task, model: torch.nn.Module) -> dict[str, float]:
    inputs, targets = _all(task.data().test)
    with torch.no_grad():
        outputs = model.eval()(inputs)
    return {name: metric(outputs, targets) for name, metric in task.metrics.items()}


def _all(data: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    return data.gather(np.arange(len(data)))


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_each_task_takes_plain_steps_to_finite_parameters(name: str) -> None:
    smaller = {"width": 64} if name == "wide-mlp" else {}
    task = make(name, **smaller)
    assert task.name == name
    before = [p.clone() for p in _seeded_model(task).parameters()]
    model, losses = train_plainly(task, steps=2)
    assert np.isfinite(losses).all()
    for old, new in zip(before, model.parameters(), strict=True):
        assert new.isfinite().all()
        assert not torch.equal(old, new)


def _seeded_model(task: Task) -> torch.nn.Module:
    torch.manual_seed(0)
    return task.model()


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_models_have_the_size_that_is_quoted(name: str, count: int, tmp_path: Path) -> None:
    task = load_task(name, data_dir=str(tmp_path))  # the folder is opened only when the data are
    with torch.device("meta"):
        assert sum(p.numel() for p in task.model().parameters()) == count


@pytest.mark.parametrize("name", TASKS)
def test_tasks_can_travel_to_another_process(name: str, tmp_path: Path) -> None:
    if name == "regression":
        task = load_task(name)
    else:
        task = load_task(name, data_dir=str(tmp_path))
    assert pickle.loads(pickle.dumps(task)).name == name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits-mlp", "digits-cnn"])
def test_digits_reach_0_96_with_their_own_recipe(name: str) -> None:
    task = make(name)
    model, _ = train_plainly(task)
    assert measure(task, model)["accuracy"] >= 0.96


@pytest.mark.slow
def test_regression_explains_most_of_the_variance() -> None:
    task = make("regression")
    model, _ = train_plainly(task)
    got = measure(task, model)
    assert set(got) == {"mae", "mse", "r2"}
    assert got["r2"] > 0.85


def test_wide_mlp_fits_its_classes_when_made_narrow() -> None:
    task = make("wide-mlp", width=64, depth=1, epochs=4)
    model, losses = train_plainly(task)
    assert losses[-1] < losses[0] / 2
    assert measure(task, model)["accuracy"] > 0.5


@pytest.mark.slow
def test_lenet5_learns_mnist_within_an_epoch() -> None:
    task = make("mnist-lenet5", epochs=1)
    model, _ = train_plainly(task)
    assert measure(task, model)["accuracy"] > 0.85


class TestDigits:
    def test_they_are_scikit_learns_less_the_mean_image(self) -> None:
        data, theirs = digits(flat=True), load_digits()
        (train, train_labels), (test, test_labels) = _all(data.train), _all(data.test)
        ours, labels = torch.cat([train, test]).double(), torch.cat([train_labels, test_labels])
        # Every pixel is 0 somewhere, so the smallest value is what was taken away.
        pixels = ((ours - ours.min(0).values) * 16).round().numpy()
        table = np.column_stack([pixels, labels.numpy()])
        assert sorted(table.tolist()) == sorted(np.column_stack([theirs.data, theirs.target]).tolist())
        assert train.mean(0).abs().max() < 1e-5

    def test_a_fifth_of_each_class_is_kept_for_testing(self) -> None:
        data = digits(flat=True)
        train, test = (np.bincount(_all(part)[1].numpy()) for part in data)
        assert np.abs(test / (train + test) - 0.2).max() < 0.01

    def test_the_split_is_not_the_runs_business(self) -> None:
        torch.manual_seed(1)
        np.random.seed(1)
        digits.cache_clear()
        first = _all(digits(flat=True).test)[0]
        torch.manual_seed(2)
        np.random.seed(2)
        digits.cache_clear()
        assert torch.equal(_all(digits(flat=True).test)[0], first)

    def test_images_are_the_rows_in_another_shape(self) -> None:
        rows, images = _all(digits(flat=True).test)[0], _all(digits(flat=False).test)[0]
        assert images.shape[1:] == (1, 8, 8)
        assert torch.equal(images.flatten(1), rows)

    @pytest.mark.slow
    def test_a_node_needs_neither_scikit_learn_nor_scipy(self) -> None:
        code = (
            "import sys; from podium.task import load_task; task = load_task('digits-mlp'); task.model(); task.data();"
            "print([m for m in ('sklearn', 'scipy', 'pandas', 'click', 'rich') if m in sys.modules])"
        )
        assert _python(code) == "[]"


class TestNames:
    def test_an_unknown_task_lists_the_known_and_the_nearest(self) -> None:
        with pytest.raises(UnknownName, match=r"unknown task 'digit-mlp'\. Did you mean 'digits-mlp'") as caught:
            find_task("digit-mlp")
        assert all(name in str(caught.value) for name in TASKS)

    def test_an_unknown_option_lists_the_known_and_the_nearest(self) -> None:
        with pytest.raises(UnknownName, match=r"'batchsize'. Did you mean 'batch_size'.*hidden"):
            load_task("digits-mlp", {"batchsize": 3})

    def test_every_task_has_a_line_that_says_what_it_is(self) -> None:
        described = describe_tasks()
        assert set(described) == set(TASKS)
        for name, line in described.items():
            assert line == (find_task(name).__doc__ or "").partition("\n")[0]
            assert line.endswith(".")

    def test_names_are_listed_without_torch(self) -> None:
        code = "import sys; from podium.tasks import describe_tasks; describe_tasks(); print('torch' in sys.modules)"
        assert _python(code) == "False"


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"lr": -1.0}, "lr must be a number of 0 or more, got -1"),
            ({"lr": "fast"}, "task digits-mlp: lr must be a number, got 'fast'"),
            ({"momentum": 1.0}, "momentum must be"),
            ({"batch_size": 0}, "batch_size must be"),
            ({"epochs": 1.5}, "epochs must be a whole number, got 1.5"),
        ],
    )
    def test_a_wrong_value_is_refused_with_its_name(self, options: dict[str, object], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            load_task("digits-mlp", options)

    def test_hidden_widths_come_as_a_list_or_as_text(self) -> None:
        for given in ([32, 16], "32,16"):
            model = load_task("digits-mlp", {"hidden": given}).model()
            assert [p.shape[0] for p in model.parameters()] == [32, 32, 16, 16, 10, 10]

    def test_a_width_of_zero_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="layer widths must be whole numbers of at least 1"):
            load_task("digits-mlp", {"hidden": [0]}).model()


class TestDataDir:
    @pytest.mark.parametrize(("name", "file"), [("mnist-lenet5", "train-images"), ("cifar10-resnet20", "data_batch_1")])
    def test_a_task_on_files_says_what_it_looks_for(self, name: str, file: str) -> None:
        with pytest.raises(DataError, match=f"{name}.*{file}.*--data-dir"):
            load_task(name)

    def test_several_cifar_files_are_one_set(self, tmp_path: Path) -> None:
        for number, name in enumerate(["data_batch_1", "data_batch_2", "test_batch"]):
            rows = np.full((3, SAMPLE_BYTES), number, np.uint8)
            rows.tofile(tmp_path / f"{name}.bin")
        data = load_task("cifar10-resnet20", data_dir=str(tmp_path)).data()
        assert (len(data.train), len(data.test)) == (6, 3)
        images, labels = data.train.gather(np.array([5, 0]), np.array([0, 0], np.uint64))
        assert labels.tolist() == [1, 0]
        assert images.shape == (2, 3, 32, 32)

    def test_regression_takes_arrays_of_any_number_type(self, tmp_path: Path) -> None:
        draw = np.random.default_rng(0)
        for split, count in (("train", 40), ("test", 20)):
            inputs = draw.normal(size=(count, 2, 2))
            np.savez(tmp_path / f"{split}.npz", inputs=inputs, targets=inputs.sum((1, 2)))
        task = load_task("regression", {"epochs": 40, "batch_size": 10}, data_dir=str(tmp_path))
        model, _ = train_plainly(task)
        assert measure(task, model)["r2"] > 0.8


class TestRegressionMetrics:
    outputs = torch.tensor([[1.0, 2.0], [2.0, 0.0], [4.0, 1.0], [0.5, 1.5]])
    targets = torch.tensor([[1.5, 2.0], [1.0, 1.0], [3.0, 0.0], [0.0, 5.0]])

    def test_they_agree_with_scikit_learn(self) -> None:
        ours = [metric(self.outputs, self.targets) for metric in (mae, mse, r2)]
        theirs = [
            score(self.targets.numpy(), self.outputs.numpy())
            for score in (mean_absolute_error, mean_squared_error, r2_score)
        ]
        assert ours == pytest.approx(theirs, rel=1e-6)

    def test_a_single_column_may_be_flat(self) -> None:
        column = self.outputs[:, :1]
        assert mse(column, self.targets[:, 0]) == pytest.approx(mse(column, self.targets[:, :1]))

    @pytest.mark.parametrize(("offset", "score"), [(0.0, 1.0), (0.5, 0.0)])
    def test_a_target_that_never_varies_scores_one_or_nothing(self, offset: float, score: float) -> None:
        constant = torch.full((4, 1), 3.0)
        assert r2(constant + offset, constant) == score


def _python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()

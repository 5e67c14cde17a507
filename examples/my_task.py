"""A task of one's own: `podium train examples/my_task.py:make_task --set task.lr=0.2 --workers 2`."""

import torch
from sklearn.datasets import load_wine
from torch.nn.functional import cross_entropy

import podium
from podium.task import accuracy


def make_task(lr: float = 0.1, hidden: int = 32) -> podium.Task:
    """Three kinds of wine from thirteen measurements; every fifth bottle is kept for testing."""

    def data() -> podium.Data:
        table, kinds = load_wine(return_X_y=True)
        x = torch.tensor((table - table.mean(0)) / table.std(0), dtype=torch.float32)
        y = torch.tensor(kinds)
        kept = torch.arange(len(y)) % 5 == 0
        return podium.Data(train=podium.ArrayDataset(x[~kept], y[~kept]), test=podium.ArrayDataset(x[kept], y[kept]))

    return podium.Task(
        name="wine",
        model=lambda: torch.nn.Sequential(torch.nn.Linear(13, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 3)),
        data=data,
        loss=cross_entropy,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        metrics={"accuracy": accuracy},
        batch_size=32,
        epochs=20,
    )

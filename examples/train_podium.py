"""The same script under any strategy: `podium run examples/train_podium.py --workers 4 --strategy all-reduce`."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import podium

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
train_set, test_x, test_y = TensorDataset(x[:1400], y[:1400]), x[1400:], y[1400:]

model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

run = podium.join(model, optimizer)
for inputs, targets in run.batches(train_set, batch_size=64, epochs=10):
    loss = run.step(lambda: F.cross_entropy(model(inputs), targets))  # noqa: B023  # called at once

if run.is_first:
    accuracy = (model(test_x).argmax(1) == test_y).float().mean()
    print(f"accuracy {accuracy:.4f}, parameters {run.param_hash()} on {run.size} workers")

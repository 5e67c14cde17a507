"""A plain PyTorch script: an MLP on scikit-learn's digits."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
train_set, test_x, test_y = TensorDataset(x[:1400], y[:1400]), x[1400:], y[1400:]

model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for _epoch in range(10):
    for inputs, targets in DataLoader(train_set, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()

accuracy = (model(test_x).argmax(1) == test_y).float().mean()
print(f"accuracy {accuracy:.4f}")

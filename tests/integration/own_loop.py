"""A training loop of one's own: `own_loop.py MODE FOLDER …`. Ranks load it by its path: it imports no test."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import podium

SAMPLES, BATCH = 96, 16


def data() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(3))
    return inputs, inputs[:, :1].tanh()


def say(folder: str, run: podium.Run, **facts: Any) -> None:
    """Add a line to this worker's file."""
    with (Path(folder) / f"said-{run.rank}.jsonl").open("a") as file:
        file.write(json.dumps({"rank": run.rank, **facts}) + "\n")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))  # type: ignore[no-any-return]


def main(mode: str, folder: str, *args: str) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    options: dict[str, Any] = {"seed": 5} if mode == "seed-in-script" else {}
    run = podium.join(model, optimizer, **options)
    steps, x, y = 0, *data()
    if mode == "twice":
        podium.join(model, optimizer)
    if mode == "numbers":
        say(folder, run, drawn=[float(torch.rand(())), float(np.random.rand()), random.random()])
    if mode == "dicts":
        samples: Any = [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]
    elif mode == "single":
        samples = x
    else:
        samples = (x, y)
    order, casts, sizes = [], set(), []
    limit = int(args[1 if run.rank else 0]) if mode.startswith("break") else 10**9
    for inputs, targets in run.batches(samples, batch_size=BATCH, epochs=2):
        if mode == "break-before" and steps == limit:
            break
        order += inputs[:, 1].tolist()
        sizes.append(len(inputs))

        def loss(inputs: Tensor = inputs, targets: Tensor = targets, steps: int = steps) -> Tensor:
            out = model(inputs)
            casts.add(str(model.first(inputs).dtype))
            if mode == "nan-loss" and steps == 3:
                out = out * float("nan")
            if mode == "nan-gradient" and steps == 11:  # in the last step
                out = out + (0.0 * model.first.weight.sum()).abs().sqrt()  # 0 forward, no number backward
            return mse_loss(out, targets)

        run.step(loss)
        steps += 1
        if mode == "break-after" and steps == limit:
            break
    worker = run.worker
    say(
        folder,
        run,
        position=worker.position,
        steps=steps,
        order=order[:6],
        sizes=sizes[:2],
        casts=sorted(casts),
        buffers=model.norm.running_mean.tolist(),  # type: ignore[operator,union-attr]
        clip_norm=worker.replica.clip_norm,
        codec=worker.sender.packing.codec.name,
        collective=worker.sender.collective.name,
        strategy=type(run.strategy).__name__,
        balance=run._loop.balance.balancer.name,
        threads=torch.get_num_threads(),
        deadline_s=run.comm.deadline_s,
        seed=run.seed,
        size=run.size,
        moved=run.param_hash(),
    )
    if mode.startswith("break"):
        for inputs, targets in run.batches(samples, batch_size=BATCH, epochs=1):
            run.step(lambda a=inputs, b=targets: mse_loss(model(a), b))
        say(folder, run, again=worker.position, moved=run.param_hash())


if __name__ == "__main__":
    main(*sys.argv[1:])

"""On a GPU: ranks that share one device, exchange through gloo, and come to what plain PyTorch comes to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import podium
from podium.comm.base import Communicator
from podium.config import RunConfig
from podium.data.order import GlobalOrder
from podium.engine.files import load_tensors
from podium.exchange.collectives import make_collective
from podium.launch.run import run_script
from podium.records.recorder import read_records
from podium.task import load_task
from podium.testing.worlds import Real

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EPOCHS = 3


def run(tmp_path: Path, strategy: str, workers: int, **options: object) -> podium.RunResult:
    return podium.train(
        "digits-mlp", strategy=strategy, workers=workers, device="cuda", epochs=EPOCHS, out=str(tmp_path), **options
    )


def difference(a: podium.RunResult, b: podium.RunResult) -> float:
    x, y = load_tensors(Path(a.model)), load_tensors(Path(b.model))
    return max(float((x[k] - y[k]).abs().max()) for k in x)


def plain_training(seed: int = 0) -> dict[str, torch.Tensor]:
    task = load_task("digits-mlp")
    data = task.data()
    torch.manual_seed(seed)
    model = task.model().cuda()
    optimizer = task.optimizer(model)
    order = GlobalOrder(len(data.train), seed)
    position = 0
    while position < EPOCHS * order.samples:
        piece = order.slice_at(position, task.batch_size)
        x, y = data.train.gather(order.indices(piece))
        optimizer.zero_grad()
        task.loss(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
        position += piece.count
    return {k: v.cpu() for k, v in model.state_dict().items()}


def test_one_worker_on_the_gpu_is_plain_pytorch_bit_for_bit(tmp_path: Path) -> None:
    expected = plain_training()
    for strategy in ("solo", "all-reduce", "parameter-server"):
        result = run(tmp_path, strategy, 1)
        found = load_tensors(Path(result.model))
        if strategy == "parameter-server":  # its optimizer runs on the server's CPU, whose rounding may differ
            assert max(float((found[k] - expected[k]).abs().max()) for k in expected) < 1e-5
        else:
            assert all(torch.equal(found[k], expected[k]) for k in expected), strategy


@pytest.mark.parametrize(
    "strategy", ["all-reduce", "parameter-server", "parameter-server:servers=2,placement=colocated"]
)
def test_ranks_that_share_a_gpu_agree_with_one(tmp_path: Path, strategy: str) -> None:
    alone, together = run(tmp_path, "solo", 1), run(tmp_path, strategy, 2)
    assert len(set(together.param_hash.values())) == 1
    assert difference(alone, together) < 1e-4


def test_asynchronous_workers_on_the_gpu_learn(tmp_path: Path) -> None:
    result = run(tmp_path, "parameter-server:mode=async", 3)
    assert result.epochs == EPOCHS
    assert result.metrics["accuracy"] > 0.8


@pytest.mark.parametrize("launcher", ["threads", "virtual"])
def test_other_worlds_train_on_the_gpu_too(tmp_path: Path, launcher: str) -> None:
    alone, together = run(tmp_path, "solo", 1), run(tmp_path, "all-reduce", 3, launcher=launcher)
    assert len(set(together.param_hash.values())) == 1
    assert difference(alone, together) < 1e-4


def test_bf16_autocast_on_the_gpu_learns(tmp_path: Path) -> None:
    result = run(tmp_path, "all-reduce", 2, autocast="bf16")
    assert np.isfinite(result.loss)
    assert result.metrics["accuracy"] > 0.8


def sums_on_the_gpu(comm: Communicator) -> list[str]:
    """Every collective that can be had here, on tensors of the one GPU; what came out wrong."""
    wrong = []
    for name in ("shared", "auto", "ring", "halving-doubling", "task-graph", "backend"):
        collective = make_collective(name).prepare(comm)
        for numel in (1, 1000, 1 << 20):
            for dtype in (torch.float32, torch.float16):
                tensor = torch.full((numel,), comm.rank + 1.0, dtype=dtype, device="cuda")
                tensor[-1] = 0.5
                comm.wait(collective.all_reduce(comm, tensor))
                expected = torch.full((numel,), comm.size * (comm.size + 1) / 2, dtype=dtype)
                expected[-1] = comm.size / 2
                if not torch.equal(tensor.cpu(), expected):
                    wrong.append(f"{name} {numel} {dtype}")
    mine = torch.tensor([comm.rank, comm.rank], dtype=torch.uint8, device="cuda")
    into = torch.empty(2 * comm.size, dtype=torch.uint8, device="cuda")
    comm.wait(comm.all_gather(mine, into))
    if into.tolist() != [rank for rank in range(comm.size) for _ in range(2)]:
        wrong.append("all-gather")
    return wrong


@pytest.mark.parametrize("workers", [2, 4])
def test_ranks_that_share_a_gpu_add_up_there(workers: int) -> None:
    assert Real(shared=True).run(sums_on_the_gpu, workers, deadline_s=60.0) == [[]] * workers


@pytest.mark.parametrize("codec", ["fp16", "int8", "ef-sign", "top-k:ratio=0.05", "dgc", "power-sgd:rank=2", "auto"])
@pytest.mark.parametrize("strategy", ["all-reduce", "parameter-server"])
def test_codecs_on_the_gpu(tmp_path: Path, strategy: str, codec: str) -> None:
    result = run(tmp_path, strategy, 2, codec=codec)
    assert len(set(result.param_hash.values())) == 1
    assert result.metrics["accuracy"] > 0.6


LATE = [
    "local-sgd:period=4",
    "diloco:sync_every=8;outer_momentum=0.5",
    "streaming-diloco:sync_every=8;fragments=2",
    "elastic-averaging",
    "adasum",
    "gossip:overlap=false",
    "ad-psgd",
    "async-local-sgd",
    "parameter-server:mode=async;placement=colocated;servers=2",
    "parameter-server:mode=async;codec=fp16;pull=fp16",
]


@pytest.mark.parametrize("launcher", ["virtual", "local"])
@pytest.mark.parametrize("late", LATE)
def test_phases_on_the_gpu(tmp_path: Path, late: str, launcher: str) -> None:
    result = run(tmp_path, f"all-reduce until epoch:at=1 | {late} until epoch:at=2 | all-reduce", 2, launcher=launcher)
    assert len(result.switches) == 2
    assert result.audit == {"missing": 0, "repeated": 0}
    assert len(set(result.param_hash.values())) == 1
    assert result.metrics["accuracy"] > 0.8


# Workers on the GPU and on the CPU in one run.


def sums_of_a_mix(comm: Communicator) -> list[str]:
    """Every collective that can be had here, the first worker's tensors on the GPU; what came out wrong."""
    device = torch.device("cuda" if comm.rank == 0 else "cpu")
    comm.allocate(1, torch.float32, device)  # as a worker does for its parameters
    wrong = []
    for name in ("auto", "ring", "halving-doubling", "backend"):
        collective = make_collective(name).prepare(comm)
        for numel in (1, 1000, 1 << 20):
            for dtype in (torch.float32, torch.float64):
                tensor = torch.full((numel,), comm.rank + 1.0, dtype=dtype, device=device)
                comm.wait(collective.all_reduce(comm, tensor))
                if not torch.equal(tensor.cpu(), torch.full((numel,), comm.size * (comm.size + 1) / 2, dtype=dtype)):
                    wrong.append(f"{name} {numel} {dtype}")
    on_cpu = torch.ones(3)  # small words lie on the CPU everywhere
    comm.wait(comm.all_reduce(on_cpu))
    if on_cpu.tolist() != [comm.size] * 3:
        wrong.append("all-reduce of words")
    mine, into = torch.full((2,), float(comm.rank), device=device), torch.zeros(2 * comm.size, device=device)
    comm.wait(comm.all_gather(mine, into))
    if into.tolist() != [float(rank) for rank in range(comm.size) for _ in range(2)]:
        wrong.append("all-gather")
    for source in range(comm.size):
        told = torch.full((5,), float(comm.rank), device=device)
        comm.wait(comm.broadcast(told, source))
        if told.tolist() != [float(source)] * 5:
            wrong.append(f"broadcast from {source}")
    return wrong


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("workers", [2, 3])
def test_the_gpu_and_the_cpu_add_up_together(workers: int, shared: bool) -> None:
    assert Real(shared=shared).run(sums_of_a_mix, workers, deadline_s=60.0) == [[]] * workers


MIXED = ["all-reduce", "all-reduce:collective=ring", "parameter-server", "local-sgd:period=4"]


@pytest.mark.parametrize("strategy", MIXED)
@pytest.mark.parametrize("device", ["cuda,cpu", "cuda:0,cuda:0,cpu"])
def test_workers_on_the_gpu_and_on_the_cpu_train_one_model(tmp_path: Path, strategy: str, device: str) -> None:
    workers = device.count(",") + 1
    options: dict[str, Any] = {"epochs": EPOCHS, "out": str(tmp_path)}
    together = podium.train(
        "digits-mlp", strategy=strategy, workers=workers, device=device, balance="equal-finish", **options
    )
    begun = [row for row in read_records(Path(together.run_dir)) if row["kind"] == "begin" and row["role"] == "worker"]
    kinds = [row["device"].partition(":")[0] for row in sorted(begun, key=lambda row: row["rank"])]
    assert kinds == [name.partition(":")[0] for name in device.split(",")]
    assert together.audit == {"missing": 0, "repeated": 0}
    assert together.metrics["accuracy"] > 0.8
    if strategy == "parameter-server":  # its optimizer runs in one place; elsewhere replicas agree to rounding
        assert len(set(together.param_hash.values())) == 1
    if strategy != "local-sgd:period=4":
        alone = podium.train("digits-mlp", strategy="solo", device="cpu", **options)
        assert difference(alone, together) < 1e-3


def test_a_checkpoint_of_mixed_devices_is_taken_up_on_any(tmp_path: Path) -> None:
    first = podium.train("digits-mlp", workers=2, device="cuda,cpu", epochs=1, out=str(tmp_path))
    for device in ("cpu", "cpu,cuda", "cuda"):
        rest = podium.train("digits-mlp", workers=2, device=device, epochs=2, resume=first.run_dir, out=str(tmp_path))
        assert rest.audit == {"missing": 0, "repeated": 0}
        assert rest.epochs == 2


LOOP = """
import multiprocessing
import os

rank = int(multiprocessing.current_process().name.removeprefix("podium-"))
os.environ["NCCL_HOSTID"] = f"host{rank}"  # nccl takes the workers for three hosts', and so does Podium

import torch
from torch import nn

import podium
from podium.data.base import ArrayDataset

torch.manual_seed(0)
inputs = torch.randn(512, 8)
net = nn.Linear(8, 1).cuda()
run = podium.join(net, torch.optim.SGD(net.parameters(), lr=0.1))
for step, (x, y) in enumerate(run.batches(ArrayDataset(inputs, inputs[:, :1]), batch_size=16, epochs=1)):
    if rank == 2 and step == 10:
        os.kill(os.getpid(), 9)
    run.step(lambda x=x.cuda(), y=y.cuda(): nn.functional.mse_loss(net(x), y))
print("hash", run.param_hash(), flush=True)
"""


def test_workers_that_exchange_through_nccl_regroup_after_a_loss(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    config = RunConfig(strategy="all-reduce", workers=3, out=str(tmp_path / "runs"))
    assert run_script(config, str(tmp_path / "loop.py")) == 0
    (run_dir,) = (tmp_path / "runs").iterdir()
    rows = list(read_records(run_dir))
    assert [row["backend"] for row in rows if row["kind"] == "backend"] == ["nccl"]
    assert [row["members"] for row in rows if row["kind"] == "regroup"] == [[0, 1], [0, 1]]
    printed = capfd.readouterr().out + (run_dir / "logs" / "rank-1.log").read_text()
    hashes = re.findall(r"hash ([0-9a-f]+)", printed)  # nccl's own messages may stand on the same line
    assert len(hashes) == 2 and len(set(hashes)) == 1, printed


@pytest.mark.parametrize(("workers", "expected"), [(1, "nccl"), (2, "gloo")])
def test_workers_that_share_a_gpu_do_not_use_nccl(tmp_path: Path, workers: int, expected: str) -> None:
    """Alone, a worker has nobody to exchange with, whatever is chosen."""
    result = run(tmp_path, "all-reduce", workers)
    rows = read_records(Path(result.run_dir))
    assert [row["backend"] for row in rows if row["kind"] == "backend"] == [expected]

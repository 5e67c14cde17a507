"""When to leave all-reduce: Strategy-Switch beside it, moments at the switch, DiLoCo, and where the time goes.

    podium compare studies/switching.py --data-dir DIR --jobs 8            (DIR holds the folders mnist and cifar10)
    podium compare studies/switching.py --size small --jobs 2              (digits, no data needed)

Strategy-Switch (Provatas et al., 2025) trains with all-reduce until the loss has settled and then with an asynchronous
parameter server. One of 8 workers has a quarter of the others' speed. Gradients are real, the clock is virtual.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import podium
from podium import Against, Where

SMALL = "all-reduce:bucket_bytes=131072"  # small enough that a small model's exchange overlaps its backward pass
ASYNC = "parameter-server:mode=async,servers=8,placement=colocated"
SWITCH = "strategy-switch:pull=fp16"
EVEN = {"balance": "equal-finish"}
ARMS: dict[str, dict[str, Any]] = {
    "all-reduce": {"strategy": "all-reduce"},
    "all-reduce fp16": {"strategy": "all-reduce", "codec": "fp16"},
    "strategy-switch": {"strategy": "strategy-switch"},
    "strategy-switch fp16": {"strategy": SWITCH, "codec": "fp16"},
    "async fp16": {"strategy": f"{ASYNC},pull=fp16", "codec": "fp16"},
    "strategy-switch fp16, moments dropped": {"strategy": f"{SWITCH},keep_moments=false", "codec": "fp16"},
    "all-reduce, small buckets": {"strategy": SMALL},
    "all-reduce fp16, small buckets": {"strategy": SMALL, "codec": "fp16"},
    "async": {"strategy": ASYNC},
    "all-reduce, equal-finish": {"strategy": "all-reduce", **EVEN},
    "all-reduce, equal-finish, small buckets": {"strategy": SMALL, **EVEN},
} | {
    f"diloco {lr:g}, {momentum:g}": {"strategy": f"diloco:sync_every=50,outer_lr={lr},outer_momentum={momentum}"}
    for lr, momentum in ((1.0, 0.0), (1.0, 0.5), (0.7, 0.7), (0.7, 0.9), (0.7, 0.5))
}  # fmt: skip
MAIN = ("all-reduce", "all-reduce fp16", "strategy-switch", "strategy-switch fp16", "async fp16")
MOMENTS = ("strategy-switch fp16", "strategy-switch fp16, moments dropped")
TIMED = ("all-reduce", "all-reduce, small buckets", "all-reduce fp16", "all-reduce fp16, small buckets", "async",
         "async fp16", "all-reduce, equal-finish", "all-reduce, equal-finish, small buckets")  # fmt: skip
DILOCO = tuple(arm for arm in ARMS if arm.startswith("diloco"))
CHOSEN = "diloco 1, 0.5"  # the outer step that was most accurate with the first seed, and was run with the others
SLOW = {"cluster": "clusters/one-slow-of-eight.toml", "workers": 8}
CIFAR = {"task": "cifar10-resnet20", "epochs": 30, "batch_size": 128, **SLOW}
MNIST = {"task": "mnist-lenet5", "epochs": 45, "batch_size": 512, "task_options": {"lr": 0.1}, **SLOW}
DIGITS = {"task": "digits-mlp", "epochs": 20, "batch_size": 64, "task_options": {"lr": 0.05, "momentum": 0.9}, **SLOW}
SETTINGS: dict[str, dict[str, Any]] = {
    "cifar": CIFAR,
    "mnist": MNIST,
    "mnist-adam": {**MNIST, "task_options": {"optimizer": "adam", "lr": 0.001}},
    "cifar-equal": {**CIFAR, "cluster": "clusters/four-equal.toml", "workers": 4},
    "digits-momentum": DIGITS,
    "timed-cifar": {**CIFAR, "steps": 40, "eval_every": 0},
    "timed-cifar-core": {**CIFAR, "steps": 40, "eval_every": 0, "cluster": "clusters/one-slow-of-eight-core.toml"},
    "timed-mnist": {**MNIST, "steps": 160, "eval_every": 0},
}
RUN: dict[str, tuple[int, tuple[str, ...]]] = {  # seeds and arms of each setting
    "cifar": (3, (*MAIN, MOMENTS[1])),
    "mnist": (6, (*MAIN, MOMENTS[1])),
    "mnist-adam": (6, MOMENTS),
    "cifar-equal": (3, ("all-reduce", *DILOCO)),
    "digits-momentum": (12, MOMENTS),
    "timed-cifar": (1, TIMED),
    "timed-cifar-core": (1, TIMED),
    "timed-mnist": (1, TIMED),
}
LOW, HIGH = 0.1, 0.5  # a setback: a loss above HIGH of the first epoch's after one below LOW of it


def study(size: str | None) -> podium.Study:
    if size not in (None, "small"):
        raise podium.PodiumError(f"switching has one size, small, got {size}")
    run = {"digits-momentum": (2, (*MAIN, MOMENTS[1]))} if size else RUN
    settings = {"digits-momentum": {**DIGITS, "epochs": 8, "batch_size": 128}} if size else SETTINGS
    arms = {arm: given for arm, given in ARMS.items() if any(arm in some for _, some in run.values())}
    where = [Where(levels={"setting": name}, seeds=seeds) for name, (seeds, _) in run.items()]
    where += [
        Where(levels={"setting": name, "arm": [arm for arm in arms if arm not in some]}, leave_out=True)
        for name, (_, some) in run.items()
        if set(some) != set(arms)
    ]
    if not size:
        where.append(Where(levels={"arm": [arm for arm in DILOCO if arm != CHOSEN]}, seeds=1))
    return podium.Study(
        name="switching",
        question="When does it pay to leave all-reduce for asynchronous training, and what does it cost in accuracy?",
        settings={"launcher": "virtual", "threads": 1},
        factors={"arm": arms, "setting": settings},
        where=where,
        measure=measure,
        replications=max(seeds for seeds, _ in run.values()),
        responses=("sent_bytes", "global_step_ms"),
        against=() if size else TABLES,
    )


BOTH = ("accuracy", "seconds")
TABLES = (
    Against(title="Against all-reduce", levels={"arm": "all-reduce"}, margin=0.003, responses=(*BOTH, "sent_bytes"),
            only={"setting": ("cifar", "mnist", "cifar-equal")}),
    Against(title="Against all-reduce with the same codec", levels={"arm": "all-reduce fp16"}, margin=0.003,
            responses=BOTH,
            only={"setting": ("cifar", "mnist"), "arm": ("strategy-switch fp16", "async fp16", MOMENTS[1])}),
    Against(title="Moments kept against dropped", levels={"arm": MOMENTS[1]}, only={"arm": MOMENTS[0]}, responses=BOTH),
    Against(title="Where the time goes", levels={"arm": "all-reduce"}, responses=("global_step_ms",),
            only={"setting": ("timed-cifar", "timed-cifar-core", "timed-mnist")}),
)  # fmt: skip


def measure(row: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Training loss by epoch and after the switch, exchanges, and milliseconds per global step."""
    steps = [one for one in records if one["kind"] == "step" and one["samples"]]
    epoch = round(row["samples"] / row["epochs"])
    ends = [one["t_ns"] for one in steps if one["rank"] == 0]
    half, even = len(ends) // 2, row["balance"].get("balancer", "equal") == "equal"  # others first learn how to divide
    found = {
        "exchanges": sum(bool(one["sent"]) for one in steps if one["rank"] == 0),
        "train_loss": [_mean_loss(steps, first, epoch) for first in range(0, row["samples"], epoch)],
        "switches": [{**one, "loss_after": _mean_loss(steps, one["position"], epoch)} for one in row["switches"]],
        "later_ms": None if even else (ends[-1] - ends[half]) / (len(ends) - 1 - half) / 1e6,
    }
    return {**found, **derived({**row, **found})}


def derived(row: Mapping[str, Any]) -> dict[str, Any]:
    """What follows from a row alone: its first switch and setback, its pace."""
    found: dict[str, Any] = {"global_step_ms": row.get("later_ms") or 1000 * row["seconds"] / row["steps"]}
    for one in row["switches"][:1]:
        first = math.ceil(one["epoch"]) + 1
        later = row["train_loss"][first : first + 3]
        found |= {"switch_epoch": one["epoch"], "switch_share": one["position"] / row["samples"]}
        found |= {"switch_change": one["value"], "switch_ms": one["cost_ms"]["total"], "loss_after": one["loss_after"]}
        found |= {"loss_later": statistics.fmean(later) if len(later) == 3 else None}
    low = next((i for i, loss in enumerate(row["train_loss"]) if loss < LOW * row["train_loss"][0]), math.inf)
    back = (i for i, loss in enumerate(row["train_loss"], 1) if i > low and loss > HIGH * row["train_loss"][0])
    return {**found, "setback_epoch": next(back, None)}


def _mean_loss(steps: Sequence[Mapping[str, Any]], first: int, samples: int) -> float | None:
    """Mean training loss of these samples of the order, whichever worker trained on them."""
    mine = [one for one in steps if first <= one["first"] < first + samples]
    count = sum(one["samples"] for one in mine)
    return sum(one["loss"] * one["samples"] for one in mine) / count if count else None


if __name__ == "__main__":
    raise SystemExit("podium compare studies/switching.py")

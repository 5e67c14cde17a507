"""How gradients are reduced: by a collective, to one device, or not at all; multi-output regression.

    podium compare studies/reduction.py                      (a GPU; four ways on it, one on the CPU)
    podium compare studies/reduction.py --size cpu           (the same ways on CPU cores)
    podium compare studies/reduction.py --size small

The published comparison that this follows found R² to jump between ways of reducing that compute the same sum. Two
things may be held equal when workers are added: samples per step over all workers, or samples per step of each worker.
With the first, the ways must agree, and do. With the second, two workers make steps of twice the samples and half as
many of them, which is another training, whatever reduces its gradients.
"""

from __future__ import annotations

from typing import Any

import podium

BATCH = 128
DEVICES = 2

METHODS: dict[str, dict[str, Any]] = {
    "collective": {"strategy": "all-reduce", "workers": DEVICES},
    "to one device": {"strategy": "all-reduce", "workers": DEVICES, "collective": "reduce-to-one"},
    "one device": {"strategy": "solo", "workers": 1},
    "CPU": {"strategy": "solo", "workers": 1, "device": "cpu"},
}

NOTES = (
    "Why ways that must agree do agree: a step's gradient is the mean over its samples. A collective, a sum on one "
    "device that is sent back, and a single device that sees all samples compute the same mean, with additions in "
    "another order. With equal samples per step, whatever differs beyond rounding would be a mistake.",
    "What makes them differ elsewhere: libraries count the batch per device. Two devices then make steps of twice the "
    "samples and, in as many epochs, half as many steps, at the same learning rate: another training. With equal "
    "samples per worker the same happens here, to both ways with two workers alike, and not to the single device. One "
    "run of each cannot tell that from the way of reducing; the second factor can.",
    "Set-up is the time from the launch to the first step: starting processes, importing, joining. It is what a "
    "published table may call compile time.",
)


def study(size: str | None) -> podium.Study:
    """`cpu` and `small` are for machines without a GPU, where the last way would be the third again."""
    if size not in (None, "cpu", "small"):
        raise podium.PodiumError(f"reduction has sizes cpu and small, got {size}")
    methods = {name: given for name, given in METHODS.items() if size is None or name != "CPU"}
    return podium.Study(
        name="reduction",
        question="Does the way in which gradients are reduced change what is learnt, or only how long it takes?",
        settings={
            "task": "regression",
            "task_options": {
                "features": 32,
                "outputs": 8,
                "samples": 3000 if size == "small" else 20_000,
                "hidden": (256, 256),
            },
            "epochs": 3 if size == "small" else 10,
            "device": "cuda" if size is None else "cpu",
            "threads": 1,
        },
        factors={"method": methods, "equal": {"samples per step": {}, "samples per worker": {}}},
        derive=_batch,
        replications=2 if size == "small" else 5,
        responses=("mse", "r2", "setup_s", "samples_per_s"),
        notes=NOTES,
    )


def _batch(levels: dict[str, Any]) -> dict[str, Any]:
    workers = METHODS[levels["method"]]["workers"]
    return {"batch_size": BATCH * workers if levels["equal"] == "samples per worker" else BATCH}


if __name__ == "__main__":
    raise SystemExit("podium compare studies/reduction.py")

"""An exchange every batch, or every 4: what gradient accumulation saves on slow links, and how well time is predicted.

    podium compare studies/accumulation.py --jobs 2                (virtual time)
    podium compare studies/accumulation.py --size small --jobs 2
    podium compare studies/accumulation.py --size real             (six cells on shaped links: root, two idle cores)

Every combination of model, batch of a node, nodes and link, with an exchange every batch and every 4. Stand-ins with a
model's parameters train in virtual time; what a pass takes on a core is in the cluster files (studies/passes.py). Each
node goes through 8 batches in a run, whatever the cell; an epoch is 100,000 images at that pace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import podium
from podium import Against

EPOCH = 100_000  # training images of TinyImageNet
PASSES = 8
MODELS = ("resnet50", "efficientnet-b0")
LINKS = {"1000 Mbit/s": 1000, "100 Mbit/s": 100}
REAL = {  # model, workers, batches per exchange, link
    ("resnet50", 2, 1, "100 Mbit/s"),
    ("resnet50", 2, 4, "100 Mbit/s"),
    ("resnet50", 2, 1, "1000 Mbit/s"),
    ("efficientnet-b0", 2, 1, "100 Mbit/s"),
    ("efficientnet-b0", 2, 4, "100 Mbit/s"),
    ("efficientnet-b0", 1, 1, "100 Mbit/s"),
}
WORLDS = {"predicted": {"launcher": "virtual"}, "real": {"launcher": "shaped"}}


def study(size: str | None) -> podium.Study:
    if size not in (None, "small", "real"):
        raise podium.PodiumError(f"accumulation has sizes small and real, got {size}")
    real, small = size == "real", size == "small"
    batches = (4, 8, 12) if small else (32,) if real else (32, 64, 100)
    first: dict[str, Any] = {"world": WORLDS} if real else {}
    reference = {"world": "real"} if real else {"accumulate": 1}
    title = "Predicted against real" if real else "Every 4 against every batch"
    responses = ("batch_s",) if real else ("epoch_s", "wait_share")
    return podium.Study(
        name="accumulation-real" if real else "accumulation",
        question="How long does an epoch take with an exchange every 4 batches instead of every batch?"
        if not real
        else "How far is virtual time from what real processes take on shaped links?",
        settings={"strategy": "all-reduce", "collective": "ring", "epochs": 1, "eval_every": 0, "threads": 1}
        | ({} if real else WORLDS["predicted"]),
        factors=first
        | {
            "accumulate": [1, 4],
            "model": {name: {} for name in MODELS},
            "workers": [1, 2] if real else [1, 2, 3],
            "batch": {f"batch {batch}": {} for batch in batches},
            "link": {name: {} for name in LINKS if not small or name == "100 Mbit/s"},
        },
        keep=_is_real if real else None,
        derive=_settings,
        measure=measure,
        replications=3 if real else 2 if small else 5,
        responses=responses,
        against=(Against(title=title, levels=reference, responses=responses),),
    )


def _is_real(at: Mapping[str, Any]) -> bool:
    return (at["model"], at["workers"], at["accumulate"], at["link"]) in REAL


def _settings(at: Mapping[str, Any]) -> dict[str, Any]:
    """Nodes of one machine share its memory, so with two of them the profile measured beside another holds."""
    batch, real = int(at["batch"].removeprefix("batch ")), at.get("world") == "real"
    beside = "beside" if "world" in at and at["workers"] > 1 else "alone"
    options: dict[str, Any] = {"samples": PASSES * batch * at["workers"]}
    return {
        "task": f"tiny-imagenet-{at['model']}" if real else "podium.tasks.images64:stand_in",
        "task_options": options if real else {**options, "model": at["model"]},
        "batch_size": at["accumulate"] * batch * at["workers"],
        "cluster": f"clusters/{at['model']}-{beside}-{LINKS[at['link']]}mbit.toml",
    }


def measure(row: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Seconds of an epoch at the run's pace, and of a batch of one node without the first step."""
    steps = [one for one in records if one["kind"] == "step" and one["rank"] == 0]
    found = {
        "step_s": [one["step_ns"] / 1e9 for one in sorted(steps, key=lambda one: int(one["step"]))],
        "step_bytes": steps[-1]["sent"],
        "epoch_s": row["seconds"] / row["samples"] * EPOCH,
    }
    return {**found, **derived({**row, **found})}


def derived(row: Mapping[str, Any]) -> dict[str, float]:
    """The first step prepares buffers and kernels, and is left out."""
    later = row["step_s"][1:] or row["step_s"]
    return {"batch_s": sum(later) / (row["levels"]["accumulate"] * len(later))}


if __name__ == "__main__":
    raise SystemExit("podium compare studies/accumulation.py")

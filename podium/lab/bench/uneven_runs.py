"""A training run on uneven machines, and its throughput, shares and waiting times from the records."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.balance import find_balancer
from podium.config import parse_spec
from podium.launch.rendezvous import rendezvous_folder
from podium.launch.run import train
from podium.records.recorder import Record, read_records

EQUAL, EQUAL_FINISH = "equal", "equal-finish"
LEARNS_STEPS, OTHERS_STEPS = 30, 5  # not measured, by whether the balancer learns
MBIT = 1000.0
SLOWER = 4.0


@dataclass(frozen=True)
class Run:
    """The records of one run; its first `warm` steps are not measured."""

    steps: Sequence[Record]
    """In order of time, of all workers."""
    changes: Sequence[Record]
    warm: int

    @property
    def batch(self) -> int:
        """Samples of a global step."""
        return sum(row["samples"] for row in self.steps if row["step"] == self.steps[-1]["step"])

    @property
    def ends_s(self) -> list[float]:
        """When each step ended on the last worker."""
        last: dict[int, float] = {}
        for row in self.steps:
            last[row["step"]] = max(last.get(row["step"], 0.0), row["t_ns"] / 1e9)
        return [last[step] for step in sorted(last)]

    @property
    def samples_per_second(self) -> float:
        ends = self.ends_s[self.warm - 1 :]
        return float(self.batch * (len(ends) - 1) / (ends[-1] - ends[0]))

    @property
    def facts(self) -> dict[str, Any]:
        """The division of the last step, its changes, and the workers' median times."""
        ranks = sorted({row["rank"] for row in self.steps})
        own = {rank: [r for r in self.steps if r["rank"] == rank and r["step"] > self.warm] for rank in ranks}
        return {
            "shares": [own[rank][-1]["samples"] for rank in ranks],
            "changes": len(self.changes),
            "last_change_at_step": max((row["step"] for row in self.changes), default=None),
            "pass_ms": [_median_ms(own[rank], "pass_ns") for rank in ranks],
            "wait_ms": [_median_ms(own[rank], "wait_ns") for rank in ranks],
            "step_ms": 1e3 * self.batch / self.samples_per_second,
        }


def _median_ms(rows: Sequence[Record], key: str) -> float:
    return float(statistics.median(row[key] for row in rows)) / 1e6


def run_training(
    cluster: str, strategy: str, balance: str, warm: int, steps: int, bucket_bytes: int, **options: Any
) -> Run:
    """Train on these machines, and read the records. `cluster`: the text of a cluster file."""
    with rendezvous_folder() as folder:
        file = folder / "cluster.toml"
        file.write_text(cluster)
        result = train(
            "wide-mlp",
            strategy=strategy,
            strategy_options={"bucket_bytes": bucket_bytes},
            balance=balance,
            steps=warm + steps,
            epochs=warm + steps,
            eval_every=0,
            threads=1,
            cluster=str(file),
            run_dir=folder / "run",
            **options,
        )
        rows = list(read_records(Path(result.run_dir)))
    found = [row for row in rows if row["kind"] == "step"]
    return Run(found, [row for row in rows if row["kind"] == "balance"], warm)


def warm_steps(balance: str) -> int:
    """Steps before measuring begins."""
    return LEARNS_STEPS if find_balancer(parse_spec(balance, "balance")[0]).learns else OTHERS_STEPS


def node_lines(name: str, **settings: float) -> list[str]:
    rates = {"up_mbit": MBIT, "down_mbit": MBIT}
    return ["[[node]]", f'name = "{name}"', *(f"{key} = {value}" for key, value in {**rates, **settings}.items())]

"""What the summary says of staleness and of what happened on the way."""

from __future__ import annotations

from typing import Any

from podium.cli.summary import summary
from podium.config import RunConfig, RunResult


def told(**fields: Any) -> str:
    result = RunResult(
        run_dir="runs/one",
        status="finished",
        task="digits-mlp",
        strategy="parameter-server(mode=async)",
        workers=2,
        seed=0,
        launcher="local",
        metrics={"accuracy": 0.9},
        loss=0.3,
        param_hash={"0": "00", "1": "00"},
        steps=10,
        samples=640,
        epochs=1.0,
        seconds=1.0,
        samples_per_s=640.0,
        sent_bytes=1000,
        **fields,
    )
    return summary(result, RunConfig(strategy="parameter-server", workers=2))


def names(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines()[1:]]


def test_nothing_is_said_of_what_did_not_happen() -> None:
    assert {"staleness", "dropped", "lost", "restored"}.isdisjoint(names(told()))


def test_it_says_how_stale_updates_were_and_how_many_pushes_were_dropped() -> None:
    text = told(staleness={"mean": 1.25, "max": 4.0, "count": 8.0}, dropped=1200)
    assert "mean 1.25, at most 4" in text and "1,200 pushes, too stale" in text
    assert "1 push, too stale" in told(dropped=1)


def test_it_says_which_servers_were_restored_from_what_and_what_was_lost_with_them() -> None:
    first = {"server": 4, "source": "snapshot", "took_s": 0.5, "lost_updates": 12}
    second = {"server": 5, "source": "replica at 4", "took_s": None, "lost_updates": 0}
    text = told(lost=[4, 5], restored=[first, second])
    assert "rank 4, 5" in text
    assert "server 4 from snapshot in 0.50 s, 12 updates lost" in text
    assert "server 5 from replica at 4, no update lost" in text
    assert names(text).count("restored") == 2

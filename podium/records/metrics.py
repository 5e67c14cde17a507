"""Which way a metric is better: one rule for runs, comparisons, studies and sweeps."""

from __future__ import annotations

import re

LOWER_IS_BETTER = frozenset(
    (
        *("mae", "mse", "rmse", "mape", "err", "perplexity", "ppl", "nll", "entropy", "crossentropy"),
        *("wer", "cer", "fid", "distance", "regret", "cost"),
    )
)
"""A metric is better when lower if a word of its name is one of these, or contains `loss` or `error`."""


def lower_is_better(metric: str, maximize: bool | None = None) -> bool:
    """By the user's `maximize`, or by the metric's name where that is None."""
    if maximize is not None:
        return not maximize
    words = re.split(r"[^a-z0-9]+", metric.lower())
    return any(word in LOWER_IS_BETTER or "loss" in word or "error" in word for word in words)

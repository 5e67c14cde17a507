"""Podium beside its peers, in one run: interleaved rounds, medians, ratios.

Absolute times belong to the machine; a ratio taken round by round, in one run, says more.
"""

from __future__ import annotations

BENCHES: dict[str, str] = {
    "step": "podium.bench.step:bench_step",
    "ps": "podium.bench.ps:bench_ps",
    "collectives": "podium.bench.collectives:bench_collectives",
    "codecs": "podium.bench.codecs:bench_codecs",
    "switch": "podium.bench.switch:bench_switch",
    "sweep": "podium.bench.sweep:bench_sweep",
    "folds": "podium.bench.folds:bench_folds",
    "fuzz": "podium.bench.fuzz:bench_fuzz",
    "uneven": "podium.bench.uneven:bench_uneven",
    "claims": "podium.bench.claims:bench_claims",
    "soak": "podium.bench.soak:bench_soak",
}
"""Name to `module:function`; each takes peers, rounds and its own options, and returns one JSON document."""

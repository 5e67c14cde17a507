"""Benchmarks of Podium and its peers in one run: interleaved rounds, medians, ratios.

Absolute times depend on the machine; ratios taken round by round in one run depend on it less.
"""

from __future__ import annotations

BENCHES: dict[str, str] = {
    "step": "podium.lab.bench.step:bench_step",
    "hosts": "podium.lab.bench.hosts:bench_hosts",
    "ps": "podium.lab.bench.ps:bench_ps",
    "collectives": "podium.lab.bench.collectives:bench_collectives",
    "codecs": "podium.lab.bench.codecs:bench_codecs",
    "switch": "podium.lab.bench.switch:bench_switch",
    "sweep": "podium.lab.bench.sweep:bench_sweep",
    "folds": "podium.lab.bench.folds:bench_folds",
    "fuzz": "podium.testing.frame_fuzz:bench_fuzz",
    "uneven": "podium.lab.bench.uneven:bench_uneven",
    "claims": "podium.lab.bench.claims:bench_claims",
    "soak": "podium.lab.bench.soak:bench_soak",
}
"""Name to `module:function`; each takes peers, rounds and its own options, and returns one JSON document."""

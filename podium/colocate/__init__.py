"""Many models on one device: trials, executors, slots.

The public doors are `podium.sweep` (Python) and `podium sweep` (command line): `podium.colocate.sweep.sweep` trains,
`podium.study.sweeps` reports.
"""

from __future__ import annotations

EXECUTORS: dict[str, str] = {
    "sequential": "podium.colocate.sequential:Sequential",
    "streams": "podium.colocate.streams:Streams",
    "fused": "podium.colocate.fused:Fused",
    "processes": "podium.colocate.processes:Processes",
    "mps": "podium.colocate.mps:Mps",
    "ray": "podium.colocate.ray:RayActors",
    "auto": "podium.colocate.auto:Auto",
}
"""Each executor's name to `module:class`; `auto` measures the others and chooses."""

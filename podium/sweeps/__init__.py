"""Many models on one device: trials, executors, slots.

The public doors are `podium.sweep` (Python) and `podium sweep` (command line): `podium.sweeps.sweep.sweep` trains,
`podium.lab.sweeps` reports.
"""

from __future__ import annotations

EXECUTORS: dict[str, str] = {
    "sequential": "podium.sweeps.executors.sequential:Sequential",
    "streams": "podium.sweeps.executors.streams:Streams",
    "fused": "podium.sweeps.executors.fused:Fused",
    "processes": "podium.sweeps.executors.processes:Processes",
    "mps": "podium.sweeps.executors.mps:Mps",
    "ray": "podium.sweeps.executors.ray:RayActors",
    "auto": "podium.sweeps.executors.auto:Auto",
}
"""Each executor's name to `module:class`; `auto` measures the others and chooses."""

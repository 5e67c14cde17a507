"""Many models on one device: trials, executors, slots.

`podium.sweep` (Python) and `podium sweep` (command line) train by `podium.sweeps.api` and report by
`podium.lab.sweeps`.

    api, request, plan               the user's request, as frozen values; made and checked before anything is written
    session, session_log             one session: trains what earlier ones left, and records events
    sweep_folder, fingerprint        a new folder, or one of the same sweep, with the same task and data
    queue, waiting, best_models      gives out trials by structure, records reports and outcomes, keeps the best model
    trial, recipe, parts             a trial as plain data; what trials share; one trial, built
    task_options, seeds, precision   options of the task and of the optimizer; generators; precision and threads
    reference                        one trial alone, as plain PyTorch trains it
    result, ranking, answer, formats the result, read from a folder: points, tests, the answer in words
    executors/                       how trials share the device
    fused/                           many models as rows of one array
    search/  stopping/               where trials come from; when they are stopped early
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

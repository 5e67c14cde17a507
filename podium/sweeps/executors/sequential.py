"""`sequential`: one trial after another; plain PyTorch, or on a GPU, with `mode=graph`, each step as one CUDA graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, final

from podium.errors import ConfigError
from podium.sweeps.executors.base import Executor, OnEvent, Queue
from podium.sweeps.fused.device_data import DeviceData
from podium.sweeps.precision import precision_of, with_threads
from podium.sweeps.recipe import Recipe
from podium.sweeps.reference import PopulationError, ReferenceTrainer, train_trial
from podium.sweeps.trial import failed


@final
@dataclass(frozen=True, kw_only=True)
class Sequential(Executor):
    """One trial after another."""

    mode: Literal["eager", "graph", "compiled"] = "eager"
    """`eager`: plain PyTorch. On a GPU, `graph`: the whole step captured and replayed without the host's work;
    `compiled`: the same, compiled by `torch.compile` first."""
    threads: int | None = None
    """Threads of each operation on the CPU; torch's own number when not given. Small models are faster with one."""

    name = "sequential"

    def __post_init__(self) -> None:
        if self.mode not in ("eager", "graph", "compiled"):
            raise ConfigError(f"sequential: mode must be 'eager', 'graph' or 'compiled', got {self.mode!r}")

    def run(self, recipe: Recipe, queue: Queue, on_event: OnEvent) -> None:
        graphs: dict[Any, Any] = {}
        with precision_of(recipe), with_threads(self.threads):
            while not queue.stop_requested() and (trial := queue.take()) is not None:
                on_event({"event": "trial", "trial": trial.number, "state": "begins"})
                try:
                    parts = recipe.make(trial)
                    trainer = make_trainer(self.mode, recipe, parts, recipe.device_data_of(parts.task), graphs)
                    outcome = train_trial(trainer, queue.report, self.name, queue.stop_requested)
                    state = trainer.state()
                except PopulationError:
                    raise
                except Exception as error:  # an error in the user's own code fails this trial, not the sweep
                    queue.hand_in(failed(trial, error, self.name), None)
                    continue
                if outcome is not None:
                    queue.hand_in(outcome, state)


def make_trainer(mode: str, recipe: Recipe, parts: Any, device_data: DeviceData, graphs: dict[Any, Any]) -> Any:
    """A trainer of one trial; `graphs` keeps captured steps for trials of the same structure.

    A model that a captured step would change (state in Python, branches, randomness) is trained without one.
    """
    if mode == "eager" or recipe.torch_device.type != "cuda":
        return ReferenceTrainer(recipe, parts.trial, device_data, parts)
    from podium.sweeps.executors.graphed import GraphedTrainer
    from podium.sweeps.fused.probe import probe

    key = parts.structure
    if key not in graphs and not probe(recipe, [parts.trial], device_data, rows=1).fuses:
        graphs[key] = None
    if key in graphs and graphs[key] is None:
        return ReferenceTrainer(recipe, parts.trial, device_data, parts)
    return GraphedTrainer(recipe, parts.trial, device_data, parts, graphs, compiled=mode == "compiled")

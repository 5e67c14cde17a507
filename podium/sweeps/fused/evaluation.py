"""Evaluates rows of an array on their validation data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, vmap

from podium.errors import ConfigError
from podium.sweeps.precision import computing
from podium.sweeps.reference import at_least_single, validation
from podium.sweeps.trial import Evaluation

if TYPE_CHECKING:
    from podium.sweeps.fused.array import Array


def evaluate_rows(
    array: Array, rows: Sequence[int], steps: Sequence[int], most: int | None
) -> list[Evaluation | Exception]:
    """See `Array.evaluate`."""
    parts = [array.parts_of(row) for row in rows]
    wanted = [(samples, index[:most]) for samples, index in (validation(array.device_data, one) for one in parts)]
    samples, longest = wanted[0][0], max(len(index) for _, index in wanted)
    padded = np.stack([np.resize(index, longest) for _, index in wanted])
    places = torch.from_numpy(padded).to(array.device)
    outputs, targets = _predict(array, rows, places)
    found: list[Evaluation | Exception] = []
    for i, (one, (_, index)) in enumerate(zip(parts, wanted, strict=True)):
        try:
            found.append(one.evaluate(steps[i], outputs[i, : len(index)], targets[i, : len(index)]))
        except Exception as error:  # the user's own code
            found.append(error)
    assert all(other is samples for other, _ in wanted)
    return found


@torch.no_grad()
def _predict(array: Array, rows: Sequence[int], places: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and targets [rows, samples, …] on the CPU."""
    chosen = torch.tensor(list(rows), device=array.device)
    all_rows = list(rows) == list(range(array.rows))

    def take(tensor: Tensor) -> Tensor:
        return tensor if all_rows else tensor.index_select(0, chosen)

    given = {p.name: take(leaf) for p, leaf in zip(array.places, array.leaves, strict=True)}
    given.update({name: take(tensor) for name, tensor in array.frozen.items()})
    # Buffers are copied, so that an evaluation does not change the rows.
    given.update({name: take(b).clone() if all_rows else take(b) for name, b in array.buffers.items()})
    samples = validation(array.device_data, array.parts_of(rows[0]))[0]
    size = max(1, array.task.eval_batch_size // max(1, len(rows) // 8))
    columns: list[tuple[Tensor, Tensor]] = []
    with computing(array.recipe, array.task):
        for start in range(0, places.shape[1], size):
            inputs, targets = samples.batch(places[:, start : start + size], None)
            columns.append((at_least_single(_outputs(array, given, inputs)).cpu(), targets.cpu()))
    outputs, targets = (torch.cat(column, dim=1) for column in zip(*columns, strict=True))
    return outputs, targets


def _outputs(array: Array, given: dict[str, Tensor], inputs: Tensor) -> Tensor:
    def one(values: dict[str, Tensor], x: Tensor) -> Any:
        return functional_call(array.eval_model, values, (x,), strict=True)

    if array.rows == 1 or array.mode == "gradient":  # recurrent nets have no rule for `vmap` without gradients
        rows = [one({k: t[i] for k, t in given.items()}, inputs[i]) for i in range(len(inputs))]
        found: Any = torch.stack(rows)
    else:
        found = vmap(one)(given, inputs)
    if not isinstance(found, Tensor):
        raise ConfigError(f"fused: the model's output must be one tensor, got {type(found).__name__}")
    return found

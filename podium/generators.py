"""The state of random generators: torch's, on the CPU and on a rank's GPU, numpy's and Python's."""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

State = tuple[Tensor, ...]
"""The CPU generator's state; behind it the GPU's, where there is one."""

_MOST_VISITED = 10_000


def generator_state(device: torch.device) -> State:
    cpu = torch.get_rng_state()
    return (cpu, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (cpu,)


def set_generator_state(state: State, device: torch.device) -> None:
    """Go on from `state`; one that was taken on a CPU leaves the GPU's generator as it is."""
    torch.set_rng_state(state[0])
    if device.type == "cuda" and len(state) > 1:
        torch.cuda.set_rng_state(state[1], device)


def seed_generators(seed: int, *, cuda: bool = True) -> None:
    """Seed torch, numpy and Python alike; `cuda`: the GPUs' generators, too."""
    if cuda:
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
    seed_others(seed)


def seed_others(seed: int) -> None:
    """Seed numpy's and Python's global generators, as a script would that calls both with its seed."""
    seed_numpy(seed)
    random.seed(seed)


def seed_numpy(seed: int) -> None:
    """Numpy takes 32 bits, or words of them."""
    np.random.seed(seed if seed < 2**32 else [seed & 0xFFFFFFFF, seed >> 32])


@contextmanager
def undrawn(*holders: Any) -> Iterator[None]:
    """Whatever is drawn inside leaves no trace: in the global generators, and in those that the holders hold."""
    held = held_generators(*holders)
    states = [_state_of(each) for each in held]
    cpu, numpys, pythons = torch.get_rng_state(), np.random.get_state(), random.getstate()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        np.random.set_state(numpys)
        random.setstate(pythons)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)
        for each, state in zip(held, states, strict=True):
            _restore(each, state)


def held_generators(*holders: Any) -> list[Any]:
    """The generators that these objects hold: in attributes, containers, closures and the globals that they name."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    waiting = list(holders)
    while waiting and len(seen) < _MOST_VISITED:
        holder = waiting.pop()
        if id(holder) in seen or isinstance(holder, _PLAIN):
            continue
        seen.add(id(holder))
        if isinstance(holder, _GENERATORS):
            found[id(holder)] = holder
        else:
            waiting.extend(_parts_of(holder))
    return list(found.values())


_GENERATORS = (np.random.Generator, np.random.RandomState, torch.Generator, random.Random)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.ndarray, np.generic, Tensor, type, types.ModuleType)
_LONGEST_LIST = 256
"""Longer ones hold data, not generators."""


def _parts_of(holder: Any) -> list[Any]:
    if isinstance(holder, dict):
        return list(holder.values()) if len(holder) <= _LONGEST_LIST else []
    if isinstance(holder, list | tuple | set | frozenset):
        return list(holder) if len(holder) <= _LONGEST_LIST else []
    if isinstance(holder, functools.partial):
        return [holder.func, *holder.args, *holder.keywords.values()]
    if isinstance(holder, types.MethodType):
        return [holder.__self__, holder.__func__]
    if isinstance(holder, types.FunctionType):
        cells = [cell.cell_contents for cell in holder.__closure__ or () if not _is_empty(cell)]
        named = [holder.__globals__[n] for n in holder.__code__.co_names if n in holder.__globals__]
        return [*cells, *(holder.__defaults__ or ()), *(holder.__kwdefaults__ or {}).values(), *named]
    parts = list(getattr(holder, "__dict__", {}).values())
    for kind in type(holder).__mro__:
        if kind.__module__ in ("builtins", "abc", "typing"):
            continue
        slots = kind.__dict__.get("__slots__", ())
        parts += [getattr(holder, s) for s in ((slots,) if isinstance(slots, str) else slots) if hasattr(holder, s)]
        parts += [member for member in vars(kind).values() if isinstance(member, (types.FunctionType, *_GENERATORS))]
    return parts


def _is_empty(cell: types.CellType) -> bool:
    return cell == types.CellType()


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return None if isinstance(generator, random.SystemRandom) else generator.getstate()
    return generator.get_state()


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        if state is not None:
            generator.setstate(state)
    else:
        generator.set_state(state)

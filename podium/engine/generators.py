"""The state of random generators: torch's, on the CPU and on a rank's GPU, numpy's and Python's.

A step that is retried after a loss draws torch's numbers again; numpy's and Python's continue (their states take 0.1 ms
to read, too long for every step). Checkpoints hold all three.
"""

from __future__ import annotations

import ctypes
import functools
import random
import types
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch import Tensor

if TYPE_CHECKING:
    from podium.comm.base import Communicator

State = tuple[Tensor, ...]
"""The CPU generator's state, then the GPU's, where there is one."""

_MOST_VISITED = 10_000


def generator_state(device: torch.device) -> State:
    cpu = torch.get_rng_state()
    return (cpu, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (cpu,)


def set_generator_state(state: State, device: torch.device) -> None:
    """Restore `state`; one that was taken on a CPU leaves the GPU's generator as it is."""
    torch.set_rng_state(state[0])
    if device.type == "cuda" and len(state) > 1:
        torch.cuda.set_rng_state(state[1], device)


def seed_generators(seed: int, *, cuda: bool = True) -> None:
    """Seed torch, numpy and Python; `cuda`: the GPUs' generators, too."""
    if cuda:
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
    seed_others(seed)


def seed_others(seed: int) -> None:
    """Seed numpy's and Python's global generators."""
    seed_numpy(seed)
    random.seed(seed)


def seed_numpy(seed: int) -> None:
    """Numpy takes a seed of 32 bits, or a list of such."""
    np.random.seed(seed if seed < 2**32 else [seed & 0xFFFFFFFF, seed >> 32])


class Others:
    """Numpy's and Python's generators of one of several workers that share a process.

    Both are global. The worker that computes installs its own; the state of those before is saved for their worker. A
    numpy state that was not drawn from is not read back, which would take 0.1 ms.
    """

    _in_place: ClassVar[Others | None] = None

    def __init__(self) -> None:
        """Starts as a copy of the global generators."""
        state: Any = np.random.get_state(legacy=False)
        self._bits: Any = np.random.MT19937()
        self._bits.state = state
        self._rest = {k: v for k, v in state.items() if k in ("has_gauss", "gauss")}
        self._python = random.getstate()
        self._before = b""

    def put_in_place(self) -> None:
        before = Others._in_place
        if before is self:
            return
        if before is not None:
            before._take_back()
        set_bit_generator(self._bits)  # which forgets a normal number that was drawn and not used yet
        if self._rest["has_gauss"]:
            np.random.set_state({**self._bits.state, **self._rest})
        random.setstate(self._python)
        self._before, Others._in_place = _words_of(self._bits), self

    def _take_back(self) -> None:
        self._python = random.getstate()
        bits = get_bit_generator()
        drawn = bits is not self._bits or self._rest["has_gauss"] or _words_of(bits) != self._before
        if drawn or not self._before:
            state = np.random.get_state(legacy=False)
            self._bits, self._rest = bits, {"has_gauss": state["has_gauss"], "gauss": state["gauss"]}


class WorkerGenerators:
    """One worker's random generators: the process's own, or copies where several workers share the process."""

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self._comm, self._device = comm, device
        self._own: State | None = None
        self._others: Others | None = None

    @property
    def are_own(self) -> bool:
        """Whether they are copies, which `computing` puts in place."""
        return self._own is not None

    def fork(self, *, numpy_and_python: bool = True) -> None:
        """Use copies from now on, which start in the present state of the process's generators."""
        self._own = generator_state(self._device)
        self._others = Others() if numpy_and_python else None

    def state(self) -> State:
        """Of torch's generators."""
        return generator_state(self._device) if self._own is None else self._own

    def set_state(self, state: State) -> None:
        if self._own is None:
            set_generator_state(state, self._device)
        else:
            self._own = state

    def others_state(self) -> dict[str, Any]:
        """The state of numpy's and Python's generators, as a checkpoint can hold it."""
        with self.computing():
            return others_state()

    def set_others_state(self, state: Mapping[str, Any]) -> None:
        with self.computing():
            set_others_state(state)

    def computing(self) -> AbstractContextManager[None]:
        """Around forward and backward: installs this worker's generators, and excludes other workers of its process."""
        return self._in_place() if self._comm.shares_process else nullcontext()

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """This worker's generators in place of the process's, under the compute lock of its world."""
        with self._comm.computing():
            assert self._own is not None
            outer = generator_state(self._device)
            set_generator_state(self._own, self._device)
            if self._others is not None:
                self._others.put_in_place()
            try:
                yield
            finally:
                self._own = generator_state(self._device)
                set_generator_state(outer, self._device)


@contextmanager
def several_in_one_process() -> Iterator[None]:
    """Around workers that install their generators: restores the process's own afterwards."""
    bits, others = get_bit_generator(), Others._in_place
    with undrawn():
        try:
            yield
        finally:
            Others._in_place = others
            set_bit_generator(bits)


def _words_of(bits: Any) -> bytes:
    """The memory of numpy's usual generator; empty for another kind."""
    return ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES) if isinstance(bits, np.random.MT19937) else b""


_MT19937_BYTES = 624 * 4 + 4
"""Its words, and how many of them are used."""


def others_state() -> dict[str, Any]:
    """The state of numpy's and Python's generators, as a checkpoint can hold it."""
    version, words, gauss = random.getstate()
    state = np.random.get_state(legacy=False)
    found: dict[str, Any] = {"python": {"version": version, "words": torch.tensor(words), "gauss": gauss}}
    if state["bit_generator"] == "MT19937":  # a generator that the user installed is not saved
        inner = state["state"]
        key = torch.from_numpy(inner["key"].astype(np.int64))
        rest = {"pos": int(inner["pos"]), "has_gauss": int(state["has_gauss"]), "gauss": float(state["gauss"])}
        found["numpy"] = {"key": key, **rest}
    return found


def set_others_state(state: Mapping[str, Any]) -> None:
    """The inverse of `others_state`."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    if "numpy" in state:
        held = state["numpy"]
        key = held["key"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", key, held["pos"], held["has_gauss"], held["gauss"]))


@contextmanager
def undrawn(*holders: Any) -> Iterator[None]:
    """Restore, at the end, the global generators and those that the holders hold."""
    held = held_generators(*holders)
    states = [_state_of(each) for each in held]
    cpu, numpys, pythons = torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()
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


def derived_seed(seed: int, *salts: int) -> int:
    """A different seed for each rank or purpose."""
    return int(np.random.SeedSequence([seed, *salts]).generate_state(1, np.uint64)[0] >> np.uint64(1))

"""Ray: the server and the workers are actors, which exchange tensors through the object store.

Run as a script by an interpreter that has Ray; imports nothing of Podium. `script_protocol.py` lists its requests.

Variants, both updated by torch, in one pass and without a temporary array:

    ray_numpy   numpy arrays, which Ray reads without a copy
    ray_torch   torch tensors, also without a copy, by RAY_ENABLE_ZERO_COPY_TORCH_TENSORS=1
"""

from __future__ import annotations

import os
import time
import warnings
from typing import Any

from script_protocol import answer_lines  # type: ignore[import-not-found]  # found beside this script

DEADLINE_S = 100.0


class Server:
    """The parameters. An actor does one call at a time, and has copied its return value before the next call."""

    def __init__(self, variant: str, size: int, lr: float, period: int) -> None:
        self._lr, self._period, self._params = lr, period, _pattern(size, lr, period)
        # A view of the same memory, so that the update shows in the returned array.
        self._shown = self._params.numpy() if variant == "ray_numpy" else self._params

    def push(self, grad: Any) -> Any:
        self._params.add_(_as_tensor(grad), alpha=-self._lr)
        return self._shown

    def units(self) -> tuple[float, float]:
        return _units(self._params, self._lr, self._period)


class Worker:
    """One worker's gradient, whose elements are all the worker's number, and its copy of the parameters."""

    def __init__(self, variant: str, size: int, lr: float, period: int, number: int, server: Any) -> None:
        import torch

        self._lr, self._period, self._number, self._server, self._pushed = lr, period, number, server, 0
        grad = torch.full((size,), float(number))
        self._grad = grad.numpy() if variant == "ray_numpy" else grad
        self._params = _pattern(size, lr, period)

    def run(self, seconds: float) -> tuple[int, float]:
        import ray

        began, count = time.perf_counter(), 0
        while True:
            self._params.copy_(_as_tensor(ray.get(self._server.push.remote(self._grad), timeout=DEADLINE_S)))
            count += 1
            self._pushed += self._number
            took = time.perf_counter() - began
            if took >= seconds:
                return count, took

    def pulled(self) -> tuple[float, float, float]:
        return (float(self._pushed), *_units(self._params, self._lr, self._period))


def _as_tensor(value: Any) -> Any:
    """The value, or a tensor over a numpy array's memory, which Ray makes read-only."""
    import torch

    if isinstance(value, torch.Tensor):
        return value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(value)


def _pattern(size: int, lr: float, period: int) -> Any:
    import torch

    torch.set_num_threads(1)
    return torch.arange(size).remainder_(period).to(torch.float32).mul_(lr)


def _units(params: Any, lr: float, period: int) -> tuple[float, float]:
    applied = (_pattern(len(params), lr, period) - params) / lr
    return float(applied.min()), float(applied.max())


class Contender:
    """Ray and one set of actors per variant."""

    def __init__(self, sizes: list[int], workers: int, lr: float, period: int, folder: str) -> None:
        import ray
        from ray._private import ray_constants

        size = sum(sizes)
        self._ray = ray
        self.unavailable: dict[str, str] = {}
        self.variants = ["ray_numpy", "ray_torch"]
        if not hasattr(ray_constants, "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"):
            self.unavailable["ray_torch"] = f"Ray {ray.__version__} has no RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"
            self.variants.remove("ray_torch")
        ray.init(
            num_cpus=2 * (workers + 1),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            object_store_memory=max(1 << 28, 12 * 4 * size),
            _temp_dir=folder,
        )
        self._sets = {}
        for variant in self.variants:
            server = ray.remote(Server).options(num_cpus=1).remote(variant, size, lr, period)
            make = ray.remote(Worker).options(num_cpus=1)
            pushers = [make.remote(variant, size, lr, period, n + 1, server) for n in range(workers)]
            self._get([server.units.remote(), *(w.pulled.remote() for w in pushers)])
            self._sets[variant] = server, pushers

    def _get(self, refs: list[Any]) -> list[Any]:
        return list(self._ray.get(refs, timeout=DEADLINE_S))

    def round(self, variant: str, seconds: float) -> dict[str, Any]:
        took = self._get([worker.run.remote(seconds) for worker in self._sets[variant][1]])
        count = sum(n for n, _ in took)
        return {"round_trips": count, "seconds": count / sum(n / s for n, s in took)}

    def tally(self, variant: str) -> dict[str, Any]:
        server, pushers = self._sets[variant]
        pulled = self._get([worker.pulled.remote() for worker in pushers])
        (shown,) = self._get([server.units.remote()])
        return {"pushed": sum(own for own, *_ in pulled), "server": shown, "pulled": pulled}

    def end(self) -> None:
        self._ray.shutdown()


def main() -> None:
    os.environ.update(RAY_ENABLE_ZERO_COPY_TORCH_TENSORS="1", RAY_USAGE_STATS_ENABLED="0", OMP_NUM_THREADS="1")
    answer_lines(Contender)


if __name__ == "__main__":
    main()

"""TensorFlow: ParameterServerStrategy with a coordinator, two workers and a parameter server, a process each.

Run as a script by an interpreter that has TensorFlow; imports nothing of Podium. `script_protocol.py` lists its
requests.

The coordinator schedules a function; a worker runs it. It reads every variable onto the worker (the pull), takes its
gradients from a per-worker dataset in memory, and applies them on the parameter server (the push). So that nothing is
optimised away, the function returns an element of every tensor that was read, picked on the worker. Variants:

    tensorflow_layers   a variable per tensor of the model, as models have them
    tensorflow_flat     all parameters in one variable

TensorFlow's order is pull, then push: a worker has the parameters from before its push. All gradients are 1, since the
coordinator, not the script, chooses the worker.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any, ClassVar

from script_protocol import answer_lines  # type: ignore[import-not-found]  # found beside this script

DEADLINE_S = 100.0
_PR_SET_PDEATHSIG = 1
_AT_LEAST = 8  # closures in a round, so that one worker's idle moment at its end weighs little


class Contender:
    """The cluster, and the variables of each variant."""

    variants = ("tensorflow_layers", "tensorflow_flat")
    unavailable: ClassVar[dict[str, str]] = {}

    def __init__(self, sizes: list[int], workers: int, lr: float, period: int, folder: str) -> None:
        self._servers: list[subprocess.Popen[bytes]] = []
        ports = _free_ports(workers + 1)
        cluster = {"worker": [f"127.0.0.1:{p}" for p in ports[:-1]], "ps": [f"127.0.0.1:{ports[-1]}"]}
        ranks = [("worker", n) for n in range(workers)] + [("ps", 0)]
        self._servers = [_start_server(cluster, kind, n) for kind, n in ranks]

        import tensorflow as tf

        _one_thread(tf)
        self._tf, self._lr, self._period, self._workers = tf, lr, period, workers
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(cluster), rpc_layer="grpc")
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._sets = {}
        for variant, cut in zip(self.variants, (sizes, [sum(sizes)]), strict=True):
            self._sets[variant] = _Set(tf, strategy, self._coordinator, cut, lr, period)

    def round(self, variant: str, seconds: float) -> dict[str, Any]:
        return self._sets[variant].round(seconds)

    def tally(self, variant: str) -> dict[str, Any]:
        return self._sets[variant].tally(self._workers)

    def end(self) -> None:
        for server in self._servers:
            server.kill()
            server.wait(timeout=DEADLINE_S)


class _Set:
    """The variables of one variant, and the functions that workers run on them."""

    def __init__(self, tf: Any, strategy: Any, coordinator: Any, sizes: list[int], lr: float, period: int) -> None:
        self._tf, self._coordinator, self._pushed, self._rate = tf, coordinator, 0, 0.0
        starts = [sum(sizes[:n]) for n in range(len(sizes))]
        variables = []
        with strategy.scope():
            for start, size in zip(starts, sizes, strict=True):
                first = tf.cast(tf.math.floormod(tf.range(start, start + size), period), tf.float32) * lr
                variables.append(tf.Variable(first))
        optimizer_lr = tf.constant(lr)

        def gradients() -> Any:
            return tf.data.Dataset.range(1).map(lambda _: tuple(tf.ones(n) for n in sizes)).cache().repeat()

        self._iterator = iter(coordinator.create_per_worker_dataset(gradients))

        def round_trip(iterator: Any) -> Any:
            pulled = [v.read_value() for v in variables]
            picked = tf.stack([t[-1] for t in pulled])
            # The pull ends before the push begins, as in training, where gradients depend on it.
            with tf.control_dependencies([picked]):
                grads = next(iterator)
            for variable, grad in zip(variables, grads, strict=True):
                tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=optimizer_lr, delta=grad)
            return picked

        def units() -> Any:
            low, high = [], []
            for variable, start, size in zip(variables, starts, sizes, strict=True):
                first = tf.cast(tf.math.floormod(tf.range(start, start + size), period), tf.float32) * lr
                applied = (first - variable.read_value()) / lr
                low.append(tf.reduce_min(applied))
                high.append(tf.reduce_max(applied))
            return tf.reduce_min(tf.stack(low)), tf.reduce_max(tf.stack(high))

        self._round_trip, self._units = tf.function(round_trip), tf.function(units)
        self._run(2)

    def _run(self, count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            self._coordinator.schedule(self._round_trip, args=(self._iterator,))
        self._coordinator.join()
        self._pushed += count
        took = time.perf_counter() - began
        self._rate = count / took
        return took

    def round(self, seconds: float) -> dict[str, Any]:
        """As many round trips as fit into the time at the last round's rate, the same number for both workers."""
        count = max(_AT_LEAST, 2 * round(self._rate * seconds / 2))
        return {"round_trips": count, "seconds": self._run(count)}

    def tally(self, workers: int) -> dict[str, Any]:
        values = [self._coordinator.schedule(self._units) for _ in range(workers)]
        self._coordinator.join()
        pulled = [[float(self._pushed), *(float(x) for x in value.fetch())] for value in values]
        return {"pushed": float(self._pushed), "server": pulled[0][1:], "pulled": pulled}


def _one_thread(tf: Any) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)


def _free_ports(count: int) -> list[int]:
    holders = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [holder.getsockname()[1] for holder in holders]
    finally:
        for holder in holders:
            holder.close()


def _start_server(cluster: dict[str, list[str]], kind: str, index: int) -> subprocess.Popen[bytes]:
    words = [sys.executable, __file__, json.dumps(cluster), kind, str(index)]
    return subprocess.Popen(words, stdin=subprocess.DEVNULL)


def serve(cluster: dict[str, list[str]], kind: str, index: int) -> None:
    """A worker or the parameter server: executes the coordinator's requests until it is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it must not outlive a script that was killed
    import tensorflow as tf

    _one_thread(tf)
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1)
    server = tf.distribute.Server(tf.train.ClusterSpec(cluster), kind, index, protocol="grpc", config=config)
    server.join()


def main() -> None:
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="2", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    if len(sys.argv) > 1:
        return serve(json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    answer_lines(Contender)


if __name__ == "__main__":
    main()

"""`podium bench codecs`: the cost of compression on a core, its savings on a link, and its effect on accuracy.

`rows`, one per codec:

    ratio                   bytes of the wire / bytes of the tensor, a square matrix of 25 million float32 numbers
    encode_gbs, decode_gbs  gigabytes of the tensor per second on one core; `step_gbs`: packing with error feedback
    accuracy                digits-mlp, 2 workers, all-reduce in virtual time, mean over seeds; also `dense_accuracy`
    bytes_on_wire           sent by a worker's interface in a step of the `link` table, by the kernel's count, including
                            headers and acknowledgements; `counted_bytes` is Podium's own count

`link`, a row per system and codec: wide-mlp (25 million parameters) on 2 workers with one thread each, in two network
namespaces whose links are shaped to 100 Mbit/s. DistributedDataParallel trains the same model on the same samples in
the same namespaces, with its own hooks (`peers/ddp_steps.py`). `ms` is the median step after warm-up. In each round all
contenders are measured, in an order that rotates; ratios are taken round by round. Steps of two seconds and more depend
on the link alone: they are measured in the first round only, and the other rounds reuse that time.

    speedup_over_dense   the same system's dense time / this one's
    best_podium          the fastest codec whose `accuracy`, if known, is at most 0.02 below that of dense
    fastest_podium       the fastest codec at any accuracy
    podium_over_ddp      the time of DDP's best / that of Podium's best; above 1, Podium is faster
    like_for_like        the same ratio by codec, for codecs that both have
    auto_regret          the time of codec `auto` / that of Podium's best

`loopback` shows what `auto` does where ranks share a host, and its time over that of `dense`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from podium.errors import ConfigError, TrainingError
from podium.exchange.codecs.auto import AutoCodec
from podium.exchange.packing import make_packing
from podium.lab.bench.harness import check_at_least, check_names, compared, interleave, rate_or_reason, spread_ms
from podium.lab.bench.peers.ddp_steps import HOOKS, DdpSteps
from podium.lab.bench.peers.kernels import Cost, Kernels
from podium.lab.bench.peers.place import Place, places_on
from podium.lab.bench.peers.podium_steps import PodiumSteps
from podium.lab.bench.peers.stepping import LONG_S, Stepping, Steps
from podium.launch.clusters.description import uniform
from podium.launch.clusters.namespaces import ShapedNetwork
from podium.launch.rendezvous import rendezvous_folder
from podium.launch.run import train

PEERS = ("ddp",)
AUTO, DENSE = "auto", "dense"
NAMED = (
    "dense",
    "fp16",
    "bf16",
    "int8",
    "sign",
    "ef-sign",
    "one-bit",
    "vote",
    "top-k:ratio=0.01",
    "top-k:ratio=0.01;select=exact",
    "top-k:ratio=0.001",
    "random-k:ratio=0.01",
    "random-k:ratio=0.001",
    "dgc",
    "power-sgd:rank=1",
    "power-sgd:rank=2",
    "power-sgd:rank=4",
)
ON_LINK = tuple(name for name in NAMED if name not in ("bf16", "sign", "one-bit", "vote", NAMED[9]))
"""Codecs of the link table; of the others only the bytes are counted."""
_WORKERS = 2
_LINK_MBIT = 100.0
_CHECKED_AFTER = AutoCodec.check_after  # steps until `auto` has compared its prediction with its measurement
_SAME = {"none": DENSE, "fp16": "fp16", "power-sgd": "power-sgd:rank=1"}  # DDP's hooks, and ours that do the same
_TOLERANCE = 0.02  # of accuracy
_LR = 1e-6  # the parameters hardly move, so that all steps are alike with every codec
_SECONDS, _MOST_STEPS = 2.0, 5  # of a round, and its most steps


def bench_codecs(
    peers: Sequence[str] = PEERS,
    rounds: int | None = None,
    *,
    codecs: tuple[str, ...] = NAMED,
    link_codecs: tuple[str, ...] | None = None,
    side: int = 5000,
    epochs: int = 20,
    seeds: int = 3,
    link_mbit: float | None = None,
    link_rounds: int = 5,
    features: int = 2048,
    width: int = 2560,
    depth: int = 4,
) -> dict[str, Any]:
    """`rows`: one per codec. `link`: a row per system and codec. The module's docstring explains each number.

    `side`: of the square matrix. `link_mbit`: 0 for no link; the default is 100 if this machine can shape links.
    `link_codecs`: of the link table, by default `ON_LINK` and `auto`. `features`, `width` and `depth` are wide-mlp's.
    """
    on_link = link_codecs if link_codecs is not None else (*ON_LINK, AUTO)
    _check(peers, codecs, on_link, side, epochs, seeds, link_mbit)
    payload = {"features": features, "width": width, "depth": depth, "lr": _LR}
    rows = _kernel_rows(codecs, side, rounds or 5)
    for row in rows:
        row |= _accuracy(row["codec"], epochs, seeds)
    dense = next((row["accuracy"] for row in rows if row["codec"] == DENSE), None)
    for row in rows:
        row["dense_accuracy"] = dense
    document: dict[str, Any] = {"bench": "codecs", "peers": list(peers), "workers": _WORKERS, "rows": rows}
    mbit, reason = rate_or_reason("link_mbit", link_mbit, _LINK_MBIT, _WORKERS, _LINK_MBIT)
    if not mbit:
        return {**document, "link_mbit": 0, "link_skipped": reason}
    others = [codec for codec in codecs if codec not in on_link]
    poor = {row["codec"] for row in rows if not _keeps(row["accuracy"], dense)}
    found, counted = _link(mbit, payload, on_link, others, peers, rounds or link_rounds, poor)
    for row in rows:
        seen = counted[row["codec"]]
        row |= {"bytes_on_wire": round(seen.wire_bytes), "counted_bytes": round(seen.counted_bytes)}
    loopback = _loopback(payload, rounds or 3) if AUTO in on_link else {}
    return {**document, "link_mbit": mbit, **found, **loopback}


def _check(
    peers: Sequence[str],
    codecs: Sequence[str],
    on_link: Sequence[str],
    side: int,
    epochs: int,
    seeds: int,
    link_mbit: float | None,
) -> None:
    check_names("peer of bench codecs", peers, PEERS)
    for name in {*codecs, *on_link}:
        make_packing(name)
    if AUTO in codecs:
        raise ConfigError("bench codecs: auto chooses among codecs and is not one itself: name it in link_codecs")
    check_at_least("codecs", 1, side=side, epochs=epochs, seeds=seeds)
    check_at_least("codecs", 0, link_mbit=link_mbit or 0.0)


# A codec alone.


def _kernel_rows(codecs: Sequence[str], side: int, rounds: int) -> list[dict[str, Any]]:
    costs: dict[str, list[Cost]] = {codec: [] for codec in codecs}
    kernels = Kernels(side)

    def measure(codec: str) -> float:
        costs[codec].append(kernels.measure(codec))
        return costs[codec][-1].encode

    try:
        interleave({codec: partial(measure, codec) for codec in codecs}, rounds, warmup=0)
    finally:
        kernels.end()
    return [_kernel_row(codec, 4 * side * side, found) for codec, found in costs.items()]


def _kernel_row(codec: str, nbytes: int, costs: Sequence[Cost]) -> dict[str, Any]:
    encode, decode, step = (nbytes / 1e9 / float(np.median([cost[i] for cost in costs])) for i in range(3))
    return {
        "codec": codec,
        "ratio": costs[0].wire_bytes / nbytes,
        "encode_gbs": encode,
        "decode_gbs": decode,
        "step_gbs": step,
    }


def _accuracy(codec: str, epochs: int, seeds: int) -> dict[str, Any]:
    """Mean over the seeds; if a run diverges, the accuracy is None and `diverged` has the error."""
    found: list[float] = []
    with rendezvous_folder() as folder:
        for seed in range(seeds):
            try:
                result = train(
                    "digits-mlp",
                    workers=_WORKERS,
                    launcher="virtual",
                    codec=codec,
                    epochs=epochs,
                    eval_every=0,
                    seed=seed,
                    run_dir=folder / f"seed-{seed}",
                )
            except TrainingError as error:
                return {"accuracy": None, "accuracies": found, "diverged": str(error)}
            found.append(result.metrics["accuracy"])
    return {"accuracy": float(np.mean(found)), "accuracies": found}


def _keeps(accuracy: float | None, dense: float | None) -> bool:
    """Whether the accuracy is at most `_TOLERANCE` below that of dense."""
    return dense is None or (accuracy is not None and accuracy >= dense - _TOLERANCE)


# Over a link.


def _link(
    mbit: float,
    payload: Mapping[str, Any],
    codecs: Sequence[str],
    count_only: Sequence[str],
    peers: Sequence[str],
    rounds: int,
    poor: Set[str],
) -> tuple[dict[str, Any], dict[str, Steps]]:
    """The link table with its ratios, and the bytes that each of Podium's codecs sent.

    `poor`: codecs that lose too much accuracy to count as the best.
    """
    with (
        rendezvous_folder() as folder,
        ShapedNetwork(uniform(_WORKERS, mbit=mbit), folder) as network,
        ExitStack() as ends,
    ):
        places = places_on(network)
        podium = PodiumSteps(payload, folder, places)
        ends.callback(podium.end)
        contenders: dict[tuple[str, str], Stepping] = {("podium", codec): podium for codec in codecs}
        if peers:
            ddp = DdpSteps(payload, folder, places)
            ends.callback(ddp.end)
            contenders |= {("ddp", hook): ddp for hook in HOOKS}
        table = _Table(contenders)
        table.measure(rounds)
        counted = {codec: steps[-1] for (system, codec), steps in table.steps.items() if system == "podium"}
        for codec in count_only:
            counted[codec] = podium.measure(codec, seconds=0.0, most=1)
    return table.document(poor), counted


class _Table:
    """Step times by system and codec, round by round."""

    def __init__(self, contenders: Mapping[tuple[str, str], Stepping]) -> None:
        self._contenders = contenders
        self.steps: dict[tuple[str, str], list[Steps]] = {key: [] for key in contenders}
        self.times: dict[tuple[str, str], list[float]] = {}
        """The median step of each round."""
        self.chosen: list[dict[str, Any]] = []
        """The choices of `auto` in each round."""

    def measure(self, rounds: int) -> None:
        keys = {f"{system} {codec}": (system, codec) for system, codec in self._contenders}
        measures: dict[str, Callable[[], float]] = {name: partial(self._round, key) for name, key in keys.items()}
        found = interleave(measures, rounds, warmup=0)  # each round has its own warm-up
        self.times = {keys[name]: times for name, times in found.items()}

    def _round(self, key: tuple[str, str]) -> float:
        is_auto, before = key == ("podium", AUTO), self.steps[key]
        if before and np.median(before[0].seconds) >= LONG_S:
            return float(np.median(before[0].seconds))
        steps = self._contenders[key].measure(key[1], _SECONDS, _MOST_STEPS, _CHECKED_AFTER if is_auto else 0)
        self.steps[key].append(steps)
        if is_auto:
            self.chosen.append(dict(self._contenders[key].chosen))
        return float(np.median(steps.seconds))

    def document(self, poor: Set[str]) -> dict[str, Any]:
        """All rows, and how the best of them compare."""
        times, own = self.times, {key: times for key, times in self.times.items() if key != ("podium", AUTO)}
        fastest, ddp = _fastest(own, "podium"), _fastest(own, "ddp")
        best = _fastest({key: each for key, each in own.items() if key[1] not in poor}, "podium")
        document: dict[str, Any] = {"link": self.rows(), "rounds": len(times[fastest])}
        for name, key in {"best_podium": best, "fastest_podium": fastest, "best_ddp": ddp}.items():
            if key in own:
                document[name] = {"codec": key[1], "ms": self._ms(key)}
        if ddp in own and best in own:
            document |= _compared("podium_over_ddp", times[ddp], times[best])
            document["like_for_like"] = {
                codec: _compared("ddp_over_podium", times["ddp", hook], times["podium", codec])
                for hook, codec in _SAME.items()
                if ("podium", codec) in times
            }
        if ("podium", AUTO) in times and best in own:
            document |= _compared("auto_regret", times["podium", AUTO], times[best])
            document["auto_chose"] = self.chosen
        return document

    def rows(self) -> list[dict[str, Any]]:
        return [self._row(key) for key in self.times]

    def _row(self, key: tuple[str, str]) -> dict[str, Any]:
        system, codec = key
        seconds = [second for steps in self.steps[key] for second in steps.seconds]
        row = {"system": system, "codec": codec, "ms": self._ms(key), "step_ms": spread_ms(seconds)}
        dense = (system, "none" if system == "ddp" else DENSE)
        if dense in self.times:
            row |= _compared("speedup_over_dense", self.times[dense], self.times[key])
        last = self.steps[key][-1]
        row["bytes_on_wire"] = round(last.wire_bytes)
        return {**row, "counted_bytes": round(last.counted_bytes)} if system == "podium" else row

    def _ms(self, key: tuple[str, str]) -> float:
        return 1e3 * float(np.median([second for steps in self.steps[key] for second in steps.seconds]))


def _fastest(times: Mapping[tuple[str, str], Sequence[float]], system: str) -> tuple[str, str]:
    own = [key for key in times if key[0] == system]
    return min(own, key=lambda key: float(np.median(times[key])), default=(system, ""))


def _loopback(payload: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """`auto` and `dense` where both workers share the host."""
    with rendezvous_folder() as folder:
        podium = PodiumSteps(payload, Path(folder), (Place(),) * _WORKERS)
        try:
            table = _Table({("podium", DENSE): podium, ("podium", AUTO): podium})
            table.measure(rounds)
        finally:
            podium.end()
    over = _compared("auto_over_dense", table.times["podium", AUTO], table.times["podium", DENSE])
    return {"loopback": {"auto_chose": table.chosen, "rows": table.rows(), **over}}


def _compared(name: str, numerator: Sequence[float], denominator: Sequence[float]) -> dict[str, Any]:
    """The median of the rounds' ratios under this name, and its interval; None if one measurement served all rounds."""
    stands_for_all = len(numerator) > 1 and len(set(numerator)) == len(set(denominator)) == 1
    found = compared(name, numerator, denominator)
    return {**found, f"{name}_interval": None} if stands_for_all else found

"""`codec=auto`: measure which codec makes exchanges faster, if any, and check the choice afterwards.

Compression saves time on slow networks and costs time on others; most networks are not slow. So the workers measure
once, together: the time of a sum and of a gather at a few sizes (alpha + beta bytes), and each codec's time to pack and
unpack a bucket. From these they predict the time of each bucket's exchange with each codec,

    pack + alpha + beta * wire bytes + unpack

and take the fastest if it is at least `least_gain` times faster than sending dense. All workers use the numbers of the
slowest one, so all decide alike. After some steps the measured time is compared with the predictions, and packing stops
where it takes longer than dense was predicted to take.

The prediction ignores that exchanges may overlap with backward, while packing cannot. Where they would overlap
completely, packing is chosen too early; the check does not notice that either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from podium.errors import ConfigError
from podium.exchange.codecs.base import Codec, Memory, RoundsCodec, Span, StepContext
from podium.exchange.packing import Packing, make_packing

if TYPE_CHECKING:
    from podium.comm.base import Communicator
    from podium.exchange.codecs.auto import AutoCodec
    from podium.exchange.collectives.base import Collective

SIZES = (4 << 10, 64 << 10, 512 << 10)
"""Sizes in bytes at which the network is measured."""
_MORE, _QUICK_S = 16, 0.02
"""Where the largest size took less than `_QUICK_S`, up to `_MORE` times that size is measured too."""
_PACKINGS = 3
_EXCHANGES = (6, 4, 2)
"""Tries at each size: packing loses precision, so one late packet must not make workers choose it."""


class Line(NamedTuple):
    """Seconds as a line over bytes."""

    alpha: float
    beta: float

    def seconds(self, nbytes: float) -> float:
        return self.alpha + self.beta * nbytes


class Rate(NamedTuple):
    """A codec's cost per byte of a bucket."""

    seconds: float
    """To pack, store the residual and unpack."""
    wire: float
    """Bytes on the wire."""


@dataclass
class Choice:
    """The codec of each bucket, and why it was chosen."""

    packings: list[Packing]
    specs: list[str]
    dense: float
    """Predicted seconds of a step's exchanges without packing."""
    predicted: float
    """The same with the chosen codecs."""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def packs(self) -> bool:
        return any(not packing.codec.exact for packing in self.packings)


def choose(
    auto: AutoCodec,
    comm: Communicator,
    collective: Collective,
    spans: Sequence[Span],
    grads: Sequence[Tensor],
) -> Choice:
    """Measure and decide. Collective."""
    packings = {spec: make_packing(spec) for spec in auto.candidates}
    for spec, packing in packings.items():
        if packing.codec.takes_momentum or packing.codec.name == "auto":
            raise ConfigError(f"codec auto: {spec} changes more than how gradients are packed, so it is no candidate")
    if comm.size == 1:
        plain = [make_packing("dense")] * len(spans)
        return Choice(plain, ["dense"] * len(spans), 0.0, 0.0, {"why": "one worker sends nothing"})
    sizes = [span.numel * grads[span.buffer].element_size() for span in spans]
    trial = spans[sizes.index(max(sizes))]
    costs = _measure(packings, comm, collective, trial, grads[trial.buffer])
    return _decide(costs, packings, sizes, auto.least_gain)


class Costs(NamedTuple):
    """Measured cost of exchanges with each codec, as seen by the slowest worker."""

    codecs: dict[str, Codec]
    rates: dict[str, Rate]
    line_sum: Line
    line_gather: Line
    to_servers: bool

    def seconds(self, spec: str, nbytes: int) -> float:
        """Predicted time of one exchange of a bucket of this size."""
        if spec == "dense":
            return self.line_sum.seconds(nbytes)
        codec, rate = self.codecs[spec], self.rates[spec]
        line = self.line_sum if codec.reduction == "sum" else self.line_gather
        sums = 2 if isinstance(codec, RoundsCodec) and not self.to_servers else 1
        return rate.seconds * nbytes + (sums - 1) * line.alpha + line.seconds(rate.wire * nbytes)

    def totals(self, sizes: Sequence[int]) -> dict[str, float]:
        """Predicted time of all these buckets together, dense and with each codec."""
        return {spec: sum(self.seconds(spec, n) for n in sizes) for spec in ("dense", *self.codecs)}

    def best(self, sizes: Sequence[int], least_gain: float) -> str:
        """The codec for these buckets together, or `dense`."""
        cost = self.totals(sizes)
        found = min(self.codecs, key=lambda spec: cost[spec])
        return found if cost["dense"] >= least_gain * cost[found] else "dense"


def _decide(costs: Costs, packings: dict[str, Packing], sizes: Sequence[int], least_gain: float) -> Choice:
    # Servers cut the parameters into ranges of their own, so buckets do not matter there.
    if costs.to_servers:
        specs = [costs.best(sizes, least_gain)] * len(sizes)
    else:
        specs = [costs.best([nbytes], least_gain) for nbytes in sizes]
    plain, totals = make_packing("dense"), costs.totals(sizes)
    predicted = sum(costs.seconds(spec, n) for spec, n in zip(specs, sizes, strict=True))
    rates = {spec: {"gbs": 1e-9 / max(rate.seconds, 1e-15), "ratio": rate.wire} for spec, rate in costs.rates.items()}
    facts = {
        "chosen": sorted(set(specs)),
        "by_bucket": specs,
        "predicted_ms": {spec: seconds * 1e3 for spec, seconds in totals.items()},
        "link": {"sum": costs.line_sum._asdict(), "gather": costs.line_gather._asdict()},
        "rates": rates,
    }
    chosen = [plain if spec == "dense" else packings[spec] for spec in specs]
    choice = Choice(chosen, specs, totals["dense"], predicted, facts)
    facts["why"] = _why(choice, totals, least_gain)
    return choice


def _why(choice: Choice, totals: dict[str, float], least_gain: float) -> str:
    """The decision as one sentence."""
    dense = totals["dense"]
    best = min((spec for spec in totals if spec != "dense"), key=lambda spec: totals[spec])
    gain = dense / max(totals[best], 1e-12)
    if not choice.packs:
        return (
            f"off: exchanges are predicted to take {dense * 1e3:.3g} ms a step without packing, "
            f"{totals[best] * 1e3:.3g} ms with {best} ({gain:.2g}×; {least_gain:g}× is asked for)"
        )
    chosen = "+".join(sorted(set(choice.specs)))
    return (
        f"{chosen}: exchanges are predicted to take {choice.predicted * 1e3:.3g} ms a step, "
        f"{dense * 1e3:.3g} ms without packing ({dense / max(choice.predicted, 1e-12):.3g}×)"
    )


class Check:
    """Compares a prediction with the measured time of exchanges."""

    def __init__(self, choice: Choice, after: int) -> None:
        self.choice, self._after = choice, after
        self._spent: list[int] = []

    def add(self, spent_ns: int, comm: Communicator) -> dict[str, Any] | None:
        """Add the time of one step's exchanges. After `after` steps, once, it is collective and returns the result."""
        if len(self._spent) >= self._after or not self.choice.packs:
            return None
        self._spent.append(spent_ns)
        if len(self._spent) < self._after:
            return None
        usual = sorted(self._spent)[len(self._spent) // 2]
        measured = torch.tensor([float(usual)], dtype=torch.float64)
        everyone = torch.empty(comm.size, dtype=torch.float64)
        comm.wait(comm.all_gather(measured, everyone))
        seconds = float(everyone.min()) / 1e9  # of the worker that arrived last, and so waited for no other
        keeps = seconds <= self.choice.dense
        return {
            "measured_ms": seconds * 1e3,
            "predicted_ms": self.choice.predicted * 1e3,
            "dense_ms": self.choice.dense * 1e3,
            "keeps": keeps,
        }


def _measure(
    packings: dict[str, Packing], comm: Communicator, collective: Collective, trial: Span, like: Tensor
) -> Costs:
    """Measure the network, and each codec on a bucket like this one. Collective."""
    largest = trial.numel * like.element_size()
    if comm.servers:
        line_sum = line_gather = _line(comm, lambda n: _to_servers(comm, n), like.device, largest)
    else:
        line_sum = _line(comm, lambda n: (collective.all_reduce(comm, _bytes(n, like.device)),), like.device, largest)
        line_gather = _line(comm, lambda n: (_gather(comm, collective, n, like.device),), like.device, largest)
    rates = {spec: _rate(comm, packing, trial, largest, like) for spec, packing in packings.items()}
    line_sum, line_gather, rates = _slowest(comm, line_sum, line_gather, rates)
    codecs = {spec: packing.codec for spec, packing in packings.items()}
    return Costs(codecs, rates, line_sum, line_gather, bool(comm.servers))


def _line(comm: Communicator, issue: Callable[[int], tuple[Any, ...]], device: torch.device, largest: int) -> Line:
    """Time of an exchange as a line over its bytes: the best of a few tries at each size.

    Where half a megabyte is too quick to measure the rate, the size of a real bucket is tried too.
    """

    def best(nbytes: int, tries: int) -> float:
        times = []
        for _ in range(tries):
            comm.barrier()
            began = _now(comm, device)
            comm.wait(*issue(nbytes))
            times.append(_now(comm, device) - began)
        return min(times)

    sizes = list(SIZES)
    seconds = [best(nbytes, tries) for nbytes, tries in zip(SIZES, _EXCHANGES, strict=True)]
    more = min(largest, _MORE * SIZES[-1])
    if more > SIZES[-1] and _of_slowest(comm, seconds[-1:])[0] < _QUICK_S:  # all workers or none
        sizes.append(more)
        seconds.append(best(more, _EXCHANGES[-1]))
    beta = max(0.0, (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0]))
    return Line(max(0.0, seconds[0] - beta * sizes[0]), beta)


def _of_slowest(comm: Communicator, mine: Sequence[float]) -> list[float]:
    """The largest value of each number over all workers. Collective."""
    numbers = torch.tensor(mine, dtype=torch.float64)
    everyone = torch.empty(comm.size * len(mine), dtype=torch.float64)
    comm.wait(comm.all_gather(numbers, everyone))
    worst: list[float] = everyone.view(comm.size, -1).amax(dim=0).tolist()
    return worst


def _gather(comm: Communicator, collective: Collective, nbytes: int, device: torch.device) -> Any:
    wire = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    into = torch.empty(comm.size * nbytes, dtype=torch.uint8, device=device)
    return collective.all_gather(comm, wire, into)


def _to_servers(comm: Communicator, nbytes: int) -> tuple[Any, ...]:
    """Send this many bytes to all servers together, divided as in a push."""
    part = torch.zeros(max(1, nbytes // len(comm.servers)), dtype=torch.uint8)
    return tuple(comm.call(server, "probe", {}, [part]) for server in comm.servers)


def _bytes(nbytes: int, device: torch.device) -> Tensor:
    return torch.zeros(nbytes // 4, device=device)


def _rate(comm: Communicator, packing: Packing, span: Span, nbytes: int, like: Tensor) -> Rate:
    """Cost of packing and unpacking a bucket of noise: the best of a few tries after the first, which allocates."""
    codec, context = packing.codec, StepContext(workers=comm.size)
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(span.numel, generator=generator).to(like.device, like.dtype)
    alone = span._replace(buffer=0, start=0, stop=span.numel)
    memory = Memory([noise])
    out, wire = torch.empty_like(noise), noise
    times = []
    for _ in range(_PACKINGS):
        began = _now(comm, like.device)
        wire = packing.pack(noise, alone, context, memory)
        memory.commit()
        if codec.reduction == "gather":
            codec.combine(wire.expand(comm.size, -1), out, alone, context)
        else:
            out.zero_()
            codec.decode_add(wire, out, alone, context)
        comm.clock.touch(round(codec.passes * nbytes))
        times.append(_now(comm, like.device) - began)
    return Rate(min(times[1:]) / nbytes, wire.nbytes / nbytes)


def _slowest(
    comm: Communicator, line_sum: Line, line_gather: Line, rates: dict[str, Rate]
) -> tuple[Line, Line, dict[str, Rate]]:
    """The numbers that all workers use: each as on the slowest worker. Collective."""
    worst = _of_slowest(comm, [*line_sum, *line_gather, *(rate.seconds for rate in rates.values())])
    # Both send messages, so the latencies of a sum and of a gather differ more by noise than in fact: one for both.
    worst[0] = worst[2] = min(worst[0], worst[2])
    slow = {spec: rate._replace(seconds=s) for (spec, rate), s in zip(rates.items(), worst[4:], strict=True)}
    return Line(worst[0], worst[1]), Line(worst[2], worst[3]), slow


def _now(comm: Communicator, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return comm.clock.now_ns() / 1e9

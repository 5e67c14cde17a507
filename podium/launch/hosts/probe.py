"""What an agent measures for `podium cluster check`: how fast its host computes, and its links to the other hosts.

Links are measured through the channel, with TLS where the run would have it: a connection is dialled anew for each
measurement, small calls give the round trip, and large ones, several under way at once, the rate. An answer is sent
only once a body has been received, so that no buffer on the way counts as delivered. The first third of the time is
left out: TCP is still finding the rate, and a token bucket lets a burst through at once.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from podium.comm.base import DEPARTED, Message, Meta
from podium.comm.real.channel import Channel
from podium.comm.real.sockets import Address
from podium.comm.real.tls import Tls
from podium.errors import CommError, DeadlineExceeded, PodiumError
from podium.launch.coordination.rules import FIRST_AGENT

KINDS = ("compute", "listen", "reach", "measure")
"""Calls of the head that `Probe.take` answers."""
REACH_S = 5.0
"""How long a host may take to accept a connection."""
AT_ONCE = 16
"""How many hosts one host connects to at the same time."""
SLOWEST_S = 30.0
"""How long one message may take."""
MATRIX, GPU_MATRIX = 512, 4096
"""Rows of the matrices that are multiplied."""
SAMPLE_S = 0.1
"""Length of one sample of the computation: longer than the period of a CPU quota, which a shorter one would miss."""
_ROUND_TRIPS = 100
_WINDOW = 4  # calls under way at once
_SMALLEST, _LARGEST = 64 << 10, 4 << 20
_LEFT_OUT = 1 / 3
_PIECES = 16  # that a link should carry in the time


@final
class Probe:
    """The endpoint of one host that other hosts measure, and that measures them."""

    def __init__(self, number: int, address: str, folder: Path, secret: bytes, tls: Tls | None) -> None:
        """`address`: this host's own, for the others; `folder`: a private one, for sockets that nobody dials."""
        self._endpoint, self._address, self._folder = FIRST_AGENT + number, address, folder
        self._secret, self._tls = secret, tls
        self._listening: Channel | None = None
        self._busy = threading.Lock()
        self._answers: dict[str, Callable[[Meta], Meta]] = {
            "compute": lambda meta: compute(int(meta["samples"])),
            "listen": lambda _: self._listen(),
            "reach": lambda meta: self._reach(meta["peers"]),
            "measure": lambda meta: self._measure(int(meta["peer"]), str(meta["address"]), float(meta["budget_s"])),
        }

    def take(self, message: Message, reply: Callable[[Message, Meta], None]) -> None:
        """Answer one of `KINDS`, on a thread of its own, one at a time. Where it fails, the answer has `error`."""
        threading.Thread(target=self._answer, args=(message, reply), name="probe", daemon=True).start()

    def close(self) -> None:
        if self._listening is not None:
            self._listening.close()

    def _answer(self, message: Message, reply: Callable[[Message, Meta], None]) -> None:
        try:
            with self._busy:
                answer = self._answers[message.kind](message.meta)
        except (PodiumError, OSError, RuntimeError) as error:  # torch raises RuntimeError where a GPU does not work
            answer = {"error": f"{type(error).__name__}: {error}"}
        with suppress(CommError):  # the head has gone
            reply(message, answer)

    # Links.

    def _listen(self) -> Meta:
        self._listening = channel = self._channel(f"tcp:{self._address}:0")
        threading.Thread(target=_echo, args=(channel,), name="echo", daemon=True).start()
        return {"address": channel.address}

    def _reach(self, peers: Mapping[str, Address]) -> Meta:
        """Connect to each of these; returns why not, by number, of those that could not be reached."""

        def trouble(number: str) -> str | None:
            try:
                with self._dialled(int(number), peers[number]) as channel:
                    round_trip(channel, FIRST_AGENT + int(number))
                return None
            except PodiumError as error:
                return f"{peers[number]}: {cause(error, peers[number])}"

        with ThreadPoolExecutor(AT_ONCE) as threads:
            found = dict(zip(peers, threads.map(trouble, peers), strict=True))
        return {"failed": {number: why for number, why in found.items() if why is not None}}

    def _measure(self, peer: int, address: Address, budget_s: float) -> Meta:
        with self._dialled(peer, address) as channel:
            trips = round_trips(channel, FIRST_AGENT + peer, budget_s / 4)
            rate = bytes_per_s(channel, FIRST_AGENT + peer, budget_s)
        return {"round_trip_us": statistics.median(trips) * 1e6, "mbit": rate * 8 / 1e6}

    @contextmanager
    def _dialled(self, peer: int, address: Address) -> Iterator[Channel]:
        channel = self._channel(f"unix:{self._folder}/p{peer}")
        try:
            channel.introduce({FIRST_AGENT + peer: address})  # the first call dials
            yield channel
        finally:
            channel.close()

    def _channel(self, listen: Address) -> Channel:
        return Channel(self._endpoint, secret=self._secret, listen=listen, deadline_s=REACH_S, tls=self._tls)


def cause(error: PodiumError, address: Address) -> str:
    """Why an endpoint at this address could not be reached, without the endpoints' numbers."""
    return str(error).rpartition(f"{address}: ")[2]


def _echo(channel: Channel) -> None:
    """Answer every call, until the channel is closed."""
    while True:
        try:
            message = channel.recv()
        except DeadlineExceeded:
            continue
        except CommError:
            return
        if message.kind != DEPARTED:
            with suppress(CommError):  # the caller has left
                channel.reply(message, {})


def round_trips(channel: Channel, to: int, budget_s: float) -> list[float]:
    """Seconds that small calls take, one after the other; at least three, as many as fit, at most 100."""
    trips: list[float] = []
    until = time.monotonic() + budget_s
    round_trip(channel, to)  # it dials
    while len(trips) < 3 or (len(trips) < _ROUND_TRIPS and time.monotonic() < until):
        trips.append(round_trip(channel, to))
    return trips


def round_trip(channel: Channel, to: int) -> float:
    """Seconds that a small call takes."""
    begun = time.perf_counter()
    channel.wait([channel.call(to, "ping", {})], SLOWEST_S)
    return time.perf_counter() - begun


def bytes_per_s(channel: Channel, to: int, budget_s: float) -> float:
    """The rate of a stream of large messages that lasts about `budget_s`."""
    piece = _noise(_SMALLEST)
    begun = time.perf_counter()
    channel.wait([channel.call(to, "bulk", {}, [piece])], SLOWEST_S)
    size = int(len(piece) / (time.perf_counter() - begun) * budget_s / _PIECES)
    piece = _noise(min(max(size, _SMALLEST), _LARGEST))
    under_way = deque(channel.call(to, "bulk", {}, [piece]) for _ in range(_WINDOW))
    began = time.perf_counter()
    answered = [began]
    while under_way:
        channel.wait([under_way.popleft()], SLOWEST_S)
        answered.append(time.perf_counter())
        if answered[-1] - began < budget_s:
            under_way.append(channel.call(to, "bulk", {}, [piece]))
    return len(piece) * rate_of(answered)


def rate_of(answered: list[float]) -> float:
    """Answers per second from their times, without the first third; the first time is that of the start."""
    first = next(n for n, at in enumerate(answered) if at - answered[0] >= (answered[-1] - answered[0]) * _LEFT_OUT)
    if first == len(answered) - 1:  # one answer only in the later two thirds: it waited for all before it
        first = 0
    return (len(answered) - 1 - first) / (answered[-1] - answered[first])


def _noise(nbytes: int) -> Tensor:
    """Bytes that no link compresses."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


# Computing.


def compute(samples: int) -> Meta:
    """Median milliseconds of a product of two matrices, on the CPU with all its cores and on each GPU."""
    gpus = [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
    return {
        "cpu_ms": _product_ms(torch.device("cpu"), MATRIX, samples),
        "gpus_ms": [_product_ms(gpu, GPU_MATRIX, samples) for gpu in gpus],
    }


def _product_ms(device: torch.device, rows: int, samples: int) -> float:
    a, b = torch.ones(rows, rows, device=device), torch.ones(rows, rows, device=device)
    out = torch.empty_like(a)
    _products(a, b, out, SAMPLE_S / 2)  # threads start, a GPU raises its clock
    return statistics.median(_products(a, b, out, SAMPLE_S) for _ in range(samples)) * 1e3


def _products(a: Tensor, b: Tensor, out: Tensor, seconds: float) -> float:
    """Mean seconds of a product, over a sample of this length."""
    count, begun = 0, time.perf_counter()
    while count == 0 or time.perf_counter() - begun < seconds:
        torch.mm(a, b, out=out)
        if out.is_cuda:
            torch.cuda.synchronize(out.device)
        count += 1
    return (time.perf_counter() - begun) / count

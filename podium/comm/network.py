"""How messages share the links of the virtual world.

`fifo`: a network card serves one message after the other, in the order in which they were sent. A message occupies its
sender's card for size / up and its receiver's for size / down, the receiver's after the latency; it has arrived when
both have served it. `fair`: messages under way share the cards as long TCP flows do (max-min), latency paid up front.

The choice matters: 256 asynchronous workers took 0.59 s with `fifo` and 1.00 s with `fair`, since fair sharing keeps
equal workers in phase and leaves one direction of the server's card idle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, final

Action = Callable[[], None]


class Node(Protocol):
    """What the virtual world needs of one machine."""

    @property
    def flops(self) -> float: ...
    @property
    def memory_gbs(self) -> float: ...


class Terrain(Protocol):
    """What the virtual world needs of a cluster; `podium.launch.clusters.description.Cluster` is one."""

    @property
    def nodes(self) -> Sequence[Node]: ...
    @property
    def sharing(self) -> str: ...
    @property
    def jitter(self) -> float: ...
    @property
    def seconds_per_sample(self) -> float | None: ...
    @property
    def seconds_per_step(self) -> float: ...
    def place(
        self, workers: int, servers: int, colocated: bool = False, hosts: Sequence[int] = ()
    ) -> tuple[int, ...]: ...
    def speed_at(self, node: int, now_ns: int) -> float: ...
    def path(self, a: int, b: int) -> tuple[float, float, int]: ...
    def rates(self, node: int) -> tuple[float, float]: ...
    def ring_seconds(self, nbytes: int, nodes: Sequence[int]) -> float: ...


class Agenda(Protocol):
    """The part of the virtual world that a network needs: the time, and scheduling events."""

    now: int

    def at(self, time: int, rank: int, action: Action | None, order: int = 0) -> None: ...


class Network(ABC):
    """Decides when a message that is sent now arrives."""

    def __init__(self, cluster: Terrain, agenda: Agenda) -> None:
        self.cluster, self.agenda = cluster, agenda

    @abstractmethod
    def start(self, source: int, target: int, nbytes: int, rank: int, arrive: Action) -> None:
        """A message leaves node `source` for node `target` now; call `arrive` when it has arrived."""


@final
class Fifo(Network):
    """One message after the other at each card."""

    def __init__(self, cluster: Terrain, agenda: Agenda) -> None:
        super().__init__(cluster, agenda)
        self._up_free: dict[int, int] = defaultdict(int)
        self._down_free: dict[int, int] = defaultdict(int)

    def start(self, source: int, target: int, nbytes: int, rank: int, arrive: Action) -> None:
        up, down, latency_ns = self.cluster.path(source, target)
        if source == target:  # memory, not the card
            self.agenda.at(self.agenda.now + latency_ns + round(nbytes / min(up, down) * 1e9), rank, arrive)
            return
        begins = max(self.agenda.now, self._up_free[source])
        sent = begins + round(nbytes / up * 1e9)
        self._up_free[source] = sent

        def leave() -> None:
            """Queue at the receiver only now: messages that left other nodes earlier go first."""
            received = max(begins + latency_ns, self._down_free[target]) + round(nbytes / down * 1e9)
            arrived = max(received, sent + latency_ns)
            self._down_free[target] = arrived
            self.agenda.at(arrived, rank, arrive)

        if begins > self.agenda.now:
            self.agenda.at(begins, rank, leave)
        else:
            leave()


@dataclass(eq=False)
class _Flow:
    source: int
    target: int
    left: float  # bytes
    cap: float  # bytes per second of the path itself
    rank: int
    arrive: Action
    rate: float = 0.0


@final
class Fair(Network):
    """Max-min sharing by progressive filling, computed again whenever a flow begins or ends."""

    def __init__(self, cluster: Terrain, agenda: Agenda) -> None:
        super().__init__(cluster, agenda)
        self._flows: list[_Flow] = []
        self._since = 0
        self._plan = 0  # numbers the forecasts: only the newest counts

    def start(self, source: int, target: int, nbytes: int, rank: int, arrive: Action) -> None:
        up, down, latency_ns = self.cluster.path(source, target)
        if source == target:
            self.agenda.at(self.agenda.now + latency_ns + round(nbytes / min(up, down) * 1e9), rank, arrive)
            return
        flow = _Flow(source, target, float(nbytes), min(up, down), rank, arrive)
        self.agenda.at(self.agenda.now + latency_ns, rank, lambda: self._begin(flow))

    def _begin(self, flow: _Flow) -> None:
        self._drain()
        self._flows.append(flow)
        self._forecast()

    def _drain(self) -> None:
        """Subtract the bytes sent since the rates were last set."""
        seconds = (self.agenda.now - self._since) / 1e9
        self._since = self.agenda.now
        for flow in self._flows:
            flow.left -= flow.rate * seconds

    def _forecast(self) -> None:
        self._share()
        self._plan += 1
        if self._flows:
            plan = self._plan
            seconds = min(flow.left / flow.rate for flow in self._flows)
            time = self.agenda.now + max(1, -int(-seconds * 1e9 // 1))
            self.agenda.at(time, self._flows[0].rank, lambda: self._end(plan))

    def _end(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._drain()
        # A finished flow may have a rounding error left: the bytes of less than a nanosecond.
        over = [flow for flow in self._flows if flow.left <= flow.rate * 1e-9]
        self._flows = [flow for flow in self._flows if flow.left > flow.rate * 1e-9]
        for flow in over:
            flow.arrive()
        self._forecast()

    def _share(self) -> None:
        """Raise all rates together; a flow stops rising at a full card or at its own limit."""
        room: dict[tuple[str, int], float] = {}
        users: dict[tuple[str, int], int] = defaultdict(int)
        for flow in self._flows:
            for card in (("up", flow.source), ("down", flow.target)):
                room[card] = self.cluster.rates(card[1])[0 if card[0] == "up" else 1]
                users[card] += 1
        rising = list(self._flows)
        level = 0.0
        while rising:
            fair = min(room[c] / users[c] for c in room if users[c])
            step = max(0.0, min(fair, *(f.cap - level for f in rising)))
            level += step
            for card, count in users.items():
                room[card] -= step * count
            still = []
            for flow in rising:
                cards = (("up", flow.source), ("down", flow.target))
                if flow.cap <= level * (1 + 1e-12) or any(room[c] <= 1e-6 for c in cards):
                    flow.rate = level
                    for card in cards:
                        users[card] -= 1
                else:
                    still.append(flow)
            rising = still


def make_network(cluster: Terrain, agenda: Agenda) -> Network:
    return (Fair if cluster.sharing == "fair" else Fifo)(cluster, agenda)

"""How messages share wires in virtual time: arrival times worked out by hand."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.comm.network import make_network
from podium.launch.clusters.description import Cluster, Link, Node

US = 1_000
MS = 1_000_000
LATENCY = 50 * US


class Agenda:
    """The smallest event loop that a network can live in."""

    def __init__(self) -> None:
        self.now = 0
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._made = 0

    def at(self, time: int, rank: int, action: Callable[[], None] | None, order: int = 0) -> None:
        assert action is not None
        assert time >= self.now, "an event in the past"
        self._made += 1
        heapq.heappush(self._events, (time, self._made, action))

    def run(self) -> None:
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()


def cluster(sharing: str, mbits: Sequence[float] = (8, 8, 8, 8)) -> Cluster:
    """Nodes of 8 Mbit/s, which is one byte per microsecond, 50 µs apart."""
    nodes = tuple(Node(name=f"n{i}", up_mbit=m, down_mbit=m, latency_us=50) for i, m in enumerate(mbits))
    return Cluster(nodes=nodes, sharing=sharing, local_gbs=1.0, local_latency_us=5)


def arrivals(terrain: Cluster, flows: Sequence[tuple[int, int, int, int]]) -> list[int]:
    """When each of the flows (sent at, from, to, bytes) arrives."""
    agenda, arrived = Agenda(), [-1] * len(flows)
    network = make_network(terrain, agenda)
    for i, (time, source, target, nbytes) in enumerate(flows):

        def land(i: int = i) -> None:
            assert arrived[i] == -1, "it arrived twice"
            arrived[i] = agenda.now

        def send(source: int = source, target: int = target, nbytes: int = nbytes, land: object = land) -> None:
            network.start(source, target, nbytes, 0, land)

        agenda.at(time, 0, send)
    agenda.run()
    return arrived


@pytest.mark.parametrize("sharing", ["fifo", "fair"])
class TestEither:
    def test_alone_a_message_takes_its_size_over_the_rate_and_the_latency(self, sharing: str) -> None:
        assert arrivals(cluster(sharing), [(0, 0, 1, 1000)]) == [1 * MS + LATENCY]

    def test_the_slower_end_decides(self, sharing: str) -> None:
        slow_receiver = cluster(sharing, (80, 8))
        assert arrivals(slow_receiver, [(0, 0, 1, 1000)]) == [1 * MS + LATENCY]
        slow_sender = cluster(sharing, (8, 80))
        assert arrivals(slow_sender, [(0, 0, 1, 1000)]) == [1 * MS + LATENCY]

    def test_a_link_of_its_own_replaces_what_the_nodes_say(self, sharing: str) -> None:
        linked = replace(cluster(sharing), links={(0, 1): Link(mbit=4, latency_us=10)})
        assert arrivals(linked, [(0, 0, 1, 1000), (0, 2, 3, 1000)]) == [2 * MS + 10 * US, 1 * MS + LATENCY]

    def test_messages_on_one_node_pass_through_memory(self, sharing: str) -> None:
        both = [(0, 0, 0, 1000), (0, 0, 0, 1000)]
        assert arrivals(cluster(sharing), both) == [6 * US, 6 * US]

    def test_pairs_that_share_no_card_do_not_meet(self, sharing: str) -> None:
        assert arrivals(cluster(sharing), [(0, 0, 1, 1000), (0, 2, 3, 500)]) == [1 * MS + LATENCY, 500 * US + LATENCY]

    def test_both_directions_of_a_card_are_free_at_once(self, sharing: str) -> None:
        assert arrivals(cluster(sharing), [(0, 0, 1, 1000), (0, 1, 0, 1000)]) == [1 * MS + LATENCY] * 2

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 3), st.integers(1, 2000)), min_size=1, max_size=8))
    def test_a_receiver_takes_no_more_than_its_rate(self, sharing: str, flows: list[tuple[int, int, int]]) -> None:
        """Whatever is sent to one node needs at least its size at the node's rate, and no wire idles meanwhile."""
        sent = [(time * US, source, 0, nbytes) for time, source, nbytes in flows]
        came = arrivals(cluster(sharing), sent)
        busy_from, total = min(time for time, *_ in sent), sum(nbytes for *_, nbytes in sent)
        slack = len(sent) * 2  # nanoseconds of rounding
        assert max(came) >= busy_from + LATENCY + total * US - slack
        last_begins = max(time for time, *_ in sent)
        assert max(came) <= last_begins + LATENCY * (len(sent) + 1) + total * US * 2 + slack
        for (time, _, _, nbytes), arrived in zip(sent, came, strict=True):
            assert arrived >= time + LATENCY + nbytes * US - slack


class TestFifo:
    def test_two_senders_queue_at_the_receiver(self) -> None:
        assert arrivals(cluster("fifo"), [(0, 0, 2, 1000), (0, 1, 2, 1000)]) == [1 * MS + LATENCY, 2 * MS + LATENCY]

    def test_two_messages_queue_at_their_sender(self) -> None:
        assert arrivals(cluster("fifo"), [(0, 0, 1, 1000), (0, 0, 2, 500)]) == [1 * MS + LATENCY, 1500 * US + LATENCY]

    def test_the_card_is_served_in_order_of_sending(self) -> None:
        """The second comes while the first is under way; the third once all is over, and meets nobody."""
        flows = [(0, 0, 2, 1000), (400 * US, 1, 2, 100), (5 * MS, 1, 2, 100)]
        assert arrivals(cluster("fifo"), flows) == [1 * MS + LATENCY, 1100 * US + LATENCY, 5100 * US + LATENCY]

    def test_a_fast_sender_keeps_a_slow_receiver_busy(self) -> None:
        flows = [(0, 0, 1, 1000), (0, 0, 2, 1000)]
        # The sender is through with the first after 0.1 ms, so the second receiver begins then.
        assert arrivals(cluster("fifo", (80, 8, 8)), flows) == [1 * MS + LATENCY, 1100 * US + LATENCY]


class TestFair:
    def test_two_senders_halve_the_receiver(self) -> None:
        assert arrivals(cluster("fair"), [(0, 0, 2, 1000), (0, 1, 2, 1000)]) == [2 * MS + LATENCY] * 2

    def test_a_short_flow_leaves_its_half_to_the_long_one(self) -> None:
        """Both at half rate until the short one is through (1 ms), then 500 bytes at full rate."""
        assert arrivals(cluster("fair"), [(0, 0, 2, 1000), (0, 1, 2, 500)]) == [1500 * US + LATENCY, 1 * MS + LATENCY]

    def test_a_late_flow_takes_half_of_what_is_left(self) -> None:
        """600 bytes alone, then 400 of each at half rate, then the other 100 alone."""
        flows = [(0, 0, 2, 1000), (600 * US, 1, 2, 500)]
        assert arrivals(cluster("fair"), flows) == [1400 * US + LATENCY, 1500 * US + LATENCY]

    def test_what_a_slow_sender_cannot_use_goes_to_the_others(self) -> None:
        """Max-min: the sender of 2 Mbit/s keeps it (0.25 B/µs), the other gets the remaining 0.75."""
        flows = [(0, 0, 2, 250), (0, 1, 2, 750)]
        assert arrivals(cluster("fair", (2, 8, 8)), flows) == [1 * MS + LATENCY] * 2

    def test_equal_flows_all_arrive_at_once(self) -> None:
        came = arrivals(cluster("fair"), [(0, s, 3, 300) for s in (0, 1, 2)])
        assert len(set(came)) == 1
        assert came[0] - (900 * US + LATENCY) in (0, 1)  # a third of a rate is not a whole number

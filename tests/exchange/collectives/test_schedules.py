"""Schedules: whatever the members, the sizes and the wires, all end with the same sum."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from podium.comm.gather import gather_schedule
from podium.comm.moves import folded, in_window, segments, spans
from podium.comm.rank_order import Hosts
from podium.comm.schedule import Chain, Key, Running, carry_out, nbytes_sent
from podium.errors import ConfigError, UnknownName
from podium.exchange.collectives import COLLECTIVES, find_collective, make_collective
from podium.exchange.collectives.base import Scheduled
from podium.exchange.collectives.butterfly import Butterfly, best_shares
from podium.exchange.collectives.halving_doubling import HalvingDoubling
from podium.exchange.collectives.hierarchical import ByHost, Hierarchical, nearest_divisor
from podium.exchange.collectives.rank_order import RankOrder, RankOrderByHost
from podium.exchange.collectives.reduce_to_one import ReduceToOne
from podium.exchange.collectives.ring import Ring
from podium.exchange.collectives.task_graph import TaskGraph
from podium.exchange.collectives.tree import DoubleTree, both_places, depth_of

Schedules = list[list[Chain]]

SIZES = st.one_of(st.integers(1, 9), st.integers(10, 33))
SEGMENTS = st.sampled_from([1, 7, 64, 1000, 1 << 20])
LEAST = st.sampled_from([1, 64, 4096])


@st.composite
def groupings(draw: st.DrawFn, size: int) -> tuple[tuple[int, ...], ...]:
    """Members in groups of any sizes, in any order."""
    members = draw(st.permutations(range(size)))
    cuts = sorted(draw(st.sets(st.integers(1, size - 1)))) if size > 1 else []
    return tuple(tuple(members[a:b]) for a, b in zip([0, *cuts], [*cuts, size], strict=True))


def hosts_of_any_sizes(size: int) -> st.SearchStrategy[Hosts]:
    """Members on up to four hosts, in any order."""
    placed = st.lists(st.integers(0, 3), min_size=size, max_size=size)
    return placed.map(
        lambda places: tuple(sorted(tuple(m for m in range(size) if places[m] == h) for h in set(places)))
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Scheduled, int]:
    """A collective with any options, and a number of members."""
    size, segment = draw(SIZES), draw(SEGMENTS)
    kinds: dict[str, Callable[[], Scheduled]] = {
        "ring": lambda: Ring(
            segment_bytes=segment,
            least_bytes=draw(LEAST),
            order=draw(st.none() | st.permutations(range(size)).map(tuple)),
        ),
        "halving-doubling": lambda: HalvingDoubling(
            segment_bytes=segment, small_bytes=draw(st.sampled_from([0, 100, 64 << 10])), window=draw(st.integers(1, 7))
        ),
        "tree": lambda: DoubleTree(segment_bytes=segment, window=draw(st.integers(1, 40))),
        "hierarchical": lambda: Hierarchical(
            segment_bytes=segment, group_size=draw(st.none() | st.integers(1, size + 1))
        ),
        "groups": lambda: Hierarchical(segment_bytes=segment, groups=draw(groupings(size))),
        "reduce-to-one": lambda: ReduceToOne(segment_bytes=segment, root=draw(st.integers(0, size - 1))),
        "butterfly": lambda: Butterfly(
            segment_bytes=segment,
            bandwidth=draw(st.none() | st.lists(st.floats(1e-3, 1e3), min_size=size, max_size=size).map(tuple)),
        ),
        "rank-order": lambda: RankOrder(segment_bytes=segment),
        "task-graph": lambda: TaskGraph(chunk_bytes=segment, least_bytes=draw(LEAST)),
    }
    return kinds[draw(st.sampled_from(sorted(kinds)))](), size


def numels(collective: Scheduled, size: int) -> st.SearchStrategy[int]:
    """Any number of elements, as long as it does not make too many messages to try out."""
    step: int = collective.chunk_bytes if isinstance(collective, TaskGraph) else vars(collective)["segment_bytes"]
    return st.one_of(st.integers(0, 3 * size), st.integers(0, min(5000, max(30, 10 * step))))


DEFAULTS = [make_collective(name) for name in COLLECTIVES if name not in ("default", "auto", "backend", "shared")]
WHOLE = HalvingDoubling(small_bytes=1 << 40)
HALVES = HalvingDoubling(small_bytes=0)
ALL = [*DEFAULTS, WHOLE, HALVES, Hierarchical(groups=((4, 0, 2), (1,), (3, 5))), Hierarchical(group_size=4)]


def all_schedules(collective: Scheduled, size: int, numel: int, itemsize: int) -> Schedules:
    return [collective.schedule(index, size, numel, itemsize) for index in range(size)]


def fits(collective: Scheduled, size: int) -> bool:
    """Whether its options are for so many members."""
    return getattr(collective, "groups", None) is None or size == 6


def carry_out_late(schedules: Schedules, tensors: Sequence[Tensor], chance: random.Random) -> None:
    """Messages stay where they are until they are delivered, in any order; what may land in its place does."""
    wire: list[tuple[int, int, Key, Tensor]] = []
    over = [False] * len(tensors)

    def running_of(me: int) -> Running:
        def post(peer: int, key: Key, part: Tensor) -> None:
            wire.append((me, peer, key, part))

        def finished() -> None:
            over[me] = True

        return Running(schedules[me], tensors[me], post, finished)

    running = [running_of(me) for me in range(len(tensors))]
    for run in running:
        run.start()
    while wire:
        source, to, key, part = wire.pop(chance.randrange(len(wire)))
        place = running[to].landing(source, key, part.numel())
        landed = part.clone() if place is None else place.copy_(part)
        running[source].sent()
        running[to].arrived(source, key, landed)
    assert all(over)


class TestByHost:
    """Members of one host use each other's tensors."""

    @pytest.mark.slow
    @settings(max_examples=250, deadline=None)
    @given(st.data())
    def test_sums_in_rank_order_have_the_bits_of_a_loop_over_the_ranks(self, data: st.DataObject) -> None:
        hosts = data.draw(st.integers(1, 9).flatmap(hosts_of_any_sizes))
        size, numel = sum(map(len, hosts)), data.draw(st.sampled_from([1, 100, 5000, 40_000]))
        collective = RankOrderByHost(hosts=hosts, segment_bytes=data.draw(st.sampled_from([1000, 1 << 20])))
        tensors = [torch.randn(numel) for _ in range(size)]
        want = tensors[0].clone()
        for tensor in tensors[1:]:
            want += tensor
        carry_out(
            all_schedules(collective, size, numel, 4), tensors, hosts if collective.uses_memory(4 * numel) else ()
        )
        assert all(torch.equal(tensor, want) for tensor in tensors)

    @pytest.mark.slow
    @settings(max_examples=250, deadline=None)
    @given(st.data())
    def test_rings_of_hosts_add_up_and_give_all_the_same_bits(self, data: st.DataObject) -> None:
        hosts = data.draw(st.integers(1, 9).flatmap(hosts_of_any_sizes))
        size, numel = sum(map(len, hosts)), data.draw(st.integers(0, 5000))
        collective = ByHost(hosts=hosts, segment_bytes=data.draw(SEGMENTS))
        tensors = [torch.randn(numel, dtype=torch.float64) for _ in range(size)]
        want = torch.stack(tensors).sum(0)
        carry_out(all_schedules(collective, size, numel, 8), tensors, hosts)
        assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
        torch.testing.assert_close(tensors[0], want)

    @pytest.mark.parametrize(("hosts", "leaves"), [(((0, 1), (2, 3)), 1.0), (((0,), (1,), (2,)), 4 / 3)])
    def test_between_hosts_as_little_is_sent_as_any_algorithm_can(self, hosts: Hosts, leaves: float) -> None:
        size, numel = sum(map(len, hosts)), 1 << 20
        for collective in (
            RankOrderByHost(hosts=hosts, segment_bytes=1 << 16),
            ByHost(hosts=hosts, segment_bytes=1 << 16),
        ):
            schedules = all_schedules(collective, size, numel, 4)
            for host in hosts:
                sends = [m for member in host for chain in schedules[member] for m in chain if m.kind == "send"]
                assert not [m for m in sends if m.peer in host]
                assert sum(m.stop - m.start for m in sends) == pytest.approx(leaves * numel, rel=0.02)


class TestTheSum:
    @pytest.mark.slow
    @settings(max_examples=250, deadline=None)
    @given(st.data(), st.sampled_from([torch.int64, torch.float32, torch.float64]))
    def test_all_members_hold_the_sum(self, data: st.DataObject, dtype: torch.dtype) -> None:
        collective, size = data.draw(cases())
        numel = data.draw(numels(collective, size))
        tensors = [torch.randint(-1000, 1000, (numel,)).to(dtype) for _ in range(size)]
        want = torch.stack(tensors).sum(0)
        carry_out(all_schedules(collective, size, numel, dtype.itemsize), tensors)
        for tensor in tensors:
            assert torch.equal(tensor, want)

    @settings(max_examples=120, deadline=None)
    @given(st.data(), st.integers(0, 1 << 32))
    def test_it_does_not_depend_on_when_messages_are_read_and_arrive(self, data: st.DataObject, seed: int) -> None:
        collective, size = data.draw(cases())
        numel = data.draw(numels(collective, size).filter(lambda n: n * size < 20_000))
        tensors = [torch.randint(-1000, 1000, (numel,)) for _ in range(size)]
        want = torch.stack(tensors).sum(0)
        carry_out_late(all_schedules(collective, size, numel, 8), tensors, random.Random(seed))
        for tensor in tensors:
            assert torch.equal(tensor, want)

    @pytest.mark.parametrize("size", [2, 3, 5, 6, 8, 13])
    def test_whole_tensors_may_be_read_late(self, size: int) -> None:
        for seed in range(20):
            tensors = [torch.randint(-1000, 1000, (17,)) for _ in range(size)]
            want = torch.stack(tensors).sum(0)
            carry_out_late(all_schedules(WHOLE, size, 17, 8), tensors, random.Random(seed))
            for tensor in tensors:
                assert torch.equal(tensor, want)

    @pytest.mark.parametrize("collective", ALL, ids=repr)
    def test_rounding_is_the_same_on_all_members_and_small(self, collective: Scheduled) -> None:
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            for size in (2, 3, 4, 6, 7, 8, 9):
                if not fits(collective, size):
                    continue
                exact = [torch.randn(3001, dtype=torch.float64) for _ in range(size)]
                tensors = [tensor.to(dtype) for tensor in exact]
                want = torch.stack([tensor.double() for tensor in tensors]).sum(0)
                carry_out(all_schedules(collective, size, 3001, dtype.itemsize), tensors)
                for tensor in tensors[1:]:
                    assert torch.equal(tensor, tensors[0])
                # Each of size - 1 additions rounds a partial sum, none of which is beyond the sum of all magnitudes.
                bound = torch.finfo(dtype).eps * (size - 1) * torch.stack([t.abs() for t in exact]).sum(0)
                assert ((tensors[0].double() - want).abs() <= bound + 1e-12).all()

    @pytest.mark.parametrize("collective", ALL, ids=repr)
    def test_large_tensors_of_odd_size(self, collective: Scheduled) -> None:
        numel, size = 1_000_003, 6
        tensors = [torch.randint(0, 1 << 20, (numel,), dtype=torch.int64) for _ in range(size)]
        want = torch.stack(tensors).sum(0)
        carry_out(all_schedules(collective, size, numel, 8), tensors)
        for tensor in tensors:
            assert torch.equal(tensor, want)

    @pytest.mark.parametrize("collective", ALL, ids=repr)
    def test_alone_there_is_nothing_to_do(self, collective: Scheduled) -> None:
        if fits(collective, 1):
            assert collective.schedule(0, 1, 1000, 4) == []

    @pytest.mark.parametrize("collective", ALL, ids=repr)
    def test_nothing_is_sent_of_nothing(self, collective: Scheduled) -> None:
        assert all_schedules(collective, 6, 0, 4) == [[]] * 6


class TestTheSchedule:
    @pytest.mark.slow
    @settings(max_examples=200, deadline=None)
    @given(st.data(), st.sampled_from([1, 2, 4, 8, 16]))
    def test_every_send_has_one_receive_of_the_same_elements(self, data: st.DataObject, itemsize: int) -> None:
        collective, size = data.draw(cases())
        numel = data.draw(numels(collective, size))
        check(all_schedules(collective, size, numel, itemsize), numel)

    @pytest.mark.parametrize("collective", ALL, ids=repr)
    def test_the_same_for_hundreds_of_members(self, collective: Scheduled) -> None:
        size = 130 if fits(collective, 130) else 6
        check(all_schedules(collective, size, 997, 4), 997)

    @settings(max_examples=100, deadline=None)
    @given(st.data())
    def test_sent_elements_are_added_to_by_the_next_move_or_never(self, data: st.DataObject) -> None:
        """A message may be read late: `Running` keeps a copy where the very next move changes its elements."""
        collective, size = data.draw(cases())
        numel = data.draw(numels(collective, size))
        for chains in all_schedules(collective, size, numel, 4):
            for chain in chains:
                sends = [i for i, move in enumerate(chain) if move.kind == "send"]
                adds = [i for i, move in enumerate(chain) if move.kind == "add"]
                for i in sends:
                    for j in (j for j in adds if j > i + 1):
                        behind_a_copy = chain[i + 1].kind == "add" and chain[i + 1].start == chain[i].start
                        apart = chain[j].stop <= chain[i].start or chain[i].stop <= chain[j].start
                        assert apart or behind_a_copy

    def test_messages_are_no_larger_than_segments(self) -> None:
        for collective in (Ring, DoubleTree, Hierarchical, ReduceToOne, Butterfly):
            for chains in all_schedules(collective(segment_bytes=1000), 5, 10_007, 8):
                assert max((m.stop - m.start) * 8 for chain in chains for m in chain) <= 1000
        for chains in all_schedules(TaskGraph(chunk_bytes=1000), 5, 10_007, 8):
            assert max((m.stop - m.start) * 8 for chain in chains for m in chain) <= 1000


def check(schedules: Schedules, numel: int) -> None:
    """Pairing, names, disjoint chains, and that nobody is left out of a chain."""
    size = len(schedules)
    chains = len(schedules[0])
    assert {len(mine) for mine in schedules} == {chains}
    sent: Counter[tuple[int, int, int, int, int, int]] = Counter()
    received: Counter[tuple[int, int, int, int, int, int]] = Counter()
    names: Counter[tuple[int, int, int, int]] = Counter()
    for me, mine in enumerate(schedules):
        owner = torch.full((numel,), -1)
        for c, chain in enumerate(mine):
            assert chain, "a member without a move in a chain would never be through with it"
            for move in chain:
                assert 0 <= move.start < move.stop <= numel
                in_memory = move.kind in ("fold", "share")  # between members of one host, and named by who makes it
                assert (move.peer == me) is in_memory and 0 <= move.peer < size
                touched = owner[move.start : move.stop]
                assert ((touched == -1) | (touched == c)).all()
                touched.fill_(c)
                if move.kind == "send":
                    sent[me, move.peer, c, *move[2:]] += 1
                    names[me, move.peer, c, move.round] += 1
                elif not in_memory:
                    received[move.peer, me, c, *move[2:]] += 1
        assert size == 1 or (owner >= 0).all()
    assert sent == received
    assert set(names.values()) <= {1}


def sent_bytes(collective: Scheduled, size: int, numel: int) -> list[int]:
    return [nbytes_sent(chains, 4) for chains in all_schedules(collective, size, numel, 4)]


class TestBytes:
    N = 840 * 1000  # elements; divisible by all sizes up to 8

    @pytest.mark.parametrize("collective", [Ring(), Butterfly(), TaskGraph()], ids=repr)
    def test_the_least_possible_is_sent_by_each(self, collective: Scheduled) -> None:
        for size in range(2, 9):
            least = 2 * (size - 1) / size * self.N * 4
            for nbytes in sent_bytes(collective, size, self.N):
                assert nbytes == pytest.approx(least, abs=16 * size)

    @pytest.mark.parametrize("size", [2, 4, 8, 16])
    def test_halving_sends_the_least_for_powers_of_two(self, size: int) -> None:
        for nbytes in sent_bytes(HALVES, size, 1 << 20):
            assert nbytes == pytest.approx(2 * (size - 1) / size * (4 << 20), abs=64 * size)

    @pytest.mark.parametrize("size", [3, 5, 6, 7, 9, 12])
    def test_the_busiest_of_a_pair_sends_half_a_tensor_more(self, size: int) -> None:
        power = len(folded(size))
        each = sent_bytes(HALVES, size, 1 << 20)
        assert max(each) == pytest.approx((5 / 2 - 2 / power) * (4 << 20), rel=1e-4)
        assert min(each) == pytest.approx(min(3 / 2, 2 - 2 / power) * (4 << 20), rel=1e-4)

    def test_whole_tensors_are_sent_once_a_round(self) -> None:
        for size in range(2, 17):
            depth = size.bit_length() - 1
            folds = size > 1 << depth
            assert max(sent_bytes(WHOLE, size, 1000)) == (depth + folds) * 4000

    @pytest.mark.parametrize("size", [2, 3, 4, 6, 7, 8, 15, 16, 33])
    def test_no_member_of_two_trees_sends_more_than_twice(self, size: int) -> None:
        each = sent_bytes(DoubleTree(), size, self.N)
        assert max(each) <= 2 * self.N * 4
        assert sum(each) == 2 * (size - 1) * self.N * 4

    @pytest.mark.parametrize(("size", "group"), [(4, 2), (6, 3), (6, 2), (8, 4), (8, 1), (8, 8)])
    def test_equal_groups_send_the_least_and_little_of_it_outside(self, size: int, group: int) -> None:
        collective = Hierarchical(group_size=group)
        least = 2 * (size - 1) / size * self.N * 4
        outside = [0] * (size // group)
        for index, chains in enumerate(all_schedules(collective, size, self.N, 4)):
            assert nbytes_sent(chains, 4) == pytest.approx(least, abs=64 * size)
            for move in (move for chain in chains for move in chain if move.kind == "send"):
                if move.peer // group != index // group:
                    outside[index // group] += (move.stop - move.start) * 4
        groups = size // group
        for nbytes in outside:
            assert nbytes == pytest.approx(2 * (groups - 1) / groups * self.N * 4, abs=64 * size)

    def test_the_root_sends_to_all(self) -> None:
        assert sent_bytes(ReduceToOne(root=2), 4, 1000) == [4000, 4000, 12_000, 4000]

    def test_small_tensors_take_few_messages(self) -> None:
        for size in range(2, 10):
            for collective in (Ring(), TaskGraph()):
                schedules = all_schedules(collective, size, 100, 4)
                sends = sum(move.kind == "send" for chains in schedules for chain in chains for move in chain)
                assert sends == 2 * (size - 1)


class TestRing:
    def test_the_order_is_kept(self) -> None:
        order = (2, 0, 3, 1)
        after = dict(zip(order, [*order[1:], order[0]], strict=True))
        for index, chains in enumerate(all_schedules(Ring(order=order), 4, 10_000, 4)):
            assert {m.peer for chain in chains for m in chain if m.kind == "send"} == {after[index]}

    def test_wrong_orders_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="order must name each"):
            Ring(order=(0, 0, 1))
        with pytest.raises(ConfigError, match="all 3 members, got 2"):
            Ring(order=(1, 0)).schedule(0, 3, 10, 4)
        with pytest.raises(ConfigError, match="segment_bytes must be at least 1, got 0"):
            Ring(segment_bytes=0)


class TestTree:
    def test_both_are_trees_and_a_leaf_of_one_is_inner_in_the_other(self) -> None:
        for size in (*range(2, 40), 127, 128, 129):
            places = [both_places(index, size) for index in range(size)]
            for t in (0, 1):
                assert sum(place[t].parent is None for place in places) == 1
                for index, place in enumerate(places):
                    assert len(place[t].children) <= 2
                    for child in place[t].children:
                        assert places[child][t].parent == index
                    steps, at = 0, index
                    while (parent := places[at][t].parent) is not None:
                        at, steps = parent, steps + 1
                    assert steps <= depth_of(size) <= math.ceil(math.log2(size)) + 1
            if size > 2:
                assert not any(not first.children and not second.children for first, second in places)


class TestHierarchical:
    def test_default_groups_are_about_the_root(self) -> None:
        assert [nearest_divisor(p) for p in (1, 2, 6, 7, 8, 9, 12, 16, 64, 100)] == [1, 1, 2, 1, 2, 3, 3, 4, 8, 10]
        assert Hierarchical().groups_of(6) == ((0, 1), (2, 3), (4, 5))
        assert Hierarchical(group_size=4).groups_of(6) == ((0, 1, 2, 3), (4, 5))

    def test_leaders_of_unequal_groups_talk_for_them(self) -> None:
        groups = ((4, 0, 2), (1,), (3, 5))
        for index, chains in enumerate(all_schedules(Hierarchical(groups=groups), 6, 1000, 4)):
            mine = next(group for group in groups if index in group)
            peers = {move.peer for chain in chains for move in chain}
            assert index == mine[0] or peers == {mine[0]}

    def test_groups_that_are_none_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="groups or group_size"):
            Hierarchical(groups=((0,),), group_size=1)
        with pytest.raises(ConfigError, match="each group must have members"):
            Hierarchical(groups=((0, 1), ()))
        with pytest.raises(ConfigError, match="groups must name each"):
            Hierarchical(groups=((0, 1), (1, 2)))
        with pytest.raises(ConfigError, match="0 to 4 once"):
            Hierarchical(groups=((0, 1), (2, 3))).schedule(0, 5, 10, 4)


class TestButterfly:
    @staticmethod
    def busiest(shares: Sequence[float], bandwidth: Sequence[float]) -> float:
        p = len(shares)
        return max(((p - 1) * f + (1 - f)) / b for f, b in zip(shares, bandwidth, strict=True))

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.floats(0.01, 100), min_size=1, max_size=12), st.integers(0, 1 << 32))
    def test_no_other_shares_are_faster(self, bandwidth: list[float], seed: int) -> None:
        chance = random.Random(seed)
        shares = best_shares(bandwidth)
        assert math.fsum(shares) == pytest.approx(1)
        assert min(shares) >= 0
        best = self.busiest(shares, bandwidth)
        for _ in range(50):
            other = [share * chance.uniform(0.5, 2) + chance.choice([0, 0.05]) for share in shares]
            total = math.fsum(other)
            assert self.busiest([share / total for share in other], bandwidth) >= best * (1 - 1e-9)

    @given(st.lists(st.floats(0.01, 100), min_size=3, max_size=12))
    def test_links_with_a_share_are_busy_equally_long(self, bandwidth: list[float]) -> None:
        shares, p = best_shares(bandwidth), len(bandwidth)
        busy = [(1 + (p - 2) * f) / b for f, b in zip(shares, bandwidth, strict=True) if f > 0]
        idle = [1 / b for f, b in zip(shares, bandwidth, strict=True) if f == 0]
        assert max(busy) == pytest.approx(min(busy))
        assert all(seconds >= min(busy) * (1 - 1e-9) for seconds in idle)

    def test_a_very_slow_link_has_no_elements(self) -> None:
        bandwidth = (10.0, 0.1, 10.0, 5.0)
        schedules = all_schedules(Butterfly(bandwidth=bandwidth), 4, 10_000, 4)
        assert not any(move.kind == "add" for chain in schedules[1] for move in chain)
        assert nbytes_sent(schedules[1], 4) == 40_000

    def test_equal_links_have_equal_shares(self) -> None:
        assert best_shares([3.0] * 5) == pytest.approx([0.2] * 5)
        with_links = all_schedules(Butterfly(bandwidth=(2.0,) * 5), 5, 10_000, 4)
        assert with_links == all_schedules(Butterfly(), 5, 10_000, 4)

    def test_wrong_links_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="above 0"):
            Butterfly(bandwidth=(1.0, 0.0))
        with pytest.raises(ConfigError, match="3 entries, got 2"):
            Butterfly(bandwidth=(1.0, 1.0)).schedule(0, 3, 10, 4)


class TestTaskGraph:
    def test_chunks_are_owned_in_turn_and_returned_before_the_last_is_there(self) -> None:
        schedules = all_schedules(TaskGraph(chunk_bytes=400, least_bytes=1), 3, 1000, 4)
        owners = [[c for c, chain in enumerate(chains) if chain[0].kind == "add"] for chains in schedules]
        assert owners == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


class TestReduceToOne:
    def test_a_root_that_is_no_member_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="root must be one of the members 0 to 2, got 3"):
            ReduceToOne(root=3).schedule(0, 3, 10, 4)
        with pytest.raises(ConfigError, match="not be negative"):
            ReduceToOne(root=-1)


class TestGather:
    @settings(max_examples=80, deadline=None)
    @given(st.integers(1, 12), st.integers(0, 200), st.sampled_from([1, 7, 64, 1 << 20]), st.integers(0, 1 << 32))
    @example(33, 5, 1, 0)
    def test_everyone_has_every_part(self, size: int, numel: int, segment: int, seed: int) -> None:
        parts = torch.randint(0, 256, (size, numel), dtype=torch.uint8)
        tensors = [torch.zeros(size * numel, dtype=torch.uint8) for _ in range(size)]
        for index, tensor in enumerate(tensors):
            tensor[index * numel : (index + 1) * numel] = parts[index]
        segment = max(segment, numel // 10)
        schedules = [gather_schedule(index, size, numel, segment_bytes=segment) for index in range(size)]
        check(schedules, size * numel)
        carry_out_late(schedules, tensors, random.Random(seed))
        for tensor, chains in zip(tensors, schedules, strict=True):
            assert torch.equal(tensor, parts.view(-1))
            assert size == 1 or nbytes_sent(chains, 1) == (size - 1) * numel


class TestParts:
    @given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 16), st.integers(1, 300))
    def test_segments_cover_all_and_are_small(self, start: int, length: int, itemsize: int, most: int) -> None:
        found = segments(start, start + length, itemsize, most)
        assert [e for a, b in found for e in range(a, b)] == list(range(start, start + length))
        assert all(0 < (b - a) * itemsize <= max(most, itemsize) for a, b in found)

    @given(st.integers(0, 300), st.integers(1, 40))
    def test_spans_differ_by_one_at_most(self, length: int, parts: int) -> None:
        lengths = [b - a for a, b in spans(0, length, parts)]
        assert sum(lengths) == length and len(lengths) == min(length, parts)
        assert not lengths or max(lengths) - min(lengths) <= 1

    def test_nodes_are_a_power_of_two_and_hold_each_member_once(self) -> None:
        for size in range(1, 40):
            nodes = folded(size)
            assert len(nodes) & (len(nodes) - 1) == 0 and len(nodes) <= size < 2 * len(nodes)
            assert sorted({member for node in nodes for member in node}) == list(range(size))
            assert all(not set(a) & set(b) for a, b in combinations(nodes, 2))

    def test_a_window_keeps_the_order_and_all_moves(self) -> None:
        chains = ReduceToOne(segment_bytes=4).schedule(1, 3, 7, 4)
        joined = in_window(chains, 3, rounds=2)
        assert len(joined) == 3
        assert [move.start for move in joined[0]] == [0, 0, 3, 3, 6, 6]
        assert [move.round for move in joined[0]] == [0, 1, 2, 3, 4, 5]


class TestNames:
    def test_every_name_leads_to_a_class_of_that_name(self) -> None:
        for name in COLLECTIVES:
            assert find_collective(name).name == name

    def test_options_are_given_as_text_or_values(self) -> None:
        assert make_collective("ring", {"segment-bytes": "4096", "order": "1,0"}) == Ring(
            segment_bytes=4096, order=(1, 0)
        )
        assert make_collective("hierarchical", {"groups": [[0, 1], [2]]}) == Hierarchical(groups=((0, 1), (2,)))
        assert make_collective("butterfly", {"bandwidth": [1, 2.5]}) == Butterfly(bandwidth=(1.0, 2.5))

    def test_unknown_names_and_options_are_refused(self) -> None:
        with pytest.raises(UnknownName, match=r"unknown collective 'rign'\. Did you mean 'ring'"):
            make_collective("rign")
        with pytest.raises(UnknownName, match="unknown option of collective ring 'segments'"):
            make_collective("ring", {"segments": 3})
        with pytest.raises(ConfigError, match="options are key=value, got 'fast'"):
            make_collective("ring:fast")
        with pytest.raises(ConfigError, match="must be a collective class"):
            make_collective("podium.errors:ConfigError")

    def test_a_class_of_the_users_own(self) -> None:
        assert make_collective("podium.exchange.collectives.ring:Ring") == Ring()

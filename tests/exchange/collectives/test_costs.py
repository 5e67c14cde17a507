"""Closed forms beside the schedules they stand for, carried out message by message in time."""

from __future__ import annotations

import pytest

from podium.comm.gather import gather_schedule
from podium.comm.schedule import Move
from podium.errors import CommError, UnknownName
from podium.exchange.collectives import make_collective
from podium.exchange.collectives.base import Scheduled
from podium.exchange.collectives.butterfly import Butterfly
from podium.exchange.collectives.costs import FORMULAS, seconds, two_level_seconds
from podium.exchange.collectives.halving_doubling import HalvingDoubling
from podium.exchange.collectives.hierarchical import Hierarchical
from podium.exchange.collectives.reduce_to_one import ReduceToOne
from podium.exchange.collectives.ring import Ring
from podium.exchange.collectives.simulated import simulate

RATE = 1e9
BETA = 1 / RATE
ALPHA = 20e-6


def simulated(collective: object, nbytes: int, size: int, alpha: float = ALPHA, gamma: float = 0.0) -> float:
    assert isinstance(collective, Scheduled)
    schedules = [collective.schedule(index, size, nbytes // 4, 4) for index in range(size)]
    return simulate(schedules, 4, alpha, RATE, RATE, gamma)


class TestSeconds:
    @pytest.mark.parametrize("name", FORMULAS)
    def test_large_tensors_take_what_the_formula_says(self, name: str) -> None:
        for size in range(2, 10):
            want = seconds(name, 48 << 20, size, ALPHA, BETA)
            assert simulated(make_collective(name), 48 << 20, size) == pytest.approx(want, rel=0.05)

    @pytest.mark.parametrize("name", FORMULAS)
    def test_additions_hide_behind_transfers(self, name: str) -> None:
        for size in range(2, 10):
            want = seconds(name, 48 << 20, size, ALPHA, BETA, 0.2 * BETA)
            assert simulated(make_collective(name), 48 << 20, size, gamma=0.2 * BETA) == pytest.approx(want, rel=0.05)

    @pytest.mark.parametrize("name", ["ring", "hierarchical", "reduce-to-one", "butterfly", "task-graph", "tree"])
    def test_a_few_bytes_take_the_latency_of_the_formula(self, name: str) -> None:
        for size in range(2, 10):
            want = seconds(name, 400, size, ALPHA, BETA)
            assert simulated(make_collective(name), 400, size) == pytest.approx(want, rel=0.05)

    @pytest.mark.parametrize("size", [2, 4, 8, 16])
    def test_halving_is_exact_for_powers_of_two(self, size: int) -> None:
        for nbytes in (400, 60_000, 1 << 20):
            want = seconds("halving-doubling", nbytes, size, ALPHA, BETA, 0.5 * BETA)
            assert simulated(HalvingDoubling(), nbytes, size, gamma=0.5 * BETA) == pytest.approx(want, rel=1e-3)

    @pytest.mark.parametrize("size", [3, 5, 6, 7, 9])
    def test_folding_costs_no_more_than_two_rounds(self, size: int) -> None:
        assert simulated(HalvingDoubling(), 400, size) <= seconds("halving-doubling", 400, size, ALPHA, BETA) * 1.001
        plain = seconds("halving-doubling", 1 << 20, 1 << size.bit_length() - 1, ALPHA, BETA)
        extra = 2 * ALPHA + (1 << 20) * BETA
        assert simulated(HalvingDoubling(), 1 << 20, size) == pytest.approx(plain + extra, rel=1e-3)

    @pytest.mark.parametrize("name", FORMULAS)
    def test_it_grows_with_everything(self, name: str) -> None:
        base = seconds(name, 1 << 20, 6, ALPHA, BETA, BETA / 4)
        assert seconds(name, 2 << 20, 6, ALPHA, BETA, BETA / 4) > base
        assert seconds(name, 1 << 20, 6, 2 * ALPHA, BETA, BETA / 4) > base
        assert seconds(name, 1 << 20, 6, ALPHA, 2 * BETA, BETA / 4) > base
        assert seconds(name, 1 << 20, 6, ALPHA, BETA, BETA / 2) > base

    def test_what_is_fastest_depends_on_size(self) -> None:
        def fastest(nbytes: int) -> str:
            return min(FORMULAS, key=lambda name: seconds(name, nbytes, 16, ALPHA, BETA))

        assert fastest(100) == "butterfly"
        assert fastest(256 << 20) in ("ring", "halving-doubling")
        assert seconds("halving-doubling", 1 << 20, 16, ALPHA, BETA) < seconds("ring", 1 << 20, 16, ALPHA, BETA)

    def test_alone_or_with_nothing_it_takes_no_time(self) -> None:
        for name in FORMULAS:
            assert seconds(name, 1000, 1, ALPHA, BETA) == 0
            assert seconds(name, 0, 4, ALPHA, BETA) == 0

    def test_unknown_names_are_refused(self) -> None:
        with pytest.raises(UnknownName, match="'backend'"):
            seconds("backend", 1, 2, ALPHA, BETA)

    def test_groups_pay_off_where_links_between_them_are_slow(self) -> None:
        fast, slow = (5e-6, 1e-10), (100e-6, 1e-9)
        flat = seconds("ring", 16 << 20, 16, *slow)
        assert two_level_seconds(16 << 20, 16, 4, fast, slow) < flat / 2
        assert two_level_seconds(16 << 20, 16, 1, fast, slow) == pytest.approx(flat, rel=0.01)


class TestSimulate:
    def test_one_message_takes_latency_and_the_slower_of_two_links(self) -> None:
        send, put = [[Move("send", 1, 0, 0, 100)]], [[Move("put", 0, 0, 0, 100)]]
        assert simulate([send, put], 4, 0.5, 100.0, 100.0) == pytest.approx(0.5 + 4)
        assert simulate([send, put], 4, 0.5, [50.0, 1.0], [1.0, 100.0]) == pytest.approx(0.5 + 8)
        assert simulate([send, put], 4, 0.5, [100.0, 1.0], [1.0, 50.0]) == pytest.approx(0.5 + 8)

    def test_messages_to_one_member_wait_for_each_other(self) -> None:
        assert simulated(ReduceToOne(), 1000, 5, alpha=0.0) == pytest.approx(2 * 4 * 1000 * BETA)

    def test_an_adder_does_one_thing_at_a_time(self) -> None:
        schedules = [ReduceToOne().schedule(index, 3, 100, 4) for index in range(3)]
        # Both arrive at once over links without end; the root adds 2 * 400 bytes.
        assert simulate(schedules, 4, 0.0, 1e30, 1e30, gamma=1.0) == pytest.approx(800)

    def test_a_gather_keeps_links_busy_all_the_time(self) -> None:
        schedules = [gather_schedule(index, 6, 1 << 22) for index in range(6)]
        assert simulate(schedules, 1, ALPHA, RATE, RATE) == pytest.approx(5 * (1 << 22) * BETA, rel=0.02)

    def test_shares_by_bandwidth_beat_equal_ones_on_unequal_links(self) -> None:
        rates = (1e9, 1e9, 1e9, 2e8)

        def took(collective: Scheduled) -> float:
            schedules = [collective.schedule(index, 4, 4 << 20, 4) for index in range(4)]
            return simulate(schedules, 4, ALPHA, rates, rates)

        weighted = took(Butterfly(bandwidth=rates))
        assert weighted < 0.8 * took(Butterfly())
        assert weighted < 0.8 * took(Ring())
        # The slow link has to send its own and to receive the sum, nearly all of it at once.
        assert weighted == pytest.approx((16 << 20) / 2e8, rel=0.2)

    def test_who_is_grouped_with_whom_does_not_matter_on_equal_links(self) -> None:
        apart = Hierarchical(groups=((0, 2), (1, 3)))
        assert simulated(apart, 1 << 20, 4) == pytest.approx(simulated(Hierarchical(), 1 << 20, 4))

    def test_a_schedule_that_does_not_end_is_an_error(self) -> None:
        with pytest.raises(CommError, match="does not end"):
            simulate([[[Move("put", 1, 0, 0, 4)]], []], 4, 0.0, 1.0, 1.0)

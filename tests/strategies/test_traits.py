"""What a strategy declares of itself, and how several phases become one declaration."""

from __future__ import annotations

import inspect

import pytest

from podium.errors import ConfigError
from podium.servers.gate import Rules
from podium.servers.modes import MODES, Sizes, make_mode
from podium.strategies import STRATEGIES, find_strategy, make_strategy
from podium.strategies.base import Strategy
from podium.strategies.parameter_server import ParameterServer
from podium.strategies.traits import Cadence, Payload, ServerSpec


def test_a_strategy_has_at_most_twelve_members() -> None:
    members = {name for name in (*vars(Strategy), *Strategy.__annotations__) if not name.startswith("_")}
    assert len(members) <= 12, sorted(members)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_adds_no_flag_of_its_own(name: str) -> None:
    """What the run asks of a strategy is in its three objects, so others need not look for more."""
    cls = find_strategy(name)
    options = inspect.signature(cls).parameters
    flags = {n for n, value in vars(cls).items() if isinstance(value, bool) and n not in options} - {"__final__"}
    assert not flags


class TestPhases:
    def test_the_loosest_cadence_holds_for_the_run(self) -> None:
        steps, rounds = Cadence(survives_loss=True), Cadence(every="round", unequal=True, survives_loss=True)
        leases = Cadence(every="lease")
        assert Cadence.of_phases([steps, rounds]) == Cadence(every="round", unequal=True, survives_loss=True)
        assert Cadence.of_phases([steps, rounds, leases]).every == "lease"
        assert not Cadence.of_phases([steps, leases]).survives_loss

    def test_rounds_of_equal_steps_are_fed_by_global_steps(self) -> None:
        assert Cadence(every="round").feed == "step" and Cadence(every="round", unequal=True).feed == "round"

    def test_a_run_sends_what_any_phase_sends(self) -> None:
        nothing, pairs = Payload(kind="nothing"), Payload(kind="parameters", point_to_point=True)
        found = Payload.of_phases([nothing, pairs, Payload()])
        assert found.is_sent and found.point_to_point
        assert not Payload.of_phases([nothing]).is_sent

    def test_servers_serve_every_phase(self) -> None:
        holds = ServerSpec(count=3, colocated=True, replicas=2, replaceable=True)
        lends = ServerSpec(count=1, colocated=True, role="lender")
        found = ServerSpec.of_phases([ServerSpec(), holds, lends], "phases")
        assert (found.count, found.replicas, found.role, found.replaceable) == (3, 2, "optimizer", True)
        assert not ServerSpec.of_phases([ServerSpec()], "phases")

    def test_phases_that_want_different_servers_are_refused_by_the_name_of_the_option(self) -> None:
        beside = ServerSpec(count=2, colocated=True)
        for other, told in (
            (ServerSpec(count=1), "servers, got 1, 2"),
            (beside, "placement, got colocated, dedicated"),
        ):
            with pytest.raises(ConfigError, match=f"must agree on {told}"):
                ServerSpec.of_phases([ServerSpec(count=2), other], "phases")

    def test_the_three_objects_of_a_preset_are_those_of_its_phases(self) -> None:
        found = make_strategy("strategy-switch", {}, 4)
        assert found.cadence.by_leases and found.cadence.survives_loss
        assert found.server_spec.count == 4 and found.server_spec.colocated and found.server_spec.processes == 0


class TestModes:
    SIZES = Sizes(workers=8, batch_size=64, slices=8)

    @pytest.mark.parametrize("name", MODES)
    def test_the_pushes_of_an_update_add_up_to_it(self, name: str) -> None:
        """Equal slices: the weights of as many pushes as make an update add up to 1."""
        mode = make_mode(name, ParameterServer(backups=2, groups=2))  # type: ignore[arg-type]  # a mode's name
        sizes = self.SIZES._replace(slices=mode.slices(8))
        pushes = round(mode.share(sizes) * sizes.slices)
        assert pushes * mode.weight(1 / sizes.slices, sizes) == pytest.approx(1)

    def test_without_slack_ssp_and_dssp_are_sync(self) -> None:
        together = make_mode("sync", ParameterServer()).rules(self.SIZES)
        for options in ({"staleness": 0}, {"staleness": 0, "staleness_high": 0}):
            name = "dssp" if len(options) > 1 else "ssp"
            mode = make_mode(name, ParameterServer(**options))  # type: ignore[arg-type]  # plain options
            assert mode.rules(self.SIZES) == together and not mode.streams

    def test_an_asynchronous_push_waits_only_where_it_may_be_dropped(self) -> None:
        assert make_mode("async", ParameterServer()).rules(self.SIZES) == Rules()
        assert make_mode("async", ParameterServer(mode="async", drop_beyond=2)).rules(self.SIZES).wait

"""The head's side of the agents: agents here are channels of this process that send what an agent sends."""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from podium.comm.base import Message
from podium.comm.real.channel import Channel
from podium.errors import RankFailed
from podium.launch.blobs import as_bytes, as_tensor
from podium.launch.coordination.rules import FIRST_AGENT, HEAD
from podium.launch.hosts.base import StartedAgent, Starter
from podium.launch.hosts.entries import HostEntry
from podium.launch.hosts.facts import MOST_SKEW_S, HostFacts
from podium.launch.hosts.invitation import Invitation
from podium.launch.hosts.pool import HostPool
from podium.launch.hosts.ranks import HostRanks
from podium.launch.hosts.trees import Offer
from podium.launch.process import NodeSpec

SECRET = b"of this test, for all"
LIMIT_S = 20.0


class Started(StartedAgent):
    def __init__(self) -> None:
        self.said: str | None = None

    def ended(self) -> str | None:
        return self.said

    def end(self, *, at_once: bool = False) -> None: ...


class Here(Starter):
    """Starts nothing: the test connects as an agent itself."""

    def __init__(self) -> None:
        self.agents: dict[int, Started] = {}

    def head_address(self, entries: Sequence[HostEntry]) -> str:
        return "127.0.0.1"

    def start(self, entries: Mapping[int, HostEntry], invitation: Invitation) -> dict[int, StartedAgent]:
        self.agents.update({number: Started() for number in entries})
        return {number: self.agents[number] for number in entries}


class Agent:
    """A channel that beats, as an agent does."""

    def __init__(self, number: int, head: str, folder: Path) -> None:
        listen = f"unix:{folder}/{number}"
        self.channel = Channel(FIRST_AGENT + number, secret=SECRET, listen=listen, deadline_s=LIMIT_S)
        self.channel.connect_all({HEAD: head})
        self._over = threading.Event()
        self._beats = threading.Thread(target=self._beat)
        self._beats.start()

    def _beat(self) -> None:
        while not self._over.wait(0.1):
            self.channel.send(HEAD, "beat", {"running": {}})

    def hello(self, ahead_s: float = 0.0) -> Any:
        facts = HostFacts.here("127.0.0.1")
        return self.channel.call(HEAD, "hello", facts._replace(time=time.time() + ahead_s)._asdict())

    def say(self, kind: str, body: bytes = b"", **meta: Any) -> None:
        self.channel.send(HEAD, kind, meta, [as_tensor(body)] if body else [])

    def answer(self, handle: Any) -> Message:
        return self.channel.wait([handle])[0]

    def close(self) -> None:
        self._over.set()
        self._beats.join()
        self.channel.close()


Make = Callable[..., tuple[HostPool, list[Agent]]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """`make(hosts, **options of HostPool)` gives a pool whose agents have connected."""
    ends: list[Callable[[], None]] = []

    def make_pool(count: int, **options: Any) -> tuple[HostPool, list[Agent]]:
        channel = Channel(HEAD, secret=SECRET, listen=f"unix:{tmp_path}/head")
        pool = HostPool(channel, Here(), Invitation(channel.address, SECRET, None, None, LIMIT_S), **options)
        pool.start([HostEntry(f"h{n}", gpus=2) for n in range(count)])
        agents = [Agent(n, channel.address, tmp_path) for n in range(count)]
        ends.extend([*(agent.close for agent in agents), pool.close])
        return pool, agents

    yield make_pool
    for end in ends:
        end()


def wait_for(holds: Callable[[], bool], pool: HostPool) -> None:
    with pool.changed:
        assert pool.changed.wait_for(holds, LIMIT_S)


def test_a_host_that_reads_much_keeps_nobody_from_being_heard(make: Make, tmp_path: Path) -> None:
    reading, may_end = threading.Event(), threading.Event()

    def read() -> Offer:
        reading.set()
        assert may_end.wait(LIMIT_S)
        return Offer.of("data", tmp_path, [])

    pool, (slow, other) = make(2, offers={"data": read})
    asked = slow.channel.call(HEAD, "tree", {"name": "data"})
    assert reading.wait(LIMIT_S)
    hello = other.hello()
    assert "refused" not in other.answer(hello).meta
    time.sleep(1.5)  # longer than an agent may be silent
    wait_for(lambda: pool.hosts[1].answers, pool)  # without the answer to the first
    assert abs(pool.hosts[1].clock_skew_s or 99.0) < MOST_SKEW_S / 10
    may_end.set()
    assert "refused" not in slow.answer(asked).meta


def test_an_agent_learns_when_it_asked_and_when_it_was_answered(make: Make) -> None:
    entered, may_end = threading.Event(), threading.Event()

    def welcome(asked_ns: int) -> dict[str, Any]:
        entered.set()
        assert may_end.wait(LIMIT_S)
        return {"elapsed_ns": [asked_ns, time.monotonic_ns()]}

    _, (agent,) = make(1, welcome=welcome)
    hello = agent.hello()
    assert entered.wait(LIMIT_S)
    entered_ns = time.monotonic_ns()
    time.sleep(0.2)
    may_end.set()
    asked_ns, answered_ns = json.loads(as_bytes(agent.answer(hello).body))["elapsed_ns"]
    assert asked_ns < entered_ns < entered_ns + 0.2e9 <= answered_ns


def test_a_clock_that_is_wrong_is_refused_with_how_much(make: Make) -> None:
    pool, (agent,) = make(1)
    told = agent.answer(agent.hello(ahead_s=300.0)).meta["refused"]
    assert "300 s ahead" in told or "299 s ahead" in told
    assert pool.hosts[0].failure is not None


def test_output_that_cannot_be_shown_ends_nothing(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stdout", Gone())
    pool, (agent,) = make(1, logs=tmp_path / "logs", shown="rank-0.log")
    agent.say("log", b"one\n", name="rank-0.log")
    agent.say("log", b"two\n", name="rank-0.log")
    agent.say("ready")
    wait_for(lambda: pool.hosts[0].ready, pool)
    until = time.monotonic() + LIMIT_S
    log = tmp_path / "logs" / "rank-0.log"
    while not log.exists() or log.read_text() != "one\ntwo\n":
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_message_that_makes_no_sense_costs_its_own_host_only(make: Make) -> None:
    pool, (bad, good) = make(2)
    bad.say("ended", rank="x", start=1, how="?")
    wait_for(lambda: pool.hosts[0].gone is not None, pool)
    assert "ValueError" in str(pool.hosts[0].gone)
    good.say("ready")
    wait_for(lambda: pool.hosts[1].ready, pool)


def test_the_last_words_of_a_lost_agent_are_told(make: Make) -> None:
    pool, (agent,) = make(1)
    started = pool.hosts[0].started
    assert isinstance(started, Started)
    agent.close()
    wait_for(lambda: pool.hosts[0].gone is not None, pool)
    started.said = "OSError: No space left on device"
    assert "No space left on device" in str(pool.hosts[0].why_gone())


# Ranks.


def spec(rank: int, role: str = "worker", **changes: Any) -> NodeSpec:
    fields = {
        "rank": rank,
        "endpoints": (rank,),
        "role": role,
        "workers": 2,
        "servers": 0,
        "talks": False,
        "config": {"threads": None, "device": "cuda"},
        "secret": SECRET.hex(),
        "coordinator": "tcp:127.0.0.1:1",
        "store": "coordinator",
        "rendezvous": None,
    }
    return NodeSpec(**{**fields, **changes})


def orders(agent: Agent, count: int) -> list[Any]:
    found = []
    while len(found) < count:
        message = agent.channel.recv()
        if message.kind == "start":
            found.append(message.meta)
    return found


def ready(pool: HostPool, agents: list[Agent]) -> None:
    for agent in agents:
        agent.answer(agent.hello())
        agent.say("ready")
    wait_for(lambda: all(state.is_up for state in pool.hosts.values()), pool)


def test_the_secret_is_in_no_order(make: Make) -> None:
    pool, agents = make(1)
    ready(pool, agents)
    HostRanks(pool, {0: 0}).launch(spec(0))
    (order,) = orders(agents[0], 1)
    assert order["spec"]["secret"] == "" and SECRET.hex() not in str(order)


def test_a_worker_takes_the_gpu_of_a_lost_one(make: Make) -> None:
    pool, agents = make(1)
    ready(pool, agents)
    ranks = HostRanks(pool, {0: 0, 1: 0})
    for rank in (0, 1):
        ranks.launch(spec(rank))
    agents[0].say("ended", rank=0, start=1, how="killed")
    wait_for(lambda: 0 in pool.hosts[0].ended, pool)
    ranks.launch(spec(2, late=True))
    ranks.launch(spec(3, late=True))
    found = orders(agents[0], 4)
    assert [(order["spec"]["rank"], order["nth"], order["gpus"]) for order in found] == [
        (0, 0, 2),
        (1, 1, 2),
        (2, 0, 2),
        (3, 2, 2),
    ]
    assert [order["placed"] for order in found] == [2, 2, 2, 3], "a lost rank uses no core"


@pytest.mark.parametrize(("device", "places"), [("cpu,cuda", [0, 0, 1, 1]), ("cuda,cuda,cpu,cpu", [0, 1, 0, 1])])
def test_workers_with_gpus_are_counted_apart_from_those_without(make: Make, device: str, places: list[int]) -> None:
    pool, agents = make(1)
    ready(pool, agents)
    ranks = HostRanks(pool, dict.fromkeys(range(4), 0))
    for rank in range(4):
        ranks.launch(spec(rank, config={"threads": 1, "device": device}))
    assert [order["nth"] for order in orders(agents[0], 4)] == places


def test_the_end_of_an_earlier_process_is_not_that_of_its_replacement(make: Make) -> None:
    pool, agents = make(1)
    ready(pool, agents)
    ranks = HostRanks(pool, {0: 0})
    ranks.launch(spec(0, role="server"))
    ranks.launch(spec(0, role="server", replaces=True))
    agents[0].say("ended", rank=0, start=1, how="killed by SIGKILL")
    agents[0].answer(agents[0].hello())  # which comes after it
    assert ranks.how_it_ended(0, 0.0) is None
    agents[0].say("ended", rank=0, start=2, how="killed by SIGKILL")
    wait_for(lambda: 0 in pool.hosts[0].ended, pool)


def test_a_rank_is_started_where_a_host_was_silent_for_a_moment_but_not_where_it_is_gone(make: Make) -> None:
    pool, agents = make(1)
    ready(pool, agents)
    ranks = HostRanks(pool, {0: 0})
    with pool.changed:
        pool.hosts[0].heard_at -= 100.0
        assert ranks._least_loaded() is pool.hosts[0]
        pool.hosts[0].gone = "lost"
        with pytest.raises(RankFailed, match="no host is left"):
            ranks._least_loaded()

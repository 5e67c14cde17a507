"""A rank of a run across hosts, as a process that a test starts on a host; requests and answers are lines of JSON."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import torch

from podium.comm.clocks import WallClock
from podium.comm.real.arena import Arena
from podium.comm.real.channel import Channel
from podium.comm.real.communicator import RealCommunicator
from podium.comm.real.process_group import Group, client_store, look_up, publish
from podium.errors import Lost

DEADLINE_S = 60.0
PORT = 29700


def main() -> None:
    torch.set_num_threads(1)
    comm, channel = connect(*json.loads(sys.argv[1]))
    waiting: list[Any] = []
    for line in sys.stdin:
        what, *details = json.loads(line)
        if what == "hosts":
            say(comm.hosts)
        elif what == "sum":
            say(add_up(comm, channel, *details))
        elif what.startswith("wait"):
            handle = comm.all_reduce(torch.zeros(*details))
            waiting.append(threading.Thread(target=wait_for, args=(comm, handle)))
            waiting[-1].start()
            say("issued")
        elif what == "abandon":
            comm.abandon()
            waiting.pop().join(DEADLINE_S)
        else:
            began = time.monotonic()
            comm.regroup(*details)
            say({"hosts": comm.hosts, "took_s": time.monotonic() - began})
    os._exit(0)


def connect(rank: int, size: int, host: str, address: str, meeting: str) -> tuple[RealCommunicator, Channel]:
    listen = f"host:{host};unix:/tmp/c{rank};tcp:{address}:0"
    channel = Channel(rank, secret=b"of this test", listen=listen, deadline_s=DEADLINE_S, arena=Arena())
    store = client_store(meeting, PORT, DEADLINE_S, is_host=rank == 0, world_size=size)
    publish(store, f"listens-{rank}", channel.address)
    channel.introduce({other: look_up(store, f"listens-{other}", DEADLINE_S) for other in range(size)})
    comm = RealCommunicator(
        rank,
        range(size),
        (),
        WallClock(),
        group=Group(store, host=address, deadline_s=DEADLINE_S),
        channel=channel,
        deadline_s=DEADLINE_S,
        over_channel=True,
    )
    return comm, channel


def add_up(comm: RealCommunicator, channel: Channel, numel: int) -> dict[str, int]:
    noise = comm.allocate(numel, torch.float32, torch.device("cpu"))
    noise.copy_(torch.randn(numel, generator=torch.Generator().manual_seed(comm.rank)))
    before = channel.wire.sent
    comm.wait(comm.all_reduce(noise))
    return {"bits": int(noise.view(torch.int32).to(torch.int64).sum()), "sent": channel.wire.sent - before}


def wait_for(comm: RealCommunicator, handle: Any) -> None:
    try:
        comm.wait(handle)
        say({"lost": False})
    except Lost:
        say({"lost": True})


def say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

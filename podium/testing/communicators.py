"""The contract of every communicator. A communicator's own tests subclass it and supply `world`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from podium.comm.base import DEPARTED, Communicator, Message
from podium.errors import CommError, DeadlineExceeded, Lost
from podium.testing.worlds import World

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
)


class CommunicatorContract:
    """One promise per test; an implementation supplies `world`."""

    def test_all_reduce_is_the_exact_sum_in_every_dtype(self, world: World) -> None:
        for sums in world.run(_sum_in_every_dtype, workers=3):
            for dtype, total in zip(DTYPES, sums, strict=True):
                assert total == [6, 12, 18, 24], dtype

    def test_collectives_that_overlap_keep_their_order(self, world: World) -> None:
        for results in world.run(_several_at_once, workers=3):
            assert results == [[n * 3.0 + 3.0] * 5 for n in range(6)]

    def test_broadcast_copies_the_source_and_nobody_else(self, world: World) -> None:
        assert world.run(_broadcast_from_one, workers=3) == [[20.0, 21.0]] * 3

    def test_one_worker_alone_keeps_what_it_has(self, world: World) -> None:
        assert world.run(_alone, workers=1) == [([1.0, 2.0], [1.0, 2.0])]

    def test_a_reply_lands_in_the_buffers_made_ready_for_it(self, world: World) -> None:
        asked, served = world.run(_ask_and_answer, workers=1, servers=1)
        assert asked["landed"] == [[2.0, 4.0], [6]]
        assert asked["same_storage"]
        assert asked["meta"] == {"text": "ü", "nested": {"list": [1, 2.5, None, True]}}
        assert served == {"kind": "double", "source": 0, "meta": {"n": 7}}

    def test_replies_may_come_in_another_order_than_calls(self, world: World) -> None:
        assert world.run(_answered_backwards, workers=1, servers=1)[0] == [0, 1, 2]

    def test_messages_of_one_source_arrive_in_the_order_they_were_sent(self, world: World) -> None:
        received = world.run(_many_to_one, workers=3)[2]
        for source in (0, 1):
            assert [n for s, n in received if s == source] == list(range(8))

    def test_a_body_is_taken_when_send_returns(self, world: World) -> None:
        assert world.run(_change_after_sending, workers=2)[1] == [1.0] * 1000

    def test_a_departure_is_a_message_after_all_others_of_its_source(self, world: World) -> None:
        assert world.run(_send_and_go, workers=2)[1] == [("large", 0), ("small", 0), (DEPARTED, 0)]

    def test_a_reply_counts_even_if_its_sender_then_leaves(self, world: World) -> None:
        assert world.run(_answer_and_go, workers=1, servers=1)[0] == {"answer": 42}

    def test_waiting_inside_a_backward_pass_is_refused(self, world: World) -> None:
        for message in world.run(_wait_in_backward, workers=2):
            assert "inside a backward pass" in message

    def test_a_call_that_nobody_answers_ends_with_the_deadline(self, world: World) -> None:
        asked, _ = world.attempt(partial(_call_unanswered, within_s=1.0), workers=1, servers=1)
        assert isinstance(asked, DeadlineExceeded)

    def test_receiving_what_nobody_sends_ends_with_the_deadline(self, world: World) -> None:
        outcomes = world.attempt(_receive_nothing, workers=2, deadline_s=1.0)
        assert any(isinstance(outcome, DeadlineExceeded) for outcome in outcomes)

    def test_a_collective_that_a_member_never_joins_ends(self, world: World) -> None:
        joined, absent = world.attempt(_collective_not_joined, workers=2, deadline_s=1.0)
        assert isinstance(joined, DeadlineExceeded | Lost)
        assert absent == "saw it go"

    def test_a_call_to_a_rank_that_is_gone_is_lost(self, world: World) -> None:
        caller, _ = world.attempt(_call_the_gone, workers=2)
        assert isinstance(caller, Lost)

    def test_a_call_under_way_is_lost_with_the_rank_it_went_to(self, world: World) -> None:
        caller, _ = world.attempt(_call_the_leaving, workers=1, servers=1)
        assert isinstance(caller, Lost)

    def test_survivors_of_a_lost_member_regroup_and_go_on(self, world: World) -> None:
        first, gone, last = world.run(_lose_one_and_regroup, workers=3)
        assert gone is None
        for survivor in (first, last):
            assert survivor == {"sum": [2.0, 2.0], "workers": (0, 2), "size": 2, "generation": 1, "copied": 2.0}

    def test_polling_never_waits_and_takes_messages_in_their_order(self, world: World) -> None:
        before, kinds, after = world.run(_poll_and_find, workers=2)[1]
        assert before is None
        assert kinds == ["first", "second", "third"]
        assert after is None

    def test_polling_beside_a_call_tells_of_messages_until_the_call_is_answered(self, world: World) -> None:
        kinds, answer = world.run(_poll_beside_a_call, workers=2, servers=1)[0]
        assert kinds == ["meanwhile", "meanwhile"]
        assert answer == {"answer": 42}

    def test_polling_beside_a_call_that_is_lost_ends(self, world: World) -> None:
        caller, _ = world.attempt(_poll_beside_a_lost_call, workers=1, servers=1)
        assert isinstance(caller, Lost)

    def test_polling_beside_a_call_that_nobody_answers_ends_with_the_deadline(self, world: World) -> None:
        asked, _ = world.attempt(_poll_unanswered, workers=1, servers=1)
        assert isinstance(asked, DeadlineExceeded)

    def test_polling_inside_a_backward_pass_is_refused(self, world: World) -> None:
        (message,) = world.run(_poll_in_backward, workers=1)
        assert "inside a backward pass" in message

    def test_traffic_counts_bytes_of_tensors(self, world: World) -> None:
        worker, other, server = world.run(_count_traffic, workers=2, servers=1)
        ring = 2 * 400 * (2 - 1) // 2
        assert worker == (ring + 400, ring + 40)  # the ring, the call's body; the ring, the reply's body
        assert other == (ring, ring)
        assert server == (40, 400)

    def test_nobody_passes_a_barrier_before_all_have_come(self, world: World) -> None:
        last = world.run(_barrier, workers=3)[2]
        assert last == ["before", "before", "after", "after"]


# What the ranks do.


def _sum_in_every_dtype(comm: Communicator) -> list[list[float]]:
    sums = []
    for dtype in DTYPES:
        tensor = torch.tensor([1, 2, 3, 4]).to(dtype) * (comm.rank + 1)
        comm.wait(comm.all_reduce(tensor))
        sums.append(tensor.tolist())
    return sums


def _several_at_once(comm: Communicator) -> list[list[float]]:
    tensors = [torch.full((5,), float(n + comm.rank)) for n in range(6)]
    comm.wait(*[comm.all_reduce(t) for t in tensors])
    return [t.tolist() for t in tensors]


def _broadcast_from_one(comm: Communicator) -> list[float]:
    tensor = torch.tensor([comm.rank * 10.0, comm.rank * 10.0 + 1]) + 10 * (comm.rank == 1)
    comm.wait(comm.broadcast(tensor, 1))
    return tensor.tolist()


def _alone(comm: Communicator) -> tuple[list[float], list[float]]:
    summed, copied = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])
    comm.wait(comm.all_reduce(summed), comm.broadcast(copied, 0))
    return summed.tolist(), copied.tolist()


def _ask_and_answer(comm: Communicator) -> dict[str, Any]:
    if comm.rank in comm.servers:
        message = comm.recv()
        meta = {"text": "ü", "nested": {"list": [1, 2.5, None, True]}}
        comm.reply(message, meta, [t * 2 for t in message.body])
        return {"kind": message.kind, "source": message.source, "meta": message.meta}
    into = [torch.zeros(2), torch.zeros(1, dtype=torch.int64)]
    body = [torch.tensor([1.0, 2.0]), torch.tensor([3])]
    (answer,) = comm.wait(comm.call(1, "double", {"n": 7}, body, into))
    assert answer is not None
    same = all(a.data_ptr() == b.data_ptr() for a, b in zip(answer.body, into, strict=True))
    return {"landed": [t.tolist() for t in into], "same_storage": same, "meta": answer.meta}


def _answered_backwards(comm: Communicator) -> list[int] | None:
    if comm.rank in comm.servers:
        asked = [comm.recv() for _ in range(3)]
        for message in reversed(asked):
            comm.reply(message, message.meta)
        return None
    answers = comm.wait(*[comm.call(1, "which", {"n": n}) for n in range(3)])
    return [a.meta["n"] for a in answers if a is not None]


def _many_to_one(comm: Communicator) -> list[tuple[int, int]] | None:
    if comm.rank < 2:
        for n in range(8):  # large ones first: a small one must not overtake them
            comm.send(2, "count", {"n": n}, [torch.zeros(200_000 >> (2 * n))])
        return None
    messages: list[Message] = []
    while len(messages) < 16:
        message = comm.recv()
        if message.kind != DEPARTED:
            messages.append(message)
    return [(m.source, m.meta["n"]) for m in messages]


def _change_after_sending(comm: Communicator) -> list[float] | None:
    if comm.rank == 0:
        body = torch.ones(1000)
        comm.send(1, "body", {}, [body])
        body.zero_()
        return None
    return comm.recv().body[0].tolist()


def _send_and_go(comm: Communicator) -> list[tuple[str, int]] | None:
    if comm.rank == 0:
        comm.send(1, "large", {}, [torch.zeros(100_000)])
        comm.send(1, "small", {})
        return None
    messages = [comm.recv() for _ in range(3)]
    return [(m.kind, m.source) for m in messages]


def _answer_and_go(comm: Communicator) -> dict[str, int] | None:
    if comm.rank in comm.servers:
        comm.reply(comm.recv(), {"answer": 42})
        return None
    (answer,) = comm.wait(comm.call(1, "ask", {}))
    assert answer is not None
    return answer.meta


def _wait_in_backward(comm: Communicator) -> str:
    handle = comm.all_reduce(torch.zeros(3))
    try:
        with comm.backward_pass():
            comm.wait(handle)
    except CommError as error:
        return str(error)
    finally:
        comm.wait(handle)
    return "it was allowed"


def _call_unanswered(comm: Communicator, within_s: float) -> str:
    if comm.rank in comm.servers:
        while comm.recv().kind != DEPARTED:
            pass
        return "saw it go"
    comm.wait(comm.call(1, "never", {}), deadline_s=within_s)
    return "it was answered"


def _receive_nothing(comm: Communicator) -> str:
    return comm.recv().kind


def _collective_not_joined(comm: Communicator) -> str:
    if comm.rank == 1:
        while comm.recv(deadline_s=20).kind != DEPARTED:
            pass
        return "saw it go"
    comm.send(1, "hello", {})
    comm.wait(comm.all_reduce(torch.zeros(3)))
    return "it ended well"


def _call_the_gone(comm: Communicator) -> str:
    if comm.rank == 1:
        comm.send(0, "hello", {})
        return "left"
    while comm.recv().kind != DEPARTED:
        pass
    comm.wait(comm.call(1, "anybody", {}))
    return "it was answered"


def _call_the_leaving(comm: Communicator) -> str:
    if comm.rank == 1:
        comm.recv()
        return "left without an answer"
    comm.wait(comm.call(1, "anybody", {}))
    return "it was answered"


def _lose_one_and_regroup(comm: Communicator) -> dict[str, Any] | None:
    comm.wait(comm.all_reduce(torch.ones(2)))
    if comm.rank == 1:
        return None
    lost = torch.ones(2)
    with pytest.raises(Lost):
        comm.wait(comm.all_reduce(lost))
    comm.abandon()
    comm.regroup(1, (0, 2))
    total, copied = torch.ones(2), torch.tensor(float(comm.rank))
    comm.wait(comm.all_reduce(total), comm.broadcast(copied, 2))
    return {
        "sum": total.tolist(),
        "workers": comm.workers,
        "size": comm.size,
        "generation": comm.generation,
        "copied": copied.item(),
    }


def _poll_and_find(comm: Communicator) -> tuple[Any, list[str], Any] | None:
    if comm.rank == 0:
        asked = comm.recv()
        for kind in ("first", "second", "third"):
            comm.send(1, kind, {}, [torch.zeros(3)])
        comm.reply(asked, {})  # comes after them
        comm.barrier()
        return None
    before = comm.poll()
    comm.wait(comm.call(0, "ask", {}))
    found = [comm.poll() for _ in range(3)]
    after = comm.poll()
    comm.barrier()
    return before, [message.kind for message in found if message is not None], after


def _poll_beside_a_call(comm: Communicator) -> tuple[list[str], Any] | None:
    if comm.rank == 1:
        for _ in range(2):
            comm.wait(comm.call(0, "meanwhile", {}))
        comm.send(2, "now", {})
        _receive_until(comm, "go")
        return None
    if comm.rank == 2:
        # The two come over different connections, so in any order.
        asked = {message.kind: message for message in (comm.recv(), comm.recv())}
        comm.reply(asked["ask"], {"answer": 42})
        _receive_until(comm, "go")  # and not until the departure of rank 1, which had it before
        return None
    call, kinds = comm.call(2, "ask", {}), []
    while (message := comm.poll(call, deadline_s=300)) is not None:  # nothing else ends it: no rank leaves meanwhile
        kinds.append(message.kind)
        comm.reply(message, {})
    assert call.done
    (answer,) = comm.wait(call)
    for rank in (1, 2):
        comm.send(rank, "go", {})
    return kinds, None if answer is None else answer.meta


def _receive_until(comm: Communicator, kind: str) -> None:
    while comm.recv().kind != kind:
        pass


def _poll_beside_a_lost_call(comm: Communicator) -> str:
    if comm.rank == 1:
        comm.recv()
        return "left without an answer"
    call = comm.call(1, "anybody", {})
    while comm.poll(call) is not None:
        pass
    comm.wait(call)
    return "it was answered"


def _poll_unanswered(comm: Communicator) -> str:
    if comm.rank in comm.servers:
        while comm.recv().kind != DEPARTED:
            pass
        return "saw it go"
    comm.poll(comm.call(1, "never", {}), deadline_s=0.5)
    return "it was answered"


def _poll_in_backward(comm: Communicator) -> str:
    try:
        with comm.backward_pass():
            comm.poll()
    except CommError as error:
        return str(error)
    return "it was allowed"


def _count_traffic(comm: Communicator) -> tuple[int, int]:
    if comm.rank in comm.servers:
        while (message := comm.recv()).kind != "weigh":  # the other worker may leave before the call arrives
            pass
        comm.reply(message, {}, [torch.zeros(10)])
    else:
        comm.wait(comm.all_reduce(torch.zeros(100)))
    if comm.rank == 0:
        comm.wait(comm.call(2, "weigh", {}, [torch.zeros(100)]))
    return comm.traffic.sent, comm.traffic.received


def _barrier(comm: Communicator) -> list[str] | None:
    """The last worker comes late, and sees the other workers' messages from before and after the barrier."""
    if comm.rank < 2:
        comm.send(2, "before", {})
        comm.barrier()
        comm.send(2, "after", {})
        return None
    kinds = [comm.recv().kind, comm.recv().kind]
    comm.barrier()
    messages = [comm.recv() for _ in range(4)]
    return [*kinds, *(m.kind for m in messages if m.kind != DEPARTED)]

"""Messages: every type survives the wire, and what is none of them is refused with a name."""

from __future__ import annotations

import json
import typing
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.comm.base import Message
from podium.data.order import Slice
from podium.errors import CommError
from podium.servers.leases.lease import Lease, NoLease
from podium.servers.wire import messages
from podium.servers.wire.long_settings import fold, unfold
from podium.servers.wire.messages import (
    TYPES,
    Draw,
    DrawReply,
    Have,
    Push,
    PushReply,
    arrival_of,
    decode,
    encode,
    lease_of,
    plain_lease,
)

ALL = sorted({each for each in vars(messages).values() if isinstance(each, type) and hasattr(each, "_fields")}, key=str)
MESSAGES = [each for each in ALL if each not in (Lease, NoLease, Slice, Message)]
PUSH = Push(unit=1, lease=4, size=2, version=3, options=[{"lr": 0.1}], unused=[0])

_OF: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(-(2**40), 2**40),
    float: st.floats(allow_nan=False),
    str: st.text(),
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Something of a field's type, as JSON knows it."""
    options = [part for part in typing.get_args(hint) if part is not type(None)] or [hint]
    plain = typing.get_origin(hint) or hint
    if plain in _OF:
        return _OF[plain]
    if type(None) in typing.get_args(hint):
        return st.none() | values(options[0])
    if plain is dict:
        return st.dictionaries(st.text(), st.integers())
    return st.lists(st.integers(), max_size=4)


def over_the_wire(kind: str, facts: Any) -> Message:
    return Message(7, kind, json.loads(json.dumps(encode(facts))))


@settings(max_examples=300)
@given(kind=st.sampled_from(MESSAGES), data=st.data())
def test_a_message_survives_the_wire(kind: Any, data: st.DataObject) -> None:
    hints = typing.get_type_hints(kind)
    facts = kind(**{name: data.draw(values(hints[name]), label=name) for name in kind._fields})
    assert decode(kind, over_the_wire("anything", facts)) == facts


def test_a_field_at_its_default_does_not_travel() -> None:
    assert encode(PUSH) == {"unit": 1, "lease": 4, "size": 2, "version": 3, "options": [{"lr": 0.1}], "unused": [0]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"colour": 3}, "a push of rank 7 has an unknown colour; it may have unit, lease"),
        ({"unit": "one"}, "a push of rank 7: its unit must be int, got 'one'"),
        ({"last": 1.5}, "a push of rank 7: its last must be bool, got 1.5"),
        ({"votes": None}, "a push of rank 7: its votes must be list or tuple, got None"),
        ({"context": "x"}, "a push of rank 7: its context must be list or tuple or NoneType, got 'x'"),
    ],
)
def test_what_is_unknown_or_of_another_type_is_named(change: dict[str, Any], said: str) -> None:
    decode(Push, Message(7, "push", encode(PUSH)))  # what was seen before must not hide what is wrong
    with pytest.raises(CommError, match=said):
        decode(Push, Message(7, "push", {**encode(PUSH), **change}))


def test_what_is_missing_is_named() -> None:
    with pytest.raises(CommError, match="a push of rank 7 must have size, version, options, unused, got unit, lease"):
        decode(Push, Message(7, "push", {"unit": 1, "lease": 4}))


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(CommError) as refused:
        decode(Push, Message(7, "push", {**encode(PUSH), "unit": "x" * 10_000}))
    assert len(str(refused.value)) < 200


def test_every_kind_has_one_type() -> None:
    assert len(set(TYPES.values())) == len(TYPES)


@given(
    st.integers(0, 2**40),
    st.integers(1, 100),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=3),
)
def test_a_lease_survives_both_kinds_of_answer(number: int, step: int, cuts: list[tuple[int, int]]) -> None:
    lease = Lease(number, Slice(number, 5, 1, 2), step, tuple(cuts))
    for kind in (DrawReply, PushReply):
        answer = kind(**dict(zip(("lease", "slice", "step", "cuts"), plain_lease(lease), strict=True)))
        assert lease_of(decode(kind, over_the_wire("push", answer))) == lease
    drawn = DrawReply(*plain_lease(lease._replace(cuts=())))
    assert drawn.told([torch.tensor(cuts)] if cuts else ()) == lease


def test_a_draw_may_be_answered_with_the_end_of_the_segment() -> None:
    assert DrawReply(position=12, agreed=[True, False, False]).told() == NoLease(12, [True, False, False])


def test_many_settings_travel_in_the_body() -> None:
    push = PUSH._replace(options=[{"lr": 0.1, "betas": (0.9, 0.99)}] * 100)
    meta, body = fold(encode(push), [torch.ones(3)])
    assert len(json.dumps(meta)) < 200
    message = unfold(Message(7, "push", meta, tuple(body)))
    assert decode(Push, message).options == [{"lr": 0.1, "betas": [0.9, 0.99]}] * 100
    assert len(message.body) == 1


def test_records_and_replays_know_a_message_by_its_lease_and_unit() -> None:
    for kind, facts, known_by in (
        ("push", PUSH, (4, 1)),
        ("draw", Draw(8, [False] * 3), (8, 0)),
        ("have", Have(source=2, lease=4), (4, 2)),
    ):
        assert arrival_of(over_the_wire(kind, facts)) == known_by

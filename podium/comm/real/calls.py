"""Calls over the channel; those to a lost server are repeated to the restored one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from podium.comm.base import Message, Meta
from podium.comm.real.channel import Channel
from podium.comm.real.link import ChannelHandle
from podium.comm.real.sockets import Address
from podium.errors import CommError, DeadlineExceeded, Lost

Relocate = Callable[[int, Address], Address]
"""The new address of a server that was lost at this one; blocks until it serves, raises `Lost` if it never will."""
_PENDING_S = 1.0
"""How long a worker waits for slow servers before it tells them that others have answered."""


class Call(NamedTuple):
    """A request, stored until its reply arrives, since it may have to be repeated."""

    to: int
    kind: str
    meta: Meta
    body: Sequence[Tensor]
    into: Sequence[Tensor] | None
    landing: Sequence[Tensor] | None
    """`into` where it is in host memory, else host tensors of the same shapes."""


@final
class Calls:
    """The calls of one rank."""

    def __init__(self, channel: Channel, relocate: Relocate | None) -> None:
        """Without `relocate`, a lost server is a lost rank."""
        self._channel, self._relocate = channel, relocate
        self._open: dict[ChannelHandle, Call] = {}

    def make(self, call: Call, servers: Collection[int], more: bool) -> ChannelHandle:
        handle = self._issue(call, servers, more)
        self._open[handle] = call
        return handle

    def _issue(self, call: Call, servers: Collection[int], more: bool = False) -> ChannelHandle:
        try:
            return self._channel.call(call.to, call.kind, call.meta, call.body, call.landing, more)
        except Lost as error:
            if self._relocate is None or call.to not in servers:
                raise
            handle = ChannelHandle(call.to, call.kind, call.landing)
            handle.error = error  # raised when it is waited for: an issue never waits
            return handle

    def wait(
        self, handles: Sequence[ChannelHandle], servers: Collection[int], deadline_s: float
    ) -> dict[ChannelHandle, Message]:
        """One reply per call, its tensors copied to the call's `into`."""
        answers = self._answers(handles, servers, deadline_s)
        for handle in answers:
            call = self._open.pop(handle)
            for mine, landed in zip(call.into or (), call.landing or (), strict=True):
                if mine is not landed:
                    mine.copy_(landed)
        return answers

    def _answers(
        self, handles: Sequence[ChannelHandle], servers: Collection[int], deadline_s: float
    ) -> dict[ChannelHandle, Message]:
        """Wait for all replies; repeat all calls to a lost server, also those that it had answered.

        A push is several calls, and the restored server may have none of them.
        """
        current = {handle: handle for handle in handles}
        until = time.monotonic() + deadline_s
        while True:
            left_s = max(0.0, until - time.monotonic())
            try:
                came = self._channel.wait(list(current.values()), min(left_s, _PENDING_S))
                return dict(zip(handles, came, strict=True))
            except DeadlineExceeded as error:
                if left_s <= _PENDING_S:
                    raise DeadlineExceeded(str(error).replace(f"{left_s:g} s", f"{deadline_s:g} s")) from None
                self._tell_pending([(self._open[handle], current[handle]) for handle in handles])
            except Lost:
                lost = {self._open[handle].to for handle in handles if current[handle].error is not None}
                if self._relocate is None or not lost <= set(servers):
                    for handle in handles:
                        self._open.pop(handle, None)
                    raise
                for server in sorted(lost):
                    self.find(server)
                for handle in handles:
                    if self._open[handle].to in lost:
                        current[handle] = self._issue(self._open[handle], servers)

    def find(self, server: int) -> None:
        """Get a lost server's new address; blocks until it serves."""
        assert self._relocate is not None
        old = self._channel.address_book.get(server, "")
        self._channel.introduce({server: self._relocate(server, old)})

    def _tell_pending(self, calls: Sequence[tuple[Call, ChannelHandle]]) -> None:
        """Tell servers that have not answered a push that other servers have: they may have been restored in between.

        A server that was lost right after it had answered a worker does not know of the push, and that worker will not
        send it again.
        """
        answers = [handle.message for _, handle in calls if handle.message is not None]
        for call, handle in calls if answers and self._relocate is not None else ():
            if not handle.done and call.kind == "push":
                facts: Meta = {"lease": call.meta["lease"], "dropped": any(a.meta.get("dropped") for a in answers)}
                with contextlib.suppress(CommError):  # the server is lost, and `find` will look for it
                    self._channel.send(call.to, "pending", facts)


def landing_for(into: Sequence[Tensor] | None) -> list[Tensor] | None:
    """Host tensors that replies are received in."""
    if into is None:
        return None
    return [t if t.device.type == "cpu" else torch.empty_like(t, device="cpu") for t in into]

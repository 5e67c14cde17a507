"""A server's handlers of messages from other servers, and from workers that wait for several servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from podium.servers.wire.messages import Decision, Edges, Have, Hello, Norm, Pending, Which

if TYPE_CHECKING:
    from podium.comm.base import Message
    from podium.servers.segments import Segments
    from podium.servers.transfer import StateTransfer


class PeerWords:
    """Handles other servers' messages. Those of a later segment wait until it begins here."""

    def __init__(self, segments: Segments, transfer: StateTransfer) -> None:
        self._segments, self._transfer = segments, transfer
        self._replicas, self._outbox = segments.parts.replicas, segments.parts.outbox
        self.early: list[Message] = []
        """Messages of a segment that has begun on another server and not here yet."""

    def segment_begun(self, take_up: Callable[[Message], None]) -> None:
        waiting, self.early = self.early, []
        for message in waiting:
            take_up(message)

    def _is_of_another_segment(self, message: Message, word: Any) -> bool:
        """Whether a message is about a segment that is over here, or has not begun here yet."""
        mine, theirs = self._outbox.segment, getattr(word, "segment", None)
        if theirs is None or mine is None or list(theirs) == mine:
            return False
        if list(theirs) > mine:
            self.early.append(message)
        return True

    def word(self, message: Message, word: Have | Decision | Norm | Pending) -> None:
        """For the push policy."""
        segment = self._segments.present
        if self._is_of_another_segment(message, word):
            return
        if isinstance(word, Have):
            segment.records.arrival(message)
        segment.policy.hear(message.source, word)
        self._transfer.let_go()  # it may have been the last decision

    def hello(self, message: Message, hello: Hello) -> None:
        """Another server was restored: send again what it missed."""
        segment = self._segments.present
        self._replicas.renew(message.source)
        if self._is_of_another_segment(message, hello):
            return
        segment.policy.hear(message.source, hello)
        if segment.lending is not None and segment.lending.inquiry is not None:
            segment.lending.inquiry.restored(message.source)

    def which(self, message: Message, question: Which) -> None:
        """The first server was restored and asks what is applied here."""
        if not self._is_of_another_segment(message, question):
            self._segments.questions.ask(message.source, question)

    def edges(self, message: Message, edges: Edges) -> None:
        lending = self._segments.present.lending
        inquiry = None if lending is None else lending.inquiry
        if inquiry is not None and not self._is_of_another_segment(message, edges):
            inquiry.answered(message.source, edges)

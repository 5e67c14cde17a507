"""Values that process groups exchange while they form, held by the coordinator."""

from __future__ import annotations

import re

from podium.comm.base import Message
from podium.errors import CommError
from podium.launch.coordination.context import RunContext

_LONGEST_VALUE = 1 << 16
_MOST_KEYS = 1 << 16
_GENERATION = re.compile(r"generation-(\d+)/")
_KEPT_GENERATIONS = 8


class KeyStore:
    """Keys of the present and the last few generations. A question waits until its keys exist or its asker leaves."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._values: dict[str, str] = {}
        self._questions: list[Message] = []

    def set(self, message: Message) -> None:
        self._put(str(message.meta["key"]), str(message.meta["value"]))
        self._run.post.answer(message, {})
        self._answer_questions()

    def add(self, message: Message) -> None:
        key, amount = str(message.meta["key"]), int(message.meta["amount"])
        total = int(bytes.fromhex(self._values.get(key, "30"))) + amount
        self._put(key, str(total).encode().hex())
        self._run.post.answer(message, {"value": total})
        self._answer_questions()

    def delete(self, message: Message) -> None:
        deleted = self._values.pop(str(message.meta["key"]), None) is not None
        self._run.post.answer(message, {"deleted": deleted})

    def check(self, message: Message) -> None:
        self._run.post.answer(message, {"exist": all(key in self._values for key in message.meta["keys"])})

    def get(self, message: Message) -> None:
        self._questions.append(message)
        self._answer_questions()

    def _put(self, key: str, value: str) -> None:
        if len(value) > 2 * _LONGEST_VALUE or len(self._values) >= _MOST_KEYS:
            raise CommError(f"the coordinator's store is full, or {key[:80]!r} has {len(value) // 2} bytes")
        found = _GENERATION.match(key)
        if found is not None and key not in self._values:
            self._forget(int(found[1]) - _KEPT_GENERATIONS)
        self._values[key] = value

    def _forget(self, generation: int) -> None:
        old = [key for key in self._values if (m := _GENERATION.match(key)) and int(m[1]) <= generation]
        for key in old:
            del self._values[key]

    def _answer_questions(self) -> None:
        waiting = [m for m in self._questions if m.source in self._run.roster.members]
        self._questions = []
        for message in waiting:
            keys = message.meta["keys"]
            if all(key in self._values for key in keys):
                self._run.post.answer(message, {"values": [self._values[key] for key in keys]})
            else:
                self._questions.append(message)

"""Settings that are too long for a header are sent in the body, as text.

A push has its parameter groups' settings and the list of unused parameters. A few groups take some hundred bytes of the
header; 300 groups are more than a header may hold. So each unit is sent with the settings of its own groups only, and
where these are many they go in the body.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from podium.errors import CommError

if TYPE_CHECKING:
    from podium.comm.base import Message, Meta

_FOLDED = ("options", "unused")
_MOST_NUMBERS = 256
"""Most numbers of settings in a header."""


def fold(meta: Meta, body: Sequence[Tensor]) -> tuple[Meta, Sequence[Tensor]]:
    """A message with its settings in the body where they are many; otherwise unchanged."""
    if len(meta["unused"]) + sum(map(_numbers, meta["options"])) <= _MOST_NUMBERS:
        return meta, body
    text = json.dumps({name: meta[name] for name in _FOLDED}, separators=(",", ":")).encode()
    rest = {name: value for name, value in meta.items() if name not in _FOLDED}
    return {**rest, "folded": True}, [*body, torch.frombuffer(bytearray(text), dtype=torch.uint8)]


def unfold(message: Message) -> Message:
    """The inverse of `fold`."""
    if "folded" not in message.meta:
        return message
    try:
        *body, text = message.body
        settings: dict[str, Any] = json.loads(bytes(text.numpy().data))
        meta = {**message.meta, **{name: settings[name] for name in _FOLDED}}
        del meta["folded"]
        return message._replace(meta=meta, body=tuple(body))
    except (ValueError, KeyError, TypeError) as error:
        raise CommError(f"a {message.kind} of rank {message.source} must end with its settings, got {error}") from None


def _numbers(options: Meta) -> int:
    return sum(len(value) if isinstance(value, tuple | list) else 1 for value in options.values())

"""A store for process groups whose values the coordinator holds: reached over a rank's authenticated connection.

torch's own TCP store asks nobody for a secret. Groups need a few hundred bytes of it per generation, so a round trip
to the coordinator for each is cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import final

from torch._C._distributed_c10d import Store

from podium.comm.base import Meta
from podium.errors import CommError

Ask = Callable[[str, Meta, float], Meta]
"""(kind, facts, deadline in seconds) to the coordinator's answer."""


@final
class CoordinatorStore(Store):
    """Set, get, wait and add, as c10d calls them. Values are bytes."""

    def __init__(self, ask: Ask, timeout_s: float) -> None:
        super().__init__()
        self._ask_coordinator, self._timeout_s = ask, timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._ask("store-set", {"key": key, "value": data.hex()})

    def get(self, key: str) -> bytes:
        return bytes.fromhex(self._ask("store-get", {"keys": [key]})["values"][0])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask("store-get", {"keys": list(keys)}, timeout)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("store-add", {"key": key, "amount": amount})["value"])

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of these exist. nccl's watchdog asks once a second."""
        return bool(self._ask("store-check", {"keys": list(keys)})["exist"])

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("store-delete", {"key": key})["deleted"])

    deleteKey = delete_key  # as c10d calls it

    def _ask(self, kind: str, meta: Meta, timeout: timedelta | None = None) -> Meta:
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        try:
            return self._ask_coordinator(kind, meta, limit_s)
        except CommError as error:  # c10d passes RuntimeErrors on, and takes them for a time-out
            raise RuntimeError(f"the coordinator's store: {error}") from error

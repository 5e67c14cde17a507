"""How a tensor is packed for the wire: one file per family of codecs, and a plain dict from name to class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podium.config import build
from podium.errors import ConfigError
from podium.exchange.codecs.base import Codec
from podium.imports import find_class

CODECS: dict[str, str] = {
    "auto": "podium.exchange.codecs.auto:AutoCodec",
    "dense": "podium.exchange.codecs.dense:Dense",
    "fp16": "podium.exchange.codecs.half:Fp16",
    "bf16": "podium.exchange.codecs.half:Bf16",
    "int8": "podium.exchange.codecs.int8:Int8",
    "sign": "podium.exchange.codecs.sign:Sign",
    "ef-sign": "podium.exchange.codecs.sign:EFSign",
    "vote": "podium.exchange.codecs.sign:Vote",
    "one-bit": "podium.exchange.codecs.sign:OneBit",
    "top-k": "podium.exchange.codecs.top_k:TopK",
    "dgc": "podium.exchange.codecs.dgc:DGC",
    "random-k": "podium.exchange.codecs.random_k:RandomK",
    "power-sgd": "podium.exchange.codecs.power_sgd:PowerSGD",
}


def find_codec(name: str) -> type[Codec]:
    """The class of a codec: a name from the list, or the user's own `file.py:Class` or `module:Class`."""
    cls = find_class("codec", name, CODECS)
    if not issubclass(cls, Codec):
        raise ConfigError(f"{name} must be a codec class, got {cls!r}")
    return cls


def make_codec(name: str, options: Mapping[str, Any] | None = None) -> Codec:
    return build(find_codec(name), options or {}, who=f"codec {name}")

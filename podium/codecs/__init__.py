"""How a tensor is packed for the wire: one file per family of codecs, and a plain dict from name to where it lives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podium.codecs.base import Codec
from podium.config import build
from podium.errors import ConfigError
from podium.names import find_class

CODECS: dict[str, str] = {
    "auto": "podium.codecs.auto:AutoCodec",
    "dense": "podium.codecs.dense:Dense",
    "fp16": "podium.codecs.half:Fp16",
    "bf16": "podium.codecs.half:Bf16",
    "int8": "podium.codecs.int8:Int8",
    "sign": "podium.codecs.sign:Sign",
    "ef-sign": "podium.codecs.sign:EFSign",
    "vote": "podium.codecs.sign:Vote",
    "one-bit": "podium.codecs.sign:OneBit",
    "top-k": "podium.codecs.top_k:TopK",
    "dgc": "podium.codecs.dgc:DGC",
    "random-k": "podium.codecs.random_k:RandomK",
    "power-sgd": "podium.codecs.power_sgd:PowerSGD",
}


def find_codec(name: str) -> type[Codec]:
    """The class of a codec: a name from the list, or `file.py:Class` / `module:Class` of the user's own."""
    cls = find_class("codec", name, CODECS)
    if not issubclass(cls, Codec):
        raise ConfigError(f"{name} must be a codec class, got {cls!r}")
    return cls


def make_codec(name: str, options: Mapping[str, Any] | None = None) -> Codec:
    """An instance with these options."""
    return build(find_codec(name), options or {}, who=f"codec {name}")

"""Bad frames: good ones damaged, cut, spliced or given false fields, and noise.

Most frames with false fields have lengths and checksum corrected, so that they get as far into the reader as possible.
"""

from __future__ import annotations

import json
import os
import random
import zlib
from collections.abc import Callable
from typing import NamedTuple

import torch

from podium.comm.real import frames
from podium.comm.real.arena import Arena, Neighbour, Place
from podium.comm.real.frames import DTYPES, MAGIC, PROLOGUE, VERSION, Limits

LIMITS = (
    Limits(),
    Limits(header_bytes=2048, tensors=8, body_bytes=4096),
    Limits(header_bytes=1 << 20, tensors=1 << 16, body_bytes=1 << 16),
)
_NUMBERS = (0, 1, 2, 3, 4, 7, 8, 16, 255, 4095, 4096, 4097, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53)
_HUGE = (2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, 10**400, -1, -(2**31), -(2**63), -(10**30))
_NASTY = (
    *("null", "true", "false", "NaN", "Infinity", "-Infinity", "-0", "0.0", "1.0", "1e999", "-1e-999", "1e5"),
    *('""', '"float32"', '"\\u0000"', '"\\ud800"', '"\\udc00\\ud800"', '"é€😀"', '"' + "x" * 5000 + '"', '"\\x"'),
    *("[]", "{}", "[[]]", "[null]", '{"":{"":{}}}', '{"a":1,"a":2}', "[1,]", "{,}", "[", "}", '"', "", "1 2", "0x10"),
    *("9" * 4000, "9" * 5000, "-" + "9" * 5000, "1" * 60 + "." + "1" * 60, "1e" + "9" * 100),
    *("[" * depth + "]" * depth for depth in (20, 300, 900, 990, 1000, 1010, 1500, 20_000)),
    *('{"a":' * depth + "0" + "}" * depth for depth in (20, 300, 980, 1100, 5000)),
)
_ALIAS = Place(1000, 1234567, 0)
_KEYS = ("kind", "source", "call", "meta", "tensors", "landing")


class Stream(NamedTuple):
    """The bytes of one connection: one mutated frame, perhaps among good ones."""

    name: str
    """The mutation of that frame."""
    good_before: int
    raw: bytes
    damaged: bool
    """Whether bits of prologue or header were flipped and nothing corrected: the frame must be refused."""
    limits: Limits
    attach: frames.Attach | None


class Maker:
    """Makes streams, each with one mutated frame; see `MUTATIONS`."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.arena = Arena()
        self.shared = self.arena.allocate(1024, torch.float32)
        self._neighbour = Neighbour(os.getpid())
        self._real = self.arena.locate(self.shared) or _ALIAS
        self._good = [self._good_frame() for _ in range(200)]
        self._plain = [raw for raw, places in self._good if not places]
        kinds = list(MUTATIONS)
        self._kinds, self._weights = kinds, [MUTATIONS[kind][0] for kind in kinds]

    def stream(self) -> Stream:
        draw = self.draw
        name = draw.choices(self._kinds, self._weights)[0]
        raw, damaged = MUTATIONS[name][1](self)
        before = [self.good() for _ in range(draw.choice((0, 0, 0, 0, 0, 0, 1, 2)))]
        after = self.good() if draw.random() < 0.2 else b""
        limits = LIMITS[0] if before or name == "good" else draw.choice(LIMITS)
        attach = self._attach if before or name == "good" or draw.random() < 0.7 else None
        return Stream(name, len(before) + (name == "good"), b"".join(before) + raw + after, damaged, limits, attach)

    def good(self) -> bytes:
        return self.draw.choice(self._good)[0]

    def _good_frame(self) -> tuple[bytes, bool]:
        draw = self.draw
        tensors = [self._tensor() for _ in range(draw.choice((0, 1, 1, 2, 5)))]
        landing = [self._shared_part() for _ in range(draw.randrange(3))] if draw.random() < 0.3 else None
        locate = self._locate if draw.random() < 0.5 else None
        meta = {"step": draw.randrange(1000), "x": [1.5, None, True], "name": "é€😀"} if draw.random() < 0.7 else {}
        kind = draw.choice(("push", "pull", "k", "ü"))
        views = frames.encode_frame(
            kind, draw.randrange(9), draw.randrange(-9, 9), meta, tensors, None, locate, landing
        )
        return b"".join(views), locate is not None

    def _tensor(self) -> torch.Tensor:
        draw = self.draw
        if draw.random() < 0.3:
            return self._shared_part()
        shape = [draw.choice((0, 1, 2, 3, 5)) for _ in range(draw.randrange(4))]
        return torch.ones(shape, dtype=DTYPES[draw.choice(list(DTYPES))])

    def _shared_part(self) -> torch.Tensor:
        first = self.draw.randrange(1000)
        return self.shared[first : first + self.draw.randrange(1, 24)]

    # The numbers of the shared segment differ from run to run, so fixed ones are sent.

    def _locate(self, tensor: torch.Tensor) -> Place | None:
        place = self.arena.locate(tensor)
        return None if place is None else _ALIAS._replace(offset=place.offset)

    def _attach(self, place: Place, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        ours = place[:2] == _ALIAS[:2]
        return self._neighbour.attach(self._real._replace(offset=place.offset) if ours else place, dtype, shape)

    # Mutations. Each returns a frame, and whether it must be refused.

    def flip(self) -> tuple[bytes, bool]:
        """Flip a few bits of prologue or header, which the checksum must detect."""
        draw, raw = self.draw, bytearray(self.good())
        end = (PROLOGUE.size + PROLOGUE.unpack(raw[: PROLOGUE.size])[2]) * 8
        for bit in draw.sample(range(end), draw.randint(1, 3)):
            raw[bit // 8] ^= 1 << bit % 8
        return bytes(raw), True

    def scribble(self) -> tuple[bytes, bool]:
        """Overwrite bytes anywhere."""
        draw, raw = self.draw, bytearray(self.good())
        for _ in range(draw.randint(1, 40)):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
        return bytes(raw), False

    def cut(self) -> tuple[bytes, bool]:
        """Remove bytes at the end or in the middle."""
        draw, raw = self.draw, self.good()
        first = draw.randrange(len(raw))
        return raw[:first] + (raw[first + draw.randint(1, 30) :] if draw.random() < 0.5 else b""), False

    def splice(self) -> tuple[bytes, bool]:
        """The beginning of one frame and the end of another."""
        draw, left, right = self.draw, self.good(), self.good()
        return left[: draw.randrange(len(left) + 1)] + right[draw.randrange(len(right) + 1) :], False

    def noise(self) -> tuple[bytes, bool]:
        """Random bytes, after a valid beginning or not."""
        draw = self.draw
        raw = draw.randbytes(draw.randrange(300))
        begin = MAGIC + VERSION.to_bytes(2, "big") if draw.random() < 0.7 else b""
        return begin + (draw.choice(_NUMBERS) % 2**32).to_bytes(4, "big") + raw if begin else raw, False

    def prologue(self) -> tuple[bytes, bool]:
        """False lengths, version or checksum."""
        draw, raw = self.draw, self.good()
        fields = list(PROLOGUE.unpack(raw[: PROLOGUE.size]))
        lies = [(0, b"PODN"), (1, draw.randrange(2**16)), (2, draw.choice(_NUMBERS) % 2**32)]
        lies += [(3, draw.choice((*_NUMBERS, *_HUGE)) % 2**64), (4, draw.randrange(2**32))]
        lies += [(2, max(0, fields[2] + draw.randint(-9, 9))), (3, max(0, fields[3] + draw.randint(-9, 9)))]
        for field, lie in draw.sample(lies, draw.choice((1, 1, 1, 2, 3))):
            fields[field] = lie
        return PROLOGUE.pack(*fields) + raw[PROLOGUE.size :], False

    def text(self) -> tuple[bytes, bool]:
        """A changed header text, with lengths and checksum corrected."""
        draw = self.draw
        header, body = _parts(self.good())
        text = bytearray(header)
        for _ in range(draw.choice((1, 1, 2, 3, 8))):
            at = draw.randrange(len(text) + 1)
            match draw.randrange(5):
                case 0:
                    text[at : at + 1] = bytes([draw.randrange(256)])
                case 1:
                    del text[at : at + draw.randint(1, 12)]
                case 2:
                    text[at:at] = draw.choice(_NASTY).encode("utf-8", "surrogatepass")
                case 3:
                    text[at:at] = bytes(text[draw.randrange(len(text) + 1) :][: draw.randint(1, 30)])
                case 4:
                    text[at : at + 1] = bytes([draw.choice(b'0123456789"[]{},:-.eE\\u \x00')])
        if draw.random() < 0.05:
            text = bytearray(header.decode().encode(draw.choice(("utf-16", "utf-32", "utf-8-sig", "utf-16-be"))))
        return frame_of(bytes(text), body), False

    def structure(self) -> tuple[bytes, bool]:
        """Fields of wrong types, missing, doubled, added or reordered."""
        draw = self.draw
        header, body = _parts(self.good())
        fields = [(json.dumps(k), json.dumps(v)) for k, v in json.loads(header).items()]
        for _ in range(draw.choice((1, 1, 2, 3))):
            at, nasty = draw.randrange(len(fields)), draw.choice(_NASTY)
            match draw.randrange(7):
                case 0 | 1 | 2:
                    fields[at] = fields[at][0], nasty
                case 3:
                    fields[at] = fields[at][0], str(draw.choice((*_NUMBERS, *_HUGE)))
                case 4:
                    fields.append((fields[at][0], nasty if draw.random() < 0.5 else fields[at][1]))
                case 5:
                    fields.append((json.dumps(draw.choice((*_KEYS, "", "extra", "x" * 3000))), nasty))
                case 6 if len(fields) > 1:
                    del fields[at]
        draw.shuffle(fields)
        gap = draw.choice(("", "", " ", "\n\t", " " * 500))
        return frame_of(("{" + ",".join(f"{gap}{k}:{gap}{v}" for k, v in fields) + "}").encode(), body), False

    def tensors(self) -> tuple[bytes, bool]:
        """False dtypes and shapes; the stated body size agrees with them where possible."""
        draw = self.draw
        many = draw.choice((1, 1, 1, 2, 3, 9, 100, 5000) if draw.random() < 0.1 else (1, 1, 2, 3))
        specs = [self._spec() for _ in range(min(many, 9))] * (1 if many <= 9 else many // 9)
        stated = sum(nbytes for _, nbytes in specs)
        if not 0 <= stated < 2**64 or draw.random() < 0.2:
            stated = draw.choice(_NUMBERS)
        sent = min(stated, draw.choice((5000, 5000, 70_000))) - (draw.random() < 0.1)
        fields = {"kind": '"push"', "source": "1", "call": "2", "meta": "{}"}
        fields["tensors"] = "[" + ",".join(text for text, _ in specs) + "]"
        if draw.random() < 0.2:
            fields["landing"] = (
                "[" + ",".join(self._spec(placed=draw.random() < 0.9)[0] for _ in range(draw.randrange(4))) + "]"
            )
        text = "{" + ",".join(f'"{k}":{v}' for k, v in fields.items()) + "}"
        body = bytes(max(sent, 0)) if draw.random() < 0.7 else draw.randbytes(max(sent, 0))
        return frame_of(text.encode("utf-8", "surrogatepass"), body, stated), False

    def _spec(self, placed: bool = False) -> tuple[str, int]:
        """A tensor's description, and its bytes in the body."""
        draw = self.draw
        dtype = (
            draw.choice(list(DTYPES)) if draw.random() < 0.9 else draw.choice(("complex64", "object", "Float32", ""))
        )
        dims = [draw.choice((0, 1, 1, 2, 3, 4, 7)) for _ in range(draw.choice((0, 1, 1, 2, 3, 31, 32, 33)))]
        if dims and draw.random() < 0.5:
            dims[draw.randrange(len(dims))] = draw.choice((*_NUMBERS, *_HUGE))
            if draw.random() < 0.3:
                dims[draw.randrange(len(dims))] = draw.choice((0, 2**31, 2**62))
        nbytes = DTYPES[dtype].itemsize if dtype in DTYPES else 4
        for dim in dims:
            nbytes *= dim
        shown = [str(dim) if draw.random() < 0.995 else draw.choice(_NASTY) for dim in dims]
        name = f'"{dtype}"' if draw.random() < 0.98 else draw.choice(_NASTY)
        if not placed and draw.random() < 0.75:
            return f"[{name},[{','.join(shown)}]]", max(nbytes, 0)
        return f"[{name},[{','.join(shown)}],{self._place()}]", 0

    def _place(self) -> str:
        """The place of a tensor in shared memory: nearly right, or far off."""
        draw = self.draw
        place = [_ALIAS.file, _ALIAS.inode, draw.choice((0, 4, 8, 2, 1, 4000, 4092, 4096))]
        if draw.random() < 0.5:
            place[draw.randrange(3)] = draw.choice((*_NUMBERS, *_HUGE))
        if draw.random() < 0.05:
            return draw.choice(_NASTY)
        return str(place if draw.random() < 0.95 else place[: draw.randrange(3)] + place)


def _parts(raw: bytes) -> tuple[bytes, bytes]:
    """Header and body of a good frame."""
    end = PROLOGUE.size + PROLOGUE.unpack(raw[: PROLOGUE.size])[2]
    return raw[PROLOGUE.size : end], raw[end:]


def frame_of(header: bytes, body: bytes, stated: int | None = None) -> bytes:
    """A frame with correct lengths and checksum; `stated` replaces the body's length."""
    nbytes = len(body) if stated is None else stated
    return PROLOGUE.pack(MAGIC, VERSION, len(header), nbytes, zlib.crc32(header)) + header + body


MUTATIONS: dict[str, tuple[int, Callable[[Maker], tuple[bytes, bool]]]] = {
    "good": (2, lambda maker: (maker.good(), False)),
    "flip": (10, Maker.flip),
    "scribble": (6, Maker.scribble),
    "cut": (6, Maker.cut),
    "splice": (4, Maker.splice),
    "noise": (6, Maker.noise),
    "prologue": (12, Maker.prologue),
    "text": (20, Maker.text),
    "structure": (20, Maker.structure),
    "tensors": (24, Maker.tensors),
}
"""Weight and function of each mutation."""

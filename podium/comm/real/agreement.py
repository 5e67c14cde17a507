"""A key for one connection, from a secret that may be a phrase: CPace, a password-authenticated key exchange.

An HMAC over a secret lets the other side, or an eavesdropper, try guesses offline without limit. Here each side sends
one point of a curve, made from the secret and a random number that it discards. An attacker who does not know the
secret learns nothing from the points, and has one guess per connection.

Curve25519 as in RFC 7748, the map of Elligator 2 as in RFC 9380, the exchange as in draft-irtf-cfrg-cpace. In Python: 2
to 3 ms for each side of a connection, which is why Unix sockets, open to this user only, do without.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
from typing import final

SHARE_BYTES = 32
_P = 2**255 - 19
_A = 486662
_HALF = (_A + 2) // 4 - 1  # 121665, of the ladder's doubling
_LABEL = b"podium CPace 1"


@final
class Agreement:
    """One side of the exchange, for one connection."""

    def __init__(self, secret: bytes) -> None:
        self._scalar = _clamped(secrets.token_bytes(32))
        self.share = _encoded(multiply(self._scalar, _generator(secret)))
        """The point to send to the other side."""

    def key(self, theirs: bytes) -> bytes:
        """A key that only a holder of the same secret can compute; raises ValueError for a point of small order."""
        product = multiply(self._scalar, _decoded(theirs))
        if product == 0:
            raise ValueError("the point is of small order")
        shares = b"".join(sorted((self.share, theirs)))
        return hashlib.sha256(_LABEL + b"key" + _encoded(product) + shares).digest()


def multiply(scalar: int, u: int) -> int:
    """The u-coordinate of `scalar` times the point at `u`: X25519's ladder."""
    x2, z2, x3, z3, swapped = 1, 0, u, 1, 0
    for position in reversed(range(255)):
        bit = (scalar >> position) & 1
        if bit != swapped:
            x2, x3, z2, z3 = x3, x2, z3, z2
        swapped = bit
        plus, minus = x2 + z2, x2 - z2
        plus2, minus2 = plus * plus % _P, minus * minus % _P
        across, along = (x3 - z3) * plus % _P, (x3 + z3) * minus % _P
        x3, z3 = (across + along) ** 2 % _P, u * (across - along) ** 2 % _P
        gap = plus2 - minus2
        x2, z2 = plus2 * minus2 % _P, gap * (plus2 + _HALF * gap) % _P
    if swapped:
        x2, z2 = x3, z3
    return x2 * pow(z2, _P - 2, _P) % _P


@functools.lru_cache(maxsize=16)
def _generator(secret: bytes) -> int:
    """The secret's point. By the hash, its discrete logarithm to another secret's point is unknown."""
    field = int.from_bytes(
        hashlib.sha512(_LABEL + b"generator" + len(secret).to_bytes(8, "big") + secret).digest(), "little"
    )
    return to_curve(field % _P)


def to_curve(number: int) -> int:
    """Elligator 2: a point of the curve for any number of the field."""
    u = -_A * pow(1 + 2 * number * number, _P - 2, _P) % _P
    is_square = pow(u * (u * u + _A * u + 1), (_P - 1) // 2, _P) in (0, 1)
    return u if is_square else (-u - _A) % _P


def _clamped(raw: bytes) -> int:
    """A scalar that is a multiple of 8, so that points of small order give 0, with its highest bit fixed."""
    return int.from_bytes(raw, "little") & ~7 & (2**255 - 1) | 2**254


def _encoded(u: int) -> bytes:
    return u.to_bytes(SHARE_BYTES, "little")


def _decoded(raw: bytes) -> int:
    return int.from_bytes(raw, "little") & (2**255 - 1)

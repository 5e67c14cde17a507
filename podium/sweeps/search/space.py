"""The search space: for each name a list of values, or a range.

    lr=0.1,0.03,0.01       three choices
    hidden=64|128,64       where there is a bar, it separates, and commas belong to the values
    lr=1e-4..1e-1:log      a range, uniform on a logarithmic scale
    dropout=0..0.5         a range, uniform
    width=16..128:int      a range of whole numbers, both ends included; `:int:log` too
    lr=1e-4..1e-1:log:5    five values spread evenly from end to end: choices again

A value is parsed as in `--set task.NAME=VALUE`: as TOML; bare words are text, except Python's True, False and None.
Commas and bars inside quotes or brackets do not separate, so `betas=[0.9,0.99],[0.9,0.999]` is two choices; text with
two dots in it needs quotes.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podium.config import parse_value
from podium.errors import ConfigError

_NUMBER = r"[+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})((?::\w+)*)")
_WORDS = {"True": True, "False": False, "None": None}
_NOT_OPTIONS = {"seed": "--seeds", "seeds": "--seeds", "fold": "--folds", "folds": "--folds"}


@dataclass(frozen=True)
class Choices:
    """A list of values."""

    values: tuple[Any, ...]

    def draw(self, rng: random.Random) -> Any:
        """One value, uniformly at random."""
        return self.values[rng.randrange(len(self.values))]

    def __str__(self) -> str:
        return "|".join(map(_shown, self.values)) if len(self.values) > 1 else _shown(self.values[0])


@dataclass(frozen=True)
class Range:
    """All numbers between two ends, both included."""

    low: float
    high: float
    log: bool = False
    """Whether numbers are drawn uniformly on a logarithmic scale."""
    whole: bool = False
    """Whether the range has whole numbers only."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ConfigError(f"range: its low end must be below its high end, got {self}")
        if self.log and self.low <= 0:
            raise ConfigError(f"range: on a logarithmic scale the low end must be above 0, got {self}")
        if self.whole and not (float(self.low).is_integer() and float(self.high).is_integer()):
            raise ConfigError(f"range: a range of whole numbers must have whole ends, got {self}")

    def draw(self, rng: random.Random) -> float | int:
        """One number at random."""
        # Half a number beyond each end of a whole range, or its ends would be drawn half as often.
        margin = 0.5 if self.whole else 0.0
        low, high = self.low - margin, self.high + margin
        value = math.exp(rng.uniform(math.log(low), math.log(high))) if self.log else rng.uniform(low, high)
        return self.clip(value)

    def clip(self, value: float) -> float | int:
        """The nearest number of the range."""
        value = min(max(value, self.low), self.high)
        return round(value) if self.whole else float(value)

    def at(self, share: float) -> float | int:
        """The number at this share of the way from end to end."""
        if self.log:
            value = self.low * math.exp(share * math.log(self.high / self.low))
        else:
            value = self.low + share * (self.high - self.low)
        # Twelve digits: 0.001 instead of 0.0009999999999999998.
        return self.clip(float(f"{value:.12g}"))

    def spread(self, count: int) -> Choices:
        """Values spread evenly from end to end; equal whole numbers are taken once."""
        if count < 2:
            raise ConfigError(f"range {self}: a range is spread over at least 2 values, got {count}")
        return Choices(tuple(dict.fromkeys(self.at(i / (count - 1)) for i in range(count))))

    def __str__(self) -> str:
        ends = (round(self.low), round(self.high)) if self.whole else (self.low, self.high)
        return f"{ends[0]}..{ends[1]}" + ":int" * self.whole + ":log" * self.log


Dimension = Choices | Range


class Space(Mapping[str, Dimension]):
    """The dimension of each name, in the order in which they were given."""

    def __init__(self, dimensions: Mapping[str, Dimension]) -> None:
        self._dimensions = dict(dimensions)

    def __getitem__(self, name: str) -> Dimension:
        return self._dimensions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._dimensions)

    def __len__(self) -> int:
        return len(self._dimensions)

    def __repr__(self) -> str:
        return f"Space({' '.join(self.texts())})"

    def texts(self) -> list[str]:
        """What `read_space` reads, one text per name."""
        return [f"{name}={dimension}" for name, dimension in self.items()]

    def ranges(self) -> list[str]:
        """Names that have a range, not a list of values."""
        return [name for name, dimension in self.items() if isinstance(dimension, Range)]


def read_space(given: Space | Mapping[str, Any] | Iterable[str] | None) -> Space:
    """A space from texts (`NAME=VALUES`), or from a mapping.

    In a mapping, a list is choices, text is parsed as after `NAME=`, `Choices` and `Range` are taken as they are, and
    anything else is a single choice.
    """
    if isinstance(given, Space):
        return given
    dimensions: dict[str, Dimension] = {}
    for name, value in _pairs(given):
        key = name.strip().replace("-", "_")
        if not key.isidentifier():
            raise ConfigError(f"search space: names must be those of options, got {name!r}")
        if key in _NOT_OPTIONS:
            raise ConfigError(f"search space: {key} is no option of a trial; give {_NOT_OPTIONS[key]}")
        if key in dimensions:
            raise ConfigError(f"search space: {key} must be given once, got it twice")
        dimensions[key] = _dimension(key, value)
    return Space(dimensions)


def _pairs(given: Mapping[str, Any] | Iterable[str] | None) -> list[tuple[str, Any]]:
    if given is None:
        return []
    if isinstance(given, Mapping):
        return list(given.items())
    pairs = []
    for text in [given] if isinstance(given, str) else given:
        name, equals, values = str(text).partition("=")
        if not equals:
            raise ConfigError(f"search space: takes NAME=VALUES, got {text!r}")
        pairs.append((name, values))
    return pairs


def _dimension(name: str, value: Any) -> Dimension:
    if isinstance(value, Range):
        return value
    if isinstance(value, Choices):
        return _choices(name, value.values)
    if isinstance(value, str):
        return _read(name, value.strip())
    if isinstance(value, Sequence) or hasattr(value, "tolist"):
        return _choices(name, value if isinstance(value, Sequence) else list(value))
    return _choices(name, [value])


def _read(name: str, text: str) -> Dimension:
    found = _RANGE.fullmatch(text)
    if found:
        return _read_range(name, *found.groups())
    parts = _split(name, text, "|")
    if len(parts) == 1:
        parts = _split(name, text, ",")
    for part in parts:
        if not part:
            raise ConfigError(f"search space: {name} must have a value between its separators, got {text!r}")
        if ".." in part and part[0] not in "\"'[{":
            raise ConfigError(
                f"search space: {name}: a range is LOW..HIGH, both numbers, then :log, :int or how many values, "
                f"got {text!r}; text with two dots in it needs quotes"
            )
    return _choices(name, [read_value(part) for part in parts])


def read_value(text: str) -> Any:
    return _WORDS[text] if text in _WORDS else parse_value(text)


def _read_range(name: str, low: str, high: str, flags: str) -> Dimension:
    words = flags.split(":")[1:]
    counts = [word for word in words if word.isdigit()]
    unknown = [word for word in words if word not in ("log", "int") and not word.isdigit()]
    if unknown or len(counts) > 1:
        raise ConfigError(
            f"search space: {name}: behind a range come :log, :int or how many values, got {':'.join(['', *words])}"
        )
    try:
        made = Range(float(low), float(high), log="log" in words, whole="int" in words)
        return made.spread(int(counts[0])) if counts else made
    except ConfigError as error:
        raise ConfigError(f"search space: {name}: {error}") from None


def _choices(name: str, values: Sequence[Any]) -> Choices:
    plain = tuple(value.item() if hasattr(value, "item") else value for value in values)
    if not plain:
        raise ConfigError(f"search space: {name} must have at least one value, got none")
    for value in plain:
        if not _is_plain(value):
            raise ConfigError(
                f"search space: values of {name} must be finite numbers, text, true, false, or lists and tables of "
                f"these, got {value!r}"
            )
    if len(set(map(_same, plain))) < len(plain):
        raise ConfigError(f"search space: values of {name} must differ, got {', '.join(map(str, plain))}")
    return Choices(plain)


def _same(value: Any) -> Any:
    """A key that is equal for values of the same meaning: for 1 and 1.0, but not for 1 and true."""
    if isinstance(value, Mapping):
        return "table", frozenset((k, _same(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return "list", tuple(map(_same, value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "number", value
    return repr(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | str)


def _split(name: str, text: str, separator: str) -> list[str]:
    """Split the text at separators outside quotes and brackets."""
    parts, depth, quote, escaped = [""], 0, "", False
    for char in text:
        if escaped:
            escaped = False
        elif quote:
            escaped = quote == '"' and char == "\\"
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        elif char == separator and depth == 0:
            parts.append("")
            continue
        parts[-1] += char
    if quote or depth:
        raise ConfigError(f"search space: {name}: quotes and brackets must be closed, got {text!r}")
    return [part.strip() for part in parts]


def _shown(value: Any, inside: bool = False) -> str:
    """A value as text that `parse_value` reads back; text `inside` a list or table is always quoted."""
    if isinstance(value, str):
        bare = parse_value(value) == value == value.strip() != "" and not set(value) & set("|,\"'[]{}")
        bare = bare and ".." not in value and value not in _WORDS
        return value if bare and not inside else json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(_shown(v, inside=True) for v in value)}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {_shown(v, inside=True)}" for k, v in value.items()) + "}"
    return repr(value)

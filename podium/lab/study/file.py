"""Study files: TOML, or Python where tables are not enough.

    [study]
    name = "links"
    question = "Which strategy wins on which link?"
    replications = 5            # or { least = 3, most = 10, half_width = 0.05, response = "seconds" }

    [settings]                  # of all runs, as for --set
    task = "digits-mlp"
    launcher = "virtual"

    [factors]
    strategy = ["all-reduce", "parameter-server"]
    workers = [2, 4]
    link = { slow = { cluster = "slow.toml" }, fast = { cluster = "fast.toml" } }

    [[where]]                   # some cells are different, or left out
    levels = { strategy = "solo" }
    settings = { workers = 1 }

    [sizes.small.factors]       # overrides for `--size small`
    workers = [2]

A Python file has a function `study(size)` that returns a `podium.Study`, or a Study named `STUDY`.
"""

from __future__ import annotations

import tomllib
import typing
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from podium.config import build, convert
from podium.errors import ConfigError, UnknownName
from podium.imports import load_file
from podium.lab.study.parts import Against, Replications, Stop, Where
from podium.lab.study.study import Study
from podium.sweeps.search.space import Range

SUFFIXES = (".toml", ".py")

_LISTS = ("where", "against", "reference")
_TABLES = ("study", "settings", "factors", *_LISTS, "design", "stop", "sizes")


_HEAD = (
    "name", "question", "replications", "order_seed", "target", "maximize", "retries", "responses", "baseline", "notes",
    "runs",
)  # fmt: skip
"""Fields of a Study that `[study]` sets."""
_SHAPE = ("kind", "generators", "points")
"""Fields of a Study that `[design]` sets."""


def is_study_file(text: str) -> bool:
    """Whether a text names a study file, not a task (`file.py:function` has a colon)."""
    return text.endswith(SUFFIXES)


def read_study(path: str | Path, size: str | None = None) -> Study:
    """The study in a file; `size` is one of the file's `[sizes]`, None the study without overrides."""
    place = Path(path)
    if not place.is_file():
        raise ConfigError(f"{place}: no such study file")
    study = _from_python(place, size) if place.suffix == ".py" else _from_toml(place, size)
    return replace(study, file=place, size=size or "")


def _from_python(path: Path, size: str | None) -> Study:
    try:
        module = load_file(path)
    except Exception as error:
        raise ConfigError(f"{path}: cannot be imported: {type(error).__name__}: {error}") from error
    make, found = getattr(module, "study", None), getattr(module, "STUDY", None)
    if callable(make):
        found = make(size)
    elif size is not None:
        raise ConfigError(f"{path}: has no function study(size), so it has no sizes; got size={size}")
    if not isinstance(found, Study):
        raise ConfigError(f"{path}: must have a function study(size) that returns a podium.Study, or a STUDY")
    return found


def _from_toml(path: Path, size: str | None) -> Study:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a study file: {error}") from error
    _check_tables(table, _TABLES, path, "table")
    sizes = table.pop("sizes", {})
    if size is not None:
        if size not in sizes:
            raise UnknownName(f"size of {path}", size, sizes)
        _check_tables(sizes[size], _TABLES[:-1], path, f"table of size {size}")
        table = _over(table, sizes[size])
    try:
        return _study(table, path)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _study(table: Mapping[str, Any], path: Path) -> Study:
    given = {"name": path.stem, **table.get("study", {})}
    if isinstance(given.get("notes"), str):
        given["notes"] = [given["notes"]]  # a note may contain commas
    return Study(
        **_fields(given, _HEAD, "study"),
        **_fields(table.get("design", {}), _SHAPE, "design"),
        settings=table.get("settings", {}),
        factors={name: _factor(name, levels) for name, levels in table.get("factors", {}).items()},
        where=tuple(_where(rule) for rule in table.get("where", ())),
        against=tuple(build(Against, one, who="against") for one in table.get("against", ())),
        reference=tuple(table.get("reference", ())),
        stop=build(Stop, table.get("stop", {}), who="stop"),
    )


def _fields(table: Mapping[str, Any], names: tuple[str, ...], who: str) -> dict[str, Any]:
    """Fields of a Study from a table of the file, converted to the types of the Study's annotations."""
    hints, found = typing.get_type_hints(Study), {}
    for name, value in table.items():
        field = name.replace("-", "_")
        if field not in names:
            raise UnknownName(f"option of {who}", name, names)
        found[field] = _OWN[field](value) if field in _OWN else convert(value, hints[field], f"{who}: {name}")
    return found


def _replications(asked: Any) -> int | Replications:
    if isinstance(asked, Mapping):
        return build(Replications, asked, who="replications")
    if isinstance(asked, bool) or not isinstance(asked, int):
        raise ConfigError(f"study: replications must be a whole number or a table, got {asked!r}")
    return asked


_OWN: Mapping[str, Callable[[Any], Any]] = {"replications": _replications, "kind": str, "runs": str}
"""Fields with their own conversion; the Study checks them."""


def _factor(name: str, given: Any) -> Any:
    if isinstance(given, Mapping) and {"low", "high"} <= set(given):
        return build(Range, given, who=f"factor {name}")
    return given


def _where(rule: Mapping[str, Any]) -> Where:
    if not any(rule.get(name) for name in ("settings", "leave_out", "seeds", "name")):
        raise ConfigError(f"where: must have settings, seeds, a name or leave_out = true, got {dict(rule)}")
    return build(Where, rule, who="where")


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two tables; `above` wins, key by key. Each factor and each list is replaced as a whole."""
    merged = dict(below)
    for table, value in above.items():
        merged[table] = {**below.get(table, {}), **value} if isinstance(value, Mapping) else value
    return merged


def _check_tables(table: Any, known: tuple[str, ...], path: Path, what: str) -> None:
    """Refuse unknown tables, and values where a table is needed."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path}: {what} must be a table, got {table!r}")
    for name, value in table.items():
        if name not in known:
            raise UnknownName(f"{what} in {path}:", name, known)
        whole = isinstance(value, list) and all(isinstance(one, Mapping) for one in value)
        if not (whole if name in _LISTS else isinstance(value, Mapping)):
            shape = f"[[{name}]], one or more" if name in _LISTS else f"a table [{name}]"
            raise ConfigError(f"{path}: {what} {name} must be {shape}, got {value!r}")

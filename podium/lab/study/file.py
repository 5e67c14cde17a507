"""Study files: TOML for what a table can say, Python for the rest.

    [study]
    name = "links"
    question = "Which strategy wins on which link?"
    replications = 5            # or { least = 3, most = 10, half_width = 0.05, response = "seconds" }

    [settings]                  # of all runs, in the words of --set
    task = "digits-mlp"
    launcher = "virtual"

    [factors]
    strategy = ["all-reduce", "parameter-server"]
    workers = [2, 4]
    link = { slow = { cluster = "slow.toml" }, fast = { cluster = "fast.toml" } }

    [[where]]                   # some cells are different, or left out
    levels = { strategy = "solo" }
    settings = { workers = 1 }

    [sizes.small.factors]       # what `--size small` has instead
    workers = [2]

A Python file has a function `study(size)` that returns a `podium.Study`, or a Study named `STUDY`.
"""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from podium.config import build
from podium.errors import ConfigError, UnknownName
from podium.lab.study.design import ORDER_SEED, Replications, Stop
from podium.lab.study.study import Study, Where
from podium.sweeps.search.space import Range

SUFFIXES = (".toml", ".py")

_LISTS = ("where", "reference")
_TABLES = ("study", "settings", "factors", *_LISTS, "design", "stop", "sizes")


@dataclass(frozen=True, kw_only=True)
class _Head:
    """`[study]`, as it is written."""

    name: str
    question: str = ""
    replications: Any = 3
    order_seed: int = ORDER_SEED
    target: float | None = None
    maximize: bool | None = None
    retries: int = 1
    responses: tuple[str, ...] = ()
    baseline: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """`[design]`, as it is written."""

    kind: str = "full"
    generators: tuple[str, ...] = ()
    points: int | None = None


def is_study_file(text: str) -> bool:
    """Whether a name is that of a study file, not of a task (`file.py:function` has a colon)."""
    return text.endswith(SUFFIXES)


def read_study(path: str | Path, size: str | None = None) -> Study:
    """The study in a file; `size` is one of those that it knows (without one, the study as it stands)."""
    place = Path(path)
    if not place.is_file():
        raise ConfigError(f"{place}: no such study file")
    study = _from_python(place, size) if place.suffix == ".py" else _from_toml(place, size)
    return replace(study, file=place, size=size or "")


def _from_python(path: Path, size: str | None) -> Study:
    spec = importlib.util.spec_from_file_location(f"podium_study_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses in the file look for their module
    try:
        spec.loader.exec_module(module)
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
        given["notes"] = [given["notes"]]  # its commas are no borders
    head, shape = vars(build(_Head, given, who="study")), build(_Shape, table.get("design", {}), who="design")
    asked = head["replications"]
    if isinstance(asked, Mapping):
        head = {**head, "replications": build(Replications, asked, who="replications")}
    elif isinstance(asked, bool) or not isinstance(asked, int):
        raise ConfigError(f"study: replications must be a whole number or a table, got {asked!r}")
    return Study(
        **head,
        **vars(shape),
        settings=table.get("settings", {}),
        factors={name: _factor(name, levels) for name, levels in table.get("factors", {}).items()},
        where=tuple(_where(rule) for rule in table.get("where", ())),
        reference=tuple(table.get("reference", ())),
        stop=build(Stop, table.get("stop", {}), who="stop"),
    )


def _factor(name: str, given: Any) -> Any:
    if isinstance(given, Mapping) and {"low", "high"} <= set(given):
        return build(Range, given, who=f"factor {name}")
    return given


def _where(rule: Mapping[str, Any]) -> Where:
    if not (rule.get("settings") or rule.get("leave_out") or rule.get("name")):
        raise ConfigError(f"where: must have settings, a name or leave_out = true, got {dict(rule)}")
    return build(Where, rule, who="where")


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two tables as one; what stands above wins, key by key. Factors and lists are taken whole."""
    merged = dict(below)
    for table, value in above.items():
        merged[table] = {**below.get(table, {}), **value} if isinstance(value, Mapping) else value
    return merged


def _check_tables(table: Any, known: tuple[str, ...], path: Path, what: str) -> None:
    """Refuse tables that no study has, and what is no table where one should be."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path}: {what} must be a table, got {table!r}")
    for name, value in table.items():
        if name not in known:
            raise UnknownName(f"{what} in {path}:", name, known)
        whole = isinstance(value, list) and all(isinstance(one, Mapping) for one in value)
        if not (whole if name in _LISTS else isinstance(value, Mapping)):
            shape = f"[[{name}]], one or more" if name in _LISTS else f"a table [{name}]"
            raise ConfigError(f"{path}: {what} {name} must be {shape}, got {value!r}")

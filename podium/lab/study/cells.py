"""From factors to cells: every combination of levels (or a part of them), its name and its settings."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.errors import ConfigError, UnknownName
from podium.lab.stats.factorial import Factor, Level, Levels, fractional, full, latin_hypercube
from podium.lab.study.parts import Against, Cell, Plan, Where, as_list, label
from podium.sweeps.search.space import Range

if TYPE_CHECKING:
    from podium.lab.study.study import FactorGiven, Study


def planned(study: Study) -> Study:
    """The study with its cells, and with all levels in the cells' spelling."""
    factors = {name: _levels(name, given) for name, given in study.factors.items()}
    combinations, plan = _combinations(study, factors)
    where = [replace(rule, levels=_known(study, rule.levels, factors, "where")) for rule in study.where]
    chosen = [at for at in combinations if not any(rule.leave_out and rule.holds(at) for rule in where)]
    chosen = [at for at in chosen if study.keep is None or study.keep(dict(at))]
    if not chosen:
        raise ConfigError(f"study {study.name}: where or keep leaves out every cell")
    names = _named_by_rules(study, where, chosen)
    cells = tuple(Cell(name, at, _settings(study, at, where)) for name, at in zip(names, chosen, strict=True))
    listed = {
        name: tuple(dict.fromkeys(at[name] for at in chosen)) if isinstance(levels, Range) else tuple(levels)
        for name, levels in factors.items()
    }
    return replace(
        study,
        factors=listed,
        where=(),
        derive=None,
        keep=None,
        baseline=_baseline(study, factors, chosen),
        against=tuple(_against(study, table, factors) for table in study.against),
        plan=replace(plan, cells=cells, fewer=_fewer(cells, where)),
    )


def _fewer(cells: Sequence[Cell], where: Sequence[Where]) -> dict[str, int]:
    """The number of seeds of cells for which a rule sets one; a later rule wins."""
    return {cell.cell: rule.seeds for rule in where for cell in cells if rule.seeds and rule.holds(dict(cell.levels))}


def _combinations(study: Study, factors: Mapping[str, Factor]) -> tuple[Sequence[Levels], Plan]:
    if study.kind == "latin-hypercube":
        if study.points is None:
            raise ConfigError(f"study {study.name}: a Latin hypercube needs points, the number of its cells")
        return latin_hypercube(factors, study.points, study.order_seed), Plan()
    # `full` refuses a range with an explanation.
    listed: Any = factors
    if study.kind == "full":
        return full(listed), Plan()
    fraction = fractional(listed, study.generators)
    return fraction.combinations, Plan(aliases=fraction.aliases, resolution=fraction.resolution)


def _known(study: Study, levels: Mapping[str, Any], factors: Mapping[str, Factor], what: str) -> dict[str, Any]:
    """Levels in the cells' spelling; raises `UnknownName` for a level that no cell can have."""
    found: dict[str, Any] = {}
    for name, wanted in levels.items():
        factor = factors[name]
        some = [label(str(level)) if name == "strategy" else level for level in as_list(wanted)]
        for level in some:
            # A size may have fewer levels than the rules of its file name.
            if not isinstance(factor, Range) and level not in factor and not study.size:
                raise UnknownName(f"level of {name} in {what} of study {study.name}:", str(level), map(str, factor))
        found[name] = some
    return found


def _baseline(study: Study, factors: Mapping[str, Factor], chosen: Sequence[Levels]) -> dict[str, Level]:
    """The baseline's levels; raises unless exactly one cell has them."""
    known = _known(study, study.baseline, factors, "baseline")
    cells = [at for at in chosen if all(at[name] in some for name, some in known.items())]
    if study.baseline and len(cells) != 1:
        raise ConfigError(
            f"study {study.name}: baseline must be the levels of one cell, got those of {len(cells)}: "
            f"{dict(study.baseline)}"
        )
    return {name: some[0] for name, some in known.items()}


def _against(study: Study, table: Against, factors: Mapping[str, Factor]) -> Against:
    levels = {name: some[0] for name, some in _known(study, table.levels, factors, "against").items()}
    return replace(table, levels=levels, only=_known(study, table.only, factors, "against"))


def _settings(study: Study, at: Levels, where: Sequence[Where]) -> dict[str, Any]:
    """A cell's settings: from its levels, then from `where` rules, then from `derive`; later ones win."""
    settings: dict[str, Any] = {}
    for name, level in at.items():
        factor: Any = study.factors[name]
        settings.update(factor[str(level)] if isinstance(factor, Mapping) else {name: level})
    for rule in where:
        if rule.holds(at):
            settings.update(rule.settings)
    if study.derive is not None:
        settings.update(study.derive(dict(at)))
    for name in ("cluster", "task"):
        given = settings.get(name, study.settings.get(name))
        if isinstance(given, str) and name not in study.changes.get("settings", {}):
            settings |= {} if (placed := _beside(study.file, given)) == given else {name: placed}
    return settings


def _beside(file: str | Path, name: str) -> str:
    """A cluster or task file beside the study's, relative to the working folder: results contain no absolute paths."""
    path, colon, function = name.partition(".py:")
    path += ".py" * bool(colon)
    folder = Path(file).parent
    if not file or os.path.isabs(path) or not (folder / path).is_file():
        return name
    return os.path.relpath(folder / path) + (f":{function}" if colon else "")


def _levels(name: str, given: FactorGiven) -> Factor:
    if isinstance(given, Range):
        return given
    if isinstance(given, str) or not isinstance(given, Sequence | Mapping):
        raise ConfigError(f"factor {name!r} must be a list of levels, or a table of named ones, got {given!r}")
    if isinstance(given, Mapping):
        for level, settings in given.items():
            if not isinstance(settings, Mapping):
                raise ConfigError(f"factor {name!r}: level {level!r} must be a table of settings, got {settings!r}")
        return tuple(given)
    levels: Sequence[Any] = given
    for level in levels:
        if not isinstance(level, str | int | float | bool):
            raise ConfigError(f"factor {name!r}: a level must be a text or a number, got {level!r}")
        if isinstance(level, float) and not math.isfinite(level):
            raise ConfigError(f"factor {name!r}: a level must be finite, got {level}")
    return tuple(label(str(level)) for level in given) if name == "strategy" else tuple(given)


def _named_by_rules(study: Study, where: Sequence[Where], chosen: Sequence[Levels]) -> list[str]:
    """Each cell's name: from a rule that names it, else from its levels."""
    names = _names(chosen)
    for rule in where:
        found = [place for place, at in enumerate(chosen) if rule.name and rule.holds(at)]
        if len(found) > 1:
            raise ConfigError(f"study {study.name}: where names {len(found)} cells {rule.name!r}, which must be one")
        for place in found:
            names[place] = rule.name
    return names


def _names(combinations: Sequence[Levels]) -> list[str]:
    """Each cell's name: texts alone, numbers with their factor; all with their factor if that would be ambiguous."""

    def name_of(at: Levels, plain: bool) -> str:
        if len(at) == 1 and isinstance(next(iter(at.values())), str):
            return str(next(iter(at.values())))
        return ", ".join(str(v) if plain and isinstance(v, str) else f"{k}={v}" for k, v in at.items())

    names = [name_of(at, plain=True) for at in combinations]
    return names if len(set(names)) == len(names) else [name_of(at, plain=False) for at in combinations]

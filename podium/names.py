"""Things named by text: a name from a table, `package.module:name` or `file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from podium.errors import ConfigError, UnknownName


def load_named(spec: str) -> Any:
    """What `spec` names; a file is loaded as `python file.py` would, its folder on the path."""
    place, _, name = spec.rpartition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else _import(place, spec)
    if not hasattr(module, name):
        raise UnknownName(f"name in {place}:", name, [n for n in vars(module) if not n.startswith("_")])
    return getattr(module, name)


def find_class(kind: str, name: str, table: Mapping[str, str]) -> type[Any]:
    """The class that `name` stands for: one of the table's, or the user's own. `kind` is for messages."""
    if name not in table and ":" not in name:
        raise UnknownName(kind, name, table)
    first, _, second = name.partition(":")
    if first in table and second:
        raise ConfigError(f"{kind} {first}: options are key=value, got {second!r}")
    cls = load_named(table.get(name, name))
    if not isinstance(cls, type):
        raise ConfigError(f"{name} must be a {kind} class, got {type(cls).__name__}")
    return cls


def _import(place: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and place.startswith(error.name):
            raise ConfigError(f"{spec}: there is no module {error.name!r}") from error
        raise


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    name = f"podium_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec.loader.exec_module(module)
    return module

"""Load objects by name: a name from a table, `package.module:name` or `file.py:name`.

Importing named code runs it. Where the names come from a folder that another person may have made, not from the user,
`names_of_folders` reports what is imported and refuses code that lies in the folder itself. Such a folder also brings
the arguments, and with chosen arguments `subprocess:run` can do anything; so a caller checks `folder_alone_names` and
then calls only functions that were written for Podium.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from podium.errors import ConfigError, UnknownName


def load_named(spec: str) -> Any:
    """The object that `spec` names; a file is loaded as `python file.py` would, with its folder on the path."""
    place, _, name = spec.rpartition(":")
    _check_source(place)
    module = load_file(Path(place)) if place.endswith(".py") else _import(place, spec)
    if not hasattr(module, name):
        raise UnknownName(f"name in {place}:", name, [n for n in vars(module) if not n.startswith("_")])
    return getattr(module, name)


class _Foreign(NamedTuple):
    """Folders whose manifests may name code, and the files and modules that the user has named too."""

    folders: tuple[Path, ...]
    named: frozenset[str]
    tell: Callable[[str], None]
    told: set[str]


_FOREIGN: ContextVar[_Foreign | None] = ContextVar("foreign", default=None)
_MOST_LINKS = 40
_PLACE = re.compile(r"[^\s:|,=]+(?=:)")


@contextmanager
def names_of_folders(folders: Sequence[Path], given: Collection[str], tell: Callable[[str], None]) -> Iterator[None]:
    """Inside, names may come from the manifests of these folders; `given` holds the user's own texts.

    `tell` is called once for each file that is imported because a folder names it. A file that lies in a folder, or is
    reached through it, is refused unless the user has named it. Without folders nothing is reported or refused.
    """
    named = frozenset(place for text in given for place in _PLACE.findall(text))
    token = _FOREIGN.set(_Foreign(tuple(folders), named, tell, set()) if folders else None)
    try:
        yield
    finally:
        _FOREIGN.reset(token)


def folder_alone_names(spec: str) -> bool:
    """Whether only a folder names this file or module, and the user has not."""
    foreign = _FOREIGN.get()
    return foreign is not None and spec.rpartition(":")[0] not in foreign.named


def _check_source(place: str) -> None:
    """Report or refuse an import that only a folder asks for."""
    foreign = _FOREIGN.get()
    if foreign is None or place in foreign.named or place == "podium" or place.startswith("podium."):
        return
    files = [place] if place.endswith(".py") else _files_of(place)
    manifests = " or ".join(str(folder / "manifest.json") for folder in foreign.folders)
    for file in files:
        if any(passes_through(file, folder) for folder in foreign.folders):
            raise ConfigError(
                f"{manifests} names {place}, and {file} lies in that folder or is reached through it. Importing it "
                "would run it, so it is not imported unless you name it: give the task or strategy on the command "
                "line, after you have read it"
            )
    if place not in foreign.told:
        foreign.told.add(place)
        foreign.tell(f"importing {', '.join(files) or place}, because {manifests} names it")


def _files_of(module: str) -> list[str]:
    """Paths of a module's outermost package, found without importing it."""
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    found = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.has_location and spec.origin else [])]
    return [str(file) for file in found]


def passes_through(path: str | Path, folder: Path) -> bool:
    """Whether opening `path` leads into `folder`, by its name or by any link on the way."""
    inside = Path(os.path.realpath(folder))
    rest = list(reversed((Path.cwd() / path).parts[1:]))  # with every `..`: after a link it leads elsewhere
    here, links = Path("/"), 0
    while rest:
        step = rest.pop()
        here = here.parent if step == ".." else here / step
        if here != inside and here.is_relative_to(inside):
            return True
        if step != ".." and here.is_symlink():
            links += 1
            if links > _MOST_LINKS:
                return True
            target = Path(os.readlink(here))
            here = Path("/") if target.is_absolute() else here.parent
            rest += reversed(target.parts[1:] if target.is_absolute() else target.parts)
    return False


def find_class(kind: str, name: str, table: Mapping[str, str]) -> type[Any]:
    """The class of this name in the table, or the user's own class. `kind` is for messages."""
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


def load_file(path: Path) -> ModuleType:
    """Run a user's file as a module; it can import the files beside it."""
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

"""The user's own code: which files of it ranks on other hosts need, and its names there.

A setting may name code: `file.py:function` or `package.module:Class`. A file can import the files beside it, so the
text files below its folder are sent; of a package, those below the package, and the Python files beside it, since it
can import those, too. Code that is installed (in site-packages) is expected on every host, as Podium itself is.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from podium.errors import ConfigError
from podium.launch.hosts.trees import Offer

NAMING = ("task", "strategy", "codec", "collective", "balance")
"""Settings that may name code."""
_SENT = (".py", ".toml", ".json", ".yaml", ".yml", ".txt", ".cfg", ".ini", ".csv", ".safetensors")
_SKIPPED = ("__pycache__", "node_modules", "site-packages", "runs")
_MOST_FILES, _MOST_BYTES = 2000, 64 << 20
_INSTALLED = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib"))


class UserCode(NamedTuple):
    """The folders that are sent, and how settings name code in them."""

    offers: list[Offer]
    settings: dict[str, str]
    """By setting: its value with `{code-N}` where the folder of the N-th offer stands."""
    paths: list[str]
    """Folders that packages are imported from, as `{code-N}`."""

    def here(self, roots: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
        """Settings and import paths on a host that has the trees at these places."""
        return place_code(self.settings, self.paths, roots)


def place_code(
    settings: Mapping[str, str], paths: list[str], roots: Mapping[str, str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Fill in where the trees lie on this host."""

    def filled(text: str) -> str:
        for name, root in roots.items():
            text = text.replace("{" + name + "}", root)
        return text

    return {name: filled(text) for name, text in settings.items()}, tuple(filled(path) for path in paths)


def user_code(config: Mapping[str, Any], script: str | None = None) -> UserCode:
    """The code that this configuration names, and the script of a run with its own loop."""
    roots: dict[Path, set[Path]] = {}  # a folder that is sent, and the folders in it whose text files all are
    settings, paths = dict[str, str](), list[str]()
    named = {name: str(config[name]) for name in NAMING if ":" in str(config.get(name) or "")}
    if script is not None:
        named.pop("task", None)
        settings["task"] = _in_tree(Path(script), roots)
    for name, text in named.items():
        first, _, rest = text.partition(":")
        if first.endswith(".py"):
            settings[name] = f"{_in_tree(Path(first), roots)}:{rest}"
        elif "=" not in rest.partition(":")[0]:
            for root, whole in _package_folders(first):
                path = _in_tree(root / "any", roots, whole).removesuffix("/any")
                if path not in paths:
                    paths.append(path)
    offers = [Offer.of(_name(n), root, _files(root, whole)) for n, (root, whole) in enumerate(roots.items())]
    return UserCode(offers, settings, paths)


def _name(number: int) -> str:
    return f"code-{number}"


def _in_tree(file: Path, roots: dict[Path, set[Path]], whole: Path | None = None) -> str:
    folder = file.resolve().parent
    roots.setdefault(folder, set()).add(whole or folder)
    return "{" + _name(list(roots).index(folder)) + "}/" + file.name


def _package_folders(module: str) -> list[tuple[Path, Path]]:
    """Of a module's top-level package: the folder that it is imported from, and its own; none where it is installed."""
    top = module.partition(".")[0]
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return []
    if found is None or top == "podium":
        return []
    if found.submodule_search_locations is not None:  # more than one where it is a namespace package
        own = [Path(place).resolve() for place in found.submodule_search_locations]
        folders = [(folder.parent, folder) for folder in own]
    elif found.origin is not None and found.origin.endswith(".py"):
        folder = Path(found.origin).resolve().parent
        folders = [(folder, folder)]
    else:
        return []
    return [pair for pair in folders if not any(pair[1].is_relative_to(place) for place in _INSTALLED)]


def _files(root: Path, whole: set[Path]) -> list[Path]:
    """The text files of the folders that are sent whole, and the Python files of all others below the root."""
    found, total = list[Path](), 0
    for path in _walk(root, frozenset(root.parents)):
        if path.suffix != ".py" and not any(path.is_relative_to(folder) for folder in whole):
            continue
        found.append(path)
        total += path.stat().st_size
        if len(found) > _MOST_FILES or total > _MOST_BYTES:
            raise ConfigError(
                f"{root}: the folder of your code is sent to the hosts, and may hold {_MOST_FILES} text files and "
                f"{_MOST_BYTES >> 20} MB, got more: move the code into a folder of its own"
            )
    return found


def _walk(folder: Path, above: frozenset[Path]) -> Iterator[Path]:
    """Text files below a folder, without hidden folders, caches, environments and what this user may not read.

    `above`: the folders that it lies in; a link to one of them is left out, or the walk would not end.
    """
    real = folder.resolve()
    if real in above:
        return
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return
    for path in paths:
        if path.name.startswith(".") or path.name in _SKIPPED:
            continue
        if path.is_dir():
            if not (path / "pyvenv.cfg").exists():
                yield from _walk(path, above | {real})
        elif path.suffix in _SENT and path.is_file() and os.access(path, os.R_OK):
            yield path

"""How to run a sweep again, as a command and in Python."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from podium.sweeps.search.space import Choices, Space

_PLAIN = {"metric": "--metric", "precision": "--precision", "executor": "--executor", "device": "--device"}


def command(config: Mapping[str, Any]) -> str | None:
    """One command; None if it takes Python (the caller's own objects, chosen seeds, steps)."""
    search, folds, seeds = config["search"], config["folds"], list(config["seeds"])
    own = config["own_task"] or search["own"] or (folds is not None and folds["asked"] is None)
    if own or "trials" in search or config["steps"] is not None or seeds != list(range(len(seeds))):
        return None
    words = ["podium", "sweep", config["task"]]
    drawn = [name for name in ("random", "optuna") if name in search]
    for text in search["space"]:
        words += ["--space" if drawn else "--grid", text]
    for name in drawn:
        words += [f"--{name}", str(search[name])]
    words += ["--search", search["how"]] if search["how"] else []
    words += ["--folds", folds["asked"]] if folds else []
    words += ["--seeds", str(len(seeds))] if len(seeds) > 1 else []
    words += ["--stop", config["stopping"]] if _is_spec(config["stopping"]) else []
    for name, option in _PLAIN.items():
        words += [option, config[name]]
    words += ["--maximize" if config["maximize"] else "--minimize", "--eval-every", str(config["eval_every"])]
    for text in Space({name: Choices((value,)) for name, value in config["options"].items()}).texts():
        words += ["--set", f"task.{text}"]
    words += ["--data-dir", config["data_dir"]] if config["data_dir"] else []
    words += ["--random-seed", str(search["seed"])] if search["seed"] else []
    return shlex.join(words)


def python_call(config: Mapping[str, Any]) -> str:
    """A few lines of Python; a comment names a task that was an object of the caller."""
    search, folds = config["search"], config["folds"]
    task = f"task,  # the one named {config['task']}" if config["own_task"] else f"{config['task']!r},"
    given: dict[str, Any] = {}
    drawn = {name: search[name] for name in ("random", "optuna") if name in search}
    if search["space"]:
        given["space" if drawn or search["how"] else "grid"] = search["space"]
    given |= drawn
    given |= {"trials": search["trials"]} if "trials" in search else {}
    given |= {"search": search["how"]} if search["how"] else {}  # of the caller's own search only the name is known
    given |= {"folds": folds["asked"] or f"<{folds['kind']}>"} if folds else {}
    given |= {"seeds": list(config["seeds"]), "seed": search["seed"]}
    given |= {"stopping": config["stopping"]} if _is_spec(config["stopping"]) else {}
    names = ("metric", "maximize", "options", "data_dir", "precision", "eval_every", "steps", "executor", "device")
    given |= {name: config[name] for name in names if config[name] not in (None, {})}
    arguments = "".join(f"    {name}={value!r},\n" for name, value in given.items())
    return f"import podium\n\npodium.sweep(\n    {task}\n{arguments})"


def _is_spec(stopping: str) -> bool:
    """Whether a stopping rule was given as text."""
    return stopping != "none" and "(" not in stopping

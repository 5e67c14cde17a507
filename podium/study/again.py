"""How to run a study again, in the words of the command line and of Python."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any


def python_call(study: Mapping[str, Any]) -> str:
    """A few lines of Python that run the study again."""
    names = ("strategies", "seeds", "workers", "launcher", "target")
    options = {name: study[name] for name in names if study.get(name) is not None} | study.get("settings", {})
    arguments = "".join(f"    {name}={value!r},\n" for name, value in options.items())
    # A Task that was handed over lives in the caller's program; its name alone does not bring it back.
    task = f"task,  # the Task object named {study['task']}" if study.get("own_task") else f"{study['task']!r},"
    return f"import podium\n\npodium.compare(\n    {task}\n{arguments})"


def command(study: Mapping[str, Any]) -> str | None:
    """The same as one command; None for what only Python can say (a Task object, chosen seeds)."""
    seeds = list(study["seeds"])
    if study.get("own_task") or seeds != list(range(len(seeds))):
        return None
    words = ["podium", "compare", study["task"]]
    for strategy in study["strategies"]:
        words += ["--strategy", strategy]
    words += ["--seeds", str(len(seeds)), "--workers", str(study["workers"]), "--launcher", study["launcher"]]
    if study.get("target") is not None:
        words += ["--target", str(study["target"])]
    for name, value in study.get("settings", {}).items():
        words += _set(name, value)
    return shlex.join(words)


def _set(name: str, value: Any) -> list[str]:
    if name == "task_options":
        return [word for key, inner in value.items() for word in ("--set", f"task.{key}={_toml(inner)}")]
    return ["--set", f"{name}={_toml(value)}"]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(_toml, value))
    return "none" if value is None else str(value)

"""How to run a study again, as a command and in Python."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from podium.lab.study.parts import as_text
from podium.lab.study.study import Study


def python_call(study: Study) -> str:
    """A few lines of Python that run the study again."""
    if study.file:
        changes = study.changes
        if set(changes) - {"settings"} or any("." in name for name in changes.get("settings", {})):
            read = f"study = podium.read_study({str(study.file)!r}{_size(study)})"
            return f"import podium\n\n{read}\npodium.run_study(study.changed({_changed(changes)}))"
        given = "".join(f", {name}={value!r}" for name, value in changes.get("settings", {}).items())
        return f"import podium\n\npodium.run_study({str(study.file)!r}{_size(study)}{given})"
    if list(study.factors) != ["strategy"]:
        return "import podium\n\npodium.run_study(study)  # the podium.Study of the program that asked for it"
    seeds = list(study.seeds)
    options = {"strategies": _strategies(study), "seeds": seeds, **_settings(study), "target": study.target}
    options["maximize"] = study.maximize
    arguments = "".join(f"    {name}={value!r},\n" for name, value in options.items() if value is not None)
    # A Task object exists only in the caller's program; its name alone cannot restore it.
    task = f"task,  # the Task object named {study.name}" if study.own_task else f"{study.name!r},"
    return f"import podium\n\npodium.compare(\n    {task}\n{arguments})"


def command(study: Study) -> str | None:
    """The study as one command; None if it takes Python (a Task object, chosen seeds)."""
    if study.file:
        changes = study.changes
        words = ["podium", "compare", str(study.file), *(["--size", study.size] if study.size else [])]
        for name in ("seeds", "target"):
            words += [f"--{name}", str(changes[name])] if name in changes else []
        words += _way_up(changes.get("maximize"))
        for name, value in changes.get("settings", {}).items():
            words += _set(name, value)
        return shlex.join(words)
    if list(study.factors) != ["strategy"]:
        return None
    seeds = list(study.seeds)
    if study.own_task or seeds != list(range(len(seeds))):
        return None
    words = ["podium", "compare", study.name]
    for strategy in _strategies(study):
        words += ["--strategy", strategy]
    settings = _settings(study)
    words += ["--seeds", str(len(seeds))]
    for name in ("workers", "launcher"):
        if name in settings:
            words += [f"--{name}", str(settings.pop(name))]
    if study.target is not None:
        words += ["--target", str(study.target)]
    words += _way_up(study.maximize)
    for name, value in settings.items():
        words += _set(name, value)
    return shlex.join(words)


def _way_up(maximize: bool | None) -> list[str]:
    return [] if maximize is None else ["--maximize" if maximize else "--minimize"]


def _size(study: Study) -> str:
    return f", size={study.size!r}" if study.size else ""


def _changed(changes: Mapping[str, Any]) -> str:
    others = [f"{name}={changes[name]!r}" for name in ("seeds", "target", "maximize") if name in changes]
    return ", ".join([repr(changes.get("settings", {})), *others])


def _strategies(study: Study) -> list[str]:
    return study.names


def _settings(study: Study) -> dict[str, Any]:
    return {name: value for name, value in study.settings.items() if name != "task"}


def _set(name: str, value: Any) -> list[str]:
    if name == "task_options":
        return [word for key, inner in value.items() for word in ("--set", f"task.{key}={as_text(inner)}")]
    return ["--set", f"{name}={as_text(value)}"]

"""A run's folder that somebody else made: what it names is told before it is imported, and its own code is refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from podium.cli import main
from podium.imports import passes_through

EVIL = """
from pathlib import Path
from podium import Task
from podium.tasks.digits import digits_mlp
Path({mark!r}).touch()

def task(depth: int = 1) -> Task:
    return digits_mlp()
"""
WORDS = ("--epochs", "1", "--launcher", "threads", "--quiet")


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """Is there once the code was run."""
    return tmp_path / "was run"


@pytest.fixture
def folder(tmp_path: Path, mark: Path) -> Path:
    """A run's folder with code in it."""
    made = tmp_path / "given"
    made.mkdir()
    (made / "evil.py").write_text(EVIL.format(mark=str(mark)))
    return made


def name_code(folder: Path, **config: object) -> None:
    (folder / "manifest.json").write_text(json.dumps({"config": {"workers": 1, **config}, "strategy": "x"}))


def say(*words: str) -> tuple[int, str]:
    """Exit code and standard error of `podium train`."""
    result = CliRunner().invoke(main, ["train", *words])
    return result.exit_code, result.stderr


@pytest.mark.parametrize("how", ["--resume", "--replay"])
@pytest.mark.parametrize("dry", [True, False], ids=["dry run", "run"])
@pytest.mark.parametrize("field", ["task", "strategy", "codec", "balance", "collective"])
def test_code_in_the_folder_is_not_imported_because_the_folder_names_it(
    folder: Path, mark: Path, how: str, dry: bool, field: str
) -> None:
    name_code(folder, **{field: f"{folder}/evil.py:task"})
    code, err = say(how, str(folder), *WORDS, *(["--dry-run"] if dry else []))
    assert not mark.exists()
    assert code == 2 and "lies in that folder" in err and "evil.py" in err and "name" in err


def test_of_two_folders_neither_may_bring_code(folder: Path, mark: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    name_code(other, task="digits-mlp")
    name_code(folder, task=f"{folder}/evil.py:task")
    for first, second in ((folder, other), (other, folder)):
        code, _ = say("--resume", str(first), "--replay", str(second), "--dry-run")
        assert not mark.exists()
        assert (code == 2) is (first == folder)  # the task is that of the resumed run


def test_a_trigger_in_the_folder_is_not_imported_either(folder: Path, mark: Path) -> None:
    name_code(folder, strategy=f"all-reduce until {folder}/evil.py:task | all-reduce", workers=2)
    code, err = say("--resume", str(folder), "--dry-run")
    assert not mark.exists() and code == 2 and "lies in that folder" in err


def routes(folder: Path, outside: Path) -> dict[str, Path]:
    """Ways to a file that lead through the folder."""
    outside.mkdir()
    (folder / "below").mkdir()
    (folder / "below" / "evil.py").symlink_to(outside / "code.py")
    (outside / "code.py").write_text((folder / "evil.py").read_text())
    (outside / "file.py").symlink_to(folder / "evil.py")
    (outside / "folder").symlink_to(folder / "below")
    (outside / "chain.py").symlink_to(outside / "folder" / "evil.py")
    return {
        "up and down": folder / "below" / ".." / "evil.py",
        "a link to the file": outside / "file.py",
        "a link to a folder in it, where a link leads out": outside / "folder" / "evil.py",
        "a chain of links": outside / "chain.py",
        "a link in it that leads out": folder / "below" / "evil.py",
        "up after a link": outside / "folder" / ".." / "evil.py",
    }


def test_every_way_through_the_folder_is_found(folder: Path, tmp_path: Path) -> None:
    for what, path in routes(folder, tmp_path / "outside").items():
        assert path.is_file(), what
        assert passes_through(path, folder), what
    assert not passes_through(tmp_path / "outside" / "code.py", folder)
    (tmp_path / "other").symlink_to(folder)
    assert passes_through(folder / "evil.py", tmp_path / "other")
    assert passes_through(tmp_path / "other" / "evil.py", folder)


def test_a_link_out_of_the_folder_is_refused_by_the_command(folder: Path, mark: Path, tmp_path: Path) -> None:
    path = routes(folder, tmp_path / "outside")["a chain of links"]
    name_code(folder, task=f"{path}:task")
    code, _ = say("--resume", str(folder), "--dry-run")
    assert code == 2 and not mark.exists()


def test_a_module_in_the_folder_is_refused_where_one_stands_in_it(
    folder: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend("")
    name_code(folder, task="evil:task")
    code, err = say("--resume", ".", "--dry-run")
    assert code == 2 and not mark.exists() and "lies in that folder" in err


@pytest.mark.parametrize("dry", [True, False], ids=["dry run", "run"])
def test_code_that_the_user_names_is_imported(folder: Path, mark: Path, tmp_path: Path, dry: bool) -> None:
    name_code(folder, task=f"{folder}/evil.py:task", epochs=1)
    words = (f"{folder}/evil.py:task", "--resume", str(folder), *(["--dry-run"] if dry else []))
    _, err = say(*words, *WORDS, "--out", str(tmp_path / "runs"))
    assert mark.exists() and "lies in that folder" not in err


def test_code_elsewhere_that_the_folder_names_is_told_once(folder: Path, mark: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.py"
    (folder / "evil.py").rename(elsewhere)
    name_code(folder, task=f"{elsewhere}:task")
    code, err = say("--resume", str(folder), "--dry-run")
    assert code == 0 and mark.exists()
    (line,) = [line for line in err.splitlines() if "importing" in line]
    assert line == f"podium: importing {elsewhere}, because {folder}/manifest.json names it"


@pytest.mark.parametrize("place", ["subprocess", subprocess.__file__, "podium.imports"])
@pytest.mark.parametrize("how", ["--resume", "--replay"])
def test_a_folder_calls_nothing_but_tasks(folder: Path, mark: Path, how: str, place: str) -> None:
    """With arguments from the folder, too, code that lies anywhere would do whatever the folder wants."""
    if place == "podium.imports":
        name_code(folder, task=f"{place}:_import", task_options={"place": "antigravity", "spec": "x"})
    else:
        name_code(folder, task=f"{place}:run", task_options={"args": ["touch", str(mark)]})
    code, err = say(how, str(folder), "--dry-run")
    assert code == 2 and not mark.exists() and "nothing shows that it makes a task" in err


def test_a_task_of_the_users_needs_no_annotation(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import podium\n\ndef make():\n    return podium.Task\n")
    name_code(folder, task=f"{tmp_path}/mine.py:make", task_options={})
    assert "must return a podium.Task, got type" in say("--resume", str(folder), "--dry-run")[1], "it was called"


def test_a_task_that_makes_tasks_of_names_makes_none_that_the_folder_names(folder: Path, mark: Path) -> None:
    inner = {"spec": "subprocess:run", "options": {"args": ["touch", str(mark)]}}
    name_code(folder, task="podium.task:load_task", task_options=inner)
    code, _ = say("--resume", str(folder), "--dry-run")
    assert code == 2 and not mark.exists()


def test_a_task_that_is_named_again_keeps_its_options(folder: Path) -> None:
    name_code(folder, task=f"{folder}/evil.py:task", task_options={"depth": 3}, epochs=1)
    result = CliRunner().invoke(
        main, ["train", f"{folder}/evil.py:task", "--resume", str(folder), "--dry-run", "--json"]
    )
    assert json.loads(result.stdout)["task_options"] == {"depth": 3}


def test_a_folder_without_code_is_resumed_without_a_word(folder: Path) -> None:
    name_code(folder, task="digits-mlp")
    assert say("--resume", str(folder), "--dry-run") == (0, "")


def test_a_folder_does_not_name_code_by_what_it_is_called(tmp_path: Path, folder: Path, mark: Path) -> None:
    called = folder.rename(tmp_path / "code.py:1")
    (tmp_path / "code.py").symlink_to(called / "evil.py")
    name_code(called, task=f"{tmp_path}/code.py:task")
    code, _ = say("--resume", str(called), "--dry-run")
    assert code == 2 and not mark.exists()


def test_a_checkpoint_belongs_to_its_runs_folder(folder: Path, mark: Path) -> None:
    name_code(folder, task=f"{folder}/evil.py:task")
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    code, _ = say("--resume", str(folder / "checkpoints" / "step-00000001"), "--dry-run")
    assert code == 2 and not mark.exists()


def test_a_sweeps_folder_that_names_other_code_is_refused_and_that_code_not_imported(folder: Path, mark: Path) -> None:
    name_code(
        folder, task=f"{folder}/evil.py:task", executor=f"{folder}/evil.py:task", stopping=f"{folder}/evil.py:task"
    )
    words = ["sweep", "digits-mlp", "--grid", "lr=0.1", "--epochs", "1", "--device", "cpu", "--out", str(folder), "-q"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2 and "holds another" in result.stderr and not mark.exists()

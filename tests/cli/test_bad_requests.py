"""What was asked for and cannot be: exit code 2, one message, no folder left and no rank started, whatever the verb."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from podium.cli import main


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, and things that are not what a verb wants."""
    folder = tmp_path_factory.mktemp("made")
    words = ["train", "digits-mlp", "--launcher", "threads", "--steps", "2", "-q", "--set", f"run_dir={folder}/run"]
    assert CliRunner().invoke(main, words).exit_code == 0
    (folder / "empty").mkdir()
    (folder / "file").write_text("x")
    (folder / "script.py").write_text("print(1)")
    (folder / "bad.toml").write_text("= 3 [")
    (folder / "points.csv").write_text("")
    (folder / "other").mkdir()
    (folder / "other" / "notes.txt").write_text("no results")
    (folder / "unsaved").mkdir()  # a run without a checkpoint
    shutil.copy(folder / "run" / "manifest.json", folder / "unsaved")
    (folder / "torn").mkdir()
    (folder / "torn" / "manifest.json").write_text("{")
    return folder


FOLDERS = {
    "no such folder": "missing",
    "an empty folder": "empty",
    "a file": "file",
    "another folder": "other",
    "a torn manifest": "torn",
}
OF_A_FOLDER = (
    "train --resume {}",
    "train --replay {}",
    "report {}",
    "report {} run",
    "report run {}",
    "export {}",
    "trace {}",
    "scale {} --workers 2",
)
OF_DATA = (
    "train mnist-lenet5 --data-dir {} -n 2",
    "train cifar10-resnet20 --data-dir {}",
    "train regression --data-dir {} --launcher threads",
    "train tiny-imagenet-resnet50 --data-dir {}",
    "train mnist-mlp --data-dir {} --dry-run",
    "compare mnist-mlp --data-dir {}",
    "sweep mnist-mlp --data-dir {} --grid lr=0.1,0.2",
)
OF_A_FILE = (
    "train --config {}",
    "compare --config {}",
    "train --launcher virtual --cluster {}",
    "train --launcher local --cluster {}",
    "sweep --trials {}",
)
SINGLE = (
    "train --strategy subprocess:Popen",
    "train mnist-lenet5",
    "compare mnist-mlp",
    "sweep mnist-mlp --grid lr=0.1",
    "train --resume unsaved",
    "train --launcher shaped",
    "train --launcher nope",
    "train --set nokey=3",
    "train --set x",
    "train --steps -1",
    "train --batch-size 0",
    "train -n 0",
    "train --device tpu",
    "train --codec nope",
    "train --collective nope",
    "train --balance nope",
    "train --log nope",
    "train --log tensorboard:file/x",
    "train --out file",
    "train --out file --launcher threads",
    "train --set run_dir=run",
    "run missing.py",
    "run empty",
    "run script.py --strategy nope",
    "run script.py --launcher threads",
    "run script.py --out file",
    "export run --to nope",
    "trace run --steps x",
    "trace run --out file/x",
    "trace run --out empty",
    "report run",
    "report missing.md",
    "report run run run",
    "scale run",
    "scale run --workers 0",
    "sweep --executor nope",
    "sweep --grid x",
    "sweep --grid lr=0.1 --folds 0",
    "sweep --grid lr=0.1 --device tpu",
    "sweep --grid lr=0.1 --stop nope",
    "sweep --grid lr=0.1 --metric nope",
    "sweep --grid lr=0.1 --precision nope",
    "sweep --grid lr=0.1 --keep nope",
    "sweep --grid lr=0.1 --out file",
    "sweep --grid lr=0.1 --out run",
    "sweep --trials points.csv",
    "compare --strategies nope",
    "compare --out file",
    "compare --out run --strategies solo",
    "compare --jobs 0",
    "compare bad.toml",
    "compare missing.toml",
    "demo --quick --out file",
    "bench nope",
    "bench step --set x=1",
    "certs file",
    "certs file/x",
    "list x",
    "doctor x",
    "nope",
)
REQUESTS = [
    *(text.format(place) for text in OF_A_FOLDER for place in FOLDERS.values()),
    *(text.format(place) for text in OF_DATA for place in FOLDERS.values()),
    *(text.format(place) for text in OF_A_FILE for place in ("missing.toml", "bad.toml", "empty")),
    *SINGLE,
]


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_request_that_cannot_be_ends_with_two_and_leaves_nothing(
    made: Path, request_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    before = contents(made)
    result = CliRunner().invoke(main, request_.split())
    said = result.stderr.strip().splitlines()
    assert result.exit_code == 2, said
    assert sum(line.startswith("error: ") for line in said) == 1, said
    assert "Traceback" not in result.stderr
    assert contents(made) == before
    assert [p.name for p in multiprocessing.active_children() if p.name.startswith("podium-")] == []


@pytest.mark.parametrize("request_", ["train --resume missing", "trace missing", "report missing", "certs file"])
def test_as_json_it_is_one_document(made: Path, request_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)
    result = CliRunner().invoke(main, [*request_.split(), "--json"])
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["message"]


def test_a_checkpoint_that_does_not_fit_is_a_wrong_request_too(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)
    result = CliRunner().invoke(main, ["train", "--resume", "run", "--seed", "7", "--set", "run_dir=misfit"])
    assert (result.exit_code, "was made with seed=0" in result.stderr) == (2, True), result.stderr


def contents(folder: Path) -> set[str]:
    """All names in it, but for locks: who has looked at a folder may leave one."""
    names = (os.path.join(place, name) for place, _, found in os.walk(folder) for name in found)
    folders = (os.path.join(place, name) for place, inner, _ in os.walk(folder) for name in inner)
    return {name for name in (*names, *folders) if os.path.basename(name) not in (".lock", "lock")}

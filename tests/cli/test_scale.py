"""`podium scale`: what it refuses by itself, and what it says of what the run answered."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import podium
import podium.launch.scale
from podium.cli import main
from podium.errors import ConfigError
from podium.launch.scale import ScaleAnswer


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, ["scale", *words])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Missing argument 'RUN_DIR'"),
        (["RUN"], "must be given, got neither"),
        (["RUN", "--workers", "two"], "'two' is not a valid integer"),
        (["RUN", "--worker", "2"], "--workers"),
        (["RUN", "--workers", "2"], "has no control.json"),
        (["RUN/absent", "--workers", "2"], "(there is no such folder)"),
    ],
)
def test_a_wrong_request_is_named_and_exits_with_2(words: list[str], said: str, tmp_path: Path) -> None:
    result = invoke(*(word.replace("RUN", str(tmp_path)) for word in words))
    assert result.exit_code == 2, result.output
    assert said in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"coordinator": "unix:/x", "secret": "no"}'])
def test_a_damaged_control_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "control.json").write_text(text)
    result = invoke(str(tmp_path), "-n", "2")
    assert result.exit_code == 2
    assert f"scale: {tmp_path}/control.json is damaged" in result.stderr


@pytest.mark.slow
def test_a_control_file_that_a_killed_launcher_left_is_named(tmp_path: Path) -> None:
    (tmp_path / "control.json").write_text(json.dumps({"coordinator": f"unix:{tmp_path}/k", "secret": "00"}))
    result = invoke(str(tmp_path), "-n", "2")
    assert result.exit_code == 1
    assert "does not answer; has the run ended?" in result.stderr


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (ScaleAnswer(4, 0, (2, 3), ()), "to 4 workers: starting 2, 3"),
        (ScaleAnswer(1, 2, (5,), (2, 1)), "to 1 worker and 2 servers: starting 5; retiring 2, 1"),
        (ScaleAnswer(2, 1, (), ()), "nothing to do: there are 2 workers and 1 server"),
    ],
)
def test_the_answer_says_who_comes_and_who_goes(
    answer: ScaleAnswer, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def scale(run_dir: str, **numbers: int | None) -> ScaleAnswer:
        asked.append((run_dir, numbers))
        return answer

    monkeypatch.setattr(podium.launch.scale, "scale", scale)
    result = invoke("RUN", "--workers", "4", "--servers", "1")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == said
    assert asked == [("RUN", {"workers": 4, "servers": 1, "hosts": ()})]
    document = json.loads(invoke("RUN", "-n", "4", "--json").stdout)
    assert document == json.loads(json.dumps(answer._asdict()))


def test_it_is_there_for_python_too() -> None:
    assert podium.scale is podium.launch.scale.scale


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")
def test_the_control_file_of_another_user_is_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "control.json"
    path.write_text(json.dumps({"coordinator": f"unix:{tmp_path}/k", "secret": "00" * 32}))
    os.chown(path, 65534, 65534)
    with pytest.raises(ConfigError, match="another user's"):
        podium.scale(tmp_path, workers=2)

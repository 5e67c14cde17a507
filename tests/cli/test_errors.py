"""What is wrong is said on the last line of the error stream, and by the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from podium.cli import main
from podium.cli.group import Program
from podium.cli.output import Output
from podium.errors import Interrupted, RankFailed


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


def last_line(result: Result) -> str:
    return result.stderr.splitlines()[-1]


def test_an_unknown_verb_is_answered_with_the_nearest() -> None:
    result = invoke("trian")
    assert result.exit_code == 2
    assert "Did you mean 'train'?" in last_line(result)


def test_an_unknown_option_is_answered_with_the_nearest() -> None:
    result = invoke("train", "--worker", "2")
    assert result.exit_code == 2
    assert "--workers" in last_line(result)
    assert last_line(result).startswith("error: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "digits-mpl", "--dry-run"], "Did you mean 'digits-mlp'?"),
        (["train", "--strategy", "all-reduc", "--dry-run"], "Did you mean 'all-reduce'?"),
        (["train", "--launcher", "lokal", "--dry-run"], "Did you mean 'local'?"),
        (["train", "--set", "strategy.overlapp=true", "--dry-run"], "Did you mean 'overlap'?"),
        (["train", "--set", "worker=2", "--dry-run"], "Did you mean 'workers'?"),
        (["train", "--set", "workers", "--dry-run"], "--set takes KEY=VALUE, got 'workers'"),
        (["train", "--set", "workers=two", "--dry-run"], "workers must be a whole number, got 'two'"),
        (["train", "--workers", "0", "--dry-run"], "workers must be at least 1, got 0"),
        (["train", "--workers", "two"], "'two' is not a valid integer"),
        (["train", "--cluster", "absent.toml", "--dry-run"], "absent.toml"),
        (["train", "--config", "absent.toml", "--dry-run"], "absent.toml"),
        (["train", "--strategy", "solo", "--workers", "2", "--dry-run"], "solo"),
        (["compare", "--strategies", "solo,gosip", "--dry-run"], "unknown strategy 'gosip'"),
        (["compare", "--set", "strategy.servers=2", "--strategies", "solo"], "strategy_options"),
        (["run", "absent.py"], "absent.py: no such file"),
    ],
)
def test_a_wrong_request_is_named_and_exits_with_2(words: list[str], said: str) -> None:
    result = invoke(*words)
    assert result.exit_code == 2, result.output
    assert said in last_line(result)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("words", [["train", "nope"], ["train", "--nope"], ["nope"], ["report", "nope"]])
def test_with_json_an_error_is_the_one_document(words: list[str]) -> None:
    result = invoke(*words, "--json")
    error = json.loads(result.stdout)["error"]
    assert set(error) == {"type", "message"}
    assert result.exit_code in (1, 2)
    assert last_line(result) == f"error: {error['message'].splitlines()[-1]}"


def test_a_folder_without_a_study_is_a_wrong_request(tmp_path: Path) -> None:
    result = invoke("report", str(tmp_path))
    assert result.exit_code == 2
    assert "holds no study" in last_line(result)


def program_that_raises(error: BaseException) -> Program:
    @click.command()
    @click.option("--json", is_flag=True, expose_value=False)
    def verb() -> None:
        raise error

    program = Program("podium")
    program.add_command(verb)
    return program


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RankFailed("rank 1 raised\nValueError: bad sample"), 1),
        (Interrupted("stopped"), 130),
        (KeyboardInterrupt(), 130),
        (OSError(28, "No space left on device", "runs/x"), 1),
    ],
)
def test_each_kind_of_failure_has_its_code(error: BaseException, code: int) -> None:
    result = CliRunner().invoke(program_that_raises(error), ["verb"])
    assert result.exit_code == code
    assert "Traceback" not in result.stderr


def test_the_last_line_is_the_failing_ranks_own() -> None:
    result = CliRunner().invoke(program_that_raises(RankFailed("rank 1 raised\nValueError: bad sample")), ["verb"])
    assert last_line(result) == "ValueError: bad sample"


def test_the_traceback_is_shown_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PODIUM_DEBUG", "1")
    result = CliRunner().invoke(program_that_raises(RankFailed("rank 1 raised")), ["verb"])
    assert "Traceback" in result.stderr
    assert last_line(result) == "error: rank 1 raised"


def test_what_nobody_foresaw_is_a_document_too_and_keeps_its_traceback() -> None:
    result = CliRunner().invoke(program_that_raises(ZeroDivisionError("a defect")), ["verb", "--json"])
    assert json.loads(result.stdout) == {"error": {"type": "ZeroDivisionError", "message": "a defect"}}
    assert isinstance(result.exception, ZeroDivisionError)
    assert result.exit_code == 1


def test_numbers_that_are_not_finite_are_strict_json(capsys: pytest.CaptureFixture[str]) -> None:
    with Output(json=True) as out:
        out.document({"loss": float("nan"), "time": float("inf")})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {"loss": "nan", "time": "inf"}

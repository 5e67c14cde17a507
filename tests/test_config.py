"""Configuration: plain values become what the annotation says, and what is not known is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from podium.config import RunConfig, build, convert, parse_strategy, parse_value, resolve, to_overrides
from podium.errors import ConfigError, UnknownName
from podium.strategies import make_strategy


class TestConvert:
    @pytest.mark.parametrize(
        ("value", "hint", "expected"),
        [
            ("3", int, 3),
            (3.0, int, 3),
            ("1e-3", float, 0.001),
            (2, float, 2.0),
            ("true", bool, True),
            (False, bool, False),
            ("text", str, "text"),
            ("none", int | None, None),
            (None, int | None, None),
            ("7", int | None, 7),
            ("1,2.5", tuple[float, ...], (1.0, 2.5)),
            ([1, 2], tuple[float, ...], (1.0, 2.0)),
            ("64,32", Sequence[int], (64, 32)),
            ("1,2", tuple[float, ...] | None, (1.0, 2.0)),
            ("bf16", Literal["off", "bf16"], "bf16"),
            ("0.5", int | float, 0.5),
            ("[1, 2]", Any, [1, 2]),
            ("word", Any, "word"),
            ({"a": 1}, Mapping[str, Any], {"a": 1}),
        ],
    )
    def test_values_become_what_the_annotation_says(self, value: object, hint: Any, expected: object) -> None:
        got = convert(value, hint, "it")
        assert got == expected
        assert type(got) is type(expected)

    @pytest.mark.parametrize(
        ("value", "hint", "message"),
        [
            ("three", int, "it must be a whole number, got 'three'"),
            (2.5, int, "it must be a whole number, got 2.5"),
            (True, int, "it must be a whole number, got True"),
            ("x", float, "it must be a number, got 'x'"),
            ("yes", bool, "it must be true or false, got 'yes'"),
            (3, str, "it must be text, got 3"),
            (None, int | str, "it must not be none"),
            ("x", int | None, "it must be a whole number, got 'x'"),
            ({"a": 3}, tuple[float, ...], "it must be a list, got"),
            ("1,x", tuple[float, ...], "it must be a number, got 'x'"),
            (3, Literal[1, 2], r"it must be one of \[1, 2\], got 3"),
            ("bf61", Literal["off", "bf16"], "Did you mean 'bf16'"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, value: object, hint: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            convert(value, hint, "it")

    @pytest.mark.parametrize("value", [[1], {"a": 1}])
    def test_a_list_or_table_is_no_truth_value(self, value: object) -> None:
        with pytest.raises(ConfigError, match="it must be true or false"):
            convert(value, bool, "it")

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), "nan"])
    def test_no_number_is_no_whole_number(self, value: object) -> None:
        with pytest.raises(ConfigError, match="it must be a whole number"):
            convert(value, int, "it")


class TestBuild:
    def test_dashes_stand_for_underscores(self) -> None:
        assert build(RunConfig, {"batch-size": "32"}, who="run").batch_size == 32

    def test_an_unknown_key_is_refused_with_the_nearest(self) -> None:
        with pytest.raises(UnknownName, match=r"unknown option of run 'worker'\. Did you mean 'workers'"):
            build(RunConfig, {"worker": 2}, who="run")

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"workers": 0}, "workers must be at least 1, got 0"),
            ({"seed": -1}, "seed must be between"),
            ({"epochs": 0}, "epochs must be at least 1"),
            ({"clip_norm": 0}, "clip_norm must be above 0"),
            ({"eval_every": -1}, "eval_every must be 0 or more"),
            ({"deadline_s": 0}, "deadline_s must be above 0"),
            ({"launcher": "lokal"}, "Did you mean 'local'"),
            ({"shares": "1,2", "workers": 3}, r"shares must be one number per worker \(3\)"),
            ({"shares": "0,0", "workers": 2}, "shares must be 0 or more each, not all 0"),
        ],
    )
    def test_values_that_cannot_be_are_refused(self, values: dict[str, object], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            build(RunConfig, values, who="run")

    def test_a_configuration_survives_json(self) -> None:
        config = RunConfig(workers=2, shares=(1.0, 3.0), task_options={"lr": 0.1}, autocast="bf16")
        assert build(RunConfig, json.loads(json.dumps(config.to_dict())), who="run") == config


class TestResolve:
    def test_without_anything_the_defaults_hold(self) -> None:
        assert resolve() == RunConfig()

    def test_later_sources_win(self, tmp_path: Path) -> None:
        file = tmp_path / "run.toml"
        file.write_text("workers = 2\nseed = 1\nepochs = 3\n")
        config = resolve(file, ["seed=9"], {"workers": 4, "seed": 5, "batch_size": None})
        assert (config.workers, config.seed, config.epochs, config.batch_size) == (4, 9, 3, None)

    def test_later_sources_win_however_a_key_is_spelt(self, tmp_path: Path) -> None:
        file = tmp_path / "run.toml"
        file.write_text("batch-size = 8\n")
        assert resolve(file, ["batch-size=32"], {"batch_size": 16}).batch_size == 32
        assert resolve(file, [], {"batch_size": 16}).batch_size == 16

    def test_tables_hold_the_parts_of_a_run(self, tmp_path: Path) -> None:
        file = tmp_path / "run.toml"
        file.write_text(
            '[run]\nworkers = 2\nbatch-size = 8\n[task]\nname = "regression"\nlr = 0.5\n'
            '[strategy]\nname = "parameter-server"\nservers = 2\n'
        )
        config = resolve(file)
        assert (config.task, config.strategy, config.workers, config.batch_size) == (
            "regression",
            "parameter-server",
            2,
            8,
        )
        assert config.task_options == {"lr": 0.5}
        assert config.strategy_options == {"servers": 2}

    def test_set_reaches_run_task_and_strategy(self) -> None:
        config = resolve(
            None,
            [
                "run.workers=3",
                "epochs=2",
                "task.lr=0.1",
                "task.hidden=[8, 4]",
                "task.note=word",
                "strategy.sync-every=5",
            ],
        )
        assert (config.workers, config.epochs) == (3, 2)
        assert config.task_options == {"lr": 0.1, "hidden": [8, 4], "note": "word"}
        assert config.strategy_options == {"sync_every": "5"}

    def test_set_keeps_what_the_file_says_beside_it(self, tmp_path: Path) -> None:
        file = tmp_path / "run.toml"
        file.write_text("[task]\nlr = 0.5\nepochs = 2\n")
        assert resolve(file, ["task.lr=0.1"]).task_options == {"lr": 0.1, "epochs": 2}

    def test_options_behind_the_strategys_name_give_way_to_set(self) -> None:
        config = resolve(None, ["strategy.mode=sync"], {"strategy": "parameter-server:mode=async,servers=2"})
        assert config.strategy == "parameter-server"
        assert config.strategy_options == {"mode": "sync", "servers": "2"}

    @pytest.mark.parametrize("override", ["workers", "=3", ""])
    def test_set_without_key_and_value_is_refused(self, override: str) -> None:
        with pytest.raises(ConfigError, match="--set takes KEY=VALUE"):
            resolve(None, [override])

    @pytest.mark.parametrize("override", ["wokers=3", "run.wokers=3"])
    def test_an_unknown_key_of_set_is_refused_with_the_nearest(self, override: str) -> None:
        with pytest.raises(UnknownName, match="Did you mean 'workers'"):
            resolve(None, [override])

    @pytest.mark.parametrize(
        ("content", "message"),
        [(b"workers = ", "not a TOML file"), (b"\xff\xfe", "not a TOML file"), (None, "cannot be read")],
    )
    def test_a_file_that_cannot_be_read_is_named(self, tmp_path: Path, content: bytes | None, message: str) -> None:
        file = tmp_path / "run.toml"
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"run\.toml: {message}"):
            resolve(file)


class TestParse:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("solo", ("solo", {})),
            ("all-reduce:bucket-bytes=1024", ("all-reduce", {"bucket_bytes": "1024"})),
            ("parameter-server: mode = async , servers=2", ("parameter-server", {"mode": "async", "servers": "2"})),
            ("my.py:Mine", ("my.py:Mine", {})),
            ("mine:Mine", ("mine:Mine", {})),
            ("mine:Mine:every=4", ("mine:Mine", {"every": "4"})),
            ("my.package:Mine:every=4,by=a:b", ("my.package:Mine", {"every": "4", "by": "a:b"})),
        ],
    )
    def test_a_strategy_is_a_name_and_options(self, text: str, expected: tuple[str, dict[str, str]]) -> None:
        assert parse_strategy(text) == expected

    @pytest.mark.parametrize("text", ["solo:fast", "solo:lr=1,fast"])
    def test_an_option_without_a_value_is_refused(self, text: str) -> None:
        with pytest.raises(ConfigError, match="strategy solo: options are key=value, got 'fast'"):
            make_strategy(*parse_strategy(text))

    @pytest.mark.parametrize(
        ("text", "value"),
        [("3", 3), ("0.5", 0.5), ("true", True), ('"3"', "3"), ("word", "word"), ("a.b", "a.b"), ("", "")],
    )
    def test_values_read_as_toml_and_bare_words_as_text(self, text: str, value: object) -> None:
        assert parse_value(text) == value


class TestOverrides:
    @pytest.mark.parametrize(
        "config",
        [
            RunConfig(),
            RunConfig(
                task="my task.py:make", task_options={"lr": 0.1, "name": "a = b", "digits": "5", "deep": [1, "x"]}
            ),
            RunConfig(strategy="parameter-server", strategy_options={"mode": "async", "servers": "2"}, workers=2),
            RunConfig(strategy="phases", strategy_options={"run": "solo until epoch:at=1 | all-reduce"}),
            RunConfig(codec="top-k:ratio=0.1", checksums=True, shares=(1.0, 0.5), workers=2, clip_norm=1e-3),
            RunConfig(slurm="--partition=gpu --time=2:00:00", nodes=3, launcher="slurm", deadline_s=10.0),
        ],
    )
    def test_they_make_the_same_configuration(self, config: RunConfig) -> None:
        assert resolve(None, to_overrides(config)) == config

    def test_defaults_are_left_out_unless_asked_for(self) -> None:
        assert to_overrides(RunConfig()) == []
        assert to_overrides(RunConfig(workers=2), also=("seed", "epochs")) == ["workers=2", "seed=0", "epochs=none"]

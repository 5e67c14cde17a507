"""Study files and what they come to: cells, settings, order, rules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from podium.errors import ConfigError, UnknownName
from podium.lab.study.file import read_study
from podium.lab.study.parts import Replications, Where, this_machine
from podium.lab.study.same import check_same
from podium.lab.study.study import Study
from podium.records.recorder import to_json

LINKS = """
[study]
name = "links"
question = "Which wins on which link?"
replications = 2
target = 0.9
baseline = { strategy = "solo" }
[settings]
task = "digits-mlp"
launcher = "virtual"
epochs = 2
"task.lr" = 0.2
[factors]
strategy = ["solo", "all-reduce", "parameter-server:mode=async"]
workers = [2, 4]
link = { slow = { cluster = "slow.toml" }, fast = {} }
[[where]]
levels = { strategy = "solo" }
settings = { workers = 1 }
[[where]]
levels = { strategy = "solo", workers = 4 }
leave_out = true
[[where]]
levels = { strategy = "solo", link = ["slow"] }
leave_out = true
[stop]
seconds = 5.0
[sizes.small]
study = { replications = 1 }
factors = { workers = [2] }
"""


def write(folder: Path, text: str, name: str = "links.toml") -> Path:
    (folder / "slow.toml").write_text('[[node]]\nname = "n"\ncount = 5\nup_mbit = 10\ndown_mbit = 10\n')
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_comes_to_its_cells_with_their_settings(tmp_path: Path) -> None:
    design = read_study(write(tmp_path, LINKS)).resolved()
    assert design.names[0] == "solo, workers=2, fast" and len(design.cells) == 9
    assert design.factors["workers"] == (2, 4) and design.replications.seeds == (0, 1)
    config = design.config("parameter-server:mode=async, workers=4, slow", 1)
    assert (config.strategy, config.workers, config.seed, config.epochs) == ("parameter-server", 4, 1, 2)
    assert config.strategy_options["mode"] == "async" and config.task_options == {"lr": 0.2}
    assert config.cluster is not None and Path(config.cluster).samefile(tmp_path / "slow.toml")
    assert design.nodes(config) == 5  # four workers and a server
    alone = design.config("solo, workers=2, fast", 0)
    assert alone.workers == 1 and alone.cluster is None


def test_a_size_has_its_own_levels_and_the_rest_of_the_study(tmp_path: Path) -> None:
    design = read_study(write(tmp_path, LINKS), "small").resolved()
    assert design.factors["workers"] == (2,) and design.replications.most == 1 and design.target == 0.9
    assert (design.size, Path(design.file).name) == ("small", "links.toml")
    with pytest.raises(UnknownName, match="small"):
        read_study(tmp_path / "links.toml", "tiny")


def test_every_block_has_every_cell_in_an_order_of_its_own(tmp_path: Path) -> None:
    design = read_study(write(tmp_path, LINKS)).resolved()
    blocks = design.blocks()
    assert [sorted(name for name, _ in block) for block in blocks] == [sorted(design.names)] * 2
    assert [name for name, _ in blocks[0]] != [name for name, _ in blocks[1]]
    assert blocks == read_study(tmp_path / "links.toml").resolved().blocks()


def test_some_cells_are_run_with_fewer_seeds(tmp_path: Path) -> None:
    rule = "[[where]]\nlevels = { workers = 4 }\nseeds = 1\n[stop]"
    design = read_study(write(tmp_path, LINKS.replace("[stop]", rule))).resolved()
    seeds = {name: [seed for cell, seed in design.order() if cell == name] for name in design.names}
    assert all(found == ([0] if "workers=4" in name else [0, 1]) for name, found in seeds.items())
    assert len(design.to_dict()["order"]) == 2 * 9 - 4


def test_python_says_what_a_table_cannot(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import podium\n"
        "def study(size):\n"
        "    return podium.Study(name='mine', factors={'workers': [1, 2], 'accumulate': [1, 4]},\n"
        "        settings={'launcher': 'virtual'},\n"
        "        derive=lambda at: {'batch_size': 16 * at['workers'] * at['accumulate']})\n"
    )
    design = read_study(path).resolved()
    assert [design.config(name, 0).batch_size for name in design.names] == [16, 64, 32, 128]
    assert design.names[0] == "workers=1, accumulate=1"
    path.write_text("STUDY = 3\n")
    with pytest.raises(ConfigError, match=r"mine\.py: must have a function study"):
        read_study(path)
    path.write_text("import nothing_of_that_name\n")
    with pytest.raises(ConfigError, match="cannot be imported: ModuleNotFoundError"):
        read_study(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("[settings]", "[setings]"), "settings"),
        (('name = "links"', 'nam = "links"'), "name"),
        (("epochs = 2", "epoch = 2"), "epochs"),
        (("workers = [2, 4]", "workers = [2, 2]"), "must differ"),
        (("workers = [2, 4]", "workers = 2"), "must be a list"),
        (("workers = [2, 4]", "workers = []"), "at least one level"),
        (('strategy = "solo" }\nsettings', 'strategi = "solo" }\nsettings'), "strategy"),
        (("leave_out = true\n[stop]", "[stop]"), "leave_out"),
        (('levels = { strategy = "solo", workers = 4 }', 'levels = { strategy = "sollo" }'), "solo"),
        (('levels = { strategy = "solo", workers = 4 }', 'levels = { workers = "4" }'), "level of workers in where"),
        (('baseline = { strategy = "solo" }', 'baseline = { strategy = "all-reduce" }'), "got those of 4"),
        (('baseline = { strategy = "solo" }', 'baseline = { strategy = "sollo" }'), "solo"),
        (("seconds = 5.0", "seconds = -1"), "above 0"),
        (("replications = 2", "replications = 2\nretries = -1"), "retries must be"),
        (("replications = 2", "replications = 2.5"), "whole number"),
        (("replications = 2", "replications = true"), "whole number"),
        (("target = 0.9", 'target = "high"'), "target must be a number"),
        (("target = 0.9", "maximize = 3"), "maximize must be true or false"),
        (("target = 0.9", 'responses = ["acuracy"]'), "accuracy"),
        (('name = "links"', "name = 3"), "name must be text"),
        (("[stop]", "[design]\npoints = 4\n[stop]"), "points are for"),
        (("[stop]", '[design]\ngenerators = ["a = b*c"]\n[stop]'), "generators are for"),
        (('[[where]]\nlevels = { strategy = "solo" }\n', "[where]\n"), "not a study file|one or more"),
        (("workers = [2, 4]", "workers = [2, inf]"), "finite"),
        (("replications = 2", "replications = { least = 3, most = 5 }"), "needs half_width"),
        (("replications = 2", "replications = 0"), "1 ≤ least"),
        (('"task.lr" = 0.2', "seed = 3"), "differs from run to run"),
        (("[stop]", "[stop"), "not a study file"),
    ],
)
def test_what_cannot_be_is_refused_with_the_file_and_the_reason(
    tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    assert change[0] in LINKS
    path = write(tmp_path, LINKS.replace(*change))
    with pytest.raises((ConfigError, UnknownName), match=said):
        read_study(path).resolved()


@pytest.mark.parametrize("text", ["study = 5", "settings = 3", "factors = [1]", "where = {}", "sizes = { small = 3 }"])
def test_what_is_no_table_where_one_should_be_is_refused(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match="must be"):
        read_study(path, "small" if "small" in text else None)


def test_stopping_at_the_target_needs_a_target(tmp_path: Path) -> None:
    text = LINKS.replace("seconds = 5.0", "target = true")
    assert read_study(write(tmp_path, text)).resolved().stop.target
    with pytest.raises(ConfigError, match="needs a target"):
        read_study(write(tmp_path, text.replace("target = 0.9", "")))


def test_levels_in_rules_may_be_spelt_as_people_spell_strategies(tmp_path: Path) -> None:
    rule = Where(levels={"strategy": "parameter-server: mode=async"}, settings={"epochs": 9})
    factors: dict[str, Any] = {"strategy": ["parameter-server:mode=async", "all-reduce"]}
    design = Study(name="spelling", factors=factors, where=[rule], settings={"workers": 2}).resolved()
    assert [design.config(name, 0).epochs for name in design.names] == [9, None]


def test_a_setting_that_is_a_factor_cannot_be_set_for_all(tmp_path: Path) -> None:
    study = read_study(write(tmp_path, LINKS))
    assert study.changed({"epochs": "7"}).resolved().config("all-reduce, workers=2, fast", 0).epochs == 7
    with pytest.raises(ConfigError, match="cluster is set by a level or a rule"):
        study.changed({"cluster": "other.toml"})
    with pytest.raises(ConfigError, match="workers is a factor"):
        study.changed({"workers": 3})


def test_a_fraction_and_a_hypercube_say_what_they_are() -> None:
    two: dict[str, Any] = {"workers": [1, 2], "batch_size": [16, 32], "codec": ["dense", "fp16"]}
    settings = {"launcher": "virtual"}
    design = Study(
        name="half", factors=two, settings=settings, kind="fractional", generators=["codec = workers*batch_size"]
    ).resolved()
    assert len(design.cells) == 4 and design.plan.resolution == 3
    assert design.plan.aliases["workers"] == ("batch_size × codec",)
    from podium.sweeps.search.space import Range

    spread = {"task.lr": Range(0.01, 1, log=True), "batch_size": Range(8, 64, whole=True)}
    cube = Study(name="cube", factors=spread, settings=settings, kind="latin-hypercube", points=6).resolved()
    assert len({cell.levels["task.lr"] for cell in cube.cells}) == 6
    config = cube.config(cube.names[0], 0)
    assert config.task_options["lr"] == cube.cells[0].levels["task.lr"]
    with pytest.raises(ConfigError, match="needs points"):
        Study(name="cube", factors=spread, kind="latin-hypercube").resolved()


def test_rules_may_not_leave_out_everything() -> None:
    rule = Where(levels={"workers": [1, 2]}, leave_out=True)
    with pytest.raises(ConfigError, match="every cell"):
        Study(name="none", factors={"workers": [1, 2]}, where=[rule]).resolved()


def test_replications_may_go_on_until_means_are_known() -> None:
    asked = Replications(least=3, most=8, half_width=0.1)
    assert asked.seeds == tuple(range(8))
    with pytest.raises(ConfigError, match="half_width must be above 0"):
        Replications(least=3, most=8, half_width=0.0)


def test_what_lies_beside_a_study_file_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text("from podium.tasks.digits import digits_mlp as make\n")
    path = write(tmp_path, LINKS.replace('task = "digits-mlp"', 'task = "own.py:make"').replace('"task.lr" = 0.2', ""))
    found = {}
    for folder in (tmp_path, tmp_path.parent):
        monkeypatch.chdir(folder)
        design = read_study(path).resolved()
        config = design.config("all-reduce, workers=2, slow", 0)
        assert Path(config.task.partition(":")[0]).is_file() and Path(str(config.cluster)).is_file()
        found[folder] = design.to_dict()
    one, other = found.values()
    assert one["clusters"] == other["clusters"] and one["clusters"]["all-reduce, workers=2, slow"]
    (tmp_path / "slow.toml").write_text('[[node]]\nname = "n"\ncount = 5\nup_mbit = 11\n')
    assert read_study(path).resolved().to_dict()["clusters"] != one["clusters"]


@pytest.mark.parametrize(
    "name", ["setup_s", "final accuracy", "accuracy", "metrics.accuracy", "step_ms.p50", "balance.exchange_s"]
)
def test_a_response_is_a_number_of_a_run_or_a_metric_of_the_task(name: str) -> None:
    study = Study(name="known", factors={"workers": [1, 2]}, settings={"task": "digits-mlp"}, responses=[name])
    assert study.resolved().responses == (name,)


@pytest.mark.parametrize("name", ["acuracy", "step_ms.p51", "node_seconds", "mae", "seeds to target", "balance."])
def test_a_response_that_no_run_can_have_is_refused_before_the_first(name: str) -> None:
    settings, factors = {"task": "digits-mlp"}, {"workers": [1, 2]}
    with pytest.raises(UnknownName, match=f"unknown response of study slip: '{name}'.*accuracy.*seconds to target"):
        Study(name="slip", factors=factors, settings=settings, responses=["seconds", name]).resolved()
    asked = Replications(least=2, most=3, half_width=0.1, response=name)
    with pytest.raises(UnknownName, match=name):
        Study(name="slip", factors=factors, settings=settings, replications=asked).resolved()


def test_what_a_task_that_cannot_be_made_here_would_report_is_left_to_its_runs(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def make():\n    raise OSError('no data here')\n")
    settings = {"task": f"{tmp_path}/own.py:make"}
    study = Study(name="absent", factors={"workers": [1, 2]}, settings=settings, responses=["f1"])
    assert study.resolved().responses == ("f1",)


def test_a_metric_may_come_with_an_option_of_the_task(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from dataclasses import replace\nfrom podium.tasks.digits import digits_mlp\n"
        "def make(more: str = ''):\n    task = digits_mlp()\n"
        "    return replace(task, metrics={**task.metrics, **({more: task.metrics['accuracy']} if more else {})})\n"
    )
    factors: dict[str, Any] = {"task.more": ["", "top1"]}
    settings = {"task": f"{tmp_path}/own.py:make", "workers": 1}
    assert Study(name="more", factors=factors, settings=settings, responses=["top1"]).resolved().names
    with pytest.raises(UnknownName, match="top1"):
        Study(name="less", factors={"task.more": ["", "top2"]}, settings=settings, responses=["top1"]).resolved()


def test_tasks_of_one_study_are_judged_by_one_metric() -> None:
    def study(*tasks: str) -> Study:
        return Study(name="tasks", factors={"strategy": ["solo", "all-reduce"], "task": tasks})

    assert len(study("digits-mlp", "digits-cnn").resolved().cells) == 4
    with pytest.raises(ConfigError, match=r"same metric.*got accuracy of digits-mlp, mae of regression\. Make a study"):
        study("digits-mlp", "regression").resolved()


def test_which_way_is_better_may_be_said_in_the_file(tmp_path: Path) -> None:
    for text, wanted in (("", None), ("maximize = false\n", False), ("maximize = true\n", True)):
        design = read_study(write(tmp_path, LINKS.replace("target = 0.9\n", f"target = 0.9\n{text}"))).resolved()
        assert design.maximize is wanted and design.to_dict()["maximize"] is wanted
    with pytest.raises(ConfigError, match="maximize must be true or false"):
        Study(name="ways", factors={"workers": [1, 2]}, maximize="down")  # type: ignore[arg-type]
    for responses in ("loss", [3]):
        with pytest.raises(ConfigError, match="responses must be a list of names"):
            Study(name="ways", factors={"workers": [1, 2]}, responses=responses)  # type: ignore[arg-type]


def test_a_study_read_back_from_its_json_is_the_study_that_was_written(tmp_path: Path) -> None:
    study = replace(read_study(write(tmp_path, LINKS)).resolved(), machine=this_machine())
    written = json.loads(to_json(study.to_dict()))
    found = Study.from_dict(written)
    assert json.loads(to_json(found.to_dict())) == written
    assert found.order() == study.order() and found.config(*found.order()[0]) == study.config(*study.order()[0])


def test_which_way_is_better_may_change_later_unless_runs_were_ended_by_it(tmp_path: Path) -> None:
    path = write(tmp_path, LINKS)
    before = read_study(path).resolved().to_dict()
    after = {**before, "maximize": False}
    check_same({name: x for name, x in before.items() if name != "maximize"}, after, "here")
    stop = {"stop": {"seconds": None, "target": True}}
    with pytest.raises(ConfigError, match="maximize None; wanted False"):
        check_same({**before, **stop}, {**after, **stop}, "here")

"""A study's own page: prose of PAGE.md with tables, figures and numbers of the results."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from podium.errors import ConfigError
from podium.lab.report.page import write_page
from podium.lab.study.store import Store
from tests.lab.test_page import two_factors
from tests.lab.test_traces import problems

pytest.importorskip("statsmodels")
pytest.importorskip("pandas")

PAGE = """\
# Ours

{% set fast = runs[runs.strategy == "a"] %}
Strategy a takes {{ cite(fast.seconds.min(), fast) }} s.

{{ table(means(runs, ["strategy", "workers"], ["seconds", "accuracy"]),
         {"strategy": "strategy", "machines": "workers", "seconds": "seconds"}, places="row") }}

See [the first](#row-a-2).

{{ grid(runs[runs.seed == 0], "strategy", "workers", "seconds") }}

{{ curves("times", runs[runs.seed == 0], x="workers", y="seconds", by="strategy", panel="task", log="xy") }}

{{ bars("bars", means(runs, ["strategy"], ["seconds"]), value="seconds", by="strategy") }}

{{ part.caution }}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    two_factors(tmp_path)
    (tmp_path / "PAGE.md").write_text(PAGE)
    return tmp_path


def test_every_number_of_an_own_page_leads_to_a_record(folder: Path) -> None:
    page = write_page(folder)
    text = page.read_text()
    assert problems(page, folder) == []
    assert "takes [0.250](results.jsonl#L1) s." in text
    assert '| <a id="row-a-2"></a>`a` | 2 | 0.513 ± 0.038 | [1](results.jsonl#L1)' in text
    assert "| `c` | [1](results.jsonl#L5) | [0.500](results.jsonl#L6) |" in text
    assert "What may not be concluded: Measured on" in text


def test_figures_of_an_own_page_are_drawn_and_the_same_every_time(folder: Path) -> None:
    write_page(folder)
    drawn = {path.name: path.read_bytes() for path in (folder / "figures").iterdir()}
    assert set(drawn) == {"times.svg", "bars.svg"}
    for drawing in drawn.values():
        ElementTree.fromstring(drawing)
    write_page(folder)
    assert {path.name: path.read_bytes() for path in (folder / "figures").iterdir()} == drawn


def test_a_session_between_runs_moves_no_link(folder: Path) -> None:
    store = Store(folder)
    rows = store.rows()
    store.results.unlink()
    for row in ({"kind": "session", "versions": {}}, *rows):
        store.append(row)
    assert len(store.runs()) == len(rows)
    text = write_page(folder).read_text()
    assert "takes [0.250](results.jsonl#L2) s." in text


@pytest.mark.parametrize("template", ["line\n{{ nothing }}", "{% if %}", "{{ runs.__class__.__mro__ }}"])
def test_what_is_wrong_with_a_template_is_told(folder: Path, template: str) -> None:
    (folder / "PAGE.md").write_text(template)
    with pytest.raises(ConfigError, match=r"PAGE\.md"):
        write_page(folder)

"""Every number in `docs/studies/` traces to a committed record by a link.

A table's row that has a number links to the lines of the records it was made from, or to another row of the page. A
sentence that has a number links to records, to such a row, or to the file that sets the number. Code and headings are
left out, and so are names (`CIFAR-10`, `fp16`) and the years of references.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from podium.lab.report import report
from podium.lab.report.links import Records, mark, place, slug, to
from podium.lab.report.own_page import TEMPLATE
from podium.lab.report.page import write_page
from podium.lab.report.report import write_report
from podium.lab.report.sections import title_of
from podium.lab.report.study_results import StudyResults
from podium.lab.study.store import Store
from podium.lab.study.study import Study

ROOT = Path(__file__).parents[2]
STUDIES = ROOT / "docs" / "studies"
PAGES = sorted(path for path in STUDIES.rglob("*.md") if path.name != TEMPLATE)
"""A template's prose stands in the page that is made of it, and is looked at there."""
SOURCES = (".py", ".toml", ".json")
"""Files that may say where a number of the design was set."""

NUMBER = re.compile(r"(?<![\w.])(?<![A-Za-z]-)\d")
"""Where a number begins: `10` in `10 epochs` and `±10`, not in `CIFAR-10`, `fp16` or `python3`."""
YEAR = re.compile(r"(et al\.,? |\()(19|20)\d\d\b")
CODE = re.compile(r"(`+).+?\1")
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)")
TAG = re.compile(r"<[^>]+>")
SENTENCE = re.compile(r"(?<=[.!?])\s+")
FENCE = re.compile(r"^\s*(```|~~~)")


class Piece(NamedTuple):
    """A row of a table, or a sentence."""

    line: int
    """On which it begins, from 1."""
    text: str
    section: str
    """The slug of the heading above it."""
    is_row: bool

    @property
    def targets(self) -> list[str]:
        return [match[1] for match in LINK.findall(self.text)]

    @property
    def has_number(self) -> bool:
        words = LINK.sub(r"\1", TAG.sub("", CODE.sub("", self.text)))
        return bool(NUMBER.search(YEAR.sub("", words)))


def pieces(text: str) -> Iterator[Piece]:
    """Rows and sentences of a page, in its order; without code, headings, figures and the rules of tables."""
    section, paragraph, begins = "", list[str](), 1
    fenced = False

    def ended() -> Iterator[Piece]:
        whole = " ".join(paragraph)
        held = [*_protected(whole)]
        yield from (Piece(begins, sentence, section, False) for sentence in held)
        paragraph.clear()

    for number, line in enumerate([*text.splitlines(), ""], 1):
        if FENCE.match(line):
            fenced = not fenced
            continue
        if fenced or (line.startswith("    ") and not paragraph):
            continue
        plain = line.strip()
        is_item, is_row, is_heading = bool(re.match(r"([-*]|\d+\.) ", plain)), plain.startswith("|"), line[:1] == "#"
        if not plain or is_item or is_row or is_heading:
            yield from ended()
            begins = number
        if is_heading:
            section = slug(line.lstrip("#"))
        elif is_row and set(plain) - set("|-: "):
            yield Piece(number, plain, section, True)
        elif plain and not is_row:
            begins = begins if paragraph else number
            paragraph.append(re.sub(r"^([-*]|\d+\.) ", "", plain))


def _protected(text: str) -> Iterator[str]:
    """Sentences; a full stop inside code or a link's address ends none."""
    hidden = re.sub(r"`+.+?`+|\]\([^)]*\)", lambda match: match[0].replace(" ", "\0"), text)
    for sentence in SENTENCE.split(hidden):
        yield sentence.replace("\0", " ")


@cache
def known_files(root: Path) -> frozenset[Path] | None:
    """What git keeps or would keep; None where there is no repository to ask."""
    if shutil.which("git") is None or not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, capture_output=True, timeout=30, check=False)
    if found.returncode:
        return None
    return frozenset((root / name).resolve() for name in found.stdout.decode().split("\0") if name)


@cache
def lines_of(path: Path) -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8").splitlines())


def problems(page: Path, root: Path = ROOT) -> list[str]:
    """What is wrong with a page: numbers without a link, links that lead nowhere. Each names page and line."""
    found = list(pieces(page.read_text(encoding="utf-8")))
    where = {name: piece for piece in found for name in re.findall(r'<a id="([^"]+)"', piece.text)}
    sections: dict[str, list[Piece]] = {}
    for piece in found:
        sections.setdefault(piece.section, []).append(piece)

    def to_records(piece: Piece) -> bool:
        return any(target.partition("#")[0].endswith(".jsonl") for target in piece.targets)

    def leads_on(target: str) -> bool:
        """Whether what lies at a place of this page links to records."""
        name = target[1:]
        places = [where[name]] if name in where else sections.get(name, [])
        return any(to_records(piece) for piece in places)

    def is_trace(target: str, piece: Piece) -> bool:
        path, _, line = target.partition("#")
        if not path:
            return leads_on(target)
        if path.endswith(".jsonl"):
            return bool(line) or not piece.is_row
        return path.endswith(SOURCES) and not piece.is_row and "://" not in path

    said = []
    for piece in found:
        here = f"{page.relative_to(root)}:{piece.line}"
        for target in piece.targets:
            wrong = _broken(target, page, root, {*where, *sections})
            said += [f"{here}: {wrong}"] if wrong else []
        if piece.has_number and not any(is_trace(target, piece) for target in piece.targets):
            said.append(f"{here}: no link to a record: {piece.text[:90]}")
    return said


def _broken(target: str, page: Path, root: Path, places: set[str]) -> str:
    """Why a link leads nowhere; empty when it leads somewhere."""
    if "://" in target:
        return ""
    name, _, place_ = target.partition("#")
    if not name:
        return "" if place_ in places else f"no such place on this page: {target}"
    path = (page.parent / name).resolve()
    if not path.is_relative_to(root) or not path.exists():
        return f"no such file: {target}"
    known = known_files(root)
    if known is not None and path.is_file() and path not in known:
        return f"the repository does not keep this file: {target}"
    if not place_.startswith("L"):
        return ""
    lines, wanted = lines_of(path), numbers(place_)
    if not wanted or not set(wanted) <= set(range(1, len(lines) + 1)):
        return f"{name} has {len(lines)} lines: {target}"
    if path.suffix == ".jsonl" and not all(map(is_record, (lines[line - 1] for line in wanted))):
        return f"that line holds no record: {target}"
    return ""


def numbers(fragment: str) -> list[int]:
    """The lines that `L3` or `L3-L5` names; none where it names none."""
    named = re.fullmatch(r"L(\d+)(?:-L(\d+))?", fragment)
    return [] if named is None else list(range(int(named[1]), int(named[2] or named[1]) + 1))


@cache
def is_record(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


class TestPages:
    def test_there_are_pages_to_look_at(self) -> None:
        assert len(PAGES) >= 4

    @pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(STUDIES)))
    def test_every_number_has_a_link_and_every_link_leads_somewhere(self, page: Path) -> None:
        assert not problems(page)


FOLDERS = sorted(path.parent for path in STUDIES.glob("*/study.json"))
"""Studies that `podium compare` ran."""


def title(folder: Path) -> str:
    return title_of(Study.from_dict(Store(folder).read_study()))


class TestMadeFromRecords:
    @pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(STUDIES)))
    def test_every_page_is_made_by_somebody(self, page: Path) -> None:
        assert page.name == "README.md" and page.parent in FOLDERS, "a page of numbers is made from records"

    @pytest.mark.slow
    @pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
    def test_a_study_s_page_and_report_are_what_its_committed_records_give(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(report, "to_svg", lambda figure, order: "<svg></svg>\n")  # drawing takes long
        for name in ("study.json", "results.jsonl", TEMPLATE):
            if (folder / name).is_file():
                shutil.copy(folder / name, tmp_path)
        (tmp_path / "figures").mkdir()
        for figure in (folder / "figures").glob("*.svg"):
            (tmp_path / "figures" / figure.name).touch()  # the page names those that are there
        results = StudyResults.read(tmp_path)  # its findings are computed once for both
        assert write_page(results).read_bytes() == (folder / "README.md").read_bytes()
        # The repository does not keep the report, since this makes it again.
        made = write_report(results, include_plotly=False).read_text(encoding="utf-8")
        runs = Store(tmp_path).runs()
        assert made.count('<tr id="run-') == len(runs) and f"<title>{title(folder)}" in made


class TestLinkedLines:
    """The line that a row links to is about what the row is about."""

    @pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
    def test_a_cells_row_links_to_that_cells_records(self, folder: Path) -> None:
        rows = [json.loads(line) for line in lines_of(folder / "results.jsonl")]
        text = (folder / "README.md").read_text(encoding="utf-8")
        whole = "\n## Cells\n" in text  # else a page of its own, whose rows begin with a level of the first factor
        names = [row.get("cell") if whole else next(iter(row.get("levels", {}).values()), None) for row in rows]
        looked = set()
        for piece in pieces(text):
            named = re.match(r'\| (?:<a id="cell-\d+"></a>)?`([^`]+)` \|', piece.text) if piece.is_row else None
            places = re.findall(r"\.jsonl#([^)]+)\)", piece.text)
            if named is not None and named[1] in names and places:
                assert {names[line - 1] for place in places for line in numbers(place)} == {named[1]}, piece.text
                looked.add(named[1])
        assert len(looked) >= (len(set(names)) if whole else min(5, len(set(names))))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with a file of three records, the last of them torn."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "x.jsonl").write_text('{"a": 1}\n{"a": 2}\n{"a":', encoding="utf-8")
    (tmp_path / "design.py").write_text("SEEDS = 3\n", encoding="utf-8")
    return tmp_path


def check(root: Path, text: str) -> list[str]:
    page = root / "docs" / "page.md"
    page.write_text(text, encoding="utf-8")
    return problems(page, root)


TABLE = '| arm | ms |\n| --- | ---: |\n| `a` | <a id="a"></a>[12](x.jsonl#L1) |\n'


class TestTheCheckItself:
    @pytest.mark.parametrize(
        "text",
        [
            TABLE,
            f"{TABLE}\nIt takes [12 ms](#a).",
            f"## Times\n\n{TABLE}\nIt takes 12 ms, see [the table](#times).",
            "It takes 12 ms ([record](x.jsonl#L2)) or [13 ms](x.jsonl#L1-L2).",
            "All [2 runs](x.jsonl) and [3 seeds](../design.py).",
            "ResNet-20 on CIFAR-10 in fp16 and `3 bits`, as by Doe et al., 2024, and Roe (1999).",
            "## 12 months\n\n```\n--epochs 3\n```\n\nText.\n\n    --epochs 3\n\n![Over 12 months](../design.py)",
            "One. See 'Sect. A', `a. 3 b`.",
        ],
    )
    def test_pages_in_order_pass(self, root: Path, text: str) -> None:
        assert check(root, text) == []

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("It takes 12 ms.", "docs/page.md:1: no link"),
            ("It takes [12 ms](x.jsonl#L1). It is 3× faster.", "docs/page.md:1: no link to a record: It is 3×"),
            ("- fine\n- a loss of −0.5", "docs/page.md:2: no link"),
            ("| arm | ms |\n| --- | ---: |\n| `a` | 12 |", "docs/page.md:3: no link"),
            ("| arm | ms at 8 workers |\n| --- | ---: |", "docs/page.md:1: no link"),
            ("| `a` | [12](x.jsonl) |", "no link to a record"),
            ("| `a` | [12](../design.py) |", "no link to a record"),
            ("It takes [12 ms](https://example.org/x.jsonl.html).", "no link to a record"),
            ("It takes [12 ms](page.md).", "no link to a record"),
            ("It takes [12 ms](x.jsonl#L4).", "x.jsonl has 3 lines"),
            ("It takes [12 ms](x.jsonl#L0).", "x.jsonl has 3 lines"),
            ("It takes [12 ms](x.jsonl#L3).", "holds no record"),
            ("It takes [12 ms](x.jsonl#L1-L3).", "holds no record"),
            ("It takes [12 ms](x.jsonl#L2-L1).", "x.jsonl has 3 lines"),
            ("It takes [12 ms](x.jsonl#Lfirst).", "x.jsonl has 3 lines"),
            ("It takes [12 ms](y.jsonl#L1).", "no such file: y.jsonl#L1"),
            ("It takes [12 ms](#nowhere).", "no such place on this page: #nowhere"),
            ("## Times\n\nNothing.\n\n## More\n\nIt takes [12 ms](#times).", "docs/page.md:7: no link to a record"),
            ("It takes [12 ms](../../x.jsonl).", "no such file"),
            ("long\nlines: 12 ms.", "docs/page.md:1: no link"),
        ],
    )
    def test_a_planted_fault_is_found(self, root: Path, text: str, said: str) -> None:
        found = check(root, text)
        assert any(said in one for one in found), found

    def test_records_that_git_ignores_are_no_records(self, root: Path) -> None:
        if shutil.which("git") is None:
            pytest.skip("git is not installed")
        subprocess.run(["git", "init", "-q", str(root)], check=True, timeout=30)
        assert check(root, "It takes [12 ms](x.jsonl#L1).") == []
        (root / ".gitignore").write_text("*.jsonl\n", encoding="utf-8")
        known_files.cache_clear()
        assert "does not keep this file" in check(root, "It takes [12 ms](x.jsonl#L1).")[0]


class TestLinks:
    def test_lines_are_named_once_in_the_files_order(self) -> None:
        rows = [{"a": 1}, {"a": 1}, {"a": 2}]
        records = Records("x.jsonl", rows)
        assert records.links([rows[2], rows[1], rows[2]]) == "[2](x.jsonl#L2) [3](x.jsonl#L3)"
        assert records.link("`a`", rows[0]) == "[`a`](x.jsonl#L1)"

    def test_lines_without_a_gap_are_one_link(self) -> None:
        rows = [{"a": number} for number in range(6)]
        found = Records("x.jsonl", rows).links([*rows[:3], *rows[4:]])
        assert found == "[1–3](x.jsonl#L1-L3) [5](x.jsonl#L5) [6](x.jsonl#L6)"

    def test_a_row_of_another_file_has_no_line(self) -> None:
        with pytest.raises(KeyError):
            Records("x.jsonl", [{"a": 1}]).line({"a": 1})

    def test_places_are_plain_names_and_can_be_reached(self) -> None:
        name = place("MNIST", "top-k:ratio=0.1;feedback=false")
        assert name == "mnist-top-k-ratio-0-1-feedback-false"
        assert mark(name) == f'<a id="{name}"></a>'
        assert to("text", name) == f"[text](#{name})"

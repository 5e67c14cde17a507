"""Help comes at once: nothing heavy is imported for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from podium.cli import main

VERBS = ["train", "compare", "sweep", "report", "export", "trace", "demo", "run", "scale", "list"]
VERBS += ["doctor", "cluster", "bench", "certs"]
HEAVY = ("torch", "numpy", "sklearn", "scipy", "rich", "jinja2")


def test_the_verbs_are_these() -> None:
    assert list(main.commands) == VERBS


def test_every_verb_has_a_section_in_the_manual() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    assert [verb for verb in VERBS if f"\n## podium {verb}\n" not in manual] == []


def test_help_of_every_verb_imports_nothing_heavy() -> None:
    script = f"""
import sys
from podium.cli import main
for words in ([], ["--help"], ["--version"], *([verb, "--help"] for verb in {VERBS!r})):
    try:
        main(words)
    except SystemExit as end:
        assert end.code == 0, (words, end.code)
print("heavy:", [name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_offers_json_and_fits_eighty_columns(verb: str) -> None:
    shown = CliRunner().invoke(main, [verb, "--help"], terminal_width=80)
    assert "--json" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80


def test_the_program_alone_shows_its_help() -> None:
    shown = CliRunner().invoke(main, [])
    assert shown.exit_code == 0
    assert "podium demo" in shown.stdout


def test_it_also_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "podium", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("podium ")

"""Gradient accumulation on slow links, and models of the time, to `docs/studies/accumulation.md`.

    python studies/accumulation.py                    virtual runs, then the page
    python studies/accumulation.py --part real        the cells that are run for real; root, an idle machine
    python studies/accumulation.py --size small       shows in a few minutes that everything works

What was run already is not run again.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import click

from podium.errors import PodiumError
from podium.lab.published.accumulation import design, draw, require_drawing, run_real, run_virtual

PARTS = ("virtual", "real", "report")


@click.command(help="An exchange every batch against every 4 batches: times, effects, and models that predict them.")
@click.option("--size", type=click.Choice(["small", "core"]), default="core", show_default=True)
@click.option(
    "--out", type=click.Path(path_type=Path), help="[docs/studies; runs/accumulation-small with --size small]"
)
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(PARTS),
    help="Only this one; may be repeated. [virtual and report; with --size small and as root, all]",
)
@click.option("--jobs", type=int, default=1, show_default=True, help="Virtual runs at a time.")
def main(size: str, out: Path | None, parts: tuple[str, ...], jobs: int) -> None:
    study = design(size)  # type: ignore[arg-type]  # click allows no other
    out = out or Path("runs/accumulation-small" if size == "small" else "docs/studies")
    if not parts:
        parts = PARTS if size == "small" and os.geteuid() == 0 else ("virtual", "report")
    failed, say = 0, partial(print, flush=True)
    try:
        require_drawing()
        if "virtual" in parts:
            failed += run_virtual(study, out, jobs=jobs, say=say)
        if "real" in parts:
            failed += run_real(study, out, say=say)
        # Every part ends in a page that knows of it.
        made = draw(out)
    except PodiumError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    print(f"{', '.join(map(str, made))} from {out / 'accumulation.jsonl'}")
    if failed:
        print(f"{failed} runs failed, see the page; the same command tries them again", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()

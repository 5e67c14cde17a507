"""When to leave all-reduce: Strategy-Switch, moments at the switch, DiLoCo, to `docs/studies/switching.md`.

    python studies/switching.py --data-dir DIR --device cuda --jobs 16
    python studies/switching.py --data-dir DIR --ablation

`DIR/mnist` and `DIR/cifar10` hold the files of the two data sets. What was run already is not run again.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from functools import partial
from pathlib import Path

import click

from podium.errors import PodiumError
from podium.lab.published.switching import ABLATIONS, QUICK, Study, draw, require_drawing, run


@click.command(help="Train with a straggler under all-reduce, Strategy-Switch and others, and say what each costs.")
@click.option("--data-dir", default="data", show_default=True, help="Holds the folders mnist and cifar10.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--jobs", type=int, help="Runs at a time; as many as there are cores, at most 8, when not given.")
@click.option("--out", type=click.Path(path_type=Path), help="[docs/studies; runs/switching-quick with --quick]")
@click.option("--setting", "settings", multiple=True, help="Only this one of the study's settings; may be repeated.")
@click.option("--ablation", is_flag=True, help="Only moments kept at the switch against moments dropped.")
@click.option("--quick", is_flag=True, help="A few runs on scikit-learn's digits, to see that it works.")
@click.option("--report-only", is_flag=True, help="Only make page and figure again from switching.jsonl.")
def main(
    data_dir: str,
    device: str,
    jobs: int | None,
    out: Path | None,
    settings: tuple[str, ...],
    ablation: bool,
    quick: bool,
    report_only: bool,
) -> None:
    out = out or Path("runs/switching-quick" if quick else "docs/studies")
    again = 0
    try:
        require_drawing()
        if not report_only:
            study = QUICK if quick else Study(parts=ABLATIONS) if ablation else Study()
            study = dataclasses.replace(study.only(settings), data_dir=data_dir, device=device)
            jobs = min(8, len(os.sched_getaffinity(0))) if jobs is None else jobs
            again = run(study, out, jobs=jobs, say=partial(print, flush=True))
        draw(out)
    except PodiumError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    print(f"{out / 'switching.md'}, {out / 'switching.svg'} from {out / 'switching.jsonl'}")
    if again:
        print(f"{again} runs failed, see the page; the same command tries them again", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()

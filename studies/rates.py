"""Rate against accuracy: every codec on MNIST and CIFAR-10, three seeds each, to `docs/studies/rates.md`.

    python studies/rates.py --data-dir DIR --device cuda --jobs 8

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
from podium.lab.published.rates import QUICK, Rates, draw, run


@click.command(help="Train with every codec, and say what each costs in accuracy for the bytes it saves.")
@click.option("--data-dir", default="data", show_default=True, help="Holds the folders mnist and cifar10.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--jobs", type=int, help="Runs at a time; as many as there are cores, at most 8, when not given.")
@click.option("--out", type=click.Path(path_type=Path), help="[docs/studies; runs/rates-quick with --quick]")
@click.option("--task", "tasks", multiple=True, help="Only this one of the study's tasks; may be repeated.")
@click.option("--quick", is_flag=True, help="A few runs on scikit-learn's digits, to see that it works.")
@click.option("--draw", "only_draw", is_flag=True, help="Only make page and figure again from rates.jsonl.")
def main(
    data_dir: str,
    device: str,
    jobs: int | None,
    out: Path | None,
    tasks: tuple[str, ...],
    quick: bool,
    only_draw: bool,
) -> None:
    out = out or Path("runs/rates-quick" if quick else "docs/studies")
    again = 0
    try:
        study = (QUICK if quick else Rates()).only(tasks)
        study = dataclasses.replace(study, data_dir=data_dir, device=device)
        if only_draw:
            draw(out)
        else:
            jobs = min(8, len(os.sched_getaffinity(0))) if jobs is None else jobs
            again = run(study, out, jobs=jobs, say=partial(print, flush=True))
    except PodiumError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    print(f"{out / 'rates.md'}, {out / 'rates.svg'} from {out / 'rates.jsonl'}")
    if again:
        print(f"{again} runs failed, see the page; the same command tries them again", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""Driver, runtime, framework: three levels at which many trainings share one GPU, to `docs/studies/one-gpu.md`.

    python studies/one_gpu.py --data-dir DIR --part energy --budget-s 560
    python studies/one_gpu.py --data-dir DIR --part times --budget-s 560
    python studies/one_gpu.py --size small --out runs/one-gpu/one-gpu.jsonl

`DIR/mnist` and `DIR/cifar10` hold the files of the two data sets. What was measured already is not measured again.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import click

from podium.errors import PodiumError
from podium.lab.published.one_gpu import PARTS, SIZES, Ended, design, draw, from_bench, open_store, require_drawing, run


@click.command(help="Measure many trainings on one GPU: MPS, Ray, fusion, branches; and say which is how much better.")
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Only this one; may be repeated.")
@click.option("--only", "tasks", multiple=True, metavar="TASK", help="Only this task; may be repeated.")
@click.option("--arm", "arms", multiple=True, metavar="ARM", help="Only this arm; may be repeated.")
@click.option("--budget-s", type=float, help="Begin nothing that would not be through after so many seconds.")
@click.option("--data-dir", default="", help="Holds the folders mnist and cifar10.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("docs/studies/one-gpu.jsonl"), show_default=True)
@click.option("--size", type=click.Choice(SIZES), default="core", show_default=True, help="small: digits, on a CPU.")
@click.option("--again", is_flag=True, help="Try what failed once more.")
@click.option("--commit", help="Of the code, where git cannot be asked.")
@click.option("--add-bench", type=click.Path(path_type=Path, exists=True), help="Add a document of bench sweep --json.")
@click.option("--plan", "only_plan", is_flag=True, help="Only list what would be measured, with estimates.")
@click.option("--report", "only_report", is_flag=True, help="Only make page and figures again.")
def main(
    parts: tuple[str, ...],
    tasks: tuple[str, ...],
    arms: tuple[str, ...],
    budget_s: float | None,
    data_dir: str,
    out: Path,
    size: str,
    again: bool,
    commit: str | None,
    add_bench: Path | None,
    only_plan: bool,
    only_report: bool,
) -> None:
    ended = Ended()
    try:
        asked = design(size).only(parts, tasks, arms)  # type: ignore[arg-type]  # one of SIZES
        if only_plan:
            for cell in asked.cells:
                print(f"{cell.estimate_s:6.0f} s  {cell.name}")
            print(f"{asked.estimate_s:6.0f} s  in all")
            return
        require_drawing()
        if add_bench is not None:
            _add(add_bench, out)
        elif not only_report:
            say = partial(print, flush=True)
            ended = run(asked, out, data_dir=data_dir, budget_s=budget_s, again=again, commit=commit, say=say)
        made = draw(out)
    except PodiumError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    print(f"{', '.join(map(str, made))} from {out}")
    if ended.failed:
        print(f"{ended.failed} of {ended.measured} could not run, see the page; --again tries them again")
    if ended.left:
        print(f"{ended.why}; left, some {sum(cell.estimate_s for cell in ended.left):.0f} s:", file=sys.stderr)
        for cell in ended.left:
            print(f"  {cell.name}, {cell.estimate_s:.0f} s", file=sys.stderr)
        raise SystemExit(3)


def _add(document: Path, out: Path) -> None:
    store = open_store(out)
    session = 1 + max((row["session"] for row in store.rows() if row["kind"] == "session"), default=-1)
    for row in from_bench(json.loads(document.read_text(encoding="utf-8")), session):
        store.append(row)


if __name__ == "__main__":
    main()

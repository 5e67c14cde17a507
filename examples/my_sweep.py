"""Many small models on one device: `python examples/my_sweep.py [folder]`.

Twelve settings of a classifier of wines, five folds each, one row of a fused array per model, and the best one's
parameters in an ordinary module at the end. As one command:

    podium sweep examples/my_task.py:make_task --grid lr=0.3,0.1,0.03,0.01 --grid hidden=8,16,32 --folds 5
"""

import sys

from my_task import make_task

import podium


def main(folder: str | None = None) -> None:
    sweep = podium.sweep(
        "my_task:make_task",
        grid={"lr": [0.3, 0.1, 0.03, 0.01], "hidden": [8, 16, 32]},
        folds=5,
        epochs=5,
        executor="fused",
        out=folder,
    )
    print(sweep.answer)
    best = sweep.best_trial
    assert best is not None
    model = make_task(**best.trial.options).model()
    model.load_state_dict(sweep.best_state())
    print(f"{len(sweep.outcomes)} trials, accuracy {best.evaluation.metrics['accuracy']:.4f}, report {sweep.report}")


if __name__ == "__main__":
    main(*sys.argv[1:2])

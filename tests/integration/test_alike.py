"""Ranks compare what they train on before the first step: under every launcher, in own loops, and at resume."""

from __future__ import annotations

import dataclasses
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import podium
from podium.config import RunConfig
from podium.data.base import ArrayDataset
from podium.engine.fingerprints import BUDGET_S, Digest
from podium.errors import CheckpointError, ConfigError, DataError, PodiumError
from podium.launch.run import run_script
from podium.records.recorder import read_records
from tests.integration import apart
from tests.integration.processes import settings, torchrun
from tests.integration.runs import FIELDS
from tests.integration.shaping import CLUSTER, needs_root

SHAPED = pytest.param("shaped", marks=[pytest.mark.root, needs_root])
LAUNCHERS = ["local", "threads", "virtual", SHAPED, "torchrun"]
SCRIPT = str(Path(apart.__file__))


def refusal_of(launcher: str, tmp_path: Path, how: str, **options: Any) -> str | None:
    """Train with data that come out like this; what was said when it was refused, None where it was not."""
    if launcher == "torchrun":
        words = settings({**FIELDS, "out": tmp_path / "out", "task.how": how, **options})
        code, _, err = torchrun(2, "--task", apart.TASK, *words)
        return err if code else None
    if launcher == "shaped":
        (tmp_path / "cluster.toml").write_text(CLUSTER)
        options["cluster"] = str(tmp_path / "cluster.toml")
    try:
        chosen = {**FIELDS, "out": tmp_path / "out", "launcher": launcher, "task_options": {"how": how}, **options}
        podium.train(apart.TASK, workers=2, **chosen)
    except PodiumError as error:
        return str(error)
    return None


@pytest.mark.parametrize("launcher", LAUNCHERS)
class TestUnderEveryLauncher:
    def test_a_split_without_a_seed_is_refused_or_the_same_for_all(self, launcher: str, tmp_path: Path) -> None:
        if launcher in ("threads", "virtual"):  # one process: the split is made once, and all ranks have that one
            watched: list[apart.Watched] = []

            def data() -> podium.Data:
                made = apart.data("split")
                watched.append(apart.Watched(made.train))
                return podium.Data(watched[-1], made.test)

            task = dataclasses.replace(apart.task(), data=data)
            podium.train(task, workers=2, **{**FIELDS, "out": tmp_path, "launcher": launcher})
            trained = watched[-1]
            held = {round(n) for n in trained.held.gather(np.arange(apart.SAMPLES))[0][:, 0].tolist()}
            assert {sample for sample, count in enumerate(trained.used) if count} == held
            assert max(trained.used) == 1, "no sample is used twice"
            return
        said = refusal_of(launcher, tmp_path, "split")
        assert said is not None
        assert "rank 1 has other training data than rank 0" in said
        assert "samples compared are not the same" in said
        assert "random_state=0" in said, "names the remedy"

    @pytest.mark.slow
    def test_equal_data_train(self, launcher: str, tmp_path: Path) -> None:
        assert refusal_of(launcher, tmp_path, "same") is None


@pytest.mark.parametrize("how", ["split", "subset", "length", "labels", "test"])
def test_whatever_differs_between_ranks_is_named(how: str, tmp_path: Path) -> None:
    said = refusal_of("local", tmp_path, how, strategy="parameter-server")
    assert said is not None
    assert f"has other {'test' if how == 'test' else 'training'} data than rank" in said


@pytest.mark.parametrize("how", ["torch", "numpy", "python", "own"])
def test_random_augmentation_is_no_difference(how: str, tmp_path: Path) -> None:
    assert refusal_of("local", tmp_path, how) is None


def test_the_records_say_what_was_compared(tmp_path: Path) -> None:
    for how, samples in (("same", 64), ("own", 0)):
        result = podium.train(
            apart.TASK, workers=2, task_options={"how": how}, **{**FIELDS, "out": tmp_path, "launcher": "threads"}
        )
        begun = [r for r in read_records(Path(result.run_dir)) if r["kind"] == "begin" and r["role"] == "worker"]
        assert [row["compared"]["training data"] for row in begun] == [samples, samples]


@pytest.mark.parametrize("how", ["split", "test", "labels"])
@pytest.mark.parametrize("launcher", ["threads", "local"])
def test_a_run_resumed_on_other_data_is_refused(how: str, launcher: str, tmp_path: Path) -> None:
    options = {**FIELDS, "out": tmp_path, "task_options": {"how": how}, "workers": 1, "launcher": launcher}
    first = podium.train(apart.TASK, steps=2, **options)
    with pytest.raises(CheckpointError, match=r"was made with other (test|training) data: .*random_state=0"):
        podium.train(apart.TASK, resume=first.run_dir, **options)


def test_a_run_resumed_on_the_same_data_goes_on(tmp_path: Path) -> None:
    options = {**FIELDS, "out": tmp_path, "task_options": {"how": "numpy"}, "workers": 2, "launcher": "threads"}
    first = podium.train(apart.TASK, steps=2, **options)
    assert podium.train(apart.TASK, resume=first.run_dir, **options).status == "finished"


@pytest.mark.slow
def test_ranks_of_torchrun_that_were_told_otherwise_are_refused(tmp_path: Path) -> None:
    """Each rank reads a file of its own, as on hosts that share none."""
    for rank in (0, 1):
        (tmp_path / f"run-{rank}.toml").write_text("seed = 1\nbatch_size = 24\nclip_norm = 0.5\n" if rank else "")
    wrapper = tmp_path / "rank.sh"
    wrapper.write_text(f'exec "$PYTHON" -m podium.node --config {tmp_path}/run-$RANK.toml "$@"\n')
    words = settings({**FIELDS, "out": tmp_path / "out", "steps": 2})
    code, _, err = torchrun(2, "--task", apart.TASK, *words, through=wrapper)
    assert code != 0
    assert "seed is 1 on rank 1 and 0 on rank 0" in err
    assert "batch_size is 24 on rank 1 and 48 on rank 0" in err
    assert "clip_norm is 0.5 on rank 1 and null on rank 0" in err


class TestOwnLoops:
    @pytest.mark.parametrize("how", ["seed", "batch_size", "rate", "epochs", "split"])
    def test_what_differs_by_rank_is_refused(self, how: str, tmp_path: Path) -> None:
        config = RunConfig(workers=2, out=str(tmp_path), threads=1, deadline_s=20.0)
        with pytest.raises(DataError if how == "split" else ConfigError) as raised:
            run_script(config, SCRIPT, [how])
        names = {"seed": "seed is 1 on rank 1 and 0 on rank 0", "batch_size": "batch_size is 48 on rank 1 and 24"}
        names |= {"rate": "the optimizer is", "epochs": "epochs is 2 on rank 1 and 1 on rank 0"}
        assert names.get(how, "rank 1 has other training data than rank 0") in str(raised.value)

    @pytest.mark.slow
    def test_under_torchrun_too(self, tmp_path: Path) -> None:
        code, _, said = torchrun(2, *settings({**FIELDS, "out": tmp_path}), "--script", SCRIPT, "seed")
        assert code != 0
        assert "seed is 1 on rank 1 and 0 on rank 0" in said

    @pytest.mark.parametrize("how", ["same", "own"])
    def test_what_is_alike_trains(self, how: str, tmp_path: Path) -> None:
        assert run_script(RunConfig(workers=2, out=str(tmp_path), threads=1), SCRIPT, [how]) == 0


def test_the_comparison_draws_no_number() -> None:
    """Samples that are drawn look the same behind it as without it, whichever generator they are drawn from."""
    drawn = []
    for how in ("torch", "numpy", "python", "own"):
        dataset = apart.data(how).train
        torch.manual_seed(1), np.random.seed(1), random.seed(1)
        own = dataset.items.own.bit_generator.state  # type: ignore[attr-defined]
        before = [dataset.gather(np.arange(9))[0] for _ in range(2)]
        dataset.items.own.bit_generator.state = own  # type: ignore[attr-defined]
        torch.manual_seed(1), np.random.seed(1), random.seed(1)
        Digest.of(dataset)
        after = [dataset.gather(np.arange(9))[0] for _ in range(2)]
        drawn.append(all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    assert drawn == [True] * 4


def test_reading_a_large_or_slow_set_is_bounded() -> None:
    big = ArrayDataset(torch.zeros(2_000_000, 8), torch.zeros(2_000_000))
    began = time.monotonic()
    Digest.of(big)
    assert time.monotonic() - began < 1.0

    class Slow(apart.Watched):
        def gather(self, indices: np.ndarray, keys: np.ndarray | None = None) -> tuple[Any, Any]:
            time.sleep(0.02)
            return self.held.gather(indices, keys)

    found = Digest.of(Slow(big))
    assert 8 <= len(found.samples) <= BUDGET_S / 0.04 + 1

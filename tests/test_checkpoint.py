"""Checkpoints: whole or absent, and a resumed run equals the unbroken one."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import podium
from podium.checkpoint import find_checkpoint, folder_for, save_own, save_shared
from podium.errors import CheckpointError
from podium.strategies.all_reduce import AllReduce
from podium.strategies.base import Strategy
from podium.strategies.parameter_server import ParameterServer
from podium.strategies.solo import Solo
from tests.toys import (
    BATCH,
    SAMPLES,
    Trained,
    assert_close,
    assert_same_bits,
    dropout_model,
    everything_model,
    halve_every_third,
    hashes,
    toy,
    train,
    train_in,
    train_plainly,
)
from tests.worlds import Memory, Real, Virtual, World


def make(run_dir: Path, step: int, keep: int = 2, ranks: tuple[int, ...] = (0, 1)) -> Path:
    for rank in ranks:
        save_own(run_dir, step, rank, {"rng": torch.tensor([rank, step])})
    return save_shared(run_dir, step, {"position": step * 10, "x": torch.tensor([float(step)])}, ranks, keep)


class TestFolders:
    def test_what_was_saved_is_found(self, tmp_path: Path) -> None:
        make(tmp_path, 7)
        found = find_checkpoint(tmp_path)
        assert (found.step, found.position, found.members) == (7, 70, (0, 1))
        assert found.shared()["x"].tolist() == [7.0]
        own = found.own(1)
        assert own is not None and own["rng"].tolist() == [1, 7]
        assert found.own(2) is None
        assert find_checkpoint(found.path) == found

    def test_only_the_newest_are_kept(self, tmp_path: Path) -> None:
        for step in (1, 2, 10, 100):
            make(tmp_path, step, keep=2)
        assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000010", "step-00000100"]
        assert find_checkpoint(tmp_path).step == 100

    def test_a_partial_one_is_ignored(self, tmp_path: Path) -> None:
        make(tmp_path, 3)
        save_own(tmp_path, 4, 0, {"rng": torch.zeros(1)})  # killed before the others came
        assert (tmp_path / "checkpoints" / "step-00000004.partial").is_dir()
        assert find_checkpoint(tmp_path).step == 3

    def test_one_that_was_cut_short_is_ignored(self, tmp_path: Path) -> None:
        make(tmp_path, 3)
        make(tmp_path, 4)
        (folder_for(tmp_path, 4) / "checkpoint.json").unlink()
        assert find_checkpoint(tmp_path).step == 3

    def test_the_same_step_can_be_saved_again(self, tmp_path: Path) -> None:
        make(tmp_path, 3)
        make(tmp_path, 3, ranks=(0,))
        assert find_checkpoint(tmp_path).own(1) is None

    def test_nothing_to_find_is_an_error_that_says_where(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="nowhere: no such run"):
            find_checkpoint(tmp_path / "nowhere")
        with pytest.raises(CheckpointError, match="no whole checkpoint"):
            find_checkpoint(tmp_path)

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"step": 3}'])
    def test_a_damaged_description_is_a_checkpoint_error(self, text: str, tmp_path: Path) -> None:
        path = make(tmp_path, 3)
        (path / "checkpoint.json").write_text(text)
        with pytest.raises(CheckpointError, match="cannot be read"):
            find_checkpoint(path)

    def test_a_full_disk_is_a_checkpoint_error_and_leaves_the_last_one(self, tmp_path: Path) -> None:
        make(tmp_path, 3)
        (tmp_path / "checkpoints" / "step-00000004.partial").write_text("in the way")
        with pytest.raises(CheckpointError, match="cannot be written"):
            make(tmp_path, 4)
        assert find_checkpoint(tmp_path).step == 3


TASK = toy(model=everything_model, optimizer="adamw", schedule=halve_every_third, epochs=3)


def unbroken_and_resumed(
    world: World, strategy: Strategy[Any], workers: int, where: Path, at_step: int, resume_in: World | None = None
) -> tuple[list[Trained], list[Trained]]:
    """A run that saves every few steps, and one that begins at one of its checkpoints."""
    options: dict[str, Any] = {"checkpoint_every": 3, "keep_checkpoints": 10, "seed": 3}
    whole = train_in(world, TASK, strategy, workers, run_dir=where / "whole", **options)
    resume = str(folder_for(where / "whole", at_step))
    rest = train_in(resume_in or world, TASK, strategy, workers, run_dir=where / "rest", resume=resume, **options)
    return whole, rest


def assert_same_end(whole: list[Trained], rest: list[Trained]) -> None:
    for a, b in zip(whole, rest, strict=True):
        assert_same_bits(b.state, a.state)
        assert b.position == a.position
        for name, state in a.optimizer.items():
            assert_same_bits(b.optimizer[name], state)
    assert 0 < len(rest[0].losses) < len(whole[0].losses)


class TestResumed:
    @pytest.mark.parametrize("world", [Memory(), Virtual()], ids=lambda w: w.name)
    @pytest.mark.parametrize("strategy", [AllReduce(), ParameterServer(servers=2)], ids=lambda s: s.name)
    @pytest.mark.parametrize("at_step", [3, 9])
    def test_a_synchronous_run_equals_the_unbroken_one_bit_for_bit(
        self, world: World, strategy: Strategy[Any], at_step: int, tmp_path: Path
    ) -> None:
        whole, rest = unbroken_and_resumed(world, strategy, 3, tmp_path, at_step)
        assert_same_end(whole, rest)
        assert rest[0].losses == whole[0].losses[at_step:]

    def test_one_worker_equals_plain_pytorch_whatever_broke(self, tmp_path: Path) -> None:
        _, (mine,) = unbroken_and_resumed(Memory(), Solo(), 1, tmp_path, 6)
        assert_same_bits(mine.state, train_plainly(TASK, seed=3).state)

    def test_real_processes_equal_their_unbroken_run(self, tmp_path: Path) -> None:
        whole, rest = unbroken_and_resumed(Real(), AllReduce(), 2, tmp_path, 6)
        assert_same_end(whole, rest)

    def test_another_world_goes_on_with_the_same_bits(self, tmp_path: Path) -> None:
        whole, rest = unbroken_and_resumed(Memory(), AllReduce(), 3, tmp_path, 6, resume_in=Virtual())
        assert_same_end(whole, rest)

    def test_an_asynchronous_run_equals_the_unbroken_one_from_its_drained_barrier(self, tmp_path: Path) -> None:
        for servers in (1, 2):
            strategy = ParameterServer(mode="async", servers=servers)
            whole, rest = unbroken_and_resumed(Virtual(), strategy, 3, tmp_path / str(servers), 6)
            assert_same_end(whole, rest)

    @pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 4), (4, 1)])
    def test_on_another_number_of_workers_it_goes_on_from_the_same_position(
        self, before: int, after: int, tmp_path: Path
    ) -> None:
        task = toy(optimizer="adamw", schedule=halve_every_third)
        options: dict[str, Any] = {"checkpoint_every": 3, "keep_checkpoints": 10}
        train(task, AllReduce(), before, run_dir=tmp_path / "a", **options)
        resume = str(folder_for(tmp_path / "a", 3))
        rest = train(task, AllReduce(), after, run_dir=tmp_path / "b", resume=resume, **options)
        assert len(rest) == after
        assert len(hashes(rest)) == 1
        assert [row["position"] for row in rest[0].records if row["kind"] == "begin"] == [3 * BATCH]
        assert_close(rest[0].state, train_plainly(task).state)

    def test_under_another_strategy_it_goes_on_too(self, tmp_path: Path) -> None:
        task = toy(optimizer="adamw")
        train(task, ParameterServer(servers=3), 2, run_dir=tmp_path / "a", checkpoint_every=3, keep_checkpoints=10)
        resume = str(folder_for(tmp_path / "a", 3))
        rest = train(task, AllReduce(), 2, resume=resume)
        assert_same_bits(rest[0].state, train(task, AllReduce(), 2)[0].state)

    @pytest.mark.parametrize(
        "strategy", [AllReduce(), ParameterServer(servers=2), ParameterServer(mode="async")], ids=str
    )
    def test_a_stopped_run_goes_on_to_the_unbroken_result(self, strategy: Strategy[Any], tmp_path: Path) -> None:
        stop = threading.Event()
        task = toy(model=dropout_model, epochs=30)

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "progress":
                stop.set()

        options: dict[str, Any] = {"strategy": strategy, "workers": 2, "launcher": "threads", "eval_every": 0}
        cut = podium.train(task, run_dir=str(tmp_path / "cut"), on_event=on_event, stop=stop, **options)
        assert cut.status == "stopped"
        assert 0 < cut.samples < 30 * SAMPLES
        rest = podium.train(task, run_dir=str(tmp_path / "rest"), resume=cut.run_dir, **options)
        assert rest.status == "finished"
        assert cut.samples + rest.samples == 30 * SAMPLES
        if strategy.feed == "step":
            whole = podium.train(task, run_dir=str(tmp_path / "whole"), **options)
            assert rest.param_hash == whole.param_hash


class TestRefused:
    @pytest.fixture
    def saved(self, tmp_path: Path) -> Path:
        train(toy(), AllReduce(), 2, run_dir=tmp_path / "saved")
        return tmp_path / "saved"

    def resume(self, saved: Path, task: Any = None, **options: Any) -> None:
        train(task or toy(epochs=3), AllReduce(), 2, resume=str(saved), **options)

    def test_another_seed(self, saved: Path) -> None:
        with pytest.raises(CheckpointError, match="seed=0, this run has seed=9"):
            self.resume(saved, seed=9)

    def test_other_data(self, saved: Path) -> None:
        with pytest.raises(CheckpointError, match="samples=44"):
            self.resume(saved, toy(samples=50, epochs=3))

    def test_another_model(self, saved: Path) -> None:
        with pytest.raises(CheckpointError, match="does not fit task toy"):
            self.resume(saved, toy(model=dropout_model, epochs=3))

    def test_another_optimizer_family(self, saved: Path) -> None:
        """Momentum buffers mean nothing to AdamW."""
        with pytest.raises(CheckpointError, match="does not fit"):
            self.resume(saved, toy(optimizer="adamw", epochs=3))

    @pytest.mark.parametrize("keep", [0, 7, 100, -1])
    @pytest.mark.parametrize("name", ["shared.safetensors", "rank-1.safetensors"])
    def test_a_file_cut_short(self, saved: Path, name: str, keep: int) -> None:
        path = find_checkpoint(saved).path / name
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(CheckpointError):
            self.resume(saved)

    def test_a_missing_shared_file(self, saved: Path) -> None:
        (find_checkpoint(saved).path / "shared.safetensors").unlink()
        with pytest.raises(CheckpointError, match="cannot be read"):
            self.resume(saved)

    def test_no_checkpoint(self, saved: Path) -> None:
        shutil.rmtree(saved / "checkpoints")
        with pytest.raises(CheckpointError, match="no whole checkpoint"):
            self.resume(saved)


def test_keep_checkpoints_is_obeyed_by_a_run(tmp_path: Path) -> None:
    train(toy(), AllReduce(), 2, run_dir=tmp_path, checkpoint_every=2, keep_checkpoints=3)
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000006", "step-00000008"]
    assert (tmp_path / "model.safetensors").is_file()

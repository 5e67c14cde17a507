"""Checkpoints: whole or absent, and a resumed run equals the unbroken one."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR

import podium
from podium.comm.base import Communicator
from podium.config import RunConfig
from podium.engine.build import Job
from podium.engine.checkpoint import find_checkpoint, folder_for, save_own, save_shared
from podium.engine.files import load_tensors, load_tree, tree_to_bytes
from podium.errors import CheckpointError
from podium.records.recorder import Record
from podium.strategies.all_reduce import AllReduce
from podium.strategies.base import Strategy
from podium.strategies.local_sgd import LocalSGD
from podium.strategies.parameter_server import ParameterServer
from podium.strategies.solo import Solo
from podium.testing.toys import (
    BATCH,
    CLASSES,
    FEATURES,
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
    train_rank,
)
from podium.testing.worlds import Memory, Real, Virtual, World


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


def flip(path: Path, place: int = -1) -> None:
    """Turn one bit of a file over."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


FILES = ("shared.safetensors", "rank-0.safetensors", "rank-1.safetensors", "checkpoint.json")


class TestDamage:
    @pytest.mark.parametrize("name", FILES)
    def test_a_flipped_bit_in_any_file_is_refused(self, name: str, tmp_path: Path) -> None:
        path = make(tmp_path, 3)
        whole = (path / name).read_bytes()
        for place in range(0, len(whole), 7):
            flip(path / name, place)
            with pytest.raises(CheckpointError, match=name):
                find_checkpoint(path)
            (path / name).write_bytes(whole)
        find_checkpoint(path)

    @pytest.mark.parametrize("name", FILES[:3])
    def test_what_is_loaded_is_verified_too(self, name: str, tmp_path: Path) -> None:
        found = find_checkpoint(make(tmp_path, 3), verified=False)
        flip(found.path / name)
        with pytest.raises(CheckpointError, match=rf"{name}: damaged.*must have the checksum .*got "):
            found.shared() if name == "shared.safetensors" else found.own(int(name[5]))

    @pytest.mark.parametrize("name", FILES[:3])
    def test_a_missing_file_is_named_with_those_that_belong_there(self, name: str, tmp_path: Path) -> None:
        path = make(tmp_path, 3)
        (path / name).unlink()
        for verified in (True, False):
            with pytest.raises(CheckpointError, match=rf"{name} cannot be read: it is missing.*ranks 0, 1"):
                find_checkpoint(path, verified=verified)

    @pytest.mark.parametrize("name", FILES[:3])
    def test_a_file_of_another_checkpoint_is_refused(self, name: str, tmp_path: Path) -> None:
        one, other = make(tmp_path, 3), make(tmp_path, 4)
        shutil.copy(one / name, other / name)
        for verified in (True, False):
            with pytest.raises(CheckpointError, match=rf"{name}: not the file that was written with this checkpoint"):
                find_checkpoint(other, verified=verified)

    def test_a_file_of_another_rank_is_refused(self, tmp_path: Path) -> None:
        path = make(tmp_path, 3)
        shutil.copy(path / "rank-0.safetensors", path / "rank-1.safetensors")
        with pytest.raises(CheckpointError, match=r"rank-1.safetensors: not the file"):
            find_checkpoint(path)

    @pytest.mark.parametrize("name", FILES)
    def test_a_damaged_newest_one_is_passed_over_with_a_word(self, name: str, tmp_path: Path) -> None:
        make(tmp_path, 3)
        path = make(tmp_path, 10)
        flip(path / name, len((path / name).read_bytes()) // 2)
        found = find_checkpoint(tmp_path)
        assert found.step == 3
        (word,) = found.warnings
        assert "step-00000010 is damaged" in word
        assert str(path / name) in word or name in word
        assert "resuming from step 3 instead: 7 steps are lost" in word

    def test_where_all_are_damaged_each_is_named(self, tmp_path: Path) -> None:
        for step in (3, 4):
            flip(make(tmp_path, step) / "shared.safetensors")
        with pytest.raises(CheckpointError, match=r"(?s)no whole checkpoint.*step-00000004.*step-00000003"):
            find_checkpoint(tmp_path)

    def test_one_of_before_checksums_is_taken_with_a_word(self, tmp_path: Path) -> None:
        path = make_old(tmp_path, 3)
        found = find_checkpoint(tmp_path)
        assert (found.step, found.position, found.members) == (3, 30, (0, 1))
        assert found.shared()["x"].tolist() == [3.0]
        (word,) = found.warnings
        assert "step-00000003 has no checksums" in word
        (path / "rank-1.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"rank-1.safetensors cannot be read: it is missing"):
            find_checkpoint(path)

    def test_nothing_is_published_without_every_members_file(self, tmp_path: Path) -> None:
        save_own(tmp_path, 3, 0, {"rng": torch.zeros(1)})
        with pytest.raises(CheckpointError, match=r"step 3: the file of rank 1 must be there"):
            save_shared(tmp_path, 3, {"position": 0}, (0, 1), 2)
        assert not folder_for(tmp_path, 3).exists()

    def test_an_older_file_in_the_place_of_a_members_is_not_published(self, tmp_path: Path) -> None:
        """Left by an earlier try on this disk, while the member has written on another one."""
        parts = {rank: save_own(tmp_path, 3, rank, {"rng": torch.tensor([rank])}) for rank in (0, 1)}
        save_own(tmp_path, 3, 1, {"rng": torch.tensor([7])})
        with pytest.raises(CheckpointError, match=r"the file of rank 1 must be there"):
            save_shared(tmp_path, 3, {"position": 0}, (0, 1), 2, parts)

    def test_files_of_a_rank_that_is_no_member_are_not_in_it(self, tmp_path: Path) -> None:
        save_own(tmp_path, 3, 7, {"rng": torch.zeros(1)})  # lost over an earlier try
        assert sorted(p.name for p in make(tmp_path, 3).iterdir()) == sorted(FILES)

    def test_one_that_is_replaced_is_there_until_the_other_is(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make(tmp_path, 3, keep=1)
        rename = Path.replace

        def killed(self: Path, target: Path) -> Path:
            if self.name == "step-00000003.partial":
                raise KeyboardInterrupt
            return rename(self, target)

        monkeypatch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path, 3, keep=1)
        assert find_checkpoint(tmp_path).step == 3

    def test_a_run_folder_that_was_removed_is_not_made_anew(self, tmp_path: Path) -> None:
        run_dir = tmp_path / "gone"
        with pytest.raises(CheckpointError, match=r"gone: the run's folder was removed"):
            save_own(run_dir, 3, 0, {})
        assert not run_dir.exists()


def make_old(run_dir: Path, step: int) -> Path:
    """A checkpoint as it was before files had checksums."""
    path = make(run_dir, step)
    for file in path.glob("*.safetensors"):
        file.write_bytes(tree_to_bytes(load_tree(file)))
    facts = {"step": step, "position": step * 10, "members": [0, 1]}
    (path / "checkpoint.json").write_text(json.dumps(facts))
    return path


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

    @pytest.mark.slow
    def test_real_processes_equal_their_unbroken_run(self, tmp_path: Path) -> None:
        whole, rest = unbroken_and_resumed(Real(), AllReduce(), 2, tmp_path, 6)
        assert_same_end(whole, rest)

    def test_another_world_goes_on_with_the_same_bits(self, tmp_path: Path) -> None:
        whole, rest = unbroken_and_resumed(Memory(), AllReduce(), 3, tmp_path, 6, resume_in=Virtual())
        assert_same_end(whole, rest)

    @pytest.mark.slow
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
        if strategy.cadence.feed == "step":
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


# Hosts that share no disk.


def train_on_hosts(comm: Communicator, job: Job) -> Trained | list[Record]:
    """Every rank has a folder of its own, as on hosts with a disk each."""
    assert job.run_dir is not None
    return train_rank(comm, dataclasses.replace(job, run_dir=job.run_dir / f"host-{comm.rank}"))


def run_on_hosts(world: World, where: Path, workers: int, **config: Any) -> list[Trained]:
    settings = RunConfig(task="toy", workers=workers, eval_every=0, **config)
    job = Job(settings, TASK, AllReduce(), where, task_is_named=False)
    return world.run(partial(train_on_hosts, job=job), workers)


@pytest.mark.slow
@pytest.mark.parametrize("world", [Memory(), Real()], ids=lambda world: world.name)
def test_hosts_without_a_common_disk_send_their_parts_to_the_first(world: World, tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint_every": 3, "keep_checkpoints": 10}
    whole = run_on_hosts(world, tmp_path, 2, **options)
    found = find_checkpoint(folder_for(tmp_path / "host-0", 3))
    assert found.members == (0, 1)
    own = found.own(1)
    assert own is not None
    assert own["buffers"]
    assert list((tmp_path / "host-1" / "checkpoints").iterdir()) == []
    rest = train_in(world, TASK, AllReduce(), 2, run_dir=tmp_path / "rest", resume=str(found.path), **options)
    assert_same_bits(rest[1].state, whole[1].state)


def test_hosts_that_would_resume_from_different_checkpoints_are_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint_every": 3, "keep_checkpoints": 10}
    train_in(Memory(), TASK, AllReduce(), 2, run_dir=tmp_path / "a", **options)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    flip(find_checkpoint(tmp_path / "b").path / "shared.safetensors")

    def resume(comm: Communicator) -> Any:
        settings = RunConfig(task="toy", workers=2, eval_every=0, resume=str(tmp_path / "ab"[comm.rank]))
        return train_rank(comm, Job(settings, TASK, AllReduce(), None, task_is_named=False))

    outcomes = Memory().attempt(resume, 2)
    assert "all workers must resume from one checkpoint, got step 9" in str(outcomes[1])


# State that cannot be saved, or could not once.


class Extra(nn.Module):
    """A layer with state of its own."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.linear, self.value = nn.Linear(FEATURES, CLASSES), value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


EXTRA = {"calls": 3, "table": np.arange(4, dtype=np.uint16), "blob": b"abc", "t": torch.ones(2), "f": np.float32(0.1)}


@pytest.mark.parametrize("strategy", [Solo(), AllReduce(), LocalSGD(period=2), ParameterServer(servers=1)], ids=str)
def test_extra_state_of_plain_values_is_saved_and_resumed(strategy: Strategy[Any], tmp_path: Path) -> None:
    workers = 1 if isinstance(strategy, Solo) else 2
    task = toy(model=partial(Extra, EXTRA))
    train(task, strategy, workers, run_dir=tmp_path / "a", checkpoint_every=4)
    fresh = toy(model=partial(Extra, {"calls": 0}), epochs=3)
    rest = train(fresh, strategy, workers, run_dir=tmp_path / "b", resume=str(tmp_path / "a"))
    for trained in rest:
        back = trained.state["_extra_state"]
        assert back["calls"] == 3
        assert np.array_equal(back["table"], EXTRA["table"])
        assert back["blob"] == b"abc"
        assert type(back["f"]) is np.float32
    saved = load_tensors(tmp_path / "b" / "model.safetensors")
    assert saved["_extra_state"]["calls"] == 3


def numpy_groups(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=np.float32(0.1), momentum=np.float64(0.9))


def numpy_schedule(optimizer: Optimizer, steps: int) -> LRScheduler:
    return StepLR(optimizer, step_size=np.int64(3), gamma=np.float32(0.5))


def test_numpy_scalars_in_groups_and_schedules_resume_bit_for_bit(tmp_path: Path) -> None:
    task = dataclasses.replace(toy(epochs=3), optimizer=numpy_groups, schedule=numpy_schedule)
    options: dict[str, Any] = {"checkpoint_every": 4, "keep_checkpoints": 10}
    whole = train(task, AllReduce(), 2, run_dir=tmp_path / "a", **options)
    rest = train(task, AllReduce(), 2, run_dir=tmp_path / "b", resume=str(folder_for(tmp_path / "a", 4)), **options)
    assert_same_bits(rest[0].state, whole[0].state)
    assert [type(group["lr"]) for group in rest[0].groups] == [type(group["lr"]) for group in whole[0].groups]


class OddBuffers(nn.Module):
    """Buffers of types that few models have; one is not in the state dict, but is a worker's own all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("u16", torch.tensor([7, 65535], dtype=torch.uint16))
        self.register_buffer("f8", torch.ones(3).to(torch.float8_e4m3fn))
        self.register_buffer("c128", torch.tensor([1 + 2j], dtype=torch.complex128))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("hidden", torch.tensor([3 - 1j], dtype=torch.complex128), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_buffers_of_unusual_types_are_saved_and_resumed(tmp_path: Path) -> None:
    task = toy(model=OddBuffers)
    first = train(task, AllReduce(), 1, run_dir=tmp_path / "a")
    rest = train(task, AllReduce(), 1, run_dir=tmp_path / "b", resume=str(tmp_path / "a"))
    for name in ("u16", "f8", "c128", "mask"):
        assert rest[0].state[name].dtype == first[0].state[name].dtype
        assert rest[0].state[name].tolist() == first[0].state[name].tolist()


class Common(SGD):
    """Keeps something for all parameters together, beside what it keeps for each."""

    def step(self, closure: Any = None) -> Any:
        self.state["calls"] = {"count": self.state.get("calls", {"count": 0})["count"] + 1}
        return super().step(closure)


def common(model: nn.Module) -> Optimizer:
    return Common(model.parameters(), lr=0.1, momentum=0.9)


def test_what_an_optimizer_keeps_for_all_parameters_is_saved_and_resumed(tmp_path: Path) -> None:
    task = dataclasses.replace(toy(), optimizer=common)
    train(task, AllReduce(), 2, run_dir=tmp_path / "a")
    assert find_checkpoint(tmp_path / "a").shared()["optimizer_common"] == {"calls": {"count": 8}}
    longer = dataclasses.replace(toy(epochs=3), optimizer=common)
    train(longer, AllReduce(), 2, run_dir=tmp_path / "b", resume=str(tmp_path / "a"))
    assert find_checkpoint(tmp_path / "b").shared()["optimizer_common"] == {"calls": {"count": 12}}


class Late(SGD):
    """Comes to hold what cannot be saved, in its first step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["history"] = object()
        return super().step(closure)


def late(model: nn.Module) -> Optimizer:
    return Late(model.parameters(), lr=0.1)


class Held(StepLR):
    """A schedule with an object in it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.inner = SimpleNamespace(warm=3)
        super().__init__(optimizer, 3)


def held(optimizer: Optimizer, steps: int) -> LRScheduler:
    return Held(optimizer)


UNSAVABLE: dict[str, tuple[dict[str, Any], str, int]] = {
    "extra state": ({"model": partial(Extra, object())}, r"model/_extra_state: a object cannot be saved", 0),
    "inside extra state": ({"model": partial(Extra, {"a": [object()]})}, r"model/_extra_state/a/0: a object", 0),
    "schedule": ({"schedule": held}, r"schedule/inner: a SimpleNamespace cannot be saved", 0),
    "optimizer": ({"optimizer": late}, r"optimizer/0.weight/history: a object cannot be saved", 1),
}


@pytest.mark.parametrize(("parts", "message", "steps"), UNSAVABLE.values(), ids=UNSAVABLE.keys())
@pytest.mark.parametrize("kept", ["saved", "survives a loss"])
def test_state_that_cannot_be_saved_is_refused_before_it_costs_anything(
    parts: dict[str, Any], message: str, steps: int, kept: str, tmp_path: Path
) -> None:
    """As soon as it is there: before the first step, or after it where the first step makes it."""
    done: list[int] = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if outputs.requires_grad:  # not where the loss is only tried
            done.append(1)
        return cross_entropy(outputs, targets)

    task = dataclasses.replace(toy(epochs=5), loss=loss, **parts)
    with pytest.raises(CheckpointError, match=rf"the state of this run cannot be saved.*{message}"):
        train(task, AllReduce(), 2, run_dir=tmp_path / "run" if kept == "saved" else None)
    assert len(done) <= 2 * steps


def test_keep_checkpoints_is_obeyed_by_a_run(tmp_path: Path) -> None:
    train(toy(), AllReduce(), 2, run_dir=tmp_path, checkpoint_every=2, keep_checkpoints=3)
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000006", "step-00000008"]
    assert (tmp_path / "model.safetensors").is_file()

"""Contracts of strategies. The tests of a strategy subclass a contract and supply `strategy`.

StrategyContract       any strategy
OneWorkerContract      … whose single worker trains as plain PyTorch does
SynchronousContract    … whose N workers train as one process does at the same global batch
RoundsContract         … whose workers take local steps and sync at the end of a round
BetweenRoundsContract  … and whose state outlives a checkpoint between two rounds
ClippingContract, SynchronousClippingContract    … that clip by the norm of the whole gradient
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from podium.comm.base import Communicator
from podium.config import RunConfig
from podium.engine.build import Job
from podium.engine.checkpoint import folder_for
from podium.engine.training import Training
from podium.errors import ConfigError
from podium.records.recorder import Recorder
from podium.strategies.base import Strategy
from podium.testing.toys import (
    OPTIMIZERS,
    UNUSUAL,
    Alike,
    Branching,
    Half,
    Uncontrolled,
    assert_alike,
    assert_close,
    assert_same_bits,
    batch_norm_model,
    dropout_model,
    everything_model,
    halve_every_third,
    hashes,
    samples_used,
    toy,
    train,
    train_in,
    train_plainly,
    two_groups,
)
from podium.testing.worlds import Memory, Real, Virtual, World


class StrategyContract:
    """Any strategy: it trains in all three worlds, replicas end alike, every sample is used once per epoch."""

    workers = 3

    @pytest.fixture
    def processes(self) -> World:
        """Override where ranks need more than gloo and sockets on this host."""
        return Real()

    def test_the_strategy_has_a_name(self, strategy: Strategy[Any]) -> None:
        assert isinstance(strategy.name, str), "messages and checkpoints name the strategy: name: ClassVar[str] = …"

    def test_replicas_are_alike_at_the_end(self, strategy: Strategy[Any]) -> None:
        assert len(hashes(train(toy(optimizer="adamw"), strategy, self.workers))) == 1

    def test_every_sample_is_used_once_per_epoch(self, strategy: Strategy[Any]) -> None:
        trained = train(toy(), strategy, self.workers)
        assert samples_used(trained) == trained[0].position == 2 * 44

    def test_a_model_is_learnt(self, strategy: Strategy[Any]) -> None:
        losses = train(toy(epochs=12), strategy, self.workers)[0].losses
        assert sum(losses[-4:]) < 0.8 * sum(losses[:4])

    def test_a_frozen_parameter_does_not_move(self, strategy: Strategy[Any]) -> None:
        task = toy(model=UNUSUAL["frozen"])
        torch.manual_seed(0)
        name, before = next(iter(task.model().state_dict().items()))
        for worker in train(task, strategy, self.workers):
            assert torch.equal(worker.state[name], before)

    def test_virtual_time_gives_the_same_bits_and_records_every_time(self, strategy: Strategy[Any]) -> None:
        task = toy(model=dropout_model)
        first, again = (train_in(_virtual(strategy), task, strategy, self.workers) for _ in range(2))
        assert hashes(first) == hashes(again)
        assert [worker.records for worker in first] == [worker.records for worker in again]

    def test_it_trains_on_real_processes(self, strategy: Strategy[Any], processes: World) -> None:
        trained = train_in(processes, toy(), strategy, self.workers)
        assert len(hashes(trained)) == 1
        assert samples_used(trained) == 2 * 44


def _virtual(strategy: Strategy[Any]) -> Virtual:
    return Virtual(colocated=strategy.server_spec.colocated)


class OneWorkerContract:
    """One worker under any strategy equals plain PyTorch, bit for bit."""

    most_workers = 2

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_one_worker_equals_plain_pytorch_bit_for_bit(self, strategy: Strategy[Any], optimizer: str) -> None:
        task = toy(optimizer=optimizer)
        plain, (mine,) = train_plainly(task), train(task, strategy)
        assert_same_bits(mine.state, plain.state)
        assert mine.report.param_hash == plain.param_hash
        assert mine.losses == pytest.approx(plain.losses, rel=1e-6)

    @pytest.mark.parametrize("model", UNUSUAL)
    def test_one_worker_equals_plain_pytorch_for_any_model(self, strategy: Strategy[Any], model: str) -> None:
        task = toy(model=UNUSUAL[model], optimizer="adamw")
        assert_same_bits(train(task, strategy)[0].state, train_plainly(task).state)

    def test_one_worker_equals_plain_pytorch_with_schedule_and_groups(self, strategy: Strategy[Any]) -> None:
        task = toy(optimizer=two_groups, schedule=halve_every_third)
        assert_same_bits(train(task, strategy)[0].state, train_plainly(task).state)

    def test_one_worker_equals_plain_pytorch_with_dropout_and_batch_norm(self, strategy: Strategy[Any]) -> None:
        task = toy(model=everything_model, optimizer="adamw")
        assert_same_bits(train(task, strategy, seed=5)[0].state, train_plainly(task, seed=5).state)

    def test_one_worker_equals_plain_pytorch_under_autocast(self, strategy: Strategy[Any]) -> None:
        task = toy(autocast="bf16")
        plain = train_plainly(task)
        assert plain.param_hash != train_plainly(toy()).param_hash, "nothing was cast"
        assert_same_bits(train(task, strategy)[0].state, plain.state)

    def test_a_parameter_that_nobody_uses_does_not_move(self, strategy: Strategy[Any]) -> None:
        task = toy(model=UNUSUAL["unused"], optimizer="adamw")
        torch.manual_seed(0)
        before = task.model().state_dict()
        for worker in train(task, strategy, self.most_workers):
            assert torch.equal(worker.state["spare.weight"], before["spare.weight"])
            assert not torch.equal(worker.state["first.weight"], before["first.weight"])

    def test_optimizer_state_comes_home(self, strategy: Strategy[Any]) -> None:
        task = toy(optimizer="adamw", model=UNUSUAL["scalar"])
        plain, (mine,) = train_plainly(task), train(task, strategy)
        kept = plain.optimizer.state_dict()["state"]
        names = list(dict(task.model().named_parameters()))
        assert mine.optimizer.keys() == set(names)
        for i, name in enumerate(names):
            assert_same_bits(mine.optimizer[name], kept[i])


class SynchronousContract(OneWorkerContract):
    """N workers equal one process at the same global batch; all replicas agree, whichever worker is faster."""

    @pytest.mark.parametrize("workers", [2, 3, 4])
    @pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
    def test_several_workers_equal_one_process(self, strategy: Strategy[Any], workers: int, optimizer: str) -> None:
        task = toy(optimizer=optimizer)
        plain, trained = train_plainly(task), train(task, strategy, workers)
        assert len(hashes(trained)) == 1
        assert_close(trained[0].state, plain.state)

    @pytest.mark.parametrize("shares", [(5, 1, 1, 3), (1, 0, 1), (0, 1), (7.5, 2.5)])
    def test_uneven_shares_equal_one_process(self, strategy: Strategy[Any], shares: tuple[float, ...]) -> None:
        task = toy()
        trained = train(task, strategy, len(shares), shares=shares)
        assert len(hashes(trained)) == 1
        assert_close(trained[-1].state, train_plainly(task).state)

    @pytest.mark.parametrize("micro_batches", [2, 3, 5])
    def test_accumulation_equals_one_large_batch(self, strategy: Strategy[Any], micro_batches: int) -> None:
        task = toy(accumulate=micro_batches)
        for workers in (1, 2):
            assert_close(train(task, strategy, workers)[0].state, train_plainly(toy()).state)

    @pytest.mark.parametrize("model", UNUSUAL)
    def test_several_workers_equal_one_process_for_any_model(self, strategy: Strategy[Any], model: str) -> None:
        task = toy(model=UNUSUAL[model], optimizer="adamw")
        trained = train(task, strategy, 3)
        assert len(hashes(trained)) == 1
        assert_close(trained[0].state, train_plainly(task).state)

    def test_a_parameter_that_only_some_ranks_use_moves_as_in_one_process(self, strategy: Strategy[Any]) -> None:
        task = toy(model=Branching, optimizer="adamw")
        plain = train_plainly(task)
        steps = plain.optimizer.state_dict()["state"]
        assert steps[2]["step"] < steps[0]["step"], "the branch must be unused in some steps, or this shows nothing"
        trained = train(task, strategy, 4)
        assert len(hashes(trained)) == 1
        assert_close(trained[0].state, plain.state)

    def test_replicas_are_alike_in_all_that_they_are_made_of(self, strategy: Strategy[Any]) -> None:
        trained = train(toy(model=Alike), strategy, 3)
        assert len(hashes(trained)) == 1
        for other in trained[1:]:
            assert_same_bits(other.state, trained[0].state)

    def test_the_mean_loss_of_the_workers_is_that_of_the_step(self, strategy: Strategy[Any]) -> None:
        task = toy()
        plain, trained = train_plainly(task), train(task, strategy, 3, shares=(2, 1, 1))
        rows = [[row for row in worker.records if row["kind"] == "step"] for worker in trained]
        for step, expected in enumerate(plain.losses):
            parts = [(row[step]["samples"], row[step]["loss"]) for row in rows]
            mean = sum(n * loss for n, loss in parts) / sum(n for n, _ in parts)
            assert mean == pytest.approx(expected, rel=1e-5)

    def test_every_sample_is_used_once_per_epoch(self, strategy: Strategy[Any]) -> None:
        trained = train(toy(), strategy, 3)
        used = [row["samples"] for worker in trained for row in worker.records if row["kind"] == "step"]
        assert sum(used) == trained[0].position == 2 * 44

    def test_the_same_seed_gives_the_same_bits_however_threads_race(self, strategy: Strategy[Any]) -> None:
        task = toy(model=dropout_model)
        first, again = train(task, strategy, 3, seed=4), train(task, strategy, 3, seed=4)
        assert hashes(first) == hashes(again)
        assert hashes(first) != hashes(train(task, strategy, 3, seed=5))

    @pytest.mark.parametrize("model", [dropout_model, batch_norm_model])
    def test_threads_and_virtual_time_give_the_same_bits(self, strategy: Strategy[Any], model: Any) -> None:
        task = toy(model=model, optimizer="adamw", schedule=halve_every_third)
        threads = train(task, strategy, 3)
        virtual = train_in(_virtual(strategy), task, strategy, 3)
        for a, b in zip(threads, virtual, strict=True):
            assert_same_bits(a.state, b.state)

    def test_two_real_processes_give_the_bits_of_two_threads(self, strategy: Strategy[Any]) -> None:
        task = toy(model=everything_model, optimizer="adamw", schedule=halve_every_third)
        threads, processes = train(task, strategy, 2), train_in(Real(), task, strategy, 2)
        for a, b in zip(threads, processes, strict=True):
            assert_same_bits(a.state, b.state)

    def test_dropout_draws_differ_from_rank_to_rank(self, strategy: Strategy[Any]) -> None:
        """Otherwise N workers would all drop the same units, and averaging would not reduce the noise."""
        task = toy(model=dropout_model, samples=12, epochs=1)
        one, two = train(task, strategy, 2, shares=(1, 0)), train(task, strategy, 2, shares=(0, 1))
        assert one[0].losses != two[1].losses
        plain = train_plainly(task)
        assert one[0].losses == pytest.approx(plain.losses), "the first worker must draw from the seed's own stream"


class ClippingContract:
    """For strategies that can clip by the norm of the whole gradient."""

    def test_one_worker_equals_plain_pytorch_with_clipping(self, strategy: Strategy[Any]) -> None:
        task = toy(clip_norm=0.05)
        plain = train_plainly(task)
        assert plain.param_hash != train_plainly(toy()).param_hash, "nothing was clipped"
        assert_same_bits(train(task, strategy)[0].state, plain.state)


class SynchronousClippingContract(ClippingContract):
    def test_several_workers_clip_as_one_process_does(self, strategy: Strategy[Any]) -> None:
        task = toy(clip_norm=0.05)
        trained = train(task, strategy, 3, shares=(3, 1, 2))
        assert len(hashes(trained)) == 1
        assert_close(trained[0].state, train_plainly(task).state)


class RoundsContract:
    """For strategies whose workers take local steps and sync at the end of a round."""

    @pytest.fixture
    def for_two_workers(self, strategy: Strategy[Any]) -> Strategy[Any]:
        """The strategy for two workers; override where its options name another number."""
        return strategy

    @pytest.mark.parametrize(
        ("model", "optimizer"),
        [(UNUSUAL["scalar"], "adamw"), (UNUSUAL["two-dtypes"], "momentum"), (Branching, "adamw"), (Half, "momentum")],
    )
    def test_replicas_are_alike_at_the_end_and_every_sample_is_used_once(
        self, strategy: Strategy[Any], model: Callable[[], nn.Module], optimizer: str
    ) -> None:
        trained = train(toy(model=model, optimizer=optimizer), strategy, 3)
        assert_alike(trained)
        assert samples_used(trained) == trained[0].position == 2 * 44

    def test_the_cadence_says_that_there_are_rounds(self, strategy: Strategy[Any]) -> None:
        assert strategy.cadence.by_rounds, "workers take local steps: declare cadence = Cadence(every='round')"

    def test_a_worker_without_samples_is_like_the_others_in_the_end(self, strategy: Strategy[Any]) -> None:
        if strategy.cadence.feed == "step":
            assert_alike(train(toy(optimizer="adamw"), strategy, 3, shares=(1, 0, 2)))
        assert_alike(train(toy(samples=25), strategy, 3))  # the last step of an epoch has one sample

    def test_a_parameter_that_nobody_uses_does_not_move(self, strategy: Strategy[Any]) -> None:
        task = toy(model=UNUSUAL["unused"], optimizer="adamw")
        torch.manual_seed(0)
        before = task.model().state_dict()
        for worker in train(task, strategy, 3):
            assert torch.equal(worker.state["spare.weight"], before["spare.weight"])
            assert not torch.equal(worker.state["first.weight"], before["first.weight"])

    def test_threads_and_virtual_time_give_the_same_bits_every_time(self, strategy: Strategy[Any]) -> None:
        task = toy(model=everything_model, optimizer="adamw", schedule=halve_every_third)
        threads, virtual = train(task, strategy, 3), train_in(Virtual(), task, strategy, 3)
        for a, b in zip(threads, virtual, strict=True):
            assert_same_bits(a.state, b.state)
        again = train(task, strategy, 3)
        assert hashes(threads) == hashes(again)
        assert hashes(threads) != hashes(train(task, strategy, 3, seed=5))

    def test_two_real_processes_give_the_bits_of_two_threads(self, for_two_workers: Strategy[Any]) -> None:
        task = toy(model=everything_model, optimizer="adamw", schedule=halve_every_third)
        threads, processes = train(task, for_two_workers, 2), train_in(Real(), task, for_two_workers, 2)
        for a, b in zip(threads, processes, strict=True):
            assert_same_bits(a.state, b.state)

    @pytest.mark.parametrize("codec", ["dense", "top-k:ratio=0.2"])
    def test_a_run_resumed_in_mid_round_equals_the_unbroken_one(
        self, strategy: Strategy[Any], codec: str, tmp_path: Path
    ) -> None:
        task = toy(model=everything_model, optimizer="adamw", schedule=halve_every_third, epochs=3)
        options: dict[str, Any] = {"checkpoint_every": 3, "keep_checkpoints": 10, "codec": codec}
        whole = train_in(Memory(), task, strategy, 3, run_dir=tmp_path / "whole", **options)
        resume = str(folder_for(tmp_path / "whole", 6))
        rest = train_in(Memory(), task, strategy, 3, run_dir=tmp_path / "rest", resume=resume, **options)
        assert_alike(rest)
        for a, b in zip(whole, rest, strict=True):
            assert_same_bits(b.state, a.state)
            for name, state in a.optimizer.items():
                assert_same_bits(b.optimizer[name], state)
        assert 0 < len(rest[0].losses) < len(whole[0].losses)

    @pytest.mark.parametrize("codec", ["int8", "random-k:ratio=0.3", "power-sgd:min_rate=1"])
    def test_any_codec_leaves_the_replicas_alike(self, strategy: Strategy[Any], codec: str) -> None:
        assert_alike(train(toy(), strategy, 3, codec=codec))

    def test_a_codec_that_wants_gradients_is_refused(self, strategy: Strategy[Any]) -> None:
        with pytest.raises(ConfigError, match="no gradients are sent"):
            train(toy(), strategy, 3, codec="dgc")


class BetweenRoundsContract:
    """State such as outer momentum outlives a segment: a checkpoint between two rounds changes nothing."""

    period: int
    """Steps of a round. Set it in the subclass."""

    def test_a_checkpoint_between_two_rounds_changes_nothing(self, strategy: Strategy[Any], tmp_path: Path) -> None:
        task = toy(optimizer="sgd", epochs=3)
        unbroken = train(task, strategy, 3)
        saved = train_in(Memory(), task, strategy, 3, run_dir=tmp_path, checkpoint_every=self.period)
        for a, b in zip(unbroken, saved, strict=True):
            assert_same_bits(b.state, a.state)

    def test_a_segment_begins_with_the_state_that_the_last_one_left(self, strategy: Strategy[Any]) -> None:
        """`init` must not overwrite `worker.strategy_state`, which a checkpoint holds: here one in mid-round."""
        config = RunConfig(task="toy", workers=3, eval_every=0, steps=self.period + 1)
        job = Job(config, toy(optimizer="sgd", epochs=3), strategy, None, task_is_named=False)
        for left, found in Memory().run(partial(_begin_again, job=job), 3):
            assert found.keys() == left.keys(), "the next segment's init changed worker.strategy_state"
            for name, flats in left.items():
                assert all(map(torch.equal, found[name], flats)), f"init has overwritten strategy_state[{name!r}]"


def _begin_again(comm: Communicator, job: Job) -> tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]:
    """The strategy's state when a run has ended, and after the `init` of a segment that follows."""
    training = Training(job, comm, Recorder(comm.rank), Uncontrolled())
    training.run()
    state = training.worker.strategy_state
    left = {name: [flat.clone() for flat in flats] for name, flats in state.items()}
    job.strategy.init(training.worker)
    return left, state

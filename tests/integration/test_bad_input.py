"""What cannot work ends with a clear error, in time, with its records kept and no process left behind."""

from __future__ import annotations

import contextlib
import gzip
import os
import socket
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import podium
from podium.data.base import ArrayDataset, Data
from podium.engine.checkpoint import find_checkpoint
from podium.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DeadlineExceeded,
    Lost,
    RankFailed,
    RecordError,
    TrainingError,
    UnknownName,
)
from podium.records.recorder import read_records
from podium.task import Task
from podium.testing import faults
from podium.testing.faults import TASK, Faults
from tests.integration.processes import document, finish, free_port, start
from tests.integration.processes import podium as cli
from tests.integration.runs import FIELDS, records_of, train

FAULTS = Path(faults.__file__)


# Names and values.

UNKNOWN = {
    "task": ({"task": "digits-mpl"}, "digits-mlp"),
    "strategy": ({"strategy": "all-reduse"}, "all-reduce"),
    "option of the strategy": ({"strategy": "parameter-server:server=2"}, "servers"),
    "value of the strategy": ({"strategy": "parameter-server:mode=asynk"}, "async"),
    "option of the task": ({"task_options": {"lrr": 0.1}}, "lr"),
    "launcher": ({"launcher": "lokal"}, "local"),
    "key": ({"chekpoint_every": 5}, "checkpoint_every"),
    "function": ({"task": f"{FAULTS}:smal"}, "small"),
}


@pytest.mark.parametrize(("asked", "near"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_an_unknown_name_comes_with_the_known_ones_and_the_nearest(
    tmp_path: Path, asked: dict[str, Any], near: str
) -> None:
    with pytest.raises(UnknownName, match=rf"(?s)Did you mean '{near}'\?.*Known: .*{near}"):
        podium.train(**{"task": "digits-mlp", "out": tmp_path, **asked})
    assert not os.listdir(tmp_path)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "workers": ({"workers": 0}, "workers must be at least 1, got 0"),
    "text for a number": ({"workers": "two"}, "workers must be a whole number, got 'two'"),
    "epochs": ({"epochs": 0}, "epochs must be at least 1, got 0"),
    "deadline": ({"deadline_s": -1}, "deadline_s must be above 0, got -1"),
    "shares": ({"workers": 2, "shares": (1.0,)}, r"shares must be one number per worker \(2\)"),
    "servers": ({"strategy": "parameter-server:servers=0"}, "servers must be at least 1, got 0"),
    "colocated": ({"strategy": "parameter-server:servers=3,placement=colocated"}, "need a worker each"),
    "solo": ({"strategy": "solo", "workers": 2}, "solo runs with 1 worker, got workers=2"),
    "cluster": ({"launcher": "shaped"}, "needs a cluster file"),
    "file": ({"task": "nowhere.py:make"}, "nowhere.py: no such file"),
    "module": ({"task": "no.such.module:make"}, "no module"),
    "device": ({"device": "tpu"}, "device must be"),
    "batch smaller than workers": ({"workers": 2, "batch_size": 1}, "at least one sample per worker"),
}


@pytest.mark.parametrize(("asked", "said"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_value_is_refused_with_what_must_hold_and_what_came(
    tmp_path: Path, asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        podium.train(**{"task": "digits-mlp", "out": tmp_path, **asked})


# Data.


def idx(kind: int, array: np.ndarray) -> bytes:
    sizes = b"".join(n.to_bytes(4, "big") for n in array.shape)
    return bytes([0, 0, kind, array.ndim]) + sizes + array.tobytes()


IMAGES = idx(8, np.zeros((40, 28, 28), dtype=np.uint8))
LABELS = idx(8, np.zeros(40, dtype=np.uint8))
DAMAGED: dict[str, tuple[str, bytes]] = {
    "truncated": ("train-images-idx3-ubyte", IMAGES[:-100]),
    "not what it claims": ("train-images-idx3-ubyte", b"\x89PNG" + IMAGES),
    "empty": ("train-labels-idx1-ubyte", b""),
    "a label too many": ("train-labels-idx1-ubyte", idx(8, np.zeros(41, dtype=np.uint8))),
    "truncated gzip": ("train-images-idx3-ubyte.gz", gzip.compress(os.urandom(5000))[:-200]),
}


@pytest.mark.parametrize(("name", "content"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_data_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for part in ("train", "t10k"):
        (folder / f"{part}-images-idx3-ubyte").write_bytes(IMAGES)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(LABELS)
    (folder / name.removesuffix(".gz")).unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=name.split("-")[1]):
        podium.train("mnist-lenet5", data_dir=str(folder), workers=2, steps=1, out=tmp_path, **FIELDS)


def with_samples(train_count: int, test_count: int) -> Task:
    def data() -> Data:
        parts = [ArrayDataset(torch.zeros(n, 6), torch.zeros(n, 2)) for n in (train_count, test_count)]
        return Data(*parts)

    return Task(
        name="few",
        model=lambda: torch.nn.Linear(6, 2),
        data=data,
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    )


def test_too_few_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must not be empty, got 0 and 5"):
        podium.train(with_samples(0, 5), launcher="threads", out=tmp_path)
    with pytest.raises(DataError, match="must not be empty, got 5 and 0"):
        podium.train(with_samples(5, 0), launcher="threads", out=tmp_path)
    with pytest.raises(ConfigError, match="3 workers need at least 3 samples, got 2"):
        podium.train(with_samples(2, 5), launcher="threads", workers=3, out=tmp_path)


# A rank that fails.


@pytest.mark.parametrize("strategy", ["all-reduce", "parameter-server", "parameter-server:mode=async"])
def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path, strategy: str) -> None:
    with pytest.raises(TrainingError, match=r"^rank \d: the loss became (nan|inf) at step \d+") as caught:
        train(tmp_path, strategy=strategy, workers=2, task_options={"lr": 1e9})
    assert "clip gradients" in str(caught.value)
    assert records_of(only_run(tmp_path), "step")


@pytest.mark.parametrize(("where", "step"), [("model", 1), ("data", 1), ("loss", 5), ("validation", 1)])
@pytest.mark.parametrize("strategy", ["all-reduce", "parameter-server"])
def test_the_users_own_error_and_its_place_are_what_is_shown(
    tmp_path: Path, strategy: str, where: str, step: int
) -> None:
    with pytest.raises(RankFailed) as caught:
        train(tmp_path, Faults().and_then("raise", 0, step, where), strategy=strategy, workers=2)
    line = next(n for n, text in enumerate(FAULTS.read_text().splitlines(), 1) if "the user's own mistake" in text)
    assert str(caught.value).splitlines() == [
        "rank 0: ValueError: the user's own mistake",
        f"  at {FAULTS}:{line} in _raise",
        f"  records and logs: {only_run(tmp_path)}",
    ]
    (failed,) = records_of(only_run(tmp_path), "failed")
    assert (failed["failed"], failed["error"]) == (0, "ValueError")


def test_what_is_refused_inside_a_rank_keeps_its_exit_code(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^rank 1: this task needs nothing: pip install 'podium\[more\]'") as caught:
        train(tmp_path, Faults().and_then("refuse", 1, where="data"), workers=2)
    assert caught.value.exit_code == 2


def test_an_error_after_a_checkpoint_comes_with_the_command_that_goes_on(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        train(tmp_path, Faults().and_then("raise", 1, 15), workers=2, checkpoint_every=10)
    run_dir = only_run(tmp_path)
    assert str(caught.value).splitlines()[-1] == f"  resume from the last checkpoint: podium train --resume {run_dir}"
    assert find_checkpoint(run_dir).step == 10


def test_a_worker_that_exits_is_lost_and_says_how(tmp_path: Path) -> None:
    result = train(tmp_path / "a", Faults().and_then("exit", 1, 9), workers=3)
    assert result.lost == [1]
    assert "exit code 3" in records_of(result.run_dir, "lost")[0]["cause"]
    served = train(tmp_path / "b", Faults().and_then("exit", 1, 9), workers=2, strategy="parameter-server")
    assert served.lost == [1]
    assert "exit code 3" in records_of(served.run_dir, "lost")[0]["cause"]


@pytest.mark.parametrize("strategy", ["all-reduce", "parameter-server", "gossip"])
def test_when_all_workers_are_lost_all_are_named_with_how_each_ended(tmp_path: Path, strategy: str) -> None:
    faults = Faults().kill(0, step=9).and_then("exit", 1, 9)
    with pytest.raises(Lost, match=r"^worker \d was lost: .*; all workers are lost \(") as caught:
        train(tmp_path, faults, workers=2, strategy=strategy)
    assert "worker 0: killed by SIGKILL" in str(caught.value)
    assert "worker 1: it ended with exit code 3" in str(caught.value)


class AbortsWhenSent:
    """A task whose arrival in another process ends that process."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return os.abort, ()


def test_when_all_ranks_end_before_they_join_all_are_named(tmp_path: Path) -> None:
    part: Any = AbortsWhenSent()
    task = Task(name="aborting", model=part, data=part, loss=part, optimizer=part)
    with pytest.raises(RankFailed, match=r"ranks 0, 1, 2 ended before they joined: rank 0: killed by SIGABRT"):
        podium.train(task, workers=3, out=tmp_path)


# A rank that never comes.


class HangsWhenSent:
    """A task whose arrival in another process never ends."""

    def __reduce__(self) -> tuple[Callable[[float], None], tuple[float]]:
        return time.sleep, (120.0,)


def test_a_rank_that_never_joins_is_not_waited_for(tmp_path: Path) -> None:
    hanging: Any = HangsWhenSent()
    task = Task(name="hanging", model=hanging, data=hanging, loss=hanging, optimizer=hanging)
    with pytest.raises(DeadlineExceeded, match=r"^ranks 0, 1 did not join within 2 s"):
        podium.train(task, workers=2, out=tmp_path, start_deadline_s=2.0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["all-reduce", "parameter-server"])
def test_a_rank_that_never_begins_is_not_waited_for(tmp_path: Path, strategy: str) -> None:
    hangs = Faults().and_then("hang", 1, where="data")
    with pytest.raises(DeadlineExceeded, match=r"^rank 1 did not begin within 4 s: still making the model"):
        train(tmp_path, hangs, workers=2, strategy=strategy, start_deadline_s=4.0)


def test_a_task_that_cannot_be_sent_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be sent to other processes.*file.py:make_task.*launcher='threads'"):
        podium.train(with_samples(5, 5), workers=2, out=tmp_path)


# The user's script.


@pytest.mark.slow
def test_a_script_without_a_main_guard_runs_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import podium
        print("begun", flush=True)
        result = podium.train("{TASK}", workers=2, steps=3, out="{tmp_path}")
        print(result.steps, flush=True)
        """)
    )
    code, out, err = finish(start(str(script)))
    assert code == 0, err
    assert out.split() == ["begun", "3"]


@pytest.mark.slow
def test_a_script_without_a_main_guard_that_sends_its_task_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import podium
        from podium.tasks.digits import digits_mlp
        podium.train(digits_mlp(), workers=2, steps=3, out="{tmp_path}/runs")
        """)
    )
    code, _, err = finish(start(str(script)))
    assert code == 1
    assert "if __name__ == '__main__':" in "".join(err.splitlines()[-2:])
    assert len(os.listdir(tmp_path / "runs")) == 1  # the ranks began no runs of their own


@pytest.mark.slow
def test_the_command_line_ends_with_the_users_error_and_nothing_of_ours(tmp_path: Path) -> None:
    faults = Faults().and_then("raise", 1, 5)
    code, out, err = finish(
        cli("train", TASK, "-n", "2", "--out", str(tmp_path), "--json", "--set", f"task.faults={faults}")
    )
    assert code == 1
    assert document(out)["error"]["type"] == "RankFailed"
    assert "Traceback" not in err
    run_dir = only_run(tmp_path)
    assert err.splitlines()[-3] == "error: rank 1: ValueError: the user's own mistake"
    assert err.splitlines()[-1] == f"  records and logs: {run_dir}"


def run_loop(tmp_path: Path, text: str) -> tuple[int, list[str]]:
    """Exit code and error lines of a script of one's own on two ranks, with a deadline that no test would wait for."""
    script = tmp_path / "loop.py"
    script.write_text(textwrap.dedent(text))
    code, _, err = finish(
        cli("run", str(script), "--workers", "2", "--out", str(tmp_path / "runs"), "--set", "start_deadline_s=600")
    )
    return code, err.splitlines()


@pytest.mark.slow
def test_a_loop_that_fails_before_it_joins_ends_with_its_own_error_and_place(tmp_path: Path) -> None:
    code, err = run_loop(tmp_path, "import podium\nraise ValueError('too soon')\n")
    assert code == 1
    assert err[-3:-1] in [
        [f"error: rank {rank}: ValueError: too soon", f"  at {tmp_path}/loop.py:2 in <module>"] for rank in (0, 1)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["print('no loop')", "raise SystemExit(0)"])
def test_a_loop_that_never_joins_is_told_so(tmp_path: Path, text: str) -> None:
    code, err = run_loop(tmp_path, text)
    assert code == 1
    assert err[-2].startswith("error: ")
    assert err[-2].endswith(f"{tmp_path}/loop.py ended without calling podium.join")


# Places and ports.


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RecordError, match=r"file.*cannot be written"):
        train(tmp_path / "file", workers=2)


@contextlib.contextmanager
def tiny_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"needs a file system of its own: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.root
@pytest.mark.parametrize("saving", [{"checkpoint_every": 1, "keep_checkpoints": 1000}, {"epochs": 1000}])
def test_a_full_disk_ends_the_run_and_keeps_what_was_written(tmp_path: Path, saving: dict[str, int]) -> None:
    """Filled by checkpoints, and by records alone."""
    with tiny_disk(tmp_path / "disk") as disk:
        with pytest.raises((CheckpointError, RecordError), match="No space left on device"):
            train(disk, workers=2, **saving)
        run_dir = only_run(disk)
        steps = [row["step"] for row in read_records(run_dir) if row["kind"] == "step" and row["rank"] == 0]
        assert steps == list(range(1, len(steps) + 1))
        assert steps
        if "checkpoint_every" in saving:
            assert find_checkpoint(run_dir).shared()["steps_done"] >= 1


@pytest.mark.slow
def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        names = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        words = ("-m", "podium.node", "--task", TASK, "--set", f"out={tmp_path}")
        code, _, err = finish(start(*words, **names))
    assert code == 1
    assert err.splitlines()[-1].startswith("podium: the store at 127.0.0.1:")
    assert f"port {port} is in use, choose another MASTER_PORT" in err


@pytest.mark.slow
def test_a_rank_without_a_first_one_gives_up(tmp_path: Path) -> None:
    names = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = ("-m", "podium.node", "--task", TASK, "--set", f"out={tmp_path}", "--set", "start_deadline_s=2")
    code, _, err = finish(start(*words, **names))
    assert code == 1
    assert "cannot be reached" in err.splitlines()[-1]


def only_run(out: Path) -> Path:
    (run_dir,) = [path for path in out.iterdir() if path.is_dir() and (path / "manifest.json").is_file()]
    return run_dir

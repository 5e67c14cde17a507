"""Three hosts that share nothing: the same run through every launcher ends with the bits of one machine.

Whatever starts the ranks, the first host has all that a run on one machine leaves, and the run can be resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import podium
from podium.records.recorder import read_records
from podium.testing import Host, Hosts, RayCluster, SlurmCluster, why_not_ray, why_not_slurm
from tests.integration.on_hosts import (
    CLEAN,
    RUN,
    by_ray,
    by_slurm,
    folder_on,
    result_of,
    result_of_torchrun,
    torchrun,
    train,
)
from tests.integration.ssh_hosts import left_clean, ssh_hosts

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(240)]
Run = Callable[..., dict[str, Any]]

LAUNCHERS = ("ssh", "slurm", "ray", "torchrun")
SYNCHRONOUS = ("all-reduce", "parameter-server:mode=sync", "local-sgd:period=3", "diloco:sync_every=3")
STEPS = 12
FILES = {"checkpoint.json", "shared.safetensors", *(f"rank-{rank}.safetensors" for rank in range(3))}


@pytest.fixture(scope="module")
def hosts(own_temporary_folder: Path) -> Iterator[Hosts]:
    with ssh_hosts(own_temporary_folder, 3) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left_behind(hosts: Hosts) -> Iterator[None]:
    """Instead of the folder's fixture: the hosts stay until the module's end."""
    with left_clean(hosts):
        yield


@pytest.fixture(scope="module", params=LAUNCHERS)
def run(request: pytest.FixtureRequest, hosts: Hosts) -> Iterator[Run]:
    """`run(hosts, **settings)`: one run with a worker per host, or more, started at the first; gives its result."""
    if request.param == "ssh":
        yield lambda chosen, **fields: result_of(train(chosen, **fields))
    elif request.param == "torchrun":
        yield _by_torchrun
    elif request.param == "slurm":
        if reason := why_not_slurm():
            pytest.skip(reason)
        with SlurmCluster(hosts) as slurm:
            yield lambda chosen, **fields: result_of(by_slurm(slurm, chosen[0], nodes=len(chosen), **fields))
    else:
        if reason := why_not_ray():
            pytest.skip(reason)
        with RayCluster(hosts) as ray:
            yield lambda chosen, **fields: result_of(by_ray(ray, chosen[0], "--nodes", str(len(chosen)), **fields))


def _by_torchrun(chosen: Sequence[Host], *, workers: int, strategy: str = "all-reduce", **fields: Any) -> Any:
    """A worker per host. The last rank becomes the server, where the strategy has one."""
    servers = int(strategy.startswith("parameter-server"))
    assert workers == len(chosen)
    return result_of_torchrun(torchrun(chosen, [*[1] * (workers - 1), 1 + servers], strategy=strategy, **fields))


@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_a_synchronous_run_ends_with_the_bits_of_one_machine(
    run: Run, hosts: Hosts, strategy: str, tmp_path: Path
) -> None:
    fields = {"strategy": strategy, "workers": 3, "steps": STEPS}
    here = podium.train("digits-mlp", **{**RUN, **fields, "out": tmp_path})
    result = run(list(hosts), **fields)
    assert result["param_hash"] == {str(rank): bits for rank, bits in here.param_hash.items()}
    assert len(result["param_hash"]) == 3 and len(set(result["param_hash"].values())) == 1
    assert result["audit"] == CLEAN
    home = folder_on(hosts[0], result["run_dir"])
    assert {row["rank"] for row in read_records(home) if row["kind"] == "step"} == {0, 1, 2}
    assert (home / "model.safetensors").is_file()
    assert {path.name for path in (home / "checkpoints" / f"step-{STEPS:08}").iterdir()} >= FILES


def test_a_run_resumes_in_bits_and_on_two_of_three_hosts_to_rounding(run: Run, hosts: Hosts) -> None:
    whole = run(list(hosts), workers=3, steps=STEPS)
    half = run(list(hosts), workers=3, steps=STEPS // 2)
    rest = run(list(hosts), workers=3, steps=STEPS, resume=half["run_dir"])
    assert rest["param_hash"] == whole["param_hash"] and rest["audit"] == CLEAN
    fewer = run(list(hosts)[:2], workers=2, steps=STEPS, resume=half["run_dir"])
    assert len(fewer["param_hash"]) == 2 and fewer["audit"] == CLEAN
    assert fewer["loss"] == pytest.approx(whole["loss"], rel=1e-4)

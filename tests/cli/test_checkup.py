"""The doctor ticks what it did, says why it did not try the rest, and has a fix for what failed."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from podium.cli import checkup as doctor
from podium.errors import ConfigError


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, doctor.Check]:
    # The two processes of the collective have their own tests; here it only has to be asked.
    out = tmp_path_factory.mktemp("doctor") / "runs"
    return {check.name: check for check in doctor.checks(str(out), collective=lambda: "done")}


@pytest.mark.slow
def test_what_every_machine_has_is_exercised(found: dict[str, doctor.Check]) -> None:
    for name in (
        "python",
        "torch",
        "no conflict",
        "loopback TCP",
        "Unix socket",
        "gloo",
        "shared memory",
        "run folder",
    ):
        assert found[name].status == "ok", found[name]


def test_measured_links_say_their_numbers(found: dict[str, doctor.Check]) -> None:
    for name in ("loopback TCP", "Unix socket"):
        assert "GB/s" in found[name].detail and "µs" in found[name].detail


def test_every_failure_has_a_fix_and_every_skip_a_reason(found: dict[str, doctor.Check]) -> None:
    assert all(check.fix for check in found.values() if check.status == "failed")
    assert all(check.detail for check in found.values())


def test_nccl_is_not_ticked_without_two_gpus(found: dict[str, doctor.Check]) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        assert found["nccl"].status == "skipped"
        assert "GPU" in found["nccl"].detail


def test_shaping_is_not_ticked_without_root(found: dict[str, doctor.Check]) -> None:
    if os.geteuid() == 0:
        assert found["shaped links"].status in ("ok", "failed")
    else:
        assert found["shaped links"].status == "skipped" and "root" in found["shaped links"].detail


def test_energy_that_cannot_be_read_will_be_blank(found: dict[str, doctor.Check]) -> None:
    assert found["energy"].status in ("ok", "skipped")
    if found["energy"].status == "skipped":
        assert "joules will be left blank" in found["energy"].detail


def test_the_document_is_json_and_fails_with_any_check(found: dict[str, doctor.Check]) -> None:
    good = [check for check in found.values() if check.status != "failed"]
    document = json.loads(json.dumps(doctor.to_dict(good)))
    assert document["ok"] is True and len(document["checks"]) == len(good)
    bad = doctor.Check(name="x", status="failed", detail="y", fix="z")
    assert doctor.to_dict([*good, bad])["ok"] is False


def test_a_collective_that_fails_is_a_cross_with_its_cause() -> None:
    def fail() -> str:
        raise ConfigError("rank 1 did not answer")

    check = doctor.check_collective(fail)
    assert check.status == "failed" and "rank 1 did not answer" in check.detail and check.fix


def test_a_run_folder_is_not_made_by_looking_at_it(tmp_path: Path) -> None:
    assert doctor.check_folder(tmp_path / "a" / "runs").status == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_or_too_full_is_a_cross(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert doctor.check_folder(tmp_path / "file").status == "failed"
    full = doctor.check_folder(tmp_path, need_bytes=1 << 60)
    assert full.status == "failed" and full.fix


def test_an_extra_that_is_not_installed_is_skipped_with_the_command() -> None:
    check = doctor.check_extra("sweep", {"a-package-that-nobody-has": "nothing"})
    assert check.status == "skipped" and check.fix == "pip install 'podium[sweep]'"


def test_an_extra_that_is_installed_and_does_not_import_is_a_cross() -> None:
    check = doctor.check_extra("study", {"numpy": "numpy.a_module_that_is_not_there"})
    assert check.status == "failed" and "ModuleNotFoundError" in check.detail


def test_an_energy_counter_is_read_where_there_is_one(tmp_path: Path) -> None:
    for package, microjoules in (("intel-rapl:0", 1_500_000), ("intel-rapl:1", 500_000)):
        (tmp_path / package).mkdir()
        (tmp_path / package / "energy_uj").write_text(f"{microjoules}\n")
    assert doctor._read_rapl(tmp_path) == 2.0


def test_a_socket_that_nobody_listens_on_is_an_error() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionRefusedError):
            doctor.measure_link(server, nbytes=1024, timeout_s=5.0)

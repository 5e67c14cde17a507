"""What is asked of Ray for a run."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from podium.config import RunConfig
from podium.errors import CommError, ConfigError
from podium.launch.hosts.ray import Request, check_address, find_address, request_for
from podium.launch.local import endpoints_of
from podium.launch.prepare import resolve_job


def request(nodes: int, *, gpus: float = 0.0, **fields: Any) -> Request:
    job = resolve_job(RunConfig(launcher="ray", **fields))
    return request_for(job.config, endpoints_of(job), nodes, gpus)


class TestRequest:
    def test_a_bundle_per_host_has_a_cpu_per_process(self) -> None:
        asked = request(3, workers=3)
        assert asked == Request([{"CPU": 1}] * 3, [1, 1, 1], "STRICT_SPREAD")
        assert request(3, workers=4).ranks == [2, 1, 1]
        assert request(2, workers=4, threads=3).bundles == [{"CPU": 6}, {"CPU": 6}]

    def test_no_host_stays_without_a_process(self) -> None:
        assert request(5, workers=2).ranks == [1, 1]

    def test_workers_on_gpus_get_one_each_and_servers_none(self) -> None:
        servers = {"strategy": "parameter-server", "strategy_options": {"servers": 2}}
        asked = request(2, workers=2, device="cuda", **servers)
        assert asked.ranks == [2, 2] and asked.bundles == [{"CPU": 2, "GPU": 1}] * 2
        assert request(2, workers=2, device="cuda,cpu").bundles == [{"CPU": 1, "GPU": 1}, {"CPU": 1}]

    def test_device_auto_takes_gpus_where_there_are_enough(self) -> None:
        assert request(2, workers=2, device="auto", gpus=2).bundles == [{"CPU": 1, "GPU": 1}] * 2
        assert request(2, workers=2, device="auto", gpus=1).bundles == [{"CPU": 1}] * 2

    def test_packed_hosts_may_share_a_node(self) -> None:
        assert request(2, workers=2, placement="pack").strategy == "PACK"

    def test_it_reads_as_what_is_looked_for(self) -> None:
        assert str(request(3, workers=5, device="cuda")) == (
            "hosts: 2 with 2 CPU, 2 GPU, 1 with 1 CPU, 1 GPU (STRICT_SPREAD)"
        )


class TestAddress:
    def test_without_a_cluster_the_error_says_how_to_name_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("ray")
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
        for address in ("auto", "local"):
            monkeypatch.setenv("RAY_ADDRESS", address)
            with pytest.raises(ConfigError, match="launcher ray needs a Ray cluster, and RAY_ADDRESS names none"):
                find_address()
        monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
        assert find_address() == "ray://head:10001"

    def test_an_address_that_is_none_and_one_without_ray_are_told_at_once(self) -> None:
        with pytest.raises(ConfigError, match="RAY_ADDRESS must be HOST:PORT or ray://HOST:PORT, got 'head'"):
            check_address(None, "head")
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # and nobody listens
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            for text in (address, f"ray://{address}"):
                with pytest.raises(CommError, match=rf"no Ray answers at {text} \(Connection refused\)"):
                    check_address(None, text)

"""Hosts as a user lists them."""

from __future__ import annotations

from pathlib import Path

import pytest

from podium.errors import ConfigError, PodiumError
from podium.launch.hosts.entries import HostEntry, divide, parse_entry, read_hosts


def test_a_file_has_a_line_per_host(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text("# ours\nme@a slots=4 gpus=2  # fast\n\nb python=/opt/python\n")
    assert read_hosts(str(path)) == [HostEntry("me@a", 4, 2), HostEntry("b", python="/opt/python")]
    assert read_hosts("a,b") == [HostEntry("a"), HostEntry("b")]


@pytest.mark.parametrize(
    "line", ["", "   ", "# nothing", "-oProxyCommand=x", "a slots", "a slots=0", "a gpus=-1", "a cores=2"]
)
def test_a_line_that_names_no_host_is_refused(line: str) -> None:
    with pytest.raises(PodiumError, match=r"host"):
        parse_entry(line)


def test_a_host_is_listed_once() -> None:
    with pytest.raises(ConfigError, match="got a again"):
        read_hosts("a,b,a")


@pytest.mark.parametrize(
    ("slots", "processes", "counts"),
    [([None, None], 5, [3, 2]), ([4, None], 5, [4, 1]), ([4, 4], 5, [4, 1]), ([1, None, None], 6, [1, 3, 2])],
)
def test_processes_are_divided_among_hosts(slots: list[int | None], processes: int, counts: list[int]) -> None:
    entries = [HostEntry(f"h{n}", count) for n, count in enumerate(slots)]
    assert divide(entries, processes) == counts


def test_too_few_slots_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs 3 processes, and its hosts have 2 slots"):
        divide([HostEntry("a", 2)], 3)

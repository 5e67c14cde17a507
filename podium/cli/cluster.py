"""`podium cluster`: what the hosts of a run are, and whether they can train together."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from podium.cli.doctor import line_of
from podium.cli.group import Program
from podium.cli.options import options, resolve_run
from podium.cli.output import Output

if TYPE_CHECKING:
    from podium.cli.checkup import Check
    from podium.launch.hosts.check import ClusterCheck
    from podium.launch.hosts.measured import HostReport, LinkReport

UNTRIED = (
    "not tried, and not encrypted: where others can listen on the network, use a collective over the channel "
    "(--collective ring)"
)
UNEVEN = "--balance equal-finish gives each worker a part of a step that it finishes in the same time"


@click.group(cls=Program, short_help="Check the hosts of a run, and describe them.")
def cluster() -> None:
    """The hosts that a run is to use.

    \b
    podium cluster check host1,host2 [--out cluster.toml] [--json]
    """


@cluster.command(short_help="Try hosts and the links between them; write a cluster file.")
@click.argument("listed", metavar="[HOSTS]", required=False)
@click.option("--hosts", metavar="FILE", help="As HOSTS: a file with a line per host, or a,b,c.")
@click.option("--launcher", default="ssh", metavar="NAME", help="What starts ranks there: ssh, slurm, ray. [ssh]")
@click.option("--out", "file", metavar="FILE", help="Write a cluster file, for --launcher virtual and shaped.")
@options("set", "json")
@click.pass_obj
def check(
    out: Output,
    listed: str | None,
    hosts: str | None,
    launcher: str,
    file: str | None,
    overrides: tuple[str, ...],
) -> int:
    """Reach each host, and compare versions, clocks, free disk and speed; connect each to each, and measure all pairs.

    Takes a minute at most. A tick means that it was executed. Exit code 1 where a host cannot take part.

    \b
    podium cluster check hosts.txt --out cluster.toml
    podium train digits-mlp --workers 4 --launcher ssh --hosts hosts.txt
    podium train digits-mlp --workers 4 --launcher virtual --cluster cluster.toml
    """
    from podium.launch.hosts.check import check_cluster

    if listed is not None and hosts is not None:
        raise click.UsageError(f"give the hosts once, got {listed} and --hosts {hosts}")
    config = resolve_run(None, overrides, {"hosts": listed or hosts, "launcher": launcher})
    found = check_cluster(config, out=file, tell=_progress)
    out.document(found.to_dict())
    out.say(*_lines(found))
    return 0 if found.ok else 1


def _progress(text: str) -> None:
    print(f"{text}…", file=sys.stderr, flush=True)


def _lines(found: ClusterCheck) -> list[str]:
    head = found.head
    rows = [*(_host(host) for host in found.hosts), *_links(found)]
    width = max(14, *(len(row.name) for row in rows))
    return [
        f"this machine: {head['address'] or 'no address for these hosts'}, podium {head['podium']}, "
        f"torch {head['torch']}, Python {head['python']}",
        "",
        *(line_of(row, width) for row in rows),
        "",
        *_conclusions(found),
    ]


def _host(host: HostReport) -> Check:
    from podium.cli.checkup import Check

    if host.failure is not None:
        return Check(name=host.host, status="failed", detail=host.failure.what, fix=host.failure.fix)
    facts = host.facts
    assert facts is not None and host.clock_skew_s is not None and host.cpu_ms is not None  # of a host that was reached
    parts = [
        f"podium {facts.podium}, torch {facts.torch}, Python {facts.python}",
        f"clock {host.clock_skew_s:+.2f} s",
        f"{facts.cores} core{'' if facts.cores == 1 else 's'}, {facts.memory_bytes / 1e9:.1f} GB of memory",
        f"{facts.free_bytes / 1e9:.1f} GB free in {facts.folder}",
        f"matrices multiplied in {host.cpu_ms:.1f} ms",
        *(f"GPU {n}: {gpu}, {host.gpus_ms[n]:.1f} ms" for n, gpu in enumerate(facts.gpus)),
    ]
    return Check(name=host.host, status="ok", detail="; ".join(parts if facts.gpus else [*parts, "no GPU"]))


def _links(found: ClusterCheck) -> list[Check]:
    from podium.cli.checkup import Check

    by_ends = {(link.source, link.target): link for link in found.links}
    rows = []
    for link in found.links:
        back = by_ends.get((link.target, link.source))
        if not link.ok or back is None or not back.ok:
            rows.append(_one_way(link))
        elif (link.target, link.source) not in list(by_ends)[: list(by_ends).index((link.source, link.target))]:
            rows.append(_both_ways(link, back))
    if found.links:
        rows.append(Check(name="gloo, nccl", status="skipped", detail=UNTRIED))
    return rows


def _one_way(link: LinkReport) -> Check:
    from podium.cli.checkup import Check

    name = f"{link.source} → {link.target}"
    if link.failure is not None:
        return Check(name=name, status="failed", detail=link.failure.what, fix=link.failure.fix)
    return Check(name=name, status="ok", detail="connected")


def _both_ways(link: LinkReport, back: LinkReport) -> Check:
    from podium.cli.checkup import Check

    name = f"{link.source} – {link.target}"
    if link.round_trip_us is None or link.mbit is None or back.mbit is None:
        return Check(name=name, status="ok", detail="connected, not measured")
    detail = f"round trip {link.round_trip_us:,.0f} µs; {link.mbit:,.0f} Mbit/s there, {back.mbit:,.0f} back"
    return Check(name=name, status="ok", detail=detail)


def _conclusions(found: ClusterCheck) -> list[str]:
    lines = []
    if found.links:
        how = "with TLS" if found.head["tls"] else "without TLS"
        lines.append(f"links: {found.pairs_measured} of {found.pairs} pairs measured through the channel, {how}")
    slow = [f"{host.host} ({', '.join(host.slow)})" for host in found.hosts if host.slow]
    if slow:
        lines.append(f"slow: {', '.join(slow)}; {UNEVEN}")
    if found.file is not None:
        lines.append(f"cluster file: {found.file}, for --launcher virtual --cluster {found.file}")
    failed = [host.host for host in found.hosts if not host.ok]
    cut = [f"{link.source} → {link.target}" for link in found.links if not link.ok]
    if not failed and not cut:
        return [*lines, f"all {len(found.hosts)} hosts can take part in a run"]
    return [*lines, f"{len(failed) + len(cut)} failed: {', '.join([*failed, *cut])}"]

"""What must stay as it is while code moves: parameters, records, reports and sweeps, as digests.

    python tests/golden/golden.py            compare with golden.json; 1 where something differs
    python tests/golden/golden.py --write    make golden.json anew; say in the commit what changed, and why
    python tests/golden/golden.py ring ssp   only the runs whose names contain one of these

A virtual run's records are compared byte by byte, by the digest of each field: what differs is told by its name. The
digests are those of one version of torch and one kind of CPU, which golden.json names.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import podium

FILE = Path(__file__).with_name("golden.json")
DIGITS: dict[str, Any] = {"task": "digits-mlp", "workers": 4, "steps": 30, "batch_size": 64, "launcher": "virtual"}

CODECS = ("fp16", "bf16", "int8", "sign", "ef-sign", "vote", "one-bit", "top-k", "dgc", "random-k", "power-sgd")

RUNS: dict[str, dict[str, Any]] = {
    # strategies
    "solo": {"strategy": "solo", "workers": 1},
    "all-reduce": {"strategy": "all-reduce"},
    "all-reduce, buckets": {"strategy": "all-reduce:bucket_bytes=4000"},
    "sync servers": {"strategy": "parameter-server:mode=sync,servers=2"},
    "asynchronous server": {"strategy": "parameter-server:mode=async"},
    "two asynchronous servers with replicas": {"strategy": "parameter-server:mode=async,servers=2,replicas=2"},
    "ssp": {"strategy": "parameter-server:mode=ssp,staleness=2"},
    "local-sgd": {"strategy": "local-sgd:period=4"},
    "diloco": {"strategy": "diloco:sync_every=5"},
    "streaming-diloco": {"strategy": "streaming-diloco:sync_every=6"},
    "elastic-averaging": {"strategy": "elastic-averaging"},
    "adasum": {"strategy": "adasum"},
    "gossip": {"strategy": "gossip"},
    "ad-psgd": {"strategy": "ad-psgd"},
    "async-local-sgd": {"strategy": "async-local-sgd"},
    "async-elastic": {"strategy": "async-elastic"},
    # phases
    "strategy-switch": {"strategy": "strategy-switch"},
    "sync-switch": {"strategy": "sync-switch"},
    "post-local-sgd": {"strategy": "post-local-sgd"},
    "phases": {
        "strategy": "all-reduce until step:at=8 | parameter-server:mode=async until step:at=20 | local-sgd:period=3"
    },
    # codecs
    **{f"codec {name}": {"strategy": "all-reduce", "codec": name} for name in CODECS},
    "codec int8 to servers": {"strategy": "parameter-server:mode=async", "codec": "int8"},
    # collectives
    **{
        f"collective {name}": {"strategy": "all-reduce", "collective": name}
        for name in ("ring", "halving-doubling", "tree", "hierarchical", "reduce-to-one", "butterfly", "task-graph")
    },
    # worlds
    **{
        f"{strategy} in {launcher}": {"strategy": strategy, "launcher": launcher, "workers": 2}
        for launcher in ("threads", "local")
        for strategy in ("all-reduce", "parameter-server:mode=sync,servers=2", "local-sgd:period=4")
    },
    # what a run may ask for
    "accumulation and clipping": {"strategy": "all-reduce", "task": "digits-cnn", "accumulate": 2, "clip_norm": 0.5},
    "one batch per worker, uneven": {"strategy": "all-reduce", "batch_size": 61, "workers": 3},
    "balance": {
        "strategy": "all-reduce",
        "balance": "equal-finish",
        "cluster": "examples/clusters/one-slow-of-four.toml",
    },
}

SWEEPS: dict[str, list[str]] = {
    executor: ["digits-mlp", "--grid", "lr=0.05,0.1,0.2", "--executor", executor, "--epochs", "2"]
    for executor in ("sequential", "fused")
}
MEASURED = ("elapsed", "seconds", "started", "time", "_s", "joules", "memory", "host", "answer")
OF_THE_MACHINE = ("commit", "system", "cpu", "cores", "memory gb")  # rows of a report


def digest(value: Any) -> str:
    """A short digest of anything that JSON can hold, or of bytes."""
    data = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def fields(records: Path) -> dict[str, str]:
    """For each kind of record and each of its fields the digest of all its values, in their order."""
    columns: dict[str, list[Any]] = {}
    for line in records.read_text().splitlines():
        record = json.loads(line)
        for name, value in record.items():
            columns.setdefault(f"{record['kind']}.{name}", []).append(value)
    return {name: digest(values) for name, values in sorted(columns.items())}


def run(name: str, out: Path) -> dict[str, Any]:
    """One training, as digests; a real launcher's records hold times and are left out."""
    config = {**DIGITS, **RUNS[name], "out": str(out)}
    result = podium.train(config.pop("task"), **config)
    hashes = sorted(set(result.param_hash.values()))
    row: dict[str, Any] = {"param_hash": hashes, "metrics": result.metrics, "steps": result.steps}
    if config["launcher"] == "virtual":
        row |= {"seconds": result.seconds, "sent_bytes": result.sent_bytes}
        row["records"] = fields(Path(result.run_dir) / "records.jsonl")
    return row


def command(arguments: list[str]) -> str:
    """What a `podium` command prints on standard output."""
    words = [sys.executable, "-m", "podium", *arguments]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(f"podium {' '.join(arguments)} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def report(out: Path) -> dict[str, Any]:
    """A comparison in virtual time: its answer and its report, without times of day and folders."""
    arguments = ["compare", "digits-mlp", "--strategies", "solo,all-reduce,parameter-server:mode=async", "--seeds", "3"]
    text = command([*arguments, "--launcher", "virtual", "--epochs", "2", "--out", str(out), "--json"])
    (page,) = out.rglob("report.html")
    answer = without(json.loads(plain(text, out)), ("wall_s",))
    return {"answer": digest(answer), "report": digest(plain(page.read_text(), out))}


def plain(text: str, out: Path) -> str:
    text = text.replace(str(out), "OUT")
    text = re.sub(rf"(({'|'.join(OF_THE_MACHINE)})</dt><dd>)[^<]*", r"\1", text)
    text = re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?([+-]\d{4}| UTC)?", "WHEN", text)
    return re.sub(r"-\d{4}-\d{6}-[0-9a-f]{4}", "-RUN", text)


def sweep(executor: str, out: Path) -> dict[str, Any]:
    """All that a sweep says but times: scores, points, the best one."""
    text = command(["sweep", *SWEEPS[executor], "--out", str(out), "--json"])
    return {"document": digest(without(json.loads(plain(text, out)), MEASURED))}


def without(value: Any, words: tuple[str, ...]) -> Any:
    """The same without keys that contain one of these words."""
    if isinstance(value, dict):
        return {k: without(v, words) for k, v in value.items() if not any(word in k for word in words)}
    return [without(v, words) for v in value] if isinstance(value, list) else value


def rows(wanted: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    made = [(name, run, name) for name in RUNS]
    made += [(f"sweep {name}", sweep, name) for name in SWEEPS]
    made += [("compare", lambda _, out: report(out), "")]
    for name, make, argument in made:
        if not wanted or any(part in name for part in wanted):
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as out:
                row = make(argument, Path(out))
            print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
            yield name, row


def differences(name: str, then: Any, now: Any) -> Iterator[str]:
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted({*then, *now}):
            yield from differences(f"{name} / {key}", then.get(key), now.get(key))
    elif then != now:
        yield f"{name}: {then} before, {now} now"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cpu = torch.backends.cpu.get_cpu_capability()
    place = {"torch": torch.__version__, "cpu": cpu, "python": platform.python_version()[:4]}
    now = dict(rows(arguments.names))
    if arguments.write:
        FILE.write_text(json.dumps({"place": place, "runs": now}, indent=1) + "\n")
        return 0
    golden = json.loads(FILE.read_text())
    if golden["place"] != place:
        print(f"golden.json was made with {golden['place']}, this is {place}: hashes differ by rounding")
    told = [line for name, row in now.items() for line in differences(name, golden["runs"].get(name), row)]
    print("\n".join(told) or f"all {len(now)} as in golden.json")
    return 1 if told else 0


if __name__ == "__main__":
    raise SystemExit(main())

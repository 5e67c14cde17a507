"""A run's configuration: one frozen dataclass, read from TOML, overridden by `a.b=c`; unknown keys are errors.

Only names and numbers, no torch: the command line reads this module before any heavy import, and each rank receives
the configuration as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from podium.errors import ConfigError, UnknownName

LAUNCHERS = ("local", "threads", "virtual", "shaped", "ssh", "slurm", "ray")
"""Where ranks live: local processes, threads, simulated time, processes in shaped network namespaces; other hosts."""
ON_HOSTS = ("ssh", "slurm", "ray")
"""The launchers of processes on other hosts."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides a run. The resolved configuration is written to the run's manifest."""

    task: str = "digits-mlp"
    """A built-in name, `file.py:function` or `package.module:function`."""
    task_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the task's function (`--set task.lr=0.1`)."""
    strategy: str = "all-reduce"
    strategy_options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the strategy (`--set strategy.servers=2`)."""
    codec: str = "dense"
    """How gradients are packed for the wire: `NAME[:K=V;…]`."""
    collective: str = "default"
    """The algorithm that sums tensors over the workers: `NAME[:K=V;…]`."""
    workers: int = 1
    seed: int = 0
    epochs: int | None = None
    """Passes over the data; the task's own number when not given."""
    steps: int | None = None
    """Ends the run after this many global steps, unless `epochs` ends it earlier."""
    batch_size: int | None = None
    """Samples per global step over all workers; the task's own number when not given."""
    accumulate: int | None = None
    """Micro-batches per step on each worker; the task's own number when not given."""
    clip_norm: float | None = None
    autocast: Literal["off", "bf16"] | None = None
    buffers: Literal["mean", "broadcast", "local"] | None = None
    shares: tuple[float, ...] | None = None
    """Each worker's part of a global step, in any unit; equal when not given. An error in asynchronous training."""
    balance: str = "equal"
    """The balancer, which divides global steps among the workers unless `shares` does: `NAME[:K=V;…]`."""
    eval_every: int = 1
    """Epochs between validations; 0 validates at the end only."""
    checkpoint_every: int = 0
    """Global steps between checkpoints; 0 writes one at the end only."""
    keep_checkpoints: int = 2
    launcher: Literal["local", "threads", "virtual", "shaped", "ssh", "slurm", "ray"] = "local"
    hosts: str | None = None
    """Launcher ssh: a file with a line per host (`user@host slots=4 gpus=2`), or names separated by commas."""
    head: str | None = None
    """This machine's address for the hosts; that of the interface that routes to them when not given."""
    nodes: int | None = None
    """Launchers slurm and ray: how many hosts to ask for.

    When not given, SLURM chooses, and under Ray as many as the cluster has, at most one per process. Inside an
    allocation of SLURM's, all of its nodes are used.
    """
    slurm: str = ""
    """Launcher slurm, outside an allocation: more options of sbatch (`--partition=gpu --time=2:00:00 --gres=gpu:2`)."""
    placement: Literal["spread", "pack"] = "spread"
    """Launcher ray: each host's ranks on a node of their own, or on as few nodes as possible."""
    cluster: str | None = None
    """A cluster file (TOML): nodes and links. Needed by `shaped`, used by `virtual`."""
    device: str = "cpu"
    """`cpu`, `cuda` (a node's ranks take its visible GPUs round-robin), `cuda:1` or `auto`; or a list that the workers
    take round-robin: `cuda,cpu`."""
    threads: int | None = None
    """Intra-op threads per rank; the cores divided by the ranks when not given, 1 in threads, virtual time and Ray."""
    data_dir: str | None = None
    out: str = "runs"
    """The run's folder is made inside this one."""
    run_dir: str | None = None
    """The run's folder itself, which must not hold a run yet; named by task, strategy and time when not given."""
    resume: str | None = None
    """A run's folder or one checkpoint to resume from."""
    replay: str | None = None
    """A run's folder whose recorded order of arrivals is repeated, in virtual time."""
    deadline_s: float = 300.0
    """How long any rank waits for another before it gives up, and how long a running rank may be silent.

    A worker that other workers wait for is removed if it finishes no step for this long, even if its heartbeats arrive;
    while it validates or writes a checkpoint it has a dozen times as long.
    """
    heartbeat_s: float = 2.0
    """A rank whose process is stopped or gone, or whose host is silent, counts as lost after this long.

    A process that is known to run has `deadline_s`.
    """
    start_deadline_s: float = 60.0
    """How long all ranks together may take to start."""
    checksums: bool = False
    """Send tensors to other hosts with a CRC-32. Not used under TLS, which detects damage itself."""
    tls: Literal["auto", "off"] = "auto"
    """Encryption of what ranks on several hosts send each other over the channel; `auto`: with keys made for the run.

    gloo and nccl never encrypt.
    """
    tls_cert: str | None = None
    """A certificate (PEM). With it, `tls_key` and `tls_ca`, the channel's TCP connections use mutual TLS."""
    tls_key: str | None = None
    """The certificate's key (PEM, not encrypted)."""
    tls_ca: str | None = None
    """The authority (PEM) that must have signed the certificates of all ranks."""

    def __post_init__(self) -> None:
        def need(holds: bool, name: str, what: str) -> None:
            if not holds:
                raise ConfigError(f"{name} must be {what}, got {getattr(self, name)!r}")

        need(self.workers >= 1, "workers", "at least 1")
        need(0 <= self.seed < 2**63, "seed", "between 0 and 2**63 - 1")
        for name in ("epochs", "steps", "batch_size", "accumulate", "threads", "nodes"):
            value = getattr(self, name)
            need(value is None or value >= 1, name, "at least 1")
        need(self.clip_norm is None or self.clip_norm > 0, "clip_norm", "above 0")
        for name in ("eval_every", "checkpoint_every"):
            need(getattr(self, name) >= 0, name, "0 or more")
        need(self.keep_checkpoints >= 1, "keep_checkpoints", "at least 1")
        for name in ("deadline_s", "heartbeat_s", "start_deadline_s"):
            need(getattr(self, name) > 0, name, "above 0")
        need(self.slurm.isprintable(), "slurm", "options of sbatch, on one line")
        tls = (self.tls_cert, self.tls_key, self.tls_ca)
        if any(tls) and not all(tls):
            raise ConfigError(f"tls_cert, tls_key and tls_ca must be given together, got {', '.join(map(str, tls))}")
        if self.launcher not in LAUNCHERS:
            raise UnknownName("launcher", self.launcher, LAUNCHERS)
        kinds = {name.partition(":")[0] for name in devices_in(self.device)}
        if len(kinds) > 1 and self.launcher in ("threads", "virtual"):
            raise ConfigError(
                f"device={self.device}: workers on devices of different kinds must be processes of their own, "
                f"got launcher={self.launcher}; use launcher=local"
            )
        if self.shares is not None:
            need(len(self.shares) == self.workers, "shares", f"one number per worker ({self.workers})")
            need(min(self.shares) >= 0 and sum(self.shares) > 0, "shares", "0 or more each, not all 0")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


_SCRIPT = "the script decides it"
REFUSED_BY_SCRIPTS: Mapping[str, str] = {
    "task": "the script is what is trained",
    "task_options": "give the script arguments of its own: podium run SCRIPT --lr 0.1",
    "epochs": f"{_SCRIPT}: run.batches(…, epochs=N)",
    "steps": f"{_SCRIPT}: break out of run.batches",
    "batch_size": f"{_SCRIPT}: run.batches(…, batch_size=N)",
    "accumulate": "a step runs the script's closure once; compute the loss of several micro-batches inside it",
    "eval_every": "the script does its own validation",
    "checkpoint_every": "the script saves its own checkpoints: run.save(path)",
    "keep_checkpoints": "the script saves its own checkpoints: run.save(path)",
    "resume": "the script loads its own checkpoint, before podium.join",
    "replay": "the arrivals of a script's run cannot be repeated",
    "data_dir": "give the script an argument of its own",
    "launcher": "a script runs in processes: launcher must be 'local', 'ssh', 'slurm' or 'ray'",
    "cluster": "a cluster file needs the launcher 'shaped' or 'virtual', and a script runs in processes",
}
"""The fields that a script with its own loop (`podium run`, `podium.node --script`) does not use, and why."""


def check_script(config: RunConfig) -> None:
    """Refuse settings that a script with its own loop would ignore."""
    plain = RunConfig()
    for name, why in REFUSED_BY_SCRIPTS.items():
        value = getattr(config, name)
        if value != getattr(plain, name) and not (name == "launcher" and value in ON_HOSTS):
            raise ConfigError(f"podium run: {name} must not be set, got {value!r}: {why}")


def named_in(overrides: Sequence[str], given: Mapping[str, Any]) -> frozenset[str]:
    """Names of the fields that the user set, even to their default."""
    keys = [override.partition("=")[0].strip().removeprefix("run.") for override in overrides]
    return frozenset(key.replace("-", "_") for key in [*keys, *(k for k, v in given.items() if v is not None)])


def devices_in(device: str) -> tuple[str, ...]:
    """The devices that a `device` setting names; workers take them round-robin."""
    names = tuple(name.strip() for name in device.split(","))
    for name in names:
        if not re.fullmatch(r"cpu|cuda(:\d+)?|auto", name) or (name == "auto" and len(names) > 1):
            raise ConfigError(
                "device must be 'cpu', 'cuda', 'cuda:N' or 'auto', or several of the first three, one for each worker "
                f"(cuda,cpu), got {device!r}"
            )
    return names


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A run's result. `podium train --json` prints it; `results.jsonl` holds one per line.

    After a resume, `steps` and `epochs` count from the beginning of training; the other counts and times (`updates`,
    `samples`, `seconds`, bytes, waiting, staleness) cover this run alone.
    """

    run_dir: str
    status: Literal["finished", "stopped"]
    task: str
    strategy: str
    """Name and options that differ from the default, as `parameter-server(mode=async)`."""
    workers: int
    seed: int
    launcher: str
    metrics: Mapping[str, float]
    """Of the last validation."""
    loss: float
    """Of the last validation."""
    param_hash: Mapping[str, str]
    """Each worker's hash of its parameters at the end, by rank."""
    steps: int
    """Global steps since the beginning; in asynchronous training, computed from the samples used."""
    samples: int
    """Used in this run."""
    epochs: float
    """Passes over the data since the beginning."""
    seconds: float
    """Training time of this run on the world's clock, without validation."""
    samples_per_s: float
    sent_bytes: int
    """By all ranks together, in this run."""
    updates: int = 0
    """Pushes that each server applied in this run; 0 unless pushes are applied one by one (asynchronous)."""
    step_ms: Mapping[str, float] = field(default_factory=dict)
    """Median and 90th percentile of a worker's step: `p50`, `p90`."""
    wait_share: float = 0.0
    """Share of their step time that workers spent waiting for other ranks."""
    staleness: Mapping[str, float] = field(default_factory=dict)
    """`mean`, `max`, `count` over updates; empty when nothing can be stale.

    A worker's first push of a segment (after the run's beginning or a checkpoint) is left out: all workers begin a
    segment with the same parameters.
    """
    histogram: Sequence[Sequence[int]] = ()
    """Staleness: `[low, high, count]` for each non-empty bin, both ends included.

    Up to 64 each value is a bin; beyond, bins end at powers of two.
    """
    dropped: int = 0
    """Pushes that were too stale to be applied; their samples were lent again."""
    codec_choice: Mapping[str, Any] = field(default_factory=dict)
    """Under `codec=auto`: `why`, `chosen`, `predicted_ms` by codec and, once checked, `check`; empty otherwise."""
    history: Sequence[Mapping[str, Any]] = ()
    """One row per validation: step, epoch and samples since the beginning, seconds of this run, loss, the metrics."""
    lost: Sequence[int] = ()
    """Ranks that were lost during the run."""
    restored: Sequence[Mapping[str, Any]] = ()
    """Servers that took the place of lost ones: `server`, `source` of its state, `took_s`, `lost_updates`."""
    audit: Mapping[str, int] = field(default_factory=dict)
    """Counted from the records: samples that no step used (`missing`) and that several steps used (`repeated`)."""
    switches: Sequence[Mapping[str, Any]] = ()
    """Changes of phase: `before`, `after`, `rule`, `why`, `value`, `step`, `epoch`, `seconds`, `cost_ms` by part."""
    rules: Sequence[Mapping[str, Any]] = ()
    """When the rule in force fired, and when others would have: `rule`, `in_force`, `step`, `epoch`, `seconds`, …"""
    balance: Mapping[str, Any] = field(default_factory=dict)
    """How shared steps were divided among the workers; empty where workers shared none.

    `workers` (by rank: `samples_per_s` while computing, `wait_share` of its step time, …), `division` (`unit` each, of
    the last whole step or round), `changes` of it, `exchange_s`, whether workers are `uneven`, and where that helps
    their `course`.
    """
    model: str = ""
    """Path of the trained parameters (safetensors)."""
    notices: Sequence[str] = ()
    """Warnings from before the run: triggers that cannot fire in it, exchanges that cannot overlap."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


T = TypeVar("T")


def build(cls: type[T], values: Mapping[str, Any], *, who: str) -> T:
    """An instance of a config dataclass from plain values: strings are converted, unknown keys refused."""
    if not dataclasses.is_dataclass(cls):
        raise ConfigError(
            f"{who}: {cls.__name__} must be a dataclass: write @dataclass(frozen=True, kw_only=True) above it"
        )
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        raise ConfigError(f"{who}: {cls.__name__} must define {', '.join(missing)}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: hints[f.name] for f in dataclasses.fields(cls)}
    given = {}
    for name, value in values.items():
        key = name.replace("-", "_")
        if key not in fields:
            raise UnknownName(f"option of {who}", name, fields)
        given[key] = convert(value, fields[key], f"{who}: {name}")
    for field_ in dataclasses.fields(cls):
        needed = field_.init and field_.default is dataclasses.MISSING and field_.default_factory is dataclasses.MISSING
        if needed and field_.name not in given:
            raise ConfigError(f"{who}: {field_.name} must be given")
    return cls(**given)


def convert(value: Any, hint: Any, who: str) -> Any:
    """Convert a plain value (perhaps a string from the command line) to the annotated type, or raise ConfigError."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return parse_value(value) if isinstance(value, str) else value
    if origin in (typing.Union, types.UnionType):
        if value is None or (value == "none" and type(None) in args):
            if type(None) in args:
                return None
            raise ConfigError(f"{who} must not be none")
        choices = [a for a in args if a is not type(None)]
        for choice in choices[:-1]:
            try:
                return convert(value, choice, who)
            except ConfigError:
                continue
        return convert(value, choices[-1], who)
    if origin is Literal:
        if value in args:
            return value
        if all(isinstance(a, str) for a in args):
            raise UnknownName(f"value of {who}:", value, args)
        raise ConfigError(f"{who} must be one of {list(args)}, got {value!r}")
    if origin in (tuple, list, Sequence):
        items = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int | float) else value
        if not isinstance(items, Sequence):
            raise ConfigError(f"{who} must be a list, got {value!r}")
        return tuple(convert(item, args[0], who) for item in items)
    if origin is not None:  # mappings and the like come from code or TOML as they are
        return value
    return _convert_plain(value, hint, who)


def _convert_plain(value: Any, hint: Any, who: str) -> Any:
    if hint is bool:
        known = {"true": True, "false": False, "True": True, "False": False}
        if str(value) not in known:
            raise ConfigError(f"{who} must be true or false, got {value!r}")
        return known[str(value)]
    if hint in (int, float):
        if isinstance(value, bool) or (hint is int and isinstance(value, float) and not value.is_integer()):
            raise ConfigError(f"{who} must be {_A[hint]}, got {value!r}")
        try:
            return hint(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{who} must be {_A[hint]}, got {value!r}") from None
    if hint is str and not isinstance(value, str):
        raise ConfigError(f"{who} must be text, got {value!r}")
    return value


_A = {int: "a whole number", float: "a number"}


def parse_value(text: str) -> Any:
    """A value as TOML would read it; bare words stay text."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def format_value(value: Any) -> str:
    """A value as TOML writes it; the inverse of `parse_value`."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(format_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {format_value(item)}" for key, item in value.items()) + "}"
    # JSON writes text, numbers and booleans as TOML does, except inf and nan.
    return json.dumps(value, ensure_ascii=False).replace("Infinity", "inf").replace("NaN", "nan")


def to_overrides(config: RunConfig, *, also: Collection[str] = ()) -> list[str]:
    """`KEY=VALUE` for each field that is not the default: with these, `resolve` makes the same configuration.

    `also`: fields to name even if they have their default.
    """
    plain, overrides = RunConfig(), list[str]()
    for name in (each.name for each in dataclasses.fields(config)):
        value = getattr(config, name)
        if name == "task_options":
            overrides += [f"task.{key}={_as_typed(option)}" for key, option in value.items()]
        elif name == "strategy_options":
            overrides += [f"strategy.{key}={_as_text(option)}" for key, option in value.items()]
        elif value != getattr(plain, name) or name in also:
            overrides.append(f"{name}={_as_text(value)}")
    return overrides


def _as_typed(value: Any) -> str:
    """Text that `parse_value` reads as this value; bare words stay bare."""
    return value if isinstance(value, str) and parse_value(value) == value else format_value(value)


def _as_text(value: Any) -> str:
    """Text that `convert` reads as this value."""
    if value is None:
        return "none"
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def resolve(
    file: str | Path | None = None, overrides: Sequence[str] = (), given: Mapping[str, Any] | None = None
) -> RunConfig:
    """The run's configuration: defaults, overridden by the TOML file, then by `given`, then by `a.b=c`."""
    values: dict[str, Any] = {}
    if file is not None:
        # One spelling per key from here on, or two spellings of one option would both be kept.
        values.update({k.replace("-", "_"): v for k, v in _flatten(_read_toml(Path(file))).items()})
    values.update({k: v for k, v in (given or {}).items() if v is not None})
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set takes KEY=VALUE, got {override!r}")
        _put(values, key.strip(), text.strip())
    name, options = parse_strategy(str(values.get("strategy", RunConfig.strategy)))
    own, lifted = lift(options)
    values["strategy"] = name
    values["strategy_options"] = {**own, **values.get("strategy_options", {})}
    values.update({key: value for key, value in lifted.items() if key not in values})
    for key in LIFTED:
        if more := values.pop(f"{key}.", None):
            which, before = parse_spec(str(values.get(key, getattr(RunConfig, key))), key)
            values[key] = format_spec(which, {**before, **more})
    return build(RunConfig, values, who="run")


def parse_strategy(text: str, who: str = "strategy") -> tuple[str, dict[str, Any]]:
    """`name` or `name:key=value,key=value` to name and options; `my.py:Class` and `module:Class` are names too.

    `STRATEGY until TRIGGER | STRATEGY` is short for the strategy `phases`.
    """
    if ("|" in text or " until " in text) and not text.startswith("phases:"):
        return "phases", {"run": text.strip().replace(",", ";")}
    name, _, rest = text.partition(":")
    second, _, behind = rest.partition(":")
    if second and "=" not in second:  # not an option, so a class in the user's own file or module
        name, rest = f"{name.strip()}:{second.strip()}", behind
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"{who} {name}: options are key=value, got {part!r}")
        options[key.strip().replace("-", "_")] = value.strip()
    return name.strip(), options


def parse_spec(text: str, who: str = "codec") -> tuple[str, dict[str, Any]]:
    """`name` or `name:key=value;key=value` to name and options; commas work too, where nothing else needs them."""
    return parse_strategy(text.replace(";", ","), who)


def format_spec(name: str, options: Mapping[str, Any]) -> str:
    """The inverse of `parse_spec`."""
    return f"{name}:{';'.join(f'{key}={value}' for key, value in options.items())}" if options else name


LIFTED = ("codec", "collective", "balance")
"""Settings of a run that may be given among a strategy's options, so that the arms of a comparison can differ."""


def lift(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split options into the strategy's own and the run's."""
    own = {key: value for key, value in options.items() if key not in LIFTED}
    return own, {key: value for key, value in options.items() if key in LIFTED}


def _put(values: dict[str, Any], key: str, text: str) -> None:
    head, dot, tail = key.partition(".")
    if head in LIFTED and dot:
        values.setdefault(f"{head}.", {})[tail.replace("-", "_")] = text  # `resolve` merges them once the name is known
        return
    if head in ("strategy", "task") and dot:
        options = values[f"{head}_options"] = dict(values.get(f"{head}_options", {}))
        options[tail.replace("-", "_")] = parse_value(text) if head == "task" else text
    elif head == "run" and dot:
        values[tail.replace("-", "_")] = text
    else:
        values[key.replace("-", "_")] = text


def _flatten(table: Mapping[str, Any]) -> dict[str, Any]:
    """`[run]`, `[task]` and `[strategy]` tables of a run file to the fields of RunConfig."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if key == "run" and isinstance(value, Mapping):
            flat.update(value)
        elif key in ("task", "strategy") and isinstance(value, Mapping):
            options = dict(value)
            if "name" in options:
                flat[key] = options.pop("name")
            flat[f"{key}_options"] = options
        else:
            flat[key] = value
    return flat


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from error

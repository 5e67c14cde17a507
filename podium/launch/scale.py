"""Change the number of workers and servers of a run that is under way.

During the run, its launcher has `control.json` in the run's folder: the coordinator's address and the run's secret,
readable by the user only.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from podium.comm.real.channel import Channel
from podium.comm.real.sockets import Address
from podium.comm.real.tls import Tls
from podium.errors import CommError, ConfigError, Lost, RecordError
from podium.launch.coordination.rules import COORDINATOR, OPERATOR

_CONTROL = "control.json"
_ANSWER_S = 60.0
"""How long the launcher may take to start new processes; it answers as soon as it has."""


class ScaleAnswer(NamedTuple):
    """The result of a request. New ranks take part once they are ready; those that retire finish the step first."""

    workers: int
    servers: int
    starting: tuple[int, ...]
    retiring: tuple[int, ...]


def scale(
    run_dir: str | os.PathLike[str],
    *,
    workers: int | None = None,
    servers: int | None = None,
    hosts: Sequence[str] = (),
) -> ScaleAnswer:
    """Ask a running job to continue with this many ranks; None leaves a number unchanged.

    `hosts` (`user@host slots=2`) are added to a run on hosts; its new ranks start there, as many as there are slots
    where no number of workers is given.

    Raises ConfigError where the run cannot be scaled. The run pauses briefly once all new ranks are ready, and not
    before; one that cannot be started is left out, and the run reports it.
    """
    if workers is None and servers is None and not hosts:
        raise ConfigError("scale: the number of workers or servers, or hosts, must be given, got neither")
    answer = _ask(Path(run_dir), {"workers": workers, "servers": servers, "hosts": list(hosts)})
    if "refused" in answer:
        raise ConfigError(answer["refused"])
    return ScaleAnswer(answer["workers"], answer["servers"], tuple(answer["starting"]), tuple(answer["retiring"]))


def _ask(run_dir: Path, asked: dict[str, Any]) -> dict[str, Any]:
    coordinator, secret, tls = _read_control(run_dir)
    with tempfile.TemporaryDirectory(prefix="podium-ask-") as folder:
        channel = Channel(OPERATOR, secret=secret, listen=f"unix:{folder}/s", deadline_s=_ANSWER_S, tls=tls)
        try:
            channel.introduce({COORDINATOR: coordinator})
            (answer,) = channel.wait([channel.call(COORDINATOR, "scale", asked)])
        except CommError as error:
            raise Lost(f"scale: the launcher of {run_dir} does not answer; has the run ended? ({error})") from error
        finally:
            channel.close()
    return answer.meta


@contextmanager
def open_to_change(run_dir: Path, coordinator: Address, secret: bytes, tls: Tls | None = None) -> Iterator[None]:
    """Inside, the user who owns the run's folder can request a change."""
    path = run_dir / _CONTROL
    try:
        path.unlink(missing_ok=True)
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "w", encoding="utf-8") as text:
            keys = {} if tls is None else {"tls": dataclasses.asdict(tls)}
            json.dump({"coordinator": coordinator, "secret": secret.hex(), **keys}, text)
    except OSError as error:
        raise RecordError(f"{path} cannot be written: {error.strerror}") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _read_control(run_dir: Path) -> tuple[Address, bytes, Tls | None]:
    path = run_dir / _CONTROL
    try:
        with path.open(encoding="utf-8") as text:
            if os.fstat(text.fileno()).st_uid != os.geteuid():
                raise ConfigError(f"scale: {path} must be of a run of yours, and is another user's")
            found = json.loads(text.read())
        coordinator, secret, keys = str(found["coordinator"]), bytes.fromhex(found["secret"]), found.get("tls")
        return coordinator, secret, None if keys is None else Tls(str(keys["cert"]), str(keys["key"]), str(keys["ca"]))
    except FileNotFoundError:
        raise ConfigError(
            f"scale: {run_dir} must be the folder of a run under way in processes of this machine, "
            f"and has no {_CONTROL}{'' if run_dir.is_dir() else ' (there is no such folder)'}"
        ) from None
    except OSError as error:
        raise ConfigError(f"scale: {path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"scale: {path} is damaged: {error}") from error

"""`podium certs`: an authority and a certificate for mutual TLS, made by the package `cryptography`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click

from podium.cli.options import options
from podium.cli.output import Output
from podium.errors import ConfigError, as_request

NAMES = {"tls_cert": "node.pem", "tls_key": "node.key", "tls_ca": "ca.pem"}
"""The settings of a run, and the file for each."""


@click.command(short_help="Make certificates for TLS between ranks.")
@click.argument("folder", metavar="FOLDER")
@click.option("--days", type=click.IntRange(min=1), default=365, metavar="N", help="Days until they expire. [365]")
@options("json")
@click.pass_obj
def certs(out: Output, folder: str, days: int) -> None:
    """Make an authority and one certificate signed by it in FOLDER, for all ranks of your runs.

    \b
    podium certs keys
    torchrun … -m podium.node --set tls_cert=keys/node.pem \\
        --set tls_key=keys/node.key --set tls_ca=keys/ca.pem …
    """
    with as_request():
        made = make_certificates(Path(folder), days)
    out.document(made)
    out.say(*(f"{setting:<9} {path}" for setting, path in made.items()))
    out.say(
        "",
        "Every machine of a run needs these three files. Anyone with the key and the secret can join your runs;",
        f"anyone with {Path(folder) / 'ca.key'} can make more of them: keep it elsewhere, or delete it.",
    )


def make_certificates(folder: Path, days: int = 365) -> dict[str, str]:
    """Make certificates in this folder, which must have none yet; returns the run's settings that use them."""
    from podium.comm.real.certificates import AUTHORITY_KEY, make_pems

    pems = make_pems(days)  # raises before a folder is made
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    present = [name for name in (*NAMES.values(), AUTHORITY_KEY) if (folder / name).exists()]
    if present:
        raise ConfigError(f"podium certs: {folder} must hold no certificates yet, got {', '.join(present)}")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as made:
        for name in (AUTHORITY_KEY, *NAMES.values()):
            path = Path(made) / name
            path.touch(mode=0o600)  # restrict access before the key is written
            path.write_bytes(pems[name])
            os.chmod(Path(made) / name, 0o600 if name.endswith(".key") else 0o644)
            os.rename(Path(made) / name, folder / name)
    return {setting: str(folder / name) for setting, name in NAMES.items()}

"""`podium certs`: an authority and a certificate for mutual TLS, made by OpenSSL's own program."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
from pathlib import Path

import click

from podium.cli.options import options
from podium.cli.output import Output
from podium.errors import ConfigError, PodiumError, as_request

NAMES = {"tls_cert": "node.pem", "tls_key": "node.key", "tls_ca": "ca.pem"}
"""The settings of a run, and which of the files each wants."""
_AUTHORITY_KEY = "ca.key"
_SECONDS = 30.0
_ABOUT = """\
[req]
distinguished_name = name
prompt = no
[name]
CN = podium
[authority]
basicConstraints = critical, CA:true, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[node]
basicConstraints = critical, CA:false
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid:always
"""


@click.command(short_help="Make certificates for TLS between ranks.")
@click.argument("folder", metavar="FOLDER")
@click.option("--days", type=click.IntRange(min=1), default=365, metavar="N", help="How long they are good. [365]")
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
        "Every machine of a run needs these three files. Whoever has the key and the secret takes part in your runs;",
        f"whoever has {Path(folder) / _AUTHORITY_KEY} makes more of them: keep it elsewhere, or delete it.",
    )


def make_certificates(folder: Path, days: int = 365) -> dict[str, str]:
    """Make them in this folder, where none may be yet; returns the run's settings that use them."""
    program = shutil.which("openssl")
    if program is None:
        raise ConfigError(
            "podium certs: needs the program openssl, which is not here; install it (apt install openssl)"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    present = [name for name in (*NAMES.values(), _AUTHORITY_KEY) if (folder / name).exists()]
    if present:
        raise ConfigError(f"podium certs: {folder} must hold no certificates yet, got {', '.join(present)}")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as made:
        _make(program, Path(made), days)
        for name in (_AUTHORITY_KEY, *NAMES.values()):
            os.chmod(Path(made) / name, 0o600 if name.endswith(".key") else 0o644)
            os.rename(Path(made) / name, folder / name)
    return {setting: str(folder / name) for setting, name in NAMES.items()}


def _make(program: str, folder: Path, days: int) -> None:
    (folder / "about").write_text(_ABOUT)
    new = ("req", "-config", "about", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-sha256")
    span, serial = ("-days", str(days)), ("-set_serial", str(secrets.randbits(120)))
    _openssl(program, folder, *new, "-x509", *span, "-subj", "/CN=podium authority", "-extensions", "authority",
             "-keyout", _AUTHORITY_KEY, "-out", "ca.pem")  # fmt: skip
    _openssl(program, folder, *new, "-new", "-subj", "/CN=podium node", "-keyout", "node.key", "-out", "request")
    _openssl(program, folder, "x509", "-req", "-sha256", "-in", "request", "-CA", "ca.pem", "-CAkey", _AUTHORITY_KEY,
             *serial, *span, "-extfile", "about", "-extensions", "node", "-out", "node.pem")  # fmt: skip


def _openssl(program: str, folder: Path, *words: str) -> None:
    done: subprocess.CompletedProcess[str] | None = None
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [program, *words], cwd=folder, capture_output=True, text=True, umask=0o077, timeout=_SECONDS, check=False
        )
    if done is None or done.returncode:
        said = done.stderr.strip().splitlines()[-1:] if done is not None else ["it could not be run, or hung"]
        raise PodiumError(f"podium certs: {program} {words[0]} failed: {''.join(said) or 'without a word'}")

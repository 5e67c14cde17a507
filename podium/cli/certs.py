"""`podium certs`: an authority and a certificate for mutual TLS, made by the package `cryptography`."""

from __future__ import annotations

import datetime
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from podium.cli.options import options
from podium.cli.output import Output
from podium.errors import ConfigError, MissingExtra, as_request

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, ExtensionType

NAMES = {"tls_cert": "node.pem", "tls_key": "node.key", "tls_ca": "ca.pem"}
"""The settings of a run, and the file for each."""
_AUTHORITY_KEY = "ca.key"


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
        f"anyone with {Path(folder) / _AUTHORITY_KEY} can make more of them: keep it elsewhere, or delete it.",
    )


def make_certificates(folder: Path, days: int = 365) -> dict[str, str]:
    """Make certificates in this folder, which must have none yet; returns the run's settings that use them."""
    try:
        import cryptography.x509  # noqa: F401  # raises before a folder is made
    except ImportError:
        raise MissingExtra("cryptography", "tls", "podium certs") from None
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    present = [name for name in (*NAMES.values(), _AUTHORITY_KEY) if (folder / name).exists()]
    if present:
        raise ConfigError(f"podium certs: {folder} must hold no certificates yet, got {', '.join(present)}")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as made:
        _write_all(Path(made), days)
        for name in (_AUTHORITY_KEY, *NAMES.values()):
            os.chmod(Path(made) / name, 0o600 if name.endswith(".key") else 0o644)
            os.rename(Path(made) / name, folder / name)
    return {setting: str(folder / name) for setting, name in NAMES.items()}


def _write_all(folder: Path, days: int) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509 import AuthorityKeyIdentifier, BasicConstraints, ExtendedKeyUsage
    from cryptography.x509.oid import ExtendedKeyUsageOID

    authority, node = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    may_sign = (BasicConstraints(ca=True, path_length=0), _usage("key_cert_sign", "crl_sign"))
    _write(folder / _AUTHORITY_KEY, authority)
    _write(folder / "ca.pem", _signed("podium authority", authority, authority, days, critical=may_sign))
    critical = (BasicConstraints(ca=False, path_length=None), _usage("digital_signature"))
    both_ends = ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    more = (both_ends, AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()))
    _write(folder / "node.key", node)
    _write(folder / "node.pem", _signed("podium node", node, authority, days, critical=critical, more=more))


def _signed(
    name: str,
    key: EllipticCurvePrivateKey,
    authority: EllipticCurvePrivateKey,
    days: int,
    *,
    critical: tuple[ExtensionType, ...],
    more: tuple[ExtensionType, ...] = (),
) -> Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.x509.oid import NameOID

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    now = datetime.datetime.now(datetime.UTC)
    try:
        ends = now + datetime.timedelta(days=days)
    except OverflowError:
        raise ConfigError(f"podium certs: certificates must end before the year 10000, got {days} days") from None
    made = x509.CertificateBuilder(
        subject_name=named(name),
        issuer_name=named("podium authority"),
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now,
        not_valid_after=ends,
    )
    for extension in critical:
        made = made.add_extension(extension, critical=True)
    for extension in (*more, x509.SubjectKeyIdentifier.from_public_key(key.public_key())):
        made = made.add_extension(extension, critical=False)
    return made.sign(authority, SHA256())


def _usage(*allowed: str) -> ExtensionType:
    from cryptography.x509 import KeyUsage

    purposes = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
        *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return KeyUsage(**{purpose: purpose in allowed for purpose in purposes})


def _write(path: Path, what: EllipticCurvePrivateKey | Certificate) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509 import Certificate

    pem = Encoding.PEM
    if isinstance(what, Certificate):
        data = what.public_bytes(pem)
    else:
        data = what.private_bytes(pem, PrivateFormat.PKCS8, NoEncryption())
    path.touch(mode=0o600)  # restrict access before the key is written
    path.write_bytes(data)

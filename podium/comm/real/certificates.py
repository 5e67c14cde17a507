"""Certificates for mutual TLS: an authority and one certificate that it signed, made by the package `cryptography`."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

from podium.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, ExtensionType

AUTHORITY_KEY = "ca.key"
_RUN_DAYS = 3650


def run_keys() -> dict[str, str]:
    """The certificate, its key and the authority of one run, as PEM texts: `cert`, `key`, `ca`.

    The authority's own key is forgotten. Valid for ten years both ways, so that a clock that is wrong is found by the
    check of clocks, which says so, and not by a failed handshake.
    """
    made = make_pems(_RUN_DAYS, before_days=_RUN_DAYS)
    return {"cert": made["node.pem"].decode(), "key": made["node.key"].decode(), "ca": made["ca.pem"].decode()}


def make_pems(days: int, before_days: int = 0) -> dict[str, bytes]:
    """PEM files by name: `ca.key`, `ca.pem`, `node.key`, `node.pem`; valid from `before_days` ago until in `days`."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509 import AuthorityKeyIdentifier, BasicConstraints, ExtendedKeyUsage
        from cryptography.x509.oid import ExtendedKeyUsageOID
    except ImportError:
        raise MissingExtra("cryptography", "tls", "TLS between hosts") from None
    authority, node = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    try:
        valid = now - before_days * day, now + days * day
    except OverflowError:
        raise ConfigError(f"podium certs: certificates must end before the year 10000, got {days} days") from None
    may_sign = (BasicConstraints(ca=True, path_length=0), _usage("key_cert_sign", "crl_sign"))
    critical = (BasicConstraints(ca=False, path_length=None), _usage("digital_signature"))
    both_ends = ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    more = (both_ends, AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()))
    return {
        AUTHORITY_KEY: _pem(authority),
        "ca.pem": _pem(_signed("podium authority", authority, authority, valid, critical=may_sign)),
        "node.key": _pem(node),
        "node.pem": _pem(_signed("podium node", node, authority, valid, critical=critical, more=more)),
    }


def _signed(
    name: str,
    key: EllipticCurvePrivateKey,
    authority: EllipticCurvePrivateKey,
    valid: tuple[datetime.datetime, datetime.datetime],
    *,
    critical: tuple[ExtensionType, ...],
    more: tuple[ExtensionType, ...] = (),
) -> Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.x509.oid import NameOID

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    made = x509.CertificateBuilder(
        subject_name=named(name),
        issuer_name=named("podium authority"),
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=valid[0],
        not_valid_after=valid[1],
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


def _pem(what: EllipticCurvePrivateKey | Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509 import Certificate

    if isinstance(what, Certificate):
        return what.public_bytes(Encoding.PEM)
    return what.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

"""Keys to try a federation out with: an authority, a server certificate, a key for every node.

All are elliptic-curve keys (P-384), in files that only their owner can read.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import FedflatError, MissingExtra, explained

if TYPE_CHECKING:
    from cryptography import x509

MOST_NODES, MOST_DAYS = 100_000, 36_500
PUBLIC, PRIVATE = 0o644, 0o600


def make_keys(directory: Path, nodes: int, hosts: list[str], port: int = 8443, days: int = 365) -> list[Path]:
    """Write everything into a directory that holds none of it yet; the files, in order."""
    try:
        from cryptography.hazmat.primitives import serialization
    except ImportError:
        raise MissingExtra("cryptography", "flower", "Making keys") from None
    if nodes < 1 or days < 1:
        raise FedflatError(f"{nodes} nodes for {days} days: give at least 1 of each.")
    if nodes > MOST_NODES or days > MOST_DAYS:
        raise FedflatError(f"{nodes} nodes for {days} days: at most {MOST_NODES:,} and {MOST_DAYS:,}.")
    if not hosts:
        raise FedflatError("Name the server's host, such as --host 127.0.0.1.")
    hosts = [_ascii(host) for host in hosts]
    authority_key, server_key = _new_key(), _new_key()
    authority = _certificate("fedflat federation", authority_key, None, authority_key, days, [])
    server = _certificate(hosts[0], server_key, authority, authority_key, days, hosts)
    files: dict[str, tuple[bytes, int]] = {
        "ca.crt": (authority.public_bytes(serialization.Encoding.PEM), PUBLIC),
        "ca.key": (_pem(authority_key), PRIVATE),
        "server.pem": (server.public_bytes(serialization.Encoding.PEM), PUBLIC),
        "server.key": (_pem(server_key), PRIVATE),
    }
    for number in range(nodes):
        key = _new_key()
        files[f"node-{number}"] = (_openssh(key), PRIVATE)
        public = key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        files[f"node-{number}.pub"] = (public + b"\n", PUBLIC)
    root = (directory / "ca.crt").resolve()
    files["superlink.toml"] = (_connection(hosts[0], port, root).encode(), PUBLIC)
    _write(directory, files)
    return [directory / name for name in files]


def _write(directory: Path, files: dict[str, tuple[bytes, int]]) -> None:
    taken = [name for name in files if (directory / name).exists()]
    if taken:
        raise FedflatError(
            f"{directory / taken[0]} exists already and is not overwritten: nodes would be locked out. Choose "
            "another directory, or remove it first."
        )
    with explained(f"{directory} cannot be written"):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, (content, mode) in files.items():
            # made with its mode, so that no other user can read it even for a moment
            descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def _pem(key: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _openssh(key: Any) -> bytes:
    """As Flower reads the keys of its SuperNodes."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))


def _certificate(
    name: str, key: Any, issuer: x509.Certificate | None, issuer_key: Any, days: int, hosts: list[str]
) -> x509.Certificate:
    """A certificate for hosts, or for an authority where there are none."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    now = datetime.datetime.now(datetime.UTC)
    public, signer = key.public_key(), issuer_key.public_key()
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=not hosts, path_length=None if hosts else 0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
        .add_extension(_usage(authority=not hosts), critical=True)
    )
    if hosts:
        names = x509.SubjectAlternativeName([_alternative(host) for host in hosts])
        built = built.add_extension(names, critical=False)
        purpose = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        built = built.add_extension(purpose, critical=False)
    return built.sign(issuer_key, hashes.SHA384())


def _usage(authority: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(host: str) -> x509.GeneralName:
    from cryptography import x509

    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    return x509.DNSName(host)


def _ascii(host: str) -> str:
    """A host's name as certificates and files have it: letters that are not ASCII are written in another way."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host))
    with contextlib.suppress(UnicodeError):
        name = host.encode("idna").decode("ascii")
        if re.fullmatch(r"(\*\.)?[A-Za-z0-9_.-]+", name):
            return name
    raise FedflatError(f"--host {host!r} is no name of a host.")


def _connection(host: str, port: int, root: Path) -> str:
    """How Flower's command line finds the server; for its config.toml."""
    return f'[superlink.federation]\naddress = "{host}:{port}"\nroot-certificates = "{root}"\n'

"""Certificates for tests of TLS: an authority of one's own, and what it signs."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


class Authority:
    def __init__(self, folder: Path, name: str = "ca"):
        self.folder, self.key, self.name = folder, ec.generate_private_key(ec.SECP256R1()), _name(name)
        self.file = folder / f"{name}.pem"
        signed = self._build(self.name, self.key, 30, x509.BasicConstraints(ca=True, path_length=None))
        self.file.write_bytes(signed.public_bytes(serialization.Encoding.PEM))

    def _build(self, subject, key, days: int, *extensions) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        first, last = sorted([now - datetime.timedelta(days=1), now + datetime.timedelta(days=days)])
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self.name).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(first).not_valid_after(last)
        for extension in extensions:
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return builder.sign(self.key, hashes.SHA256())

    def sign(self, name: str, hosts: tuple[str, ...] = ("127.0.0.1", "localhost"), days: int = 30) -> Path:
        """A PEM file with a certificate for `hosts` and its key; it has expired where `days` are negative."""
        key = ec.generate_private_key(ec.SECP256R1())
        known = x509.SubjectAlternativeName([_host(host) for host in hosts])
        pem = self._build(_name(name), key, days, known).public_bytes(serialization.Encoding.PEM)
        plain = serialization.NoEncryption()
        pem += key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        path = self.folder / f"{name}.pem"
        path.write_bytes(pem)
        path.chmod(0o600)
        return path


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)

"""Revocation lists: the client certificates that their authority has revoked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

from edgewater.base.errors import InvalidConfig, Unauthenticated

_BEGIN = b"-----BEGIN X509 CRL-----"


class RevocationLists:
    """The lists in a PEM file, each signed by one of the authorities. Immutable.

    Raises:
        InvalidConfig: the file does not have lists in PEM, or has a list that no authority has signed.
    """

    def __init__(self, path: Path, lists: bytes, authorities: bytes) -> None:
        try:
            issuers = x509.load_pem_x509_certificates(authorities)
            blocks = [_BEGIN + block for block in lists.split(_BEGIN)[1:]]
            crls = [x509.load_pem_x509_crl(block) for block in blocks]
            unsigned = [c for c in crls if not any(_has_signed(i, c) for i in issuers)]
        except (ValueError, UnsupportedAlgorithm) as exc:
            raise InvalidConfig("tls.crl", str(path), "revocation lists in PEM", str(exc)) from exc
        if not crls or unsigned:
            raise InvalidConfig("tls.crl", str(path), "revocation lists in PEM that tls.client_ca has signed")
        self._revoked = {(c.issuer, r.serial_number) for c in crls for r in c}
        ends = [int(c.next_update_utc.timestamp() * 1000) for c in crls if c.next_update_utc is not None]
        self._next_update_ms = min(ends, default=None)

    def is_overdue(self, now_ms: int) -> bool:
        """Whether the time of a list's next update has passed."""
        return self._next_update_ms is not None and now_ms >= self._next_update_ms

    def require_valid(self, certificate: bytes | None, now_ms: int) -> None:
        """Raises Unauthenticated if a certificate (PEM) is missing, revoked or has expired."""
        if certificate is None:
            raise Unauthenticated("no client certificate")
        try:
            read = x509.load_pem_x509_certificate(certificate)
        except ValueError as exc:
            raise Unauthenticated(f"the client certificate cannot be read: {exc}") from exc
        if (read.issuer, read.serial_number) in self._revoked:
            raise Unauthenticated(f"the client certificate with serial number {read.serial_number:x} is revoked")
        if now_ms >= read.not_valid_after_utc.timestamp() * 1000:
            raise Unauthenticated(f"the client certificate has expired, at {read.not_valid_after_utc:%FT%TZ}")


def _has_signed(issuer: x509.Certificate, crl: x509.CertificateRevocationList) -> bool:
    key: Any = issuer.public_key()  # one that cannot sign is refused by TLS
    try:
        return bool(issuer.subject == crl.issuer and crl.is_signature_valid(key))
    except InvalidSignature:
        return False

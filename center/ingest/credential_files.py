"""The files of the gateway's credentials: tokens, certificate and key, client CA, revocation lists.

The gateway reads them again when they change, for example by an editor, a renewal or the swap of a symbolic link in a
mounted Secret. If a file cannot be used, because it is no YAML for example, the previous credentials stay in use.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from center.config import TlsSection, load_certificate
from center.edge_access import EdgeAccess, read_tokens_file
from center.ingest.authentication import Credentials, Presented
from edgewater.base.errors import InvalidConfig
from edgewater.base.streams import EdgeId
from edgewater.runtime.configuration import FileWatch

if TYPE_CHECKING:
    from center.ingest.revocation import RevocationLists

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedCredentials:
    """The content of the files when they were last read.

    Attributes:
        tls: gRPC's server certificate configuration; None: plain text.
        authorities: content of the client CA.
    """

    edges: Credentials
    tls: Any = None
    authorities: bytes | None = field(default=None, repr=False)
    revocations: RevocationLists | None = None

    def require(self, presented: Presented, edge: EdgeId, now_ms: int) -> EdgeAccess:
        """Returns the access of an edge that has sent a Hello in a call. Raises Unauthenticated."""
        if self.revocations is not None:
            self.revocations.require_valid(presented.certificate, now_ms)
        return self.edges.require(presented, edge, now_ms)


class CredentialFiles:
    """Loads the credentials, and loads them again when a file has changed.

    Args:
        tokens: entries in addition to the entries of `tokens_file`.

    Raises:
        InvalidConfig: a file cannot be used.

    Attributes:
        loaded: the credentials in use.
        problem: why changed files are not in use; None: they are in use.
    """

    def __init__(self, tokens: Mapping[str, EdgeAccess], tokens_file: Path | None, tls: TlsSection | None) -> None:
        self._tokens = tokens
        self._tokens_file = tokens_file
        self._tls = tls
        of_tls = (tls.cert, tls.key, tls.client_ca, tls.crl) if tls is not None else ()
        self._served: Any = None
        self._watch = FileWatch(tokens_file, *of_tls)
        self.loaded = self._load()
        self.problem: str | None = None

    @property
    def authenticates(self) -> bool:
        """Whether a call without any credential is refused."""
        by_certificate = self._tls is not None and self._tls.client_ca is not None
        return bool(self._tokens) or self._tokens_file is not None or by_certificate

    def refresh(self) -> bool:
        """Reads the files if one has changed and is complete; returns whether `loaded` or `problem` is new. Blocks."""
        before = self.problem
        try:
            loaded = self._watch.read(self._load, again=before is not None)
        except InvalidConfig as exc:
            self.problem = exc.message
            return self.problem != before
        if loaded is None:
            return False
        self.loaded, self.problem = loaded, None
        return True

    def server_credentials(self) -> Any:
        """Returns gRPC's credentials, which use the newest certificate at each handshake; None: plain text."""
        if self._tls is None:
            return None
        self._served = self.loaded.tls
        return grpc.dynamic_ssl_server_credentials(
            self._served, self._newer_tls, require_client_authentication=self._tls.client_ca is not None
        )

    def _newer_tls(self) -> Any:
        """Returns the configuration if it is newer than the last returned one, otherwise None. gRPC's threads call
        it."""
        newest = self.loaded.tls
        if newest is self._served:
            return None
        self._served = newest
        return newest

    def _load(self) -> LoadedCredentials:
        access = dict(self._tokens)
        if self._tokens_file is not None:
            access |= read_tokens_file(self._tokens_file)
        # A file without entries revokes all tokens. It must not open the gateway to every edge.
        required = bool(access) or self._tokens_file is not None
        if self._tls is None:
            return LoadedCredentials(Credentials(access, entry_required=required))
        tls, revocations = self._tls, None
        _require_usable(tls)
        authorities = None if tls.client_ca is None else _read(tls.client_ca, "tls.client_ca")
        if tls.crl is not None and authorities is not None:
            from center.ingest.revocation import RevocationLists

            revocations = RevocationLists(tls.crl, _read(tls.crl, "tls.crl"), authorities)
        pair = (_read(tls.key, "tls.key"), _read(tls.cert, "tls.cert"))
        return LoadedCredentials(
            Credentials(access, by_certificate=authorities is not None, entry_required=required),
            grpc.ssl_server_certificate_configuration([pair], authorities),
            authorities,
            revocations,
        )


def _read(path: Path, field: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise InvalidConfig(field, str(path), "a readable PEM file", exc.strerror or "") from exc


def _require_usable(tls: TlsSection) -> None:
    """Raises InvalidConfig if key and certificates do not fit together. gRPC would notice it at the next handshake."""
    for name in ("cert", "key", "client_ca"):
        path: Path | None = getattr(tls, name)
        if path is not None:
            _read(path, f"tls.{name}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_certificate(context, tls.cert, tls.key, "tls.cert")
    if tls.client_ca is not None:
        try:
            context.load_verify_locations(tls.client_ca)
        except (ssl.SSLError, OSError) as exc:
            raise InvalidConfig("tls.client_ca", str(tls.client_ca), "certificates in PEM", str(exc)) from exc

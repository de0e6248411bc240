"""Authentication of edges: by bearer token, by client certificate or, on loopback only, by the id in their Hello. Pure.

A certificate names an edge by its subject alternative names of type DNS and URI, such as a SPIFFE id. The common name
counts only if the certificate has no such name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from center.edge_access import EdgeAccess
from edgewater.base.errors import InvalidConfig, Unauthenticated
from edgewater.base.streams import EdgeId
from edgewater.base.timestamps import rfc3339
from edgewater.runtime.bearer import bearer_token, token_digest

_ALTERNATIVE_NAMES = ("peer_dns", "peer_uri")
NO_END_MS = 1 << 62  # format: above all times


@dataclass(frozen=True, slots=True)
class Presented:
    """The credentials that a call presents.

    Attributes:
        token_digest: digest of the bearer token; None: the call has no token.
        names: names in the client certificate, if there is a certificate.
        certificate: the client certificate in PEM.
    """

    token_digest: bytes | None
    names: frozenset[str]
    certificate: bytes | None

    @classmethod
    def of(cls, metadata: Iterable[tuple[str, str | bytes]], auth_context: Mapping[str, Iterable[bytes]]) -> Presented:
        """Reads the metadata and gRPC's auth context of a call."""
        header = next((str(v) for k, v in metadata if k == "authorization"), "")
        token = bearer_token(header)
        digest = None if token is None else token_digest(token)
        names = [name for key in _ALTERNATIVE_NAMES for name in auth_context.get(key, ())]
        names = names or list(auth_context.get("x509_common_name", ()))
        certificate = next(iter(auth_context.get("x509_pem_cert", ())), None)
        return cls(digest, frozenset(n.decode(errors="replace") for n in names if n), certificate)


class Credentials:
    """Who may connect as which edge. Only digests of tokens are stored and compared, so that timing reveals nothing.

    Args:
        access: entries by edge id.
        by_certificate: every call has a client certificate.
        entry_required: whether edges without an entry are refused, even if there is no entry at all; None: they are
            refused if there is any entry.

    Raises:
        InvalidConfig: a token is empty, or two edges have the same token.
    """

    def __init__(
        self, access: Mapping[str, EdgeAccess], *, by_certificate: bool = False, entry_required: bool | None = None
    ) -> None:
        self._access = {EdgeId(edge): entry for edge, entry in access.items()}
        self._entry_required = bool(access) if entry_required is None else entry_required
        self._by_certificate = by_certificate
        self._tokens: dict[bytes, tuple[EdgeId, int]] = {}
        for edge, entry in self._access.items():
            for token in entry.tokens:
                secret = token.token.get_secret_value()
                digest = token_digest(secret)
                if not secret or self._tokens.get(digest, (edge, 0))[0] != edge:
                    raise InvalidConfig(f"tokens.{edge}", "…", "a token that is not empty and that no other edge has")
                self._tokens[digest] = edge, NO_END_MS if token.expires is None else token.expires

    def next_end_ms(self, now_ms: int) -> int:
        """The wall time after `now_ms` at which the next token expires."""
        return min((end for _, end in self._tokens.values() if end > now_ms), default=NO_END_MS)

    def candidates(self, presented: Presented, now_ms: int) -> frozenset[EdgeId] | None:
        """Returns the edges that may make a call; None: any edge, because no credential is required.

        Raises:
            Unauthenticated: the call has no credential, or its credential is unknown or has expired.
        """
        if self._by_certificate and not presented.names:
            raise Unauthenticated("the client certificate has no name: expected a subject alternative name, DNS or URI")
        if not self._entry_required:
            return frozenset(EdgeId(n) for n in presented.names) if presented.names else None
        if presented.token_digest is not None:
            edge, end_ms = self._tokens.get(presented.token_digest, (None, 0))
            if edge is None:
                raise Unauthenticated("unknown credential: the bearer token belongs to no edge")
            if now_ms >= end_ms:
                raise Unauthenticated(f"expired credential: the bearer token was accepted until {rfc3339(end_ms)}")
            return frozenset({edge})
        named = {e for e, entry in self._access.items() if not entry.tokens and presented.names & _names(e, entry)}
        if not named:
            raise Unauthenticated("no credential: the call's metadata needs authorization: Bearer <token>")
        return frozenset(named)

    def require(self, presented: Presented, edge: EdgeId, now_ms: int) -> EdgeAccess:
        """Returns the entry of an edge that has sent a Hello in a call. Raises Unauthenticated."""
        candidates = self.candidates(presented, now_ms)
        entry = self._access.get(edge, EdgeAccess())
        if candidates is not None and edge not in candidates:
            raise Unauthenticated(f"Hello of edge {edge} with the credential of edge {' or '.join(sorted(candidates))}")
        if (presented.names or entry.identity) and not presented.names & _names(edge, entry):
            theirs = ", ".join(sorted(presented.names)[:3]) or "nothing"
            raise Unauthenticated(
                f"the token belongs to edge {edge}, the certificate to {theirs:.200}; expected one of"
                f" {', '.join(sorted(_names(edge, entry)))}"
            )
        return entry


def _names(edge: EdgeId, entry: EdgeAccess) -> frozenset[str]:
    """The names that the edge's certificate may have."""
    return frozenset(entry.identity or (edge,))

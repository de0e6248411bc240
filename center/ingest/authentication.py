"""Authentication of edges: by bearer token, by client certificate or, on loopback only, by the id in their Hello."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from edgewater.errors import InvalidConfig, Unauthenticated
from edgewater.streams import EdgeId

_SCHEME = "Bearer "


class Credentials:
    """Edge ids by token. Only digests are stored and compared, so that timing reveals nothing.

    Args:
        tokens: token by edge id; empty: no token is required.

    Raises:
        InvalidConfig: an empty token, or one that two edges share.
    """

    def __init__(self, tokens: Mapping[str, str]) -> None:
        self._edges: dict[bytes, EdgeId] = {}
        for edge, token in tokens.items():
            digest = _digest(token)
            if not token or digest in self._edges:
                raise InvalidConfig(f"tokens.{edge}", "…", "a token that is not empty and that no other edge has")
            self._edges[digest] = EdgeId(edge)

    def identify(
        self, metadata: Iterable[tuple[str, str | bytes]], certificate: Mapping[str, Iterable[bytes]]
    ) -> EdgeId | None:
        """The edge that the credentials belong to; None if none are required.

        Args:
            certificate: gRPC's auth context of the call.

        Raises:
            Unauthenticated: no credential, an unknown one, or two of different edges.
        """
        named = [EdgeId(name.decode()) for name in certificate.get("x509_common_name", ())]
        if not self._edges:
            return named[0] if named else None
        header = next((str(v) for k, v in metadata if k == "authorization"), None)
        if header is None or not header.startswith(_SCHEME):
            raise Unauthenticated("no credential: the call's metadata needs authorization: Bearer <token>")
        edge = self._edges.get(_digest(header[len(_SCHEME) :]))
        if edge is None:
            raise Unauthenticated("unknown credential: the bearer token belongs to no edge")
        if named and named[0] != edge:
            raise Unauthenticated(f"the token belongs to edge {edge}, the certificate to {named[0]}")
        return edge


def require_own_id(credential: EdgeId | None, claimed: EdgeId) -> None:
    """Raises Unauthenticated if a Hello names another edge than the credential."""
    if credential is not None and credential != claimed:
        raise Unauthenticated(f"Hello of edge {claimed} with the credential of edge {credential}")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()

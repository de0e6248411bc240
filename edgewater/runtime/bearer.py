"""Bearer tokens (RFC 6750): how edges, gateways and the API read and compare them."""

from __future__ import annotations

import hashlib


def bearer_token(authorization: str | None) -> str | None:
    """Returns the token of an ``Authorization`` header, or of a call's metadata; None if there is none.

    The name of the scheme is case-insensitive (RFC 9110, section 11.1).
    """
    scheme, _, token = (authorization or "").strip().partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def token_digest(token: str) -> bytes:
    """Returns the SHA-256 by which tokens are stored and compared, so that the time of a comparison reveals nothing."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()

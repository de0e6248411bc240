"""Who may connect as which edge, and what it may serve: the entries of `tokens` and of the file `tokens_file`.

The short form of an entry is a token, ``jfk: a-long-secret`` or ``jfk: {env: JFK_TOKEN}``. The long form is an
`EdgeAccess`. No error shows a value, as it may be a secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, SecretStr

from edgewater.model.errors import InvalidConfig
from edgewater.runtime.configuration import Instant, Secret, Section, read_yaml, validate


def _listed(value: object) -> object:
    return value if isinstance(value, list | tuple) else [value]


def _token(value: object) -> object:
    return {"token": value} if _is_secret(value) else value


def _access(value: object) -> object:
    return {"tokens": [value]} if _is_secret(value) else value


def _is_secret(value: object) -> bool:
    return isinstance(value, str | SecretStr) or (isinstance(value, Mapping) and list(value) in (["env"], ["file"]))


class EdgeToken(Section):
    """A bearer token; from `expires` on it is refused."""

    token: Secret
    """The token itself, `{env: NAME}` or `{file: PATH}`."""
    expires: Instant | None = None
    """Time from which the token is refused. None: it does not expire."""


class EdgeAccess(Section):
    """What an edge must present, and what it may serve.

    Without `identity`, a client certificate must name the edge's id.
    """

    tokens: tuple[Annotated[EdgeToken, BeforeValidator(_token)], ...] = ()
    """Any of them is accepted. None: the certificate alone identifies the edge."""
    identity: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()
    """Names of the client certificate, such as ``spiffe://example.org/edge/jfk``; it must have one of them."""
    streams: tuple[str, ...] | None = None
    """Patterns of the streams that the edge may serve; None: all."""
    queries: tuple[str, ...] | None = None
    """Patterns of the queries that the edge may answer; None: all."""

    def may_serve(self, stream: str) -> bool:
        return self.streams is None or any(fnmatchcase(stream, pattern) for pattern in self.streams)


UNLIMITED = EdgeAccess()
AccessEntry = Annotated[EdgeAccess, BeforeValidator(_access)]
"""The short or the long form."""


class _TokensFile(Section):
    tokens: dict[str, AccessEntry] = {}


def read_tokens_file(path: Path) -> dict[str, EdgeAccess]:
    """Returns the entries of a `tokens_file` by edge; an empty file has none. Raises InvalidConfig, without any
    value."""
    document = read_yaml(path, "tokens_file", secret=True)
    if document is None:
        return {}
    if not isinstance(document, Mapping):
        raise InvalidConfig("tokens_file", str(path), "a file with a YAML mapping of edge to token")
    try:
        return validate(_TokensFile, {"tokens": {str(edge): entry for edge, entry in document.items()}}).tokens
    except InvalidConfig as exc:
        within = exc.field.removeprefix("tokens.")
        raise InvalidConfig("tokens_file", str(path), exc.accepted, _join(f"at {within}", exc.reason)) from None


def without_secret(exc: InvalidConfig) -> InvalidConfig:
    """The same error without the value, which may be a secret."""
    return InvalidConfig(exc.field, "…", exc.accepted, exc.reason)


def _join(*reasons: str) -> str:
    return ", ".join(filter(None, reasons))

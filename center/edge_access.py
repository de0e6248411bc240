"""Who may connect as which edge, and what the edge may serve: the entries of `tokens` and of the file `tokens_file`.

The short form of an entry is a token, ``jfk: a-long-secret`` or ``jfk: {env: JFK_TOKEN}``. The long form is an
`EdgeAccess`. Error messages do not contain values, because a value may be a secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BeforeValidator, SecretStr

from edgewater.base.errors import InvalidConfig
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
    """A bearer token. It is refused from the time `expires` on."""

    token: Secret
    """The token itself, `{env: NAME}` or `{file: PATH}`."""
    expires: Instant | None = None
    """Time from which the token is refused. None: it does not expire."""


class EdgeAccess(Section):
    """The credentials that an edge must present, and the streams and queries that it may serve.

    If `identity` is empty, a client certificate must have the edge's id as a name.
    """

    tokens: tuple[Annotated[EdgeToken, BeforeValidator(_token)], ...] = ()
    """Accepted tokens; an edge must present one of them. None: the certificate alone identifies the edge."""
    identity: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()
    """Names of the client certificate, such as ``spiffe://example.org/edge/jfk``. The certificate must have one of
    these names."""
    streams: tuple[str, ...] | None = None
    """Patterns of the streams that the edge may serve. None: all streams."""
    queries: tuple[str, ...] | None = None
    """Patterns of the queries that the edge may answer. None: all queries."""

    def may_serve(self, stream: str) -> bool:
        return self.streams is None or any(fnmatchcase(stream, pattern) for pattern in self.streams)


UNLIMITED = EdgeAccess()
AccessEntry = Annotated[EdgeAccess, BeforeValidator(_access)]
"""The short or the long form of an entry."""


File = TypeVar("File", bound=Section)


class _TokensFile(Section):
    tokens: dict[str, AccessEntry] = {}


def read_tokens_file(path: Path) -> dict[str, EdgeAccess]:
    """Returns the entries of a `tokens_file` by edge. An empty file has no entries.

    Raises:
        InvalidConfig: the file cannot be read or is not valid. The error contains no value of the file.
    """
    return read_secrets_file(path, "tokens_file", _TokensFile, "tokens", "edge to token").tokens


def read_secrets_file(path: Path, field: str, kind: type[File], key: str, mapping: str) -> File:
    """Reads a YAML mapping by name, such as of tokens. An empty file has no entries.

    Args:
        field: the key of the configuration that names the file.
        kind: has the entries in its field `key`.
        mapping: says what the file maps to what.

    Raises:
        InvalidConfig: the file cannot be read or is not valid. The error contains no value of the file.
    """
    document = read_yaml(path, field, secret=True)
    if not isinstance(document, Mapping | None):
        raise InvalidConfig(field, str(path), f"a file with a YAML mapping of {mapping}")
    try:
        return validate(kind, {key: {str(name): entry for name, entry in (document or {}).items()}})
    except InvalidConfig as exc:

        def in_file(fault: InvalidConfig) -> InvalidConfig:
            reason = ", ".join(filter(None, (f"at {fault.field.removeprefix(f'{key}.')}", fault.reason)))
            return InvalidConfig(field, str(path), fault.accepted, reason)

        raise exc.changed(in_file) from None


def without_secret(exc: InvalidConfig) -> InvalidConfig:
    """Returns the same error without the value, which may be a secret."""
    return InvalidConfig(exc.field, "…", exc.accepted, exc.reason)

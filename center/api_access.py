"""Who may use the API, and what each principal may do: `api.token`, `api.principals`, `api.tokens_file` and `api.oidc`.

A principal has grants. A grant is a role on the queries whose names match one of its patterns. A grant also says which
streams and columns new queries may read. Error messages do not contain values, because a value may be a secret.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, model_validator

from center.edge_access import read_secrets_file
from edgewater.runtime.configuration import Duration, Instant, ProxyUrl, Secret, Section, is_loopback, refusal

Role = Literal["reader", "editor", "admin"]
ROLES: tuple[Role, ...] = ("reader", "editor", "admin")
"""All roles, in ascending order. Each role includes the roles before it."""


class RoleGrant(Section):
    """A role, and patterns of the names to which it applies, such as ``sales_*``.

    The name of a query says nothing about the records that the query reads, so a grant on some queries must name
    streams.
    """

    role: Role
    """What the principal may do. Each role includes the roles before it."""
    queries: tuple[str, ...] | None = None
    """Patterns of the queries that the role is for. None: all queries, and resources that belong to no query."""
    streams: tuple[str, ...] | None = None
    """Patterns of the streams that new queries may read. None: all streams if `queries` is None, otherwise none."""
    columns: tuple[str, ...] | None = None
    """Patterns of the columns that new queries may read. None: all columns of these streams."""

    def includes(self, role: Role, query: str | None) -> bool:
        """Returns whether the grant includes the role on a query. If `query` is None, returns whether the role is for
        everything.
        """
        if ROLES.index(self.role) < ROLES.index(role):
            return False
        return self.queries is None or (query is not None and _matches(query, self.queries))

    def names_stream(self, stream: str) -> bool:
        """Returns whether new queries may read the stream."""
        return self.queries is None if self.streams is None else _matches(stream, self.streams)

    def names_columns(self, columns: Iterable[str]) -> bool:
        """Returns whether new queries may read all of these columns. Event time is a column of every stream."""
        from edgewater.base.streams import TIME_COLUMN  # loads Arrow, which starts threads: see `fork_components`

        return self.columns is None or all(c == TIME_COLUMN or _matches(c, self.columns) for c in columns)


@dataclass(frozen=True, slots=True)
class Principal:
    """A person or a program that uses the API."""

    name: str
    grants: tuple[RoleGrant, ...]

    def may(self, role: Role, query: str | None) -> bool:
        """Returns whether the principal has the role on a query. If `query` is None, returns whether the role is for
        everything.
        """
        return any(grant.includes(role, query) for grant in self.grants)

    def may_register(self, query: str, stream: str, columns: Sequence[str]) -> bool:
        """Returns whether one grant includes the editor role on the query, and names the query's stream and all its
        columns.
        """
        return any(
            grant.includes("editor", query) and grant.names_stream(stream) and grant.names_columns(columns)
            for grant in self.grants
        )

    def has(self, role: Role) -> bool:
        """Returns whether any grant of the principal includes the role."""
        return any(ROLES.index(grant.role) >= ROLES.index(role) for grant in self.grants)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


ANYONE = Principal("anyone", (RoleGrant(role="admin"),))
"""The principal of all requests if no credentials are configured. Limits per principal do not apply to it."""


class PrincipalEntry(RoleGrant):
    """A principal with a bearer token. The entry has the token itself or the hexadecimal SHA-256 of the token."""

    role: Role = "reader"
    token: Secret | None = None
    """The bearer token itself, `{env: NAME}` or `{file: PATH}`. Either `token` or `sha256` is required."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """The SHA-256 of the bearer token, as 64 hexadecimal digits."""
    expires: Instant | None = None
    """Time from which the token is refused. None: it does not expire."""

    @property
    def grant(self) -> RoleGrant:
        """What the principal may do, without its secret."""
        return RoleGrant(**self.model_dump(include=set(RoleGrant.model_fields)))

    @model_validator(mode="after")
    def _one_secret(self) -> Self:
        if (self.token is None) == (self.sha256 is None):
            raise refusal("exactly one of token and sha256")
        if self.token is not None and len(self.token.get_secret_value()) < 1:
            raise refusal("a token that is not empty")
        return self


def _grant(value: object) -> object:
    return {"role": value} if isinstance(value, str) else value


class OidcSection(Section):
    """OpenID Connect: principals are the subjects of JWTs that the issuer has signed."""

    issuer: Annotated[str, Field(pattern=r"^https?://")]
    """URL of the issuer, as in the claim `iss`."""
    audience: str
    """Value that the claim `aud` must have."""
    jwks_url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """URL of the issuer's keys. None: the URL in the issuer's ``/.well-known/openid-configuration``."""
    algorithms: tuple[Literal["RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "EdDSA"], ...] = ("RS256", "ES256")
    """Signature algorithms that are accepted."""
    claim: str = "roles"
    """The claim whose values `roles` lists; dots separate levels, as in ``realm_access.roles``."""
    roles: Annotated[dict[str, Annotated[RoleGrant, BeforeValidator(_grant)]], Field(min_length=1)]
    """Role by value of the claim. A role may also be ``{role: editor, queries: [sales_*]}``. A token without any of the
    values is refused."""
    leeway: Annotated[Duration, Field(le=300_000)] = 30_000
    """The largest accepted difference between the clocks of issuer and center."""
    proxy: ProxyUrl | None = None
    """An HTTP proxy on the way to the issuer. None: no proxy."""

    @model_validator(mode="after")
    def _authentic(self) -> Self:
        for url in (self.issuer, self.jwks_url):
            parts = urlsplit(url or "")
            if parts.scheme == "http" and not is_loopback(f"{parts.hostname}:0"):
                reason = "with http://, anyone on the network between could sign tokens"
                raise refusal("https:// of the issuer and of its keys", reason)
        return self


class _PrincipalsFile(Section):
    principals: dict[str, PrincipalEntry] = {}


def read_principals_file(path: Path) -> dict[str, PrincipalEntry]:
    """Returns the entries of `api.tokens_file` by name. An empty file has no entries.

    Raises:
        InvalidConfig: the file cannot be read or is not valid. The error contains no value of the file.
    """
    accepted = "name to {token: …, role: reader}"
    return read_secrets_file(path, "api.tokens_file", _PrincipalsFile, "principals", accepted).principals

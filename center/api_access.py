"""Who may use the API, and what each may do: `api.token`, `api.principals`, `api.tokens_file` and `api.oidc`.

A principal has grants: a role, on the queries whose names match one of the patterns. A grant also says which
streams and columns new queries may read. No error shows a value, as it may be a secret.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, SecretStr, model_validator

from center.edge_access import without_secret
from edgewater.model.errors import InvalidConfig
from edgewater.runtime.configuration import Duration, Instant, Section, is_loopback, read_yaml, refusal, validate

Role = Literal["reader", "editor", "admin"]
ROLES: tuple[Role, ...] = ("reader", "editor", "admin")
"""In ascending order: each may do what those before it may."""


@dataclass(frozen=True, slots=True)
class RoleGrant:
    """A role on the queries that match one of the patterns; None: on everything, also on what belongs to no query.

    Attributes:
        streams: patterns of the streams that new queries may read; None: all streams if `queries` is None, else none.
            A name of a query says nothing about the records that it reads, so a grant on some queries must name
            streams.
        columns: patterns of the columns that new queries may read; None: all columns of these streams.
    """

    role: Role
    queries: tuple[str, ...] | None = None
    streams: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None

    def includes(self, role: Role, query: str | None) -> bool:
        """Whether it includes the role on a query; None: on everything."""
        if ROLES.index(self.role) < ROLES.index(role):
            return False
        return self.queries is None or (query is not None and _matches(query, self.queries))

    def names_stream(self, stream: str) -> bool:
        """Whether new queries may read the stream."""
        return self.queries is None if self.streams is None else _matches(stream, self.streams)

    def names_columns(self, columns: Iterable[str]) -> bool:
        """Whether new queries may read all of these columns. Event time is a column of every stream."""
        from edgewater.model.streams import TIME_COLUMN  # loads Arrow, which starts threads: see `fork_components`

        return self.columns is None or all(c == TIME_COLUMN or _matches(c, self.columns) for c in columns)


@dataclass(frozen=True, slots=True)
class Principal:
    """A person or a program that uses the API."""

    name: str
    grants: tuple[RoleGrant, ...]

    def may(self, role: Role, query: str | None) -> bool:
        """Whether it has the role on a query; None: on everything."""
        return any(grant.includes(role, query) for grant in self.grants)

    def may_register(self, query: str, stream: str, columns: Sequence[str]) -> bool:
        """Whether one grant has the editor role on the query, and names its stream and all its columns."""
        return any(
            grant.includes("editor", query) and grant.names_stream(stream) and grant.names_columns(columns)
            for grant in self.grants
        )

    def has(self, role: Role) -> bool:
        """Whether it has the role on anything."""
        return any(ROLES.index(grant.role) >= ROLES.index(role) for grant in self.grants)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


ANYONE = Principal("anyone", (RoleGrant("admin"),))
"""Everyone, where no credentials are configured. Limits per principal are not for it."""


class GrantEntry(Section):
    """A role, and patterns of the names to which it applies, such as ``sales_*``."""

    role: Role
    """What the principal may do. Each role includes the roles before it."""
    queries: tuple[str, ...] | None = None
    """Patterns of the queries that the role is for. None: all queries, and what belongs to no query."""
    streams: tuple[str, ...] | None = None
    """Patterns of the streams that new queries may read. None: all streams if `queries` is None, otherwise none."""
    columns: tuple[str, ...] | None = None
    """Patterns of the columns that new queries may read. None: all columns of these streams."""

    @property
    def grant(self) -> RoleGrant:
        return RoleGrant(self.role, self.queries, self.streams, self.columns)


class PrincipalEntry(GrantEntry):
    """A principal with a bearer token, which is given as it is or as the hexadecimal digest of its SHA-256."""

    role: Role = "reader"
    token: SecretStr | None = None
    """The bearer token itself. Either `token` or `sha256` is required."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """The SHA-256 of the bearer token, as 64 hexadecimal digits."""
    expires: Instant | None = None
    """Time from which the token is refused. None: it does not expire."""

    @model_validator(mode="after")
    def _one_secret(self) -> Self:
        if (self.token is None) == (self.sha256 is None):
            raise refusal("either token or sha256")
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
    """URL of the issuer's keys. None: as the issuer's ``/.well-known/openid-configuration`` says."""
    algorithms: tuple[Literal["RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "EdDSA"], ...] = ("RS256", "ES256")
    """Signatures that are accepted."""
    claim: str = "roles"
    """The claim whose values `roles` lists; dots separate levels, as in ``realm_access.roles``."""
    roles: Annotated[dict[str, Annotated[GrantEntry, BeforeValidator(_grant)]], Field(min_length=1)]
    """Value of the claim -> role, or ``{role: editor, queries: [sales_*]}``. A token without any of them is refused."""
    leeway: Annotated[Duration, Field(le=300_000)] = 30_000
    """How far the clocks of issuer and center may differ."""

    @model_validator(mode="after")
    def _authentic(self) -> Self:
        for url in (self.issuer, self.jwks_url):
            parts = urlsplit(url or "")
            if parts.scheme == "http" and not is_loopback(f"{parts.hostname}:0"):
                raise refusal("https:// of the issuer and of its keys", "whoever is in between could sign any token")
        return self


class _PrincipalsFile(Section):
    principals: dict[str, PrincipalEntry] = {}


def read_principals_file(path: Path) -> dict[str, PrincipalEntry]:
    """Returns the entries of `api.tokens_file` by name; an empty file has none. Raises InvalidConfig, without any
    value."""
    document = read_yaml(path, "api.tokens_file", secret=True)
    accepted = "a file with a YAML mapping of name to {token: …, role: reader}"
    if document is None:
        return {}
    if not isinstance(document, Mapping):
        raise InvalidConfig("api.tokens_file", str(path), accepted)
    try:
        return validate(_PrincipalsFile, {"principals": {str(k): v for k, v in document.items()}}).principals
    except InvalidConfig as exc:
        hidden = without_secret(exc)
        within = hidden.field.removeprefix("principals.")
        reason = f"at {within}{', ' if hidden.reason else ''}{hidden.reason}"
        raise InvalidConfig("api.tokens_file", str(path), hidden.accepted, reason) from None

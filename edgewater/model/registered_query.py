"""A query as the center has registered it, and its key."""

from __future__ import annotations

from dataclasses import dataclass

from edgewater.model.errors import StorageError
from edgewater.model.query import QuerySpec
from edgewater.wire import QueryRef


@dataclass(frozen=True, slots=True)
class RegisteredQuery:
    """A query with the version that its registration gave it.

    Attributes:
        registered_at_ms: wall time of the registration.
        deleted_at_ms: wall time of the deletion; None: the query is live.
    """

    ref: QueryRef
    spec: QuerySpec
    registered_at_ms: int
    deleted_at_ms: int | None

    @property
    def key(self) -> str:
        return query_key(self.ref)


def query_key(query: QueryRef) -> str:
    """Returns a query's key for places that need a string, such as offsets: ``name@version``."""
    return f"{query.name}@{query.version}"


def query_from_key(key: str) -> QueryRef:
    """Parses a `query_key`. Raises StorageError."""
    name, _, version = key.rpartition("@")
    if not name or not version.isdigit():
        raise StorageError(f"{key!r} is not a query's key; expected a name, @ and a version")
    return QueryRef(name, int(version))

"""A query as the center has registered it, and its key."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from edgewater.base.errors import StorageError
from edgewater.base.streams import MAX_TIME_MS
from edgewater.model.query import QuerySpec
from edgewater.model.window_range import ALL_WINDOWS, WindowRange
from edgewater.wire import QueryRef


@dataclass(frozen=True, slots=True)
class RegisteredQuery:
    """A query with the version that its registration gave it.

    Attributes:
        registered_at_ms: wall time of the registration.
        deleted_at_ms: wall time of the deletion; None if the query is not deleted.
        spec: the query, without `until`, which is in `windows`.
        windows: the windows of this version. Two versions of a query have no window in common.
        ended_at_ms: wall time at which all its windows had their final answers; None if edges still answer it.
    """

    ref: QueryRef
    spec: QuerySpec
    registered_at_ms: int
    deleted_at_ms: int | None
    windows: WindowRange = ALL_WINDOWS
    ended_at_ms: int | None = None

    @property
    def is_running(self) -> bool:
        """Whether edges answer the query."""
        return self.deleted_at_ms is None and self.ended_at_ms is None

    @property
    def asked(self) -> QuerySpec:
        """The query with `until`, if its range of windows has an end."""
        until_ms = self.windows.until_ms
        return self.spec if until_ms == MAX_TIME_MS else replace(self.spec, until_ms=until_ms)

    @property
    def key(self) -> str:
        return query_key(self.ref)


def query_key(query: QueryRef) -> str:
    """Returns a query's key for places that need a string, such as offsets: ``name@version``."""
    return f"{query.name}@{query.version}"


@lru_cache(maxsize=1024)
def query_from_key(key: str) -> QueryRef:
    """Parses a result of `query_key`. Raises StorageError for other texts."""
    name, _, version = key.rpartition("@")
    if not name or not version.isdigit():
        raise StorageError(f"{key!r} is not a query's key; expected a name, @ and a version")
    return QueryRef(name, int(version))

"""Which version of a query answers a request. Versions have different windows, in ascending order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from center.api.services import Services
from edgewater.base.errors import InvalidRequest, NotFound
from edgewater.base.streams import MAX_TIME_MS, MIN_TIME_MS
from edgewater.base.timestamps import rfc3339
from edgewater.model.registered_query import RegisteredQuery

Version = Annotated[
    int | None, Field(ge=1, le=1 << 31, description="Only answers of this version of the query. Default: of all.")
]


def versions_of(center: Services, name: str, version: int | None) -> list[RegisteredQuery]:
    """Returns the versions of a query that have, or may have, answers; with `version`, only that version.

    Raises:
        NotFound: the query, or its version, is not known.
    """
    versions = center.catalog.queries.versions(name)
    if version is None:
        return versions
    chosen = [query for query in versions if query.ref.version == version]
    if not chosen:
        listed = [query.ref.version for query in versions]
        known = f"version {listed[0]}" if len(listed) == 1 else f"versions {listed[0]} to {listed[-1]}"
        raise NotFound(f"query {name}: version {version} is not known; it has {known}")
    return chosen


def version_with(versions: Sequence[RegisteredQuery], start_ms: int) -> RegisteredQuery:
    """Returns the newest version whose windows begin at or before a time; the first version, if none does."""
    begun = [query for query in versions if query.windows.from_ms <= start_ms]
    return begun[-1] if begun else versions[0]


def clipped(query: RegisteredQuery, start_ms: int | None, end_ms: int | None) -> tuple[int | None, int | None]:
    """Returns the part of a range of window starts that belongs to a version; None: the range is open."""
    start = max(MIN_TIME_MS if start_ms is None else start_ms, query.windows.from_ms)
    end = min(MAX_TIME_MS if end_ms is None else end_ms, query.windows.until_ms)
    return None if start == MIN_TIME_MS else start, None if end == MAX_TIME_MS else max(start, end)


def only_version(
    versions: Sequence[RegisteredQuery], start_ms: int | None, end_ms: int | None
) -> tuple[RegisteredQuery, int | None, int | None]:
    """Returns the version that has the windows of a range, and the range.

    Without `start_ms`, the range is in the newest version that has windows before its end.

    Raises:
        InvalidRequest: the range has windows of several versions, which do not merge.
    """
    last_ms = MAX_TIME_MS if end_ms is None else end_ms - 1
    query = version_with(versions, last_ms if start_ms is None else start_ms)
    if end_ms is not None and end_ms > query.windows.until_ms and query is not versions[-1]:
        accepted = f"a range within one version: version {query.ref.version} ends at {rfc3339(query.windows.until_ms)}"
        raise InvalidRequest("end", rfc3339(end_ms), accepted)
    return query, *clipped(query, start_ms, end_ms)

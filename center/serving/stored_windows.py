"""`StoredWindows`: `AnsweredWindows` over the result store.

Each request has its own, which caches lookups for the other questions of the request. Synopses are read and decoded
once, and cached in a `SynopsisCache`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from cachetools import LRUCache

from center.results import AnswerRecord, ResultStore, as_far_as_readable
from center.serving.evaluator import data_key
from center.serving.synopsis_cache import SynopsisCache
from edgewater.answers import Cause
from edgewater.answers.work import spend
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery
from edgewater.synopses import GroupedAggregate

PAGE = 25  # limit: memory of a read
"""Answers, with their synopses, that are read at a time."""
_CACHED_WINDOWS = 4096  # limit: memory of the cache
"""Maximum number of windows in the cache of lookups; an empty lookup counts as one window."""


class StoredWindows:
    """The answers of one query. Not thread-safe.

    Args:
        find_query: finds a query by name; raises NotFound.
    """

    def __init__(
        self,
        results: ResultStore,
        query: RegisteredQuery,
        synopses: SynopsisCache,
        find_query: Callable[[str], RegisteredQuery],
    ) -> None:
        self._results = results
        self._query = query
        self._synopses = synopses
        self._find_query = find_query
        self._lookups: LRUCache[Hashable, tuple[AnswerRecord, ...]] = LRUCache(
            _CACHED_WINDOWS, lambda found: len(found) + 1
        )
        self._other_queries: dict[str, StoredWindows] = {}

    @property
    def spec(self) -> QuerySpec:
        return self._query.spec

    def for_query(self, query: str) -> StoredWindows:
        if query not in self._other_queries:
            found = self if query == self._query.ref.name else None
            self._other_queries[query] = found or StoredWindows(
                self._results, self._find_query(query), self._synopses, self._find_query
            )
        return self._other_queries[query]

    def at(self, time_ms: int) -> Sequence[AnswerRecord]:
        return self._lookup(("at", time_ms), lambda: map(self._take, self._results.at(self._query.ref, time_ms)))

    def starting(self, start_ms: int) -> AnswerRecord | None:
        def read() -> Iterable[AnswerRecord]:
            return map(self._take, self._results.windows(self._query.ref, start_ms, start_ms + 1, 1)[0])

        found = self._lookup(("start", start_ms), read)
        return found[0] if found else None

    def empty(self, windows: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
        return self._results.empty_windows(self._query.ref, windows)

    def latest(self, count: int) -> Sequence[AnswerRecord]:
        return self._lookup(("latest", count), lambda: self._last(count))

    def _last(self, count: int) -> list[AnswerRecord]:
        start = self._results.last(self._query.ref, count)
        found: list[AnswerRecord] = []
        cursor: str | None = None
        while start is not None:
            page, cursor = self._results.windows(self._query.ref, start, None, PAGE, cursor)
            found += map(self._take, page)
            if cursor is None:
                break
        return found[-count:]  # a new window may have been answered meanwhile

    def _lookup(self, key: Hashable, read: Callable[[], Iterable[AnswerRecord]]) -> tuple[AnswerRecord, ...]:
        held = self._lookups.get(key)
        if held is None:
            held = tuple(read())
            if len(held) < _CACHED_WINDOWS:
                self._lookups[key] = held
        return held

    def _take(self, record: AnswerRecord) -> AnswerRecord:
        """Returns the record without its synopsis, which goes into the cache."""
        spend()

        def window(record: AnswerRecord) -> AnswerRecord:
            if record.synopsis is not None:
                self._synopses.get(data_key(record), lambda: _aggregate(record))
            return replace(record, synopsis=None)

        return as_far_as_readable(window, record)

    def aggregate(self, window: AnswerRecord) -> GroupedAggregate | None:
        if window.facts.by_cause(Cause.UNREADABLE):
            return None
        answer = partial(self._results.answer, self._query.ref, window.window_start_ms, window.revision)
        return self._synopses.get(data_key(window), lambda: _aggregate(answer()))


def _aggregate(record: AnswerRecord) -> GroupedAggregate | None:
    return None if record.synopsis is None else GroupedAggregate.from_bytes(record.synopsis, are_distinct=True)

"""`evaluate.AnsweredWindows` over the result store.

What is looked up is remembered until there is a newer answer, of any query: `refresh` asks for that, which
is one small read. Synopses are read and synopses once, and kept by `SynopsisCache` as long as there is room.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from cachetools import LRUCache

from center.catalog import RegisteredQuery
from center.results import AnswerRecord, ResultStore
from center.serving.evaluator import WindowAnswer
from center.serving.synopsis_cache import SynopsisCache
from edgewater.query import QuerySpec
from edgewater.synopses.grouped import GroupedAggregate

PAGE = 25
"""Answers that are read at once, with their synopses."""
_FOUND = 4096
"""AnsweredWindows that are remembered of what was looked up; a look that finds none counts as one."""


class StoredWindows:
    """The answers of one query. For one thread at a time.

    Args:
        find: another query by its name; raises NotFound.
    """

    def __init__(
        self,
        results: ResultStore,
        query: RegisteredQuery,
        synopses: SynopsisCache,
        find: Callable[[str], RegisteredQuery],
    ) -> None:
        self._results = results
        self._query = query
        self._decoded = synopses
        self._find = find
        self._found: LRUCache[Hashable, tuple[WindowAnswer, ...]] = LRUCache(_FOUND, lambda found: len(found) + 1)
        self._partners: dict[str, StoredWindows] = {}
        self._seen = -1

    @property
    def spec(self) -> QuerySpec:
        return self._query.spec

    def refresh(self) -> None:
        """From now on, answers as they stand now."""
        newest = self._results.last_answer_id()
        if newest != self._seen:
            self._found.clear()
            self._partners.clear()
            self._seen = newest

    def of(self, query: str) -> StoredWindows:
        if query not in self._partners:
            found = self if query == self._query.ref.name else None
            self._partners[query] = found or StoredWindows(self._results, self._find(query), self._decoded, self._find)
        return self._partners[query]

    def at(self, time_ms: int) -> Sequence[WindowAnswer]:
        return self._look(("at", time_ms), lambda: map(self._take, self._results.at(self._query.ref, time_ms)))

    def starting(self, start_ms: int) -> WindowAnswer | None:
        def read() -> Iterable[WindowAnswer]:
            return map(self._take, self._results.windows(self._query.ref, start_ms, start_ms + 1, 1)[0])

        found = self._look(("start", start_ms), read)
        return found[0] if found else None

    def latest(self, count: int) -> Sequence[WindowAnswer]:
        return self._look(("latest", count), lambda: self._last(count))

    def _last(self, count: int) -> list[WindowAnswer]:
        start = self._results.last(self._query.ref, count)
        found: list[WindowAnswer] = []
        cursor: str | None = None
        while start is not None:
            page, cursor = self._results.windows(self._query.ref, start, None, PAGE, cursor)
            found += map(self._take, page)
            if cursor is None:
                break
        return found[-count:]  # a window may have been answered in between

    def _look(self, key: Hashable, read: Callable[[], Iterable[WindowAnswer]]) -> tuple[WindowAnswer, ...]:
        held = self._found.get(key)
        if held is None:
            held = tuple(read())
            if len(held) < _FOUND:
                self._found[key] = held
        return held

    def _take(self, record: AnswerRecord) -> WindowAnswer:
        """The record without its bytes, which go to where synopses ones are kept."""
        window = WindowAnswer(
            (record.query.name, record.query.version, record.window_start_ms, record.revision),
            record.window_start_ms,
            record.window_end_ms,
            record.phase.value,
            record.revision,
            record.quality["completeness"],
            record.quality["error"]["withheld"],
            record.quality.get("prediction"),
        )
        synopsis = record.synopsis
        if synopsis is not None:
            self._decoded.get(window.key, lambda: GroupedAggregate.from_bytes(synopsis))
        return window

    def aggregate(self, window: WindowAnswer) -> GroupedAggregate | None:
        return self._decoded.get(window.key, lambda: self._read(window))

    def _read(self, window: WindowAnswer) -> GroupedAggregate | None:
        record = self._results.answer(self._query.ref, window.start_ms, window.revision)
        return None if record.synopsis is None else GroupedAggregate.from_bytes(record.synopsis)

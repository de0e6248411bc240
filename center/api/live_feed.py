"""Live answers as server-sent events.

The result store is the queue. A stream holds nothing but the id of the last answer it has sent; when its
client has taken an event, it reads what is newer and sends the newest revision of each window among that.
So a slow client costs no more memory than a fast one, and one that comes back with `Last-Event-ID` goes on
where it was, at any API process.

Events: ``answer`` (id: its answer_id), ``progress`` (at a fixed pace, also without data: silence is never
ambiguous), ``gap`` (answers were passed over; the newest follow).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from anyio.to_thread import run_sync
from sse_starlette import ServerSentEvent

from center.api.answer_cache import AnswerRenderer
from center.api.edge_progress import EdgeProgress
from center.catalog import RegisteredQuery
from center.results import AnswerRecord, ResultStore
from center.serving import NO_QUESTIONS, MeasureQuestions
from edgewater.errors import NotFound, StorageError

PAGE = 100
"""Answers that a stream reads at once, which bounds its memory."""
MAX_PAGES = 10
"""Full pages in a row after which a client is too far behind: it gets a `gap` and the newest."""
POLL_S = 0.03
"""Half of it is added to every answer's age. A look is an indexed read of 0.2 ms, and only while somebody listens."""

log = logging.getLogger(__name__)


class AnswerPoller:
    """Wakes all streams of a process when there is a new answer: one poll, however many clients.

    Args:
        last_answer_id: reads the newest answer's id from the store; blocks.
    """

    def __init__(self, last_answer_id: Callable[[], int], poll_s: float = POLL_S) -> None:
        self._read = last_answer_id
        self._poll_s = poll_s
        self._changed = asyncio.Event()
        self._wanted = asyncio.Event()
        self._waiting = 0
        self.newest = 0

    async def run(self) -> None:
        """Polls while anybody waits. Cancelled when the process ends."""
        while True:
            await self._wanted.wait()
            try:
                newest = await run_sync(self._read)
            except StorageError as exc:
                log.warning("no look for new answers: %s", exc)
                newest = self.newest
            if newest != self.newest:
                self.newest = newest
                self._changed.set()
                self._changed = asyncio.Event()
            await asyncio.sleep(self._poll_s)

    async def wait(self, seen: int, timeout_s: float) -> None:
        """Returns when there is an answer that is newer than `seen`, or after `timeout_s`."""
        if self.newest > seen:
            return
        self._waiting += 1
        self._wanted.set()
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout_s)
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._wanted.clear()


@dataclass(frozen=True, slots=True)
class LiveFeed:
    """What all streams of a process share.

    Attributes:
        pace_s: time between `progress` events.
        monotonic: a clock in seconds.
    """

    results: ResultStore
    progress: EdgeProgress
    renderer: AnswerRenderer
    changes: AnswerPoller
    pace_s: float
    monotonic: Callable[[], float]


@dataclass(slots=True)
class LiveStream:
    """One client's stream of one query, or (`query` None) of all.

    Attributes:
        after: id of the last answer that the client has; None: it is new.
    """

    feed: LiveFeed
    query: RegisteredQuery | None = None
    questions: MeasureQuestions = NO_QUESTIONS
    after: int | None = None
    _sent: int = field(default=0, init=False)
    _full_pages: int = field(default=0, init=False)

    async def events(self) -> AsyncIterator[ServerSentEvent]:
        """Begins with where things stand, for a client that is new; ends when the query is deleted."""
        for event in await run_sync(self._begin):
            yield event
        due_s = self.feed.monotonic()
        while True:
            if self.feed.monotonic() >= due_s:
                due_s = self.feed.monotonic() + self.feed.pace_s
                try:
                    yield _event("progress", await run_sync(self.feed.progress.event_data, self.query))
                except NotFound:
                    return
            await self.feed.changes.wait(self._sent, due_s - self.feed.monotonic())
            for event in await run_sync(self._newer):
                yield event

    def _begin(self) -> list[ServerSentEvent]:
        newest = self.feed.results.last_answer_id()
        if self.after is not None and self.after <= newest:
            self._sent = self.after
            return []
        if self.after is None:
            return self._latest(newest)
        return [
            _gap(self.after, newest, "the answers begin refresh: the center has another store"),
            *self._latest(newest),
        ]

    def _newer(self) -> list[ServerSentEvent]:
        """The next page of what is newer than the client has: the newest revision of each window in it."""
        # Read first: what is given after this has a greater id and is for the next time.
        newest = self.feed.results.last_answer_id()
        ref = self.query.ref if self.query else None
        records = self.feed.results.answers_after(self._sent, PAGE, ref)
        is_full = len(records) == PAGE
        self._full_pages = self._full_pages + 1 if is_full else 0
        if self._full_pages > MAX_PAGES:
            self._full_pages = 0
            return [_gap(self._sent, newest, f"more than {PAGE * MAX_PAGES} answers behind"), *self._latest(newest)]
        self._sent = records[-1].answer_id if is_full else max([newest, *(r.answer_id for r in records)])
        return self._events_of(newest_revisions(records))

    def _latest(self, through: int) -> list[ServerSentEvent]:
        """The last window of each query; the stream goes on after `through`."""
        self._sent = through
        # Read refresh, behind the id: an answer up to it may be of a query that is younger than the view.
        queries = [self.query] if self.query else self.feed.progress.view(refresh=True).queries
        latest = [r for q in queries if (r := self.feed.results.latest(q.ref)) is not None]
        return self._events_of(sorted(latest, key=lambda r: r.answer_id))

    def _events_of(self, records: Sequence[AnswerRecord]) -> list[ServerSentEvent]:
        if self.query is not None:
            queries = {self.query.ref: self.query}
        else:
            queries = {q.ref: q for q in self.feed.progress.view().queries}
            if any(record.query not in queries for record in records):
                # Of a query younger than the view; those of deleted ones are nobody's.
                queries = {q.ref: q for q in self.feed.progress.view(refresh=True).queries}
        return [
            ServerSentEvent(
                self.feed.renderer.answer(record, queries[record.query], self.questions).decode(),
                event="answer",
                id=str(record.answer_id),
            )
            for record in records
            if record.query in queries
        ]


def newest_revisions(records: Sequence[AnswerRecord]) -> list[AnswerRecord]:
    """The newest revision of each window, in the order of answers."""
    newest = {(r.query, r.window_start_ms): r for r in records}
    return sorted(newest.values(), key=lambda r: r.answer_id)


def _gap(after: int, through: int, reason: str) -> ServerSentEvent:
    return _event("gap", {"after": after, "through": through, "reason": reason})


def _event(name: str, data: dict[str, Any]) -> ServerSentEvent:
    return ServerSentEvent(json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")), event=name)

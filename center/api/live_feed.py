"""Live answers as server-sent events.

The result store is the queue. A stream stores only the id of the last answer that it sent, and with `changes` the
revisions of some windows. After each event that its client reads, it reads the newest revision of each changed window,
and renders only the groups that the client asked for. So a slow client needs no more memory than a fast one. A client
that reconnects with `Last-Event-ID` continues at any API process.

If clients ask the same questions and have the same answers, they share one read, one rendering and one encoding. They
are served `AT_ONCE` at a time, so that other requests run in between. Streams with large events are rendered one after
the other, so that they do not delay streams with small events.

Events: ``answer`` (event id: answer id), ``progress`` (at a fixed pace, also without data, so that silence is
unambiguous), ``gap`` (answers were skipped; the newest follow).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from cachetools import LRUCache

from center.api.answer_cache import AnswerRenderer
from center.api.edge_progress import SharedProgress
from center.api_access import ANYONE, Principal
from center.results import AnswerRecord, NewestAnswers, ResultStore
from center.serving.measures import NO_QUESTIONS, MeasureQuestions
from center.storage.wake import Channel, PollPace, Topic
from edgewater.answers import Phase
from edgewater.base.errors import InvalidRequest, NotFound, StorageError
from edgewater.model.registered_query import RegisteredQuery
from edgewater.model.table_texts import to_json
from edgewater.runtime.tasks import Tasks
from edgewater.wire import QueryRef

PAGE = 100  # limit: memory of a stream
"""Answers that a stream reads at a time. It limits the stream's memory."""
MAX_PAGES = 10
"""Full pages in a row after which a client is too far behind. It then gets a `gap` and the newest answers."""
POLL_S = 0.03  # limit: reads without wake-ups
"""The interval of polls while no driver wakes this process. Half of this is added to every answer's age. A poll is an
indexed read of 0.2 ms, and runs only while clients wait.
"""
FAILED_S = 0.5  # limit: reads of a store that fails
"""The interval of polls while the result store cannot be read."""

AT_ONCE = 8  # limit: time of a turn of the event loop
"""Clients that are woken per turn of the event loop: each takes about 0.2 ms of it."""
MAX_POLLED = 10_000
"""Maximum number of queries whose newest answers are stored one by one."""
READERS = 2  # limit: threads
"""The number of threads that read and render answers for streams with small events."""
LARGE_BYTES = 256 << 10  # limit: memory of large events
"""A stream whose last events had more bytes than this is rendered in turn with other such streams."""
WINDOWS = 32  # limit: memory of a stream
"""Number of windows of a stream whose revision at the client is stored."""
SHARED_BYTES = 16 << 20  # limit: memory of the cache
"""Bytes of the results of shared reads that are cached for clients that ask a moment later."""

log = logging.getLogger(__name__)


async def _wake(waiting: Iterable[asyncio.Future[None]]) -> None:
    for i, waiter in enumerate(waiting):
        if not waiter.done():
            waiter.set_result(None)
        if i % AT_ONCE == AT_ONCE - 1:
            await asyncio.sleep(0)


class AnswerPoller:
    """Notifies the streams of a process of new answers of their queries, with one poll for any number of clients.

    Args:
        read_newest: `ResultStore.newest_answers`; blocks.
        tasks: the tasks of the process, which has the thread that hears wakes.
        wakes: how drivers wake this process; None: it polls.
        poll_s: interval of polls while no driver wakes this process.

    Attributes:
        newest: the id of the newest answer of any query.
    """

    def __init__(
        self,
        read_newest: Callable[[int], NewestAnswers],
        tasks: Tasks,
        wakes: Channel | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        self._read, self._tasks = read_newest, tasks
        self._wakes, self._pace = wakes, PollPace(poll_s)
        self._wanted, self._woken = asyncio.Event(), asyncio.Event()
        self._waiting: dict[asyncio.Future[None], QueryRef | None] = {}
        self._by_query: dict[QueryRef, int] = {}
        # Queries without an entry may have answers up to this id.
        self._floor = 0
        # A thread of its own: requests may use all other threads.
        self._thread = CapacityLimiter(1)
        self.newest = 0
        self.ended = False

    def newest_of(self, query: QueryRef | None) -> int:
        """Returns an id such that a query (None: any query) has no newer answer."""
        return self.newest if query is None else max(self._floor, self._by_query.get(query, 0))

    def end(self) -> None:
        """Ends all streams, because the process stops.

        Their clients continue at another process, or after the restart.
        """
        self.ended = True
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def run(self) -> None:
        """Polls while any stream waits. Cancelled at the end of the process."""
        loop, problem = asyncio.get_running_loop(), ""

        def heard(has_news: bool) -> None:
            self._pace.heard(loop.time(), has_news=has_news)
            if has_news:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._woken.set)

        with contextlib.nullcontext() if self._wakes is None else self._wakes.listen(Topic.ANSWERS, heard, self._tasks):
            while True:
                was_idle = not self._wanted.is_set()
                await self._wanted.wait()
                self._woken.clear()
                pause_s = self._pace.interval_s(loop.time())
                try:
                    found = await run_sync(self._read, self.newest, limiter=self._thread)
                    problem = ""
                    if found.answer_id != self.newest:
                        if not was_idle:  # else the news may be old
                            self._pace.found(loop.time())
                        await self._notify(found)
                except StorageError as exc:
                    pause_s = FAILED_S
                    if not problem:  # once per outage
                        log.warning("cannot poll for new answers: %s", exc)
                    problem = exc.message
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._woken.wait()

    async def _notify(self, found: NewestAnswers) -> None:
        # The first poll does not read older answers. If the store was replaced, polling begins again.
        is_known = found.by_query is not None and 0 < self.newest < found.answer_id
        self.newest = found.answer_id
        if not is_known or len(self._by_query) > MAX_POLLED:
            self._floor, self._by_query = found.answer_id, {}
        else:
            self._by_query |= found.by_query or {}
        concerned = None if self._floor == found.answer_id else found.by_query
        await _wake(
            [w for w, query in self._waiting.items() if concerned is None or query is None or query in concerned]
        )

    async def wait(self, seen: int, timeout_s: float, query: QueryRef | None = None) -> None:
        """Returns when the query may have an answer newer than `seen`, when the process stops, or after `timeout_s`."""
        if self.newest_of(query) > seen or self.ended:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = query
        self._wanted.set()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await waiter
        finally:
            del self._waiting[waiter]
            if not self._waiting:
                self._wanted.clear()


class SharedReads:
    """Runs a blocking read once for all callers that need its result at the same time."""

    def __init__(self) -> None:
        self._results: LRUCache[Hashable, Any] = LRUCache(SHARED_BYTES, getsizeof=lambda r: 1024 + len(r[0]))
        self._running: dict[Hashable, tuple[asyncio.Task[Any], list[asyncio.Future[None]]]] = {}
        self._waking: set[asyncio.Task[None]] = set()

    async def read(self, key: Hashable, read: Callable[[], Any], limiter: CapacityLimiter | None = None) -> Any:
        """Returns the result of `read`, a tuple that begins with bytes and depends only on `key`.

        Its exception is raised for all.

        Args:
            limiter: limits the number of threads that read; None: the limit of all requests applies.
        """
        if key in self._results:
            return self._results[key]
        if key not in self._running:
            self._running[key] = asyncio.create_task(self._run(key, read, limiter)), []
        running, waiting = self._running[key]
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(waiter)
        await waiter
        return running.result()

    async def _run(self, key: Hashable, read: Callable[[], Any], limiter: CapacityLimiter | None) -> Any:
        try:
            result = await run_sync(read, limiter=limiter)
            with contextlib.suppress(ValueError):  # larger than the whole cache
                self._results[key] = result
            return result
        finally:
            _, waiting = self._running.pop(key)
            waking = asyncio.create_task(_wake(waiting))
            self._waking.add(waking)
            waking.add_done_callback(self._waking.discard)


@dataclass(frozen=True, slots=True)
class Event:
    """A server-sent event.

    Attributes:
        data: JSON without line breaks.
        id: of an answer; empty: none.
    """

    event: str
    data: bytes
    id: str = ""

    def encode(self) -> bytes:
        head = f"id: {self.id}\r\n" if self.id else ""
        return b"%bevent: %b\r\ndata: %b\r\n\r\n" % (head.encode(), self.event.encode(), self.data)


@dataclass(frozen=True, slots=True)
class LiveFeed:
    """The services that all streams of a process share.

    Attributes:
        pace_s: time between `progress` events. One event is shared for half of this time.
        monotonic: monotonic clock in seconds.
        readers: limits the threads of streams with small events.
        large: lets one stream with large events be rendered at a time.
    """

    results: ResultStore
    progress: SharedProgress
    renderer: AnswerRenderer
    changes: AnswerPoller
    pace_s: float
    monotonic: Callable[[], float]
    shared: SharedReads = field(default_factory=SharedReads)
    readers: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(READERS))
    large: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(1))


@dataclass(slots=True)
class LiveStream:
    """One client's stream of one query, or (`query` None) of several.

    Attributes:
        names: of several, only these; (): all.
        summary: answers have only the groups with the widest intervals.
        changes: if the client has an earlier revision of a window, the answer has only the groups that differ.
        min_phase: the stream omits answers that have not reached this phase.
        reader: the stream omits answers of queries that this principal may not read.
        require_allowed: called from time to time; raises EdgewaterError to end the stream.
        after: id of the last answer that the client has; None: a new client.
    """

    feed: LiveFeed
    query: RegisteredQuery | None = None
    questions: MeasureQuestions = NO_QUESTIONS
    reader: Principal = ANYONE
    after: int | None = None
    require_allowed: Callable[[], Awaitable[None]] | None = None
    names: tuple[str, ...] = ()
    summary: bool = False
    changes: bool = False
    min_phase: Phase = Phase.EARLY
    _sent: int = field(default=0, init=False)
    _full_pages: int = field(default=0, init=False)
    _client_has: dict[tuple[QueryRef, int], int] = field(default_factory=dict, init=False)
    """With `changes`: the revision per query and start of a window, least recently sent first."""
    _is_large: bool = field(default=False, init=False)

    async def events(self) -> AsyncIterator[bytes]:
        """Yields encoded events. Begins with the latest answers for a new client.

        Ends when the query is deleted, and when the process stops.
        """
        yield await self._first()
        due_s = self.feed.monotonic()
        while not self.feed.changes.ended:
            if self.feed.monotonic() >= due_s:
                due_s = self.feed.monotonic() + self.feed.pace_s
                if self.require_allowed is not None:
                    await self.require_allowed()
                try:
                    yield await self._progress()
                except NotFound:
                    return
            await self.feed.changes.wait(self._sent, due_s - self.feed.monotonic(), self._ref)
            if self.feed.changes.newest_of(self._ref) > self._sent:
                yield await self._next()

    @property
    def _ref(self) -> QueryRef | None:
        return None if self.query is None else self.query.ref

    @property
    def _asked(self) -> Hashable:
        """Returns a key of the stream's questions. The events depend on it and on the answers that the client has."""
        which = self.query and self.query.ref, self.names, self.questions, self.summary, self.changes, self.min_phase
        return *which, self.reader.grants

    def _moment(self) -> int:
        """Returns a number that changes twice per pace."""
        return int(self.feed.monotonic() / self.feed.pace_s * 2)

    async def _first(self) -> bytes:
        if self.after is not None:
            return _encoded(await run_sync(self.begin, limiter=self.feed.readers))

        def read() -> tuple[bytes, LiveStream]:
            like = self._like()
            return _encoded(like.begin()), like

        return await self._shared(("first", self._asked, self._moment()), read)

    async def _progress(self) -> bytes:
        def read() -> tuple[bytes, RegisteredQuery | None]:
            events = [_event("progress", self.feed.progress.event_data(self.query, self._reads))]
            following = self._following()
            if following is not None:
                like = self._like()
                like.query = following
                events += like._latest(0)
            return _encoded(events), following

        key = ("progress", self._asked, self._moment())
        data, following = await self.feed.shared.read(key, read, self.feed.readers)
        self.query = following or self.query
        return bytes(data)

    def _following(self) -> RegisteredQuery | None:
        """Returns the newer version of the query with which the stream continues, if it has an answer.

        Raises InvalidRequest: the stream's questions do not fit the newer version.
        """
        newer = None if self.query is None else self.feed.progress.newer(self.query)
        if newer is None or self.feed.results.latest(newer.ref, self.min_phase) is None:
            return None
        assert self.query is not None
        before, after = ((q.spec.measures, q.spec.derived) for q in (self.query, newer))
        if self.questions != NO_QUESTIONS and after != before:
            accepted = f"questions about version {newer.ref.version}, which has other measures"
            raise InvalidRequest("measure", None, accepted, f"version {self.query.ref.version} has been changed")
        return newer

    async def _next(self) -> bytes:
        """Returns the newer answers, shared by all clients with the same answers.

        A client that is a full page behind reads alone.
        """
        newest = self.feed.changes.newest
        if self._full_pages:
            return _encoded(await run_sync(self.newer, newest, limiter=self._lane))

        def read() -> tuple[bytes, LiveStream]:
            like = self._like(self)
            return _encoded(like.newer(newest)), like

        has = tuple(self._client_has.items())
        return await self._shared(("next", self._asked, self._sent, has, self.feed.changes.newest_of(self._ref)), read)

    async def _shared(self, key: Hashable, read: Callable[[], tuple[bytes, LiveStream]]) -> bytes:
        """Returns the events of a shared read. The stream's state becomes the same as after a read of its own."""
        data, like = await self.feed.shared.read(key, read, self._lane)
        self._sent, self._full_pages, self._client_has = like._sent, like._full_pages, dict(like._client_has)
        self._is_large = len(data) > LARGE_BYTES
        return bytes(data)

    @property
    def _lane(self) -> CapacityLimiter:
        return self.feed.large if self._is_large else self.feed.readers

    def _like(self, at: LiveStream | None = None) -> LiveStream:
        """Returns a stream with the same questions, from the beginning or from the position of the stream `at`."""
        like = replace(self, after=None, require_allowed=None)
        if at is not None:
            like._sent, like._client_has = at._sent, dict(at._client_has)
        return like

    def _reads(self, name: str) -> bool:
        """Returns whether a query is one of the stream's, and its reader may read it."""
        return (not self.names or name in self.names) and self.reader.may("reader", name)

    def begin(self) -> list[Event]:
        """Returns the first events: the latest answers of a new client, or a gap."""
        newest = self.feed.results.last_answer_id()
        if self.after is not None and self.after <= newest:
            self._sent = self.after
            return []
        if self.after is None:
            return self._latest(newest)
        return [
            _gap(self.after, newest, "the center's result store was replaced; answers begin again"),
            *self._latest(newest),
        ]

    def newer(self, newest: int) -> list[Event]:
        """Returns the next page of newer answers: the newest revision of each window in it.

        Args:
            newest: an id of an answer that was visible before; later answers belong to the next page.
        """
        changes = self.feed.results.changes_after(self._sent, PAGE, self._ref)
        records, is_full = changes.records, changes.read == PAGE
        self._full_pages = self._full_pages + 1 if is_full else 0
        if self._full_pages > MAX_PAGES:
            self._full_pages = 0
            return [_gap(self._sent, newest, f"more than {PAGE * MAX_PAGES} answers behind"), *self._latest(newest)]
        self._sent = records[-1].answer_id if is_full else max([newest, *(r.answer_id for r in records)])
        return self._events_of(records, changes.skipped)

    def _latest(self, through: int) -> list[Event]:
        """Returns the latest window of each query. The stream continues after `through`."""
        self._sent = through
        # Read the queries after the id: an answer up to it may belong to a query that the shared view lacks.
        queries = [self.query] if self.query else self.feed.progress.view(refresh=True).queries
        readable = (q for q in queries if self._reads(q.ref.name))
        latest: dict[str, AnswerRecord] = {}
        for query in readable:  # in the order of versions, so the newest version with an answer stays
            record = self.feed.results.latest(query.ref, self.min_phase, query.windows.until_ms)
            if record is not None:
                latest[query.ref.name] = record
        return self._events_of(sorted(latest.values(), key=lambda r: r.answer_id))

    def _events_of(self, records: Sequence[AnswerRecord], skipped: Mapping[int, int] | None = None) -> list[Event]:
        """Returns the events of answers that the client may read and asked for.

        Args:
            skipped: per answer id, the number of earlier revisions that the client does not get.
        """
        if self.query is not None:
            queries = {self.query.ref: self.query}
        else:
            queries = {q.ref: q for q in self.feed.progress.view().queries}
            if any(record.query not in queries for record in records):
                # The shared view may be older than the query, or the query is deleted. Answers of deleted queries are
                # skipped.
                queries = {q.ref: q for q in self.feed.progress.view(refresh=True).queries}
        selected = (
            record
            for record in records
            if record.query in queries and record.phase.rank >= self.min_phase.rank and self._reads(record.query.name)
        )
        return [self._answer(r, queries[r.query], 0 if skipped is None else skipped[r.answer_id]) for r in selected]

    def _answer(self, record: AnswerRecord, query: RegisteredQuery, skipped: int) -> Event:
        base = self._base(record) if self.changes else None
        data = self.feed.renderer.answer(record, query, self.questions, summary=self.summary, base=base)
        if skipped:
            data = data[:-1] + b',"skipped":%d}' % skipped
        return Event("answer", data, str(record.answer_id))

    def _base(self, record: AnswerRecord) -> AnswerRecord | None:
        """Returns the revision of the answer's window that the client has.

        From now on the client has this answer's revision.
        """
        window = record.query, record.window_start_ms
        revision = self._client_has.pop(window, None)
        if record.phase is not Phase.FINAL:
            self._client_has[window] = record.revision
            if len(self._client_has) > WINDOWS:
                del self._client_has[next(iter(self._client_has))]
        if revision is None or revision >= record.revision:
            return None
        try:
            return self.feed.results.answer(*window, revision)
        except NotFound:  # the revision was trimmed
            return None


def _gap(after: int, through: int, reason: str) -> Event:
    return _event("gap", {"after": after, "through": through, "reason": reason})


def _event(name: str, data: object) -> Event:
    return Event(name, to_json(data))


def _encoded(events: Sequence[Event]) -> bytes:
    return b"".join(event.encode() for event in events)

"""The worker: decides which query processes its queued records, and how many, by measured times.

An edge that keeps up has no queues: each batch is processed by all queries at once, in the order of arrival. A batch is
queued when it would hold the event loop for longer than `BLOCK_MS`, or when several queries share a source that has not
been idle for a cycle: the edge is short of CPU then, and the order decides whose answer is late. The queries that are
due process it first, and the loop ships their frames; then all others process it together, which costs what it costs
without queues. A query that takes longer than a piece runs alone, as `edgewater.scheduling` decides, and the loop
serves heartbeats, pushes and the link after each of its pieces. What the worker decides is journaled (`Ran`), so that
recovery repeats it without measuring anything.

Meanwhile the source waits, so batches become as large as without queues. A source that is behind by more than it reads
at once has no use for an order: all queries process such a batch at once, as without queues.

A source that keeps up waits between two reads: each batch costs each query a fixed time, and journal and link another
(`Worker.wait_s`). It waits the shorter, the closer its watermark is to the end of a window, so no answer is later.

Sources are held back only when the queues have reached their limit; from `QueueLimits.threshold` on, the query that
is furthest behind runs, since a batch takes memory until the last query has processed it.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from edge.core import Ingested, Ran
from edge.durability import DurableCore
from edge.records import COALESCE_S
from edge.uplink.ports import QueryDelay
from edgewater.model.query import QuerySpec
from edgewater.model.streams import LIVE, MAX_TIME_MS, MIN_TIME_MS, StreamClock
from edgewater.model.windows import SlidingWindow
from edgewater.scheduling import Operator, QueryProfile, QueueLimits, ScheduledQuery, Scheduler, Turn, make_policy
from edgewater.wire import QueryRef

BLOCK_MS = 50.0
"""A batch that takes longer is queued."""
BUSY_MS = 120.0
"""A source that has not been idle for longer has more input than the edge keeps up with."""
TOGETHER_MS = 500.0
"""Queries process their queues together if they are expected to take no longer: the event loop waits for them."""
PIECE_MS, MAX_PIECE_MS = 50.0, 75.0
"""The estimated time of a piece of a batch, and of the last one at most. A record cannot be divided, and what queries
share of a whole batch is computed anew for each piece."""
FOLD_S = 1.0
"""Measurements are added to the cost estimates after this time, or when the queries are scheduled."""
FRAME_TURN_MS = 2.0
"""The same as `TOGETHER_MS` for the queries that are not due, for the first `FRAME_TURNS` after windows have ended: a
frame takes so many turns of the event loop until it is durable."""
FRAME_TURNS = 6
WAKE_MS = 250.0
"""While no window ends, the link is told of changes after this time. It examines every query for what is to be sent,
which takes as long as thousands of records."""
READ_AHEAD_MS = 1000.0
"""Sources read on while less work is queued. With more, what they read would come in more and smaller batches, each of
which costs every query a fixed time."""
READ_EVERY_MS = 500.0
"""While batches are queued, a source that has read less work than this waits, at most so long: all queries then process
one batch after the other, as large as without queues, and share what they compute of it."""
LONGEST_WAIT_S, WAIT_SHARE = 0.25, 0.1
"""Records wait at most so long to be processed together, and at most this share of the shortest window."""
MOST_WAITING = 4_096
"""Of more records in a batch, its fixed cost is small: the source then waits half as long."""
FIRST_ROWS = 64
"""Records of the first piece of a query of which nothing has been measured."""
FIRST_BATCH_ROWS = 8_192
"""Until something has been measured, a batch of so many records is not queued: pieces that grow from the smallest cost
more than they measure."""
MAX_LAPS = 10_000
"""Measurements that are kept until then."""
OFF = "off"
"""The setting with which no batch is ever queued."""
QUEUE_SHARE = 4
"""The queues may take the memory limit divided by this."""


@dataclass(frozen=True, slots=True)
class ScheduledLoad:
    """How a query stands on this edge.

    Attributes:
        queued_records, queued_bytes: what it has not processed; the bytes may be shared with other queries.
        cost_us: measured time per record; None: none was measured.
        slack_ms: how long it can stay idle until its next answer becomes late; None: no batch is queued.
        late_ms: time since the ingestion of the first watermark that it has not processed; 0: there is none.
        overruns: turns that took far longer than a cycle.
    """

    queued_records: int
    queued_bytes: int
    cost_us: float | None
    slack_ms: float | None
    late_ms: float
    overruns: int


class Worker:
    """Runs the queries of one agent. Every method is called on the event loop.

    Args:
        changed: called when a query may have more to send.
        busy_s: returns for how long a source has had input without a pause.
        policy: a name of `edgewater.scheduling.POLICIES`, or `OFF`.
        limit_bytes: memory of the queues above which sources are held back.
        answer_delay_ms: returns how long a query's frames take to an answer, which its slack lacks; 0: unknown.
        now_ms: the wall clock.
        clock: CPU time of the event loop's thread, in seconds: other processes on the machine change no cost.
        pause: lets the loop do other work.

    Attributes:
        has_room: set while the queues are below their limit.
        may_read: set while sources may read on: there is room, little work is queued, and the last batch was not a
            small one just now.
    """

    def __init__(
        self,
        durable: DurableCore,
        *,
        changed: Callable[[], None],
        busy_s: Callable[[str], float],
        policy: str,
        limit_bytes: int,
        now_ms: Callable[[], int],
        clock: Callable[[], float],
        answer_delay_ms: Callable[[QueryRef], float] = lambda _: 0.0,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._durable, self._core = durable, durable.core
        self._changed, self._busy_s, self._now_ms, self._clock, self._pause = changed, busy_s, now_ms, clock, pause
        self._answer_delay_ms = answer_delay_ms
        self._is_on = policy != OFF
        self._limit_bytes = limit_bytes
        limits = QueueLimits(max(limit_bytes, 1), record_bytes=1.0, shared=True)
        self._scheduler = Scheduler(make_policy(policy if self._is_on else "fcfs"), memory=limits)
        self._states: dict[QueryRef, ScheduledQuery] = {}
        self._refs: dict[str, QueryRef] = {}
        self._laps: deque[tuple[QueryRef | None, int, float]] = deque(maxlen=2 * MAX_LAPS)
        self._configurations = -1
        self._cost_ms: dict[str, float] = {}  # per record, of all queries of a stream
        self._costed: set[QueryRef] = set()
        self._piece_rows: dict[QueryRef, float] = {}
        self._folded_s = clock()
        self._next_end_ms: dict[str, float] = {}
        self._watched_ms = self._asked_ms = now_ms()
        self._short_ms, self._is_short = 0.0, False
        self._queued = 0
        self._told_ms = -math.inf
        self._has_swept, self._frame_turns = False, 0
        self._was_full_read = False
        self._longest_wait_s: dict[str, float] = {}  # by stream, so that batches have at most `MOST_WAITING` records
        self._read_ms, self._read_little, self._is_full = 0, False, False
        self._work = asyncio.Event()
        self.has_room = asyncio.Event()
        self.has_room.set()
        self.may_read = asyncio.Event()
        self.may_read.set()
        self._core.cost_meter = self
        self._follow_queries()
        for ref, pipeline in self._core.queries.items():
            for batch in pipeline.queue.batches:
                self._offer(self._states[ref], batch.end - max(batch.first, pipeline.queue.done), batch.end)
        self._update_memory()

    # Costs

    def begin(self) -> None:
        self._laps.append((None, 0, self._clock()))

    def end(self, query: QueryRef, records: int) -> None:
        self._laps.append((query, records, self._clock()))

    def _fold(self) -> None:
        """Adds the measurements to the estimates."""
        self._folded_s = self._clock()
        measured = _measured(self._laps)
        self._laps.clear()
        for ref, (count, spent_ms) in measured.items():
            state = self._states.get(ref)
            if state is None or not count:
                continue
            if ref not in self._costed:
                self._costed.add(ref)
                state.costs.assume(0, spent_ms / count)
            else:
                state.costs.observe(0, count, 0, spent_ms)
        for ref, state in self._states.items():
            state.costs.report_downstream(self._answer_delay_ms(ref))
        self._cost_ms = {
            name: sum(self._states[p.ref].costs.remaining_ms[0] for p in self._core.queries_of(name))
            for name in self._core.streams
        }

    # Input

    def ingest(self, event: Ingested, append: Callable[[Ingested], object], *, is_full_read: bool = False) -> bool:
        """Passes a batch to the core by `append`, to be processed at once or queued.

        Args:
            is_full_read: as `Chunk.is_full_read`.

        Returns: whether it was queued. No query has more to send then; `changed` is called when one has run.
        """
        self._follow_queries()
        if self._clock() - self._folded_s >= FOLD_S or len(self._laps) >= MAX_LAPS or not self._costed:
            self._fold()
        queued = bool(event.batch.num_rows) and self._is_on and self._defers(event, is_full_read or self._was_full_read)
        self._was_full_read = is_full_read
        self._limit_wait(event)
        append(replace(event, queued=True) if queued else event)
        if queued or self._queued:
            end = self._core.streams[event.stream].records
            for pipeline in self._core.queries_of(event.stream):
                if pipeline.queue:
                    self._offer(self._states[pipeline.ref], event.batch.num_rows, end)
            self._read_ms = self._now_ms()
            self._read_little = event.batch.num_rows * self._cost_ms.get(event.stream, 0.0) < READ_EVERY_MS
            self._update_memory()
        self.advance(event.stream)
        return queued

    def _limit_wait(self, event: Ingested) -> None:
        longest_s, rows = self._longest_wait_s.get(event.stream, COALESCE_S), event.batch.num_rows
        factor = 0.5 if rows > MOST_WAITING else 2.0 if 2 * rows < MOST_WAITING else 1.0
        self._longest_wait_s[event.stream] = min(max(factor * longest_s, COALESCE_S), LONGEST_WAIT_S)

    def wait_s(self, stream: str, source: str) -> float:
        """Returns how long the next records of a source may wait, to be processed together (`CoalesceTime`).

        The source's watermark is expected to be at the next end of a window by then at the latest. Records of a query
        with an accuracy wait no longer than necessary: their delays are measured.
        """
        self._follow_queries()
        state, queries = self._core.streams[stream], self._core.queries_of(stream)
        clock = state.spec.clock
        if clock is None or self._queued or any(pipeline.monitor is not None for pipeline in queries):
            return COALESCE_S
        watermark_ms = state.source_watermark_ms(source)
        wall_ms = clock.to_wall_ms(watermark_ms) if MIN_TIME_MS < watermark_ms < MAX_TIME_MS else -math.inf
        longest_s = self._longest_wait_s.get(stream, COALESCE_S)
        for profile in [self._states[pipeline.ref].profile for pipeline in queries]:
            left_ms = profile.next_end_ms(wall_ms) - wall_ms if math.isfinite(wall_ms) else math.inf
            longest_s = min(longest_s, WAIT_SHARE * profile.period_ms / 1000, left_ms / 1000)
        return max(longest_s, COALESCE_S)

    def _defers(self, event: Ingested, is_full_read: bool) -> bool:
        if self._queued:
            return True  # otherwise queries without a queue would run before those with less slack
        if not self._costed and event.batch.num_rows <= FIRST_BATCH_ROWS:
            return False
        queries = self._core.queries_of(event.stream)
        work_ms = event.batch.num_rows * self._cost_ms.get(event.stream, 0.0)
        if is_full_read and len(queries) > 1 and work_ms < TOGETHER_MS:
            return False  # its source is behind by more than a batch: every answer waits for input, whatever the order
        if work_ms > BLOCK_MS:
            return True
        return len(queries) > 1 and 1000.0 * self._busy_s(event.source) > BUSY_MS

    def _offer(self, state: ScheduledQuery, records: int, end: int) -> None:
        if self._scheduler.offer(state, records, self._now_ms(), payload=end):
            self._queued += 1
            self._work.set()

    def advance(self, stream: str) -> None:
        """Has the queries of a stream follow its watermark: those that swept a window are due."""
        self._follow_queries()
        state = self._core.streams[stream]
        clock, watermark_ms = state.spec.clock, state.watermark_ms
        wall_ms = clock.to_wall_ms(watermark_ms) if clock is not None and watermark_ms < MAX_TIME_MS else watermark_ms
        if wall_ms < self._next_end_ms.get(stream, 0.0):
            return
        now_ms = self._now_ms()
        queries = self._core.queries_of(stream)
        for pipeline in queries:
            query = self._states[pipeline.ref]
            if not pipeline.queue:
                query.advance(0, wall_ms, now_ms)
            elif self._scheduler.watermark(query, wall_ms, now_ms):
                self._queued += 1
        self._next_end_ms[stream] = min((self._states[p.ref].end_ms for p in queries), default=0.0)

    # Work

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await self._work.wait()
            self._follow_queries()
            turn = self._scheduler.next(self._now_ms())
            if turn is None:
                self._work.clear()
                continue
            await self._run(turn)

    async def _run(self, turn: Turn) -> None:
        if together := self._together(turn.query):
            self._run_together(together)
            await self._release()
            return
        query, spent_ms, swept = turn.query, 0.0, turn.query.swept
        ref = self._refs[query.profile.name]
        while query.queue and spent_ms < turn.limit_ms:  # the queue of a deleted query is empty
            began_s = self._clock()
            self._run_piece(ref, query)
            spent_ms += 1000.0 * (self._clock() - began_s)
            self._has_swept |= query.swept > swept
            if query.queue:
                await self._release()
        if self._clock() - self._folded_s >= FOLD_S or ref not in self._costed:
            self._fold()
        self._scheduler.ran(turn, spent_ms, self._now_ms())
        await self._release()

    def _together(self, first: ScheduledQuery) -> list[ScheduledQuery]:
        """Returns the queries that process their queues with `first` before the event loop runs again.

        They are due if it is. One that takes longer than a piece, or of which nothing has been measured, runs alone.
        """
        room_ms = FRAME_TURN_MS if self._frame_turns and not first.sweeps else TOGETHER_MS
        stream, found = self._stream_of(first), list[ScheduledQuery]()
        for state in [first, *(each for each in self._scheduler.waiting() if each is not first)]:
            if (
                bool(state.sweeps) == bool(first.sweeps)
                and state.queued_ms <= MAX_PIECE_MS
                and self._refs[state.profile.name] in self._costed
                and (state is first or (state.debt_ms <= 0 and self._stream_of(state) == stream))
            ):
                room_ms -= state.queued_ms
                if room_ms < 0 and found:
                    break
                found.append(state)
            elif state is first:
                break
        return found

    def _stream_of(self, state: ScheduledQuery) -> str:
        return self._core.queries[self._refs[state.profile.name]].spec.stream

    def _run_together(self, states: Sequence[ScheduledQuery]) -> None:
        refs = tuple(self._refs[state.profile.name] for state in states)
        if self._clock() - self._folded_s >= FOLD_S:
            self._fold()
        known = len(self._laps)
        self._durable.run(Ran(refs, self._core.streams[self._core.queries[refs[0]].spec.stream].records))
        spent = _measured(islice(self._laps, known, None))
        now_ms = self._now_ms()
        for ref, state in zip(refs, states, strict=True):
            self._has_swept |= bool(state.sweeps)
            while state.queue:
                self._scheduler.complete(state, state.queue[0])
                self._queued -= 1
            self._scheduler.ran(Turn(state, 1, 0.0), spent.get(ref, (0.0, 0.0))[1], now_ms)

    async def _release(self) -> None:
        """Lets the event loop run, and tells the link if a query may have more to send."""
        now_ms = self._now_ms()
        self._update_memory()
        self._watch_slack()
        self._frame_turns = max(self._frame_turns - 1, 0)
        if self._has_frames():
            self._frame_turns, self._has_swept = FRAME_TURNS, False
            self._told_ms = -math.inf
        if not self._queued or not 0 <= now_ms - self._told_ms < WAKE_MS:
            self._told_ms = now_ms
            self._changed()
        await self._pause(0)
        self._follow_queries()

    def _has_frames(self) -> bool:
        """Whether all queries that were due have run: one pull builds the frames of all their windows."""
        return self._has_swept and not any(state.sweeps for state in self._states.values())

    def _run_piece(self, ref: QueryRef, query: ScheduledQuery) -> None:
        """Processes records at the head of the queue, as many as are expected to take `PIECE_MS`, at least one."""
        cost_ms = query.costs.remaining_ms[0]
        rows = self._piece_rows.get(ref) or (PIECE_MS / cost_ms if cost_ms > 0 else FIRST_ROWS)
        room = offered = max(int(rows), 1)
        through: int | None = None
        while query.queue:
            item = query.queue[0]
            if item.end_ms is None:
                if room <= 0:
                    break
                end, records = item.payload, int(item.records)
                assert isinstance(end, int)
                taken = records if 2 * records <= 3 * room else room
                through, room = end - (records - taken), room - taken
                if taken < records:
                    self._scheduler.shrink(query, item, taken)
                    break
            self._scheduler.complete(query, item)
            self._queued -= 1
        if through is not None:
            began_s = self._clock()
            self._durable.run(Ran((ref,), through))
            # The next piece by this one's time, and not by the cost per record: a small piece takes longer per record,
            # so the pieces would become smaller and smaller.
            processed, took_ms = offered - room, 1000.0 * (self._clock() - began_s)
            fitting = processed * PIECE_MS / took_ms if took_ms > 0 else math.inf
            self._piece_rows[ref] = min(max(fitting, rows / 8), max(2 * processed, rows))

    def _update_memory(self) -> None:
        used = self._core.queued_bytes if self._queued else 0
        self._scheduler.memory.used = float(used)
        if used <= self._limit_bytes:
            self.has_room.set()
        else:
            self.has_room.clear()
        self._is_full = used > self._limit_bytes or self._queued_ms() > READ_AHEAD_MS
        waits = self._read_little and 0 <= self._now_ms() - self._read_ms < READ_EVERY_MS
        if self._is_full or (self._queued and waits):
            self.may_read.clear()
        else:
            self.may_read.set()

    def _queued_ms(self) -> float:
        return sum(state.queued_ms for state in self._states.values()) if self._queued else 0.0

    def _follow_queries(self) -> None:
        """Registers the queries that the center has added, and removes those that it has deleted."""
        if self._configurations == self._core.configurations:
            return
        self._configurations = self._core.configurations
        queries = self._core.queries
        now_ms = self._now_ms()
        for ref in [ref for ref in self._states if ref not in queries]:
            name = self._states.pop(ref).profile.name
            self._queued -= len(self._scheduler.remove(name))
            del self._refs[name]
            self._costed.discard(ref)
            self._piece_rows.pop(ref, None)
        for ref in [ref for ref in queries if ref not in self._states]:
            spec = queries[ref].spec
            clock = self._core.streams[spec.stream].spec.clock or LIVE
            state = self._states[ref] = self._scheduler.add(_profile(ref, spec, clock), now_ms)
            self._refs[state.profile.name] = ref
        self._next_end_ms.clear()
        self._fold()
        self._update_memory()

    # Figures

    def delays(self) -> dict[QueryRef, QueryDelay]:
        """Returns what the center is told of each query."""
        self._follow_queries()
        now_ms = self._now_ms()
        found = {}
        for ref, state in self._states.items():
            history, late_ms = state.inputs[0].history, now_ms - state.sweeps[0][1] if state.sweeps else 0.0
            latest_ms = history.interval.latest_ms if history.interval is not None else 0.0
            delays = history.mean_delay_ms, latest_ms, state.queued_ms, late_ms
            found[ref] = QueryDelay(*(max(value, 0.0) for value in delays))
        return found

    def _watch_slack(self) -> None:
        """Counts the time since the last call if the edge was short of CPU, and examines whether it is now."""
        now_ms = self._now_ms()
        self._short_ms += max(now_ms - self._watched_ms, 0) if self._is_short else 0
        self._watched_ms = now_ms
        self._is_short = bool(self._queued) and (
            self._is_full
            or any(q.sweeps and q.sweeps[0][1] - now_ms - q.queued_ms < -BUSY_MS for q in self._states.values())
        )

    def take_short_share(self) -> float:
        """Returns the part of the time since the last call, 0 to 1, in which the edge was short of CPU.

        It is while the queues are full, and while a query is due and its slack at this edge is below
        -`BUSY_MS`. The center lowers sampling rates by it, as by the busy share of a source, which does not have
        the time that a source waits for the queues.
        """
        self._watch_slack()
        now_ms = self._watched_ms
        share = self._short_ms / (now_ms - self._asked_ms) if now_ms > self._asked_ms else float(self._is_short)
        self._asked_ms, self._short_ms = now_ms, 0.0
        return min(share, 1.0)

    def loads(self) -> dict[QueryRef, ScheduledLoad]:
        """Returns how each query stands now."""
        self._follow_queries()
        self._fold()
        now_ms = self._now_ms()
        return {
            ref: ScheduledLoad(
                pipeline.queue.records,
                pipeline.queue.nbytes,
                1000.0 * self._states[ref].costs.remaining_ms[0] if ref in self._costed else None,
                self._states[ref].slack_ms(now_ms) if pipeline.queue else None,
                max(now_ms - self._states[ref].sweeps[0][1], 0.0) if self._states[ref].sweeps else 0.0,
                self._states[ref].overruns,
            )
            for ref, pipeline in self._core.queries.items()
        }


def _measured(laps: Iterable[tuple[QueryRef | None, int, float]]) -> dict[QueryRef, tuple[int, float]]:
    """Returns how many records each query has processed, and the time in ms that it took."""
    measured: dict[QueryRef, tuple[int, float]] = {}
    began_s = 0.0
    for ref, records, at_s in laps:
        if ref is not None:
            count, spent_ms = measured.get(ref, (0, 0.0))
            measured[ref] = count + records, spent_ms + 1000.0 * (at_s - began_s)
        began_s = at_s
    return measured


def _profile(ref: QueryRef, spec: QuerySpec, clock: StreamClock) -> QueryProfile:
    """Returns the query as the scheduler sees it, in wall time. It keeps nothing of a record that it has aggregated."""
    window = spec.window
    every_ms = window.every_ms if isinstance(window, SlidingWindow) else window.slice_ms
    first_end_ms = window.origin_ms + (window.size_ms if isinstance(window, SlidingWindow) else 0)
    period_ms = max(every_ms / clock.speed, 1.0)
    offset_ms = float(clock.to_wall_ms(first_end_ms)) % period_ms
    return QueryProfile(f"{ref.name}@{ref.version}", (Operator(0.0, 0.0),), period_ms, offset_ms)

"""Decides which query processes its queued records, and how many, by measured times (`Worker`).

An edge that keeps up has no queues. All queries process each batch at once, in the order of arrival. A batch is queued
in two cases. It would block the event loop for longer than `Tuning.block_ms`. Or several queries share a source that
has not been idle for a cycle. The edge is short of CPU then, and the order of the queries decides which answer is late.

A query is *due* if a window of it ends with a queued watermark. The due queries process the batch first, and the event
loop ships their frames. Then all other queries process it together, at the same cost as without queues. A query that
takes longer than a piece runs alone. `edgewater.scheduling` decides which query runs. After each piece, the event loop
serves heartbeats, pushes and the link. Each decision is journaled (`Ran`), so that recovery repeats it without
measurements.

While batches are queued, their source waits, so batches become as large as without queues. If a source has more input
than it reads at once, an order does not help. All queries process such a batch at once.

A source that keeps up waits between two reads (`Worker.wait_s`), because each batch has a fixed cost for each query,
the journal and the link. The closer the source's watermark is to the end of a window, the shorter the wait. So no
answer is later.

Sources have to wait only when the queues have reached their limit. From `QueueLimits.threshold` on, the query with the
oldest queued records runs, because a batch needs memory until all queries have processed it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from edge.core import Ingested, Ran
from edge.durability import DurableCore
from edge.records import COALESCE_S, Position, PushId
from edge.series import SeriesUpdate
from edge.uplink.ports import QueryDelay
from edge.worker.costs import CpuShortage, QueryCosts
from edge.worker.reading import ReadPace
from edge.worker.tuning import TUNING, Tuning
from edgewater.model.query import QuerySpec
from edgewater.model.streams import LIVE, MAX_TIME_MS, MIN_TIME_MS, StreamClock
from edgewater.model.windows import window_ends
from edgewater.scheduling import Operator, QueryProfile, QueueLimits, ScheduledQuery, Scheduler, Turn, make_policy
from edgewater.wire import QueryRef

OFF = "off"
"""The setting of `policy` without queues."""
QUEUE_SHARE = 4
"""The queues may use the memory limit divided by this number."""


@dataclass(frozen=True, slots=True)
class QueryBacklog:
    """The queue and the delay of one query on this edge.

    Attributes:
        queued_records: records that the query has not processed.
        queued_bytes: memory of these records, which may be shared with other queries.
        cost_us: measured time per record, in µs; None without measurements.
        slack_ms: how long the query can stay idle until its next answer becomes late; None if no batch is queued.
        late_ms: time since the first queued watermark with an ended window was ingested; 0 if there is none.
        overruns: turns that took more than two cycles.
    """

    queued_records: int
    queued_bytes: int
    cost_us: float | None
    slack_ms: float | None
    late_ms: float
    overruns: int


class Worker:
    """Runs the queries of one agent. Call every method on the event loop.

    Args:
        changed: called when a query may have more to send.
        busy_s: returns for how many seconds a source has had input without a pause.
        policy: a name of `edgewater.scheduling.POLICIES`, or `OFF`.
        limit_bytes: memory of the queues above which sources have to wait.
        answer_delay_ms: returns the time in ms from a query's frames to the answer; 0 if unknown. It reduces the
            query's slack.
        now_ms: returns the wall time.
        clock: returns the CPU time of the event loop's thread, in seconds, so that other processes change no cost.
        pause: lets the event loop do other work.
        tuning: the times and sizes by which the worker decides.

    Attributes:
        pace: decides when sources may read.
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
        tuning: Tuning = TUNING,
    ) -> None:
        self._durable, self._core = durable, durable.core
        self._changed, self._busy_s, self._now_ms, self._clock, self._pause = changed, busy_s, now_ms, clock, pause
        self._is_on, self._tuning = policy != OFF, tuning
        limits = QueueLimits(max(limit_bytes, 1), record_bytes=1.0, shared=True)
        self._scheduler = Scheduler(make_policy(policy if self._is_on else "fcfs"), memory=limits)
        self._states: dict[QueryRef, ScheduledQuery] = {}
        self._refs: dict[str, QueryRef] = {}
        self._configurations = -1
        self._costs = QueryCosts(self._core, self._states, clock, answer_delay_ms, tuning)
        self.pace = ReadPace(limit_bytes, tuning)
        self._shortage = CpuShortage(now_ms())
        self._piece_rows: dict[QueryRef, float] = {}
        self._next_end_ms: dict[str, float] = {}
        self._queued = 0
        self._told_ms = -math.inf
        self._has_swept, self._frame_turns = False, 0
        self._was_full_read = False
        self._work = asyncio.Event()
        self._follow_queries()
        for ref, pipeline in self._core.queries.items():
            for batch in pipeline.queue.batches:
                self._offer(self._states[ref], batch.end - max(batch.first, pipeline.queue.done), batch.end)
        self._update_memory()

    # Input

    def ingest_range(
        self, event: Ingested, start: Position | None, end: Position, *, is_full_read: bool = False
    ) -> bool:
        """Ingests a batch as `DurableCore.ingest_range` does. The batch is processed at once, or queued.

        Args:
            is_full_read: as `Chunk.is_full_read`.

        Returns: whether the batch was queued. If so, nothing can be sent yet, and `changed` is called once a query has
        run.
        """
        event = self._placed(event, is_full_read=is_full_read)
        self._durable.ingest_range(event, start, end)
        return self._ingested(event)

    def ingest_payload(
        self,
        event: Ingested,
        push: PushId | None = None,
        end: Position | None = None,
        series: SeriesUpdate | None = None,
        *,
        is_full_read: bool = False,
    ) -> bool:
        """Ingests a batch as `DurableCore.ingest_payload` does. Otherwise the same as `ingest_range`."""
        event = self._placed(event, is_full_read=is_full_read)
        self._durable.ingest_payload(event, push, end, series)
        return self._ingested(event)

    def _placed(self, event: Ingested, *, is_full_read: bool) -> Ingested:
        """Returns the event of a batch, marked if the batch is to be queued."""
        self._follow_queries()
        if self._costs.is_due:
            self._costs.fold()
        queued = bool(event.batch.num_rows) and self._is_on and self._defers(event, is_full_read or self._was_full_read)
        self._was_full_read = is_full_read
        self.pace.count(event.stream, event.batch.num_rows)
        return replace(event, queued=True) if queued else event

    def _ingested(self, event: Ingested) -> bool:
        if event.queued or self._queued:
            end = self._core.streams[event.stream].records
            for pipeline in self._core.queries_of(event.stream):
                if pipeline.queue:
                    self._offer(self._states[pipeline.ref], event.batch.num_rows, end)
            self.pace.read(event.batch.num_rows * self._costs.stream_ms(event.stream), self._now_ms())
            self._update_memory()
        self.advance(event.stream)
        return event.queued

    def wait_s(self, stream: str, source: str) -> float:
        """Returns how long the next records of a source may wait, in seconds, to be processed together
        (`CoalesceTime`).

        The wait ends before the source's watermark is expected to reach the next end of a window. Records of a query
        with an accuracy wait no longer than necessary, because their delays are measured.
        """
        self._follow_queries()
        state, queries = self._core.streams[stream], self._core.queries_of(stream)
        clock = state.spec.clock
        if clock is None or self._queued or any(pipeline.monitor is not None for pipeline in queries):
            return COALESCE_S
        watermark_ms = state.source_watermark_ms(source)
        wall_ms = clock.to_wall_ms(watermark_ms) if MIN_TIME_MS < watermark_ms < MAX_TIME_MS else -math.inf
        profiles = [self._states[pipeline.ref].profile for pipeline in queries]
        return self.pace.wait_s(stream, profiles, float(wall_ms))

    def _defers(self, event: Ingested, is_full_read: bool) -> bool:
        if self._queued:
            return True  # otherwise queries without a queue would run before queries with less slack
        tuning = self._tuning
        if not self._costs.is_any_known and event.batch.num_rows <= tuning.first_batch_rows:
            return False
        queries = self._core.queries_of(event.stream)
        work_ms = event.batch.num_rows * self._costs.stream_ms(event.stream)
        if is_full_read and len(queries) > 1 and work_ms < tuning.together_ms:
            return False  # the source has more input, so every answer waits for input in any order
        if work_ms > tuning.block_ms:
            return True
        return len(queries) > 1 and 1000.0 * self._busy_s(event.source) > tuning.busy_ms

    def _offer(self, state: ScheduledQuery, records: int, end: int) -> None:
        if self._scheduler.offer(state, records, self._now_ms(), payload=end):
            self._queued += 1
            self._work.set()

    def advance(self, stream: str) -> None:
        """Tells the queries of a stream about its watermark. Queries with a window that ends are due."""
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
        """Runs until the task is cancelled."""
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
        while query.queue and spent_ms < turn.limit_ms:  # if the query is deleted meanwhile, its queue is empty
            began_s = self._clock()
            self._run_piece(ref, query)
            spent_ms += 1000.0 * (self._clock() - began_s)
            self._has_swept |= query.swept > swept
            if query.queue:
                await self._release()
        if self._costs.is_old or not self._costs.is_known(ref):
            self._costs.fold()
        self._scheduler.ran(turn, spent_ms, self._now_ms())
        await self._release()

    def _together(self, first: ScheduledQuery) -> list[ScheduledQuery]:
        """Returns the queries that process their queues with `first` before the event loop runs again.

        If `first` is due, only due queries join it; otherwise only queries that are not due. A query that takes longer
        than a piece, or has no measurements, runs alone.
        """
        is_first = self._frame_turns and not first.sweeps
        room_ms = self._tuning.frame_turn_ms if is_first else self._tuning.together_ms
        stream, chosen = self._stream_of(first), list[ScheduledQuery]()
        for state in [first, *(each for each in self._scheduler.waiting() if each is not first)]:
            if (
                bool(state.sweeps) == bool(first.sweeps)
                and state.queued_ms <= self._tuning.max_piece_ms
                and self._costs.is_known(self._refs[state.profile.name])
                and (state is first or (state.debt_ms <= 0 and self._stream_of(state) == stream))
            ):
                room_ms -= state.queued_ms
                if room_ms < 0 and chosen:
                    break
                chosen.append(state)
            elif state is first:
                break
        return chosen

    def _stream_of(self, state: ScheduledQuery) -> str:
        return self._core.queries[self._refs[state.profile.name]].spec.stream

    def _run_together(self, states: Sequence[ScheduledQuery]) -> None:
        refs = tuple(self._refs[state.profile.name] for state in states)
        if self._costs.is_old:
            self._costs.fold()
        laps = self._costs.laps
        self._durable.run(Ran(refs, self._core.streams[self._core.queries[refs[0]].spec.stream].records))
        spent_ms = self._costs.spent_ms_since(laps)
        now_ms = self._now_ms()
        for ref, state in zip(refs, states, strict=True):
            self._has_swept |= bool(state.sweeps)
            while state.queue:
                self._scheduler.complete(state, state.queue[0])
                self._queued -= 1
            self._scheduler.ran(Turn(state, 1, 0.0), spent_ms.get(ref, 0.0), now_ms)

    async def _release(self) -> None:
        """Lets the event loop run, and tells the link if a query may have more to send."""
        now_ms = self._now_ms()
        self._update_memory()
        self._watch_slack()
        self._frame_turns = max(self._frame_turns - 1, 0)
        if self._has_frames():
            self._frame_turns, self._has_swept = self._tuning.frame_turns, False
            self._told_ms = -math.inf
        if not self._queued or not 0 <= now_ms - self._told_ms < self._tuning.wake_ms:
            self._told_ms = now_ms
            self._changed()
        await self._pause(0)
        self._follow_queries()

    def _has_frames(self) -> bool:
        """Returns whether all queries that were due have run. Then one pull builds the frames of all their windows."""
        return self._has_swept and not any(state.sweeps for state in self._states.values())

    def _run_piece(self, ref: QueryRef, query: ScheduledQuery) -> None:
        """Processes records at the head of a queue: as many as take `Tuning.piece_ms`, at least one."""
        cost_ms, piece_ms = query.costs.remaining_ms[0], self._tuning.piece_ms
        rows = self._piece_rows.get(ref) or (piece_ms / cost_ms if cost_ms > 0 else self._tuning.first_rows)
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
            # The next piece is sized by the time of this piece, not by the cost per record. A small piece takes longer
            # per record, so pieces would become smaller and smaller.
            processed, took_ms = offered - room, 1000.0 * (self._clock() - began_s)
            fitting = processed * piece_ms / took_ms if took_ms > 0 else math.inf
            self._piece_rows[ref] = min(max(fitting, rows / 8), max(2 * processed, rows))

    def _update_memory(self) -> None:
        used = self._core.queued_bytes if self._queued else 0
        self._scheduler.memory.used = float(used)
        self.pace.update(used, self._queued_ms(), self._now_ms(), is_queued=bool(self._queued))

    def _queued_ms(self) -> float:
        return sum(state.queued_ms for state in self._states.values()) if self._queued else 0.0

    def _follow_queries(self) -> None:
        """Registers the queries that the center has added, and removes the queries that the center has deleted."""
        if self._configurations == self._core.configurations:
            return
        self._configurations = self._core.configurations
        queries = self._core.queries
        now_ms = self._now_ms()
        for ref in [ref for ref in self._states if ref not in queries]:
            name = self._states.pop(ref).profile.name
            self._queued -= len(self._scheduler.remove(name))
            del self._refs[name]
            self._costs.forget(ref)
            self._piece_rows.pop(ref, None)
        for ref in [ref for ref in queries if ref not in self._states]:
            spec = queries[ref].spec
            clock = self._core.streams[spec.stream].spec.clock or LIVE
            state = self._states[ref] = self._scheduler.add(_profile(ref, spec, clock), now_ms)
            self._refs[state.profile.name] = ref
        self._next_end_ms.clear()
        self._costs.fold()
        self._update_memory()

    # Figures

    def delays(self) -> dict[QueryRef, QueryDelay]:
        """Returns the delays that the edge reports to the center, by query."""
        self._follow_queries()
        now_ms = self._now_ms()
        delays = {}
        for ref, state in self._states.items():
            history, late_ms = state.inputs[0].history, now_ms - state.sweeps[0][1] if state.sweeps else 0.0
            latest_ms = history.interval.latest_ms if history.interval is not None else 0.0
            times = history.mean_delay_ms, latest_ms, state.queued_ms, late_ms
            delays[ref] = QueryDelay(*(max(value, 0.0) for value in times))
        return delays

    def _watch_slack(self) -> None:
        """Updates the measurement of CPU shortage. Called after each piece and before each report."""
        now_ms, busy_ms = self._now_ms(), self._tuning.busy_ms
        is_short = bool(self._queued) and (
            self.pace.is_full
            or any(q.sweeps and q.sweeps[0][1] - now_ms - q.queued_ms < -busy_ms for q in self._states.values())
        )
        self._shortage.watch(now_ms, is_short=is_short)

    def take_short_share(self) -> float:
        """Returns the fraction of time since the last call, 0 to 1, in which the edge was short of CPU.

        The edge is short of CPU while the queues are full, and while a due query has less slack at this edge than
        -`Tuning.busy_ms`. The center lowers sampling rates by this fraction. It also lowers them by the busy fraction
        of sources, which does not include the time that a source waits for the queues.
        """
        self._watch_slack()
        return self._shortage.take_share()

    def loads(self) -> dict[QueryRef, QueryBacklog]:
        """Returns the current backlog of each query."""
        self._follow_queries()
        self._costs.fold()
        now_ms = self._now_ms()
        return {
            ref: QueryBacklog(
                pipeline.queue.records,
                pipeline.queue.nbytes,
                1000.0 * self._states[ref].costs.remaining_ms[0] if self._costs.is_known(ref) else None,
                self._states[ref].slack_ms(now_ms) if pipeline.queue else None,
                max(now_ms - self._states[ref].sweeps[0][1], 0.0) if self._states[ref].sweeps else 0.0,
                self._states[ref].overruns,
            )
            for ref, pipeline in self._core.queries.items()
        }


def _profile(ref: QueryRef, spec: QuerySpec, clock: StreamClock) -> QueryProfile:
    """Returns the profile of a query for the scheduler, in wall time."""
    window = spec.window
    every_ms, first_end_ms = window_ends(window) or (window.slice_ms, window.origin_ms)
    period_ms = max(every_ms / clock.speed, 1.0)
    offset_ms = float(clock.to_wall_ms(first_end_ms)) % period_ms
    return QueryProfile(f"{ref.name}@{ref.version}", (Operator(0.0, 0.0),), period_ms, offset_ms)

"""`SourceReading`: reads the sources of an agent into its core, with retries and backpressure."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from edge.backfill_runner import BackfillRunner
from edge.config import LimitsConfig
from edge.core.core import EdgeCore
from edge.core.events import Ingested, InputLost, SourceEnded, SourcesOpened, TickEvent
from edge.core.memory import SliceMemoryLimits
from edge.durability import DurableCore, JournalGroupCommit
from edge.read_pace import ReadPace
from edge.records import Chunk, Position, Source
from edge.source_status import SourceStates
from edge.uplink import Input, UplinkOutbox
from edge.utilization import BusyMeter
from edgewater.base.errors import InvalidInput
from edgewater.base.streams import Delivery

log = logging.getLogger(__name__)

MAX_UNSYNCED_BYTES = 8 << 20
"""A source with more unsynced bytes waits for the journal."""
MAX_UNSYNCED_UNREPEATABLE_BYTES = 1 << 20
"""The same limit for a source that cannot be read again."""
SYNC_S = 0.05  # limit: records that a crash can cost
"""Journal records of a source that cannot be read again are synced after this time. So a crash loses only the records
of this time."""
TICK_MIN_S = 0.2  # limit: processor time at rest
BACKPRESSURE_POLL_S = 0.05  # limit: processor time while waiting
SOURCE_RETRY_S = 5.0  # limit: attempts while a source fails
LONG_BACKPRESSURE_MS = 500
"""If backpressure holds a source back for longer, the idle rule restarts for it: records may wait in the source."""
LONG_PAUSE_MS = 500
"""After a longer time in which the agent did not run, the idle rule restarts for all sources, for the same reason."""
INPUTS_EVERY_S = 5.0  # limit: work of comparing inputs
MAX_FINGERPRINTS = 64
"""Fingerprints of files that an edge reports, over all sources."""


class SourceReading:
    """Reads all sources of one agent.

    Args:
        retired: set when the center has retired this edge: then no source is read.
        limits: bounds of memory.
        now_ms: the wall clock.

    Attributes:
        sources: all sources, also those that were opened while the agent runs.
        failing: per source whose last read failed, the message and the monotonic time of the failure in seconds.
        backpressured: names of the sources that wait for memory or the disk.
        retry_s: time until a failed source is read again.
        input_gone: event that is set from a source's report that its input is gone until the next checkpoint.
    """

    def __init__(
        self,
        sources: list[Source],
        durable: DurableCore,
        commit: JournalGroupCommit,
        outbox: UplinkOutbox,
        pace: ReadPace,
        backfills: BackfillRunner,
        meter: BusyMeter,
        states: SourceStates,
        retired: asyncio.Event,
        limits: LimitsConfig,
        now_ms: Callable[[], int],
    ) -> None:
        self.sources = sources
        self._durable, self._commit, self._outbox, self._pace = durable, commit, outbox, pace
        self._backfills, self._meter, self._states = backfills, meter, states
        self._retired, self._limits, self._now_ms = retired, limits, now_ms
        self.failing: dict[str, tuple[str, float]] = {}
        self.backpressured: set[str] = set()
        self.retry_s = SOURCE_RETRY_S
        self.input_gone = asyncio.Event()
        self._unsynced = asyncio.Event()
        self._uncommitted: dict[str, Position] = {}
        self._tasks: asyncio.TaskGroup | None = None

    def is_over_memory_limit(self) -> bool:
        """Returns whether sources must wait until the edge has shipped frames."""
        return self._durable.core.pending_bytes > self._limits.max_pending_bytes

    def failures(self) -> dict[str, str]:
        """Returns the error message of each source that currently cannot be read, by source name."""
        for name, (_, at_s) in list(self.failing.items()):
            # it has looked for input since, and there was none
            if self._meter.empty_for_s(name) < time.monotonic() - at_s:
                self._end_failure(name)
        return {name: message for name, (message, _) in self.failing.items()}

    def _end_failure(self, source: str) -> None:
        if self.failing.pop(source, None) is not None:
            log.info("source %s can be read again", source)

    async def read_all(self) -> None:
        """Reads all sources; runs until it is cancelled."""
        # Records that are read before the edge has received its first queries would count in no query.
        await self._outbox.configured.wait()
        self._restart_idle_rule(*self.sources)
        tasks = [asyncio.create_task(t) for t in (self._read_sources(), self._retired.wait())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.Event().wait()  # all sources have ended, or the edge is retired; the servers continue

    async def _read_sources(self) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            for source in self.sources:
                self._tasks.create_task(self._read(source))

    def _open(self, opener: Source, sources: Iterable[Source]) -> None:
        """Begins to read the new sources among `sources`.

        Raises SourceRaised: the delivery of a source is weaker than the delivery that the edge has stated to the
        center.
        """
        names = {source.name for source in self.sources}
        new = [source for source in sources if source.name not in names]
        stated = self._durable.core.streams[opener.stream].spec.deliveries
        for source in new:
            if source.delivery not in (Delivery.EXACTLY_ONCE, *stated):
                raise SourceRaised(
                    f"the new source {source.name} has the delivery {source.delivery}, unlike the sources before it"
                )
        if new and self._tasks is not None:
            self.sources += new
            self._backfills.add(new)
            self._durable.handle(sources_opened(self.sources, self._durable.core, self._limits))
            for source in new:
                log.info("stream %s: source %s is new", source.stream, source.name)
                self._states.add(source, opener)
                self._tasks.create_task(self._read(source))

    async def _read(self, source: Source) -> None:
        """Reads a source to its end, with retries.

        A source that cannot be read holds its stream's watermark back, so that no answer treats the source as finished.
        /readyz names the source.
        """
        if source.delivery is Delivery.AT_MOST_ONCE:
            await self._commit.durable()  # after a restart the state says that this process was reading the source
        with self._meter.busy(source.name):
            while True:
                try:
                    await self._read_until_end(source)
                    break
                except SourceRaised as exc:
                    if source.name not in self.failures():
                        log.error("cannot read source %s: %s; retry every %.0f s", source.name, exc, self.retry_s)
                        if not isinstance(exc.__cause__, InvalidInput | OSError):
                            log.error("the failure of source %s", source.name, exc_info=exc.__cause__)
                    self.failing[source.name] = str(exc), time.monotonic()
                    with self._meter.backpressured(source.name):
                        await asyncio.sleep(self.retry_s)
        self._durable.handle(SourceEnded(source.stream, source.name))
        self._outbox.changed.set()
        log.info("source %s of stream %s has ended", source.name, source.stream)

    async def _read_until_end(self, source: Source) -> None:
        async for chunk in _contained(source.chunks(self._durable.state.positions.get(source.name))):
            self._end_failure(source.name)
            self._states.count(source.name, chunk)
            self._open(source, chunk.opens)
            self._ingest(source, chunk)
            self._outbox.changed.set()
            await self._wait_for_capacity(source)
        self._end_failure(source.name)

    def _ingest(self, source: Source, chunk: Chunk) -> None:
        rejected = chunk.rejected_records
        event = Ingested(source.stream, source.name, chunk.batch, self._now_ms(), rejected=rejected)
        is_open = self._durable.core.streams[source.stream].is_open(source.name)
        for reason in chunk.losses if is_open else ():  # a source that has ended can lose no records
            # The loss is stored before the position after it. So a crash in between states the loss twice, not never.
            self._durable.handle(InputLost(source.stream, source.name, reason, event.arrival_ms))
        if source.replayable and chunk.end is not None and not chunk.keep:
            self._durable.ingest_range(event, chunk.start, chunk.end)
        elif chunk.batch.num_rows or rejected or chunk.keep:
            end = chunk.end if chunk.keep else None
            self._durable.ingest_payload(event, end=end)
            if end is not None:
                self._uncommitted[source.name] = end
                self._unsynced.set()
        if source.delivery is Delivery.AT_MOST_ONCE:
            self._unsynced.set()
        if chunk.input_gone:
            self.input_gone.set()
        self._pace.count(source.stream, chunk.batch.num_rows)

    async def _wait_for_capacity(self, source: Source) -> None:
        """Applies backpressure: returns when the journal and the memory limit allow the source to continue."""
        since_ms = self._now_ms()
        self.backpressured.add(source.name)
        try:
            with self._meter.backpressured(source.name):
                repeatable = source.delivery is not Delivery.AT_MOST_ONCE
                unsynced_bytes = MAX_UNSYNCED_BYTES if repeatable else MAX_UNSYNCED_UNREPEATABLE_BYTES
                if self._durable.unsynced_bytes > unsynced_bytes or self._commit.failure is not None:
                    await self._commit.durable()
                while self.is_over_memory_limit():
                    await asyncio.sleep(BACKPRESSURE_POLL_S)
            await asyncio.sleep(0)
            if self._now_ms() - since_ms >= LONG_BACKPRESSURE_MS:
                self._restart_idle_rule(source)
        finally:
            self.backpressured.discard(source.name)

    def _restart_idle_rule(self, *sources: Source) -> None:
        """Restarts the idle rule for these sources: their input arrived while they were not read."""
        names = {source.name for source in sources}
        self._durable.handle(TickEvent(self._now_ms(), tuple(sorted(names.union(self._unread_sources())))))

    async def tick(self) -> None:
        """Sends `TickEvent`s to the core when they are due. Runs until it is cancelled."""
        due_ms, streams = self._now_ms(), self._durable.core.streams
        while True:
            # The process was stopped, the machine suspended, or the loop blocked.
            if self._now_ms() - due_ms >= LONG_PAUSE_MS:
                self._restart_idle_rule(*self.sources)
            deadline = self._durable.core.next_deadline()
            now = self._now_ms()
            if deadline is not None and deadline <= now:
                before = {n: s.watermark_ms for n, s in streams.items()}
                self._durable.handle(TickEvent(now, self._unread_sources(), self._empty_ms(now)))
                if before != {n: s.watermark_ms for n, s in streams.items()}:
                    self._outbox.changed.set()
            wait_s = max(TICK_MIN_S, ((deadline or now) - now) / 1000)
            due_ms = self._now_ms() + int(wait_s * 1000)
            await asyncio.sleep(wait_s)

    def _unread_sources(self) -> tuple[str, ...]:
        """Returns the sources that are not read now. They are not idle, although they give no records."""
        is_stopped = not self._outbox.configured.is_set() or self._commit.failure is not None
        if is_stopped or self.is_over_memory_limit():
            return tuple(source.name for source in self.sources)
        return (*self.failures(), *self.backpressured)

    def _empty_ms(self, now: int) -> dict[str, int]:
        """Returns `TickEvent.empty_ms` of all sources; 0 for a source whose reads have always returned records."""
        ages = {source.name: self._meter.empty_for_s(source.name) for source in self.sources}
        return {name: now - round(1000 * age_s) if math.isfinite(age_s) else 0 for name, age_s in ages.items()}

    async def sync(self) -> None:
        """Syncs the records of sources that cannot be read again, and acknowledges them; runs until it is cancelled."""
        while True:
            await self._unsynced.wait()
            await asyncio.sleep(SYNC_S)
            self._unsynced.clear()
            committed, self._uncommitted = self._uncommitted, {}
            await self._commit.durable()
            for source in self.sources if committed else ():
                if source.name in committed:
                    try:
                        source.committed(committed[source.name])
                    except Exception as exc:  # the other sources continue
                        log.exception("source %s cannot acknowledge its records", source.name)
                        self.failing[source.name] = f"{type(exc).__name__}; the log says more", time.monotonic()

    async def fingerprint_inputs(self) -> None:
        """Stores the fingerprints of the files that are read. Runs until it is cancelled.

        The center compares them over all edges.
        """
        sources = [source for source in self.sources if source.replayable][:MAX_FINGERPRINTS]
        if not sources:
            self._outbox.inputs = ()
        while sources:
            inputs = []
            for source in sources:
                if (position := self._durable.state.positions.get(source.name)) is not None:
                    most = MAX_FINGERPRINTS // len(sources)
                    fingerprints = await asyncio.to_thread(source.fingerprints, position, most)
                    inputs += [Input(source.stream, source.name, fingerprints)] if fingerprints else []
            self._outbox.inputs = tuple(inputs)
            await asyncio.sleep(INPUTS_EVERY_S)
        await asyncio.Event().wait()


def sources_opened(sources: Sequence[Source], core: EdgeCore, limits: LimitsConfig) -> SourcesOpened:
    """Returns the event that states all sources of the edge."""
    memory = SliceMemoryLimits.of(limits.max_pending_bytes, limits.max_query_bytes)
    replayable = tuple(s.name for s in sources if s.replayable)
    columns = {name: stream.column_types for name, stream in core.streams.items()}
    return SourcesOpened(tuple((s.stream, s.name) for s in sources), replayable, memory.state_bytes, columns)


class SourceRaised(Exception):
    """A source has raised an exception, which is the cause."""


async def _contained(chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
    """Yields the chunks of a source. Raises SourceRaised for any exception, so that other sources continue."""
    try:
        async for chunk in chunks:
            yield chunk
    except (InvalidInput, OSError) as exc:
        raise SourceRaised(str(exc)) from exc
    except Exception as exc:
        # Only the type: the message may quote records or credentials, and anybody may read /readyz.
        raise SourceRaised(f"{type(exc).__name__}; the log says more") from exc

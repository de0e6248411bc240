"""`open_agent`: recovers the state of an edge, and connects the parts of its agent, each after the parts that it needs.

Sources are built three times: for the recovery, which reads ranges again; for backfills, which read at other positions
of the same files; and for the agent. The agent's sources are built last, because the recovered queries decide how long
their records wait (`ReadPace`).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from edge.agent.agent import Agent
from edge.agent.health import AgentHealth
from edge.agent.source_reading import SourceReading, sources_opened
from edge.backfill_runner import BackfillRunner
from edge.config import EdgeConfig, StreamConfig
from edge.core.core import EdgeCore
from edge.core.events import InputLost
from edge.core.memory import SliceMemoryLimits
from edge.core.streams import StreamSpec
from edge.durability import DurableCore, JournalGroupCommit, QuotaFile, load_identity
from edge.process import now_ms
from edge.read_pace import ReadPace
from edge.records import CoalesceTime, Position, Source, shortest_wait
from edge.source_kinds import KeptSource
from edge.source_status import SourceStates
from edge.sources.factory import build_sources
from edge.sources.lookups import StreamLookups, joined, open_lookups
from edge.sources.pacing import replay_clock
from edge.uplink import DailyQuota, LinkLimits, Uplink, UplinkOutbox, Workload
from edge.utilization import BusyMeter, QueryCosts, no_marker
from edgewater.base.errors import StorageError
from edgewater.base.streams import Delivery, StreamClock, weaker_than_exactly_once
from edgewater.synopses import source_of
from edgewater.wire import LossReason

log = logging.getLogger(__name__)

UNREAD_INPUT_S = 0.1
"""A source that has not been idle for longer than this may have unread input. Input of other sources is late by at most
about this time, which is within the usual lateness of records."""


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Builds the sources of an edge, with their lookups.

    Attributes:
        clocks: the clock of each stream; None: records are read as fast as possible.
        lookups: the lookups of each stream that has lookups.
    """

    config: EdgeConfig
    directory: Path
    clocks: Mapping[str, StreamClock | None]
    lookups: Mapping[str, StreamLookups]

    def joined(self, source: Source) -> Source:
        return joined(source, self.lookups.get(source.stream))

    def built(self, meter: BusyMeter | None = None, coalesce_s: CoalesceTime = shortest_wait) -> list[Source]:
        """Returns new sources, without lookups."""
        idle, sleep = (no_marker, asyncio.sleep) if meter is None else (meter.idle, meter.sleep)
        return build_sources(self.config, self.clocks, now_ms=now_ms, sleep=sleep, idle=idle, coalesce_s=coalesce_s)

    def for_rereading(self) -> Rereader:
        """Returns new sources that read ranges of positions again."""
        return Rereader(self.directory, [self.joined(source) for source in self.built()])


class Rereader:
    """Reads ranges of positions again, as `Reread`."""

    def __init__(self, directory: Path, sources: Sequence[Source]) -> None:
        self._directory = directory
        self.sources = list(sources)

    def __call__(self, name: str, start: Position | None, end: Position) -> pa.RecordBatch:
        for source in self.sources:
            if source.name == name:
                return source.reread(start, end).batch
        raise StorageError(
            f"{self._directory}: the journal has records of source {name}, which is not in the configuration; "
            "put it back until the edge has run once more"
        )


def open_agent(config: EdgeConfig) -> Agent:
    """Recovers the state in `config.state_dir` and builds the agent; reads no source yet.

    Raises:
        InvalidConfig: the configuration cannot be used.
        StorageError: the state cannot be recovered; the message names a remedy.
    """
    directory = Path(config.state_dir)
    identity = load_identity(directory, lambda: _fresh_identity(config))
    clocks = {name: _clock(identity["clocks"].get(name), stream) for name, stream in config.streams.items()}
    lookups = {name: open_lookups(name, stream, now_ms) for name, stream in config.streams.items() if stream.lookups}
    inputs = _Inputs(config, directory, clocks, lookups)
    again, backfilled = inputs.for_rereading(), inputs.for_rereading()
    durable = _recovered(inputs, identity, again, backfilled)
    commit = JournalGroupCommit(durable)
    outbox = UplinkOutbox(config.edge, config.labels, durable, commit, now_ms)
    meter = BusyMeter(time.monotonic)
    pace, costs = ReadPace(durable.core), QueryCosts(time.thread_time)
    durable.core.cost_meter = costs
    built = inputs.built(meter, pace.wait_s)
    opened = _opened_before(inputs, built, durable.core)
    sources = [*map(inputs.joined, built), *opened]
    _begin(durable, sources, config)
    outbox.workload = Workload(meter.take_busy_share, lambda: _unread_streams(meter, sources))
    quota = _daily_quota(config, directory)
    uplink = _uplink(config, outbox, quota)
    backfills = BackfillRunner(
        durable,
        [*backfilled.sources, *opened],
        config.limits.max_pending_bytes // 2,
        changed=outbox.changed.set,
        now_ms=now_ms,
        monotonic=time.monotonic,
    )
    states = SourceStates(meter)
    for source in sources:
        states.add(source)
    retired, limits = uplink.retired, config.limits
    reading = SourceReading(sources, durable, commit, outbox, pace, backfills, meter, states, retired, limits, now_ms)
    agent = Agent(
        config, durable, commit, outbox, uplink, meter, costs, backfills, states, reading, now_ms, quota, lookups
    )
    agent.pages = AgentHealth(agent).routes()
    return agent


def begin_anew(agent: Agent) -> None:
    """Begins a new incarnation. Called when `Agent.run` has raised `OutdatedState`; then call `open_agent`.

    The new incarnation does not have the records that the agent has accepted and not shipped. The center may have them
    from another agent, so they might count twice. The center states the loss in its answers, because it does not know
    the incarnation.

    Raises:
        StorageError: the disk cannot be written.
    """
    incarnation = uuid.uuid4().hex
    agent.durable.begin_anew(incarnation, source_of(agent.config.edge, incarnation))


def _recovered(inputs: _Inputs, identity: Mapping[str, Any], again: Rereader, backfilled: Rereader) -> DurableCore:
    config, incarnation = inputs.config, str(identity["incarnation"])
    deliveries = {
        name: weaker_than_exactly_once(s.delivery for s in again.sources if s.stream == name) for name in config.streams
    }
    streams = {
        name: StreamSpec(
            stream.stream_columns,
            inputs.clocks[name],
            stream.disorder_ms,
            stream.idle_rule_ms,
            deliveries[name],
            stream.constants,
        )
        for name, stream in config.streams.items()
    }
    make_core = partial(EdgeCore, streams, source_of(config.edge, incarnation))
    memory = SliceMemoryLimits.of(config.limits.max_pending_bytes, config.limits.max_query_bytes)
    return DurableCore(
        inputs.directory, make_core, again, incarnation, reread_backfill=backfilled, now_ms=now_ms(), memory=memory
    )


def _unread_streams(meter: BusyMeter, sources: Sequence[Source]) -> tuple[str, ...]:
    """Returns the streams of the sources that may have unread input."""
    streams = {source.name: source.stream for source in sources}
    return tuple(sorted({streams[name] for name in meter.unread_sources(UNREAD_INPUT_S)}))


def _opened_before(inputs: _Inputs, built: Sequence[Source], core: EdgeCore) -> list[Source]:
    """Returns the sources that other sources have opened in earlier runs."""
    return [
        inputs.joined(other)
        for source in built
        if isinstance(source, KeptSource)
        for other in source.opened_before(core.streams[source.stream].sources)
    ]


def _begin(durable: DurableCore, sources: Sequence[Source], config: EdgeConfig) -> None:
    """Writes to the journal that a process begins to read these sources."""
    durable.begin_run((uuid.uuid4().int >> 66) | 1)
    if durable.core.configured:
        # An edge reads no input before it has received its first queries.
        for source in sources:
            if source.delivery is Delivery.AT_MOST_ONCE and durable.core.streams[source.stream].is_open(source.name):
                log.warning("source %s cannot be read again: records may be lost since the last stop", source.name)
                durable.handle(InputLost(source.stream, source.name, LossReason.RESTART, now_ms()))
    durable.handle(sources_opened(sources, durable.core, config.limits))


def _uplink(config: EdgeConfig, outbox: UplinkOutbox, quota: DailyQuota | None) -> Uplink:
    center = config.center
    return Uplink(
        center.address,
        outbox,
        token=center.token,
        tls=center.tls,
        limits=LinkLimits(center.bandwidth, link=center.link or ""),
        now_ms=now_ms,
        monotonic=time.monotonic,
        daily_quota=quota,
        proxy=center.proxy.get_secret_value() if center.proxy is not None else None,
    )


def _daily_quota(config: EdgeConfig, directory: Path) -> DailyQuota | None:
    if config.center.daily is None:
        return None
    file = QuotaFile(directory)
    return DailyQuota(config.center.daily, file.load(), file.save)


def _fresh_identity(config: EdgeConfig) -> dict[str, Any]:
    """Returns the identity of a new state. It keeps the replay clocks, which must be the same after a restart."""
    clocks = {name: replay_clock(stream.replay, now_ms()) for name, stream in config.streams.items()}
    return {
        "incarnation": uuid.uuid4().hex,
        "clocks": {name: asdict(clock) for name, clock in clocks.items() if clock is not None},
    }


def _clock(stored: dict[str, Any] | None, stream: StreamConfig) -> StreamClock | None:
    return StreamClock(**stored) if stored is not None else replay_clock(stream.replay, now_ms())

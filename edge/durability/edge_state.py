"""The state that a checkpoint of an edge contains: the core, and positions and counters (`EdgeState`).

The state is a function of the checkpoint and the journal. `DurableCore` applies events as they happen, and `Recovery`
applies events as they are read from the journal.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from edge.core.core import EdgeCore
from edge.core.events import (
    BackfillEnded,
    Configured,
    Dropped,
    Effect,
    Event,
    FunctionFailed,
    Ingested,
    InputLost,
    MemoryLimited,
    SourcesOpened,
)
from edge.core.memory import MemoryAction
from edge.durability.pushes import CountedPushes
from edge.records import Position, PushId
from edge.series import SeriesMemory, SeriesUpdate
from edgewater.synopses.encoding.state import State
from edgewater.wire import LossReason, QueryRef

log = logging.getLogger(__name__)

CHECKPOINT = "edge-checkpoint"
_SERIES = "series:"
"""The first characters of the names of checkpoint parts with the series of a source."""
MAX_RUNS = 64
"""The number of newest processes that a state remembers. If the catalog of a center is older than all of these
processes, the center treats the state as a copy.
"""
_LIMITED = {
    MemoryAction.SUSPEND: "its open windows take no more records",
    MemoryAction.DISCARD: "what its open windows have not sent is dropped",
    MemoryAction.FORGET: "the older half of its closed windows takes no more late records",
}


@dataclass(frozen=True, slots=True)
class BackfillRange:
    """The range of a source that the backfill of a query has to read.

    Attributes:
        until: the source's position when the query was registered; None if it had no position.
        position: the position after the last record that was read; None if nothing was read.
    """

    until: Position | None
    position: Position | None = None


class EdgeState:
    """The core, the positions of its sources, and counters.

    Args:
        core: an empty core.
        now_ms: wall time at which the process began.

    Attributes:
        positions: by source, the position after the last ingested record.
        pushes: the recently counted pushed batches.
        series: by source, the last points of the cumulative series of its records.
        backfills: the ranges to read, by query and source.
        drops: numbers of records that were not counted in a query, by reason.
        function_failures: numbers of failed calls of user-defined functions, by function.
        losses: numbers of stated losses of input, by "stream/reason".
        runs: numbers that identify the processes that have run on this state, the newest last.
        is_damaged: whether recovery may have lost records after the center was told their number.
    """

    def __init__(self, core: EdgeCore, now_ms: int = 0) -> None:
        self.core = core
        self._now_ms = now_ms
        self.positions: dict[str, Position] = {}
        self.pushes = CountedPushes()
        self.series: dict[str, SeriesMemory] = {}
        self.backfills: dict[QueryRef, dict[str, BackfillRange]] = {}
        self.drops: dict[str, int] = {}
        self.function_failures: dict[str, int] = {}
        self.losses: dict[str, int] = {}
        self.runs: list[int] = []
        self.is_damaged = False
        self._logged: set[tuple[str, str]] = set()

    @property
    def records(self) -> dict[str, int]:
        """The number of ingested records, by stream."""
        return {name: stream.records for name, stream in self.core.streams.items()}

    def apply(self, event: Event) -> list[Effect]:
        """Applies an event to the core, and counts its effects."""
        effects = self.core.handle(event)
        if isinstance(event, Configured | SourcesOpened | BackfillEnded):
            self._update_backfills()
        if isinstance(event, InputLost):
            kind = f"{event.stream}/{event.reason}"
            self.losses[kind] = self.losses.get(kind, 0) + 1
        if isinstance(event, MemoryLimited):
            self._count_limited(event)
        for effect in effects:
            if isinstance(effect, Dropped):
                self.drops[effect.reason] = self.drops.get(effect.reason, 0) + effect.count
            elif isinstance(effect, FunctionFailed):
                self._count_failures(effect)
        return effects

    def _update_backfills(self) -> None:
        """Adds the backfills that have begun, up to the current positions, and removes the backfills that have
        ended.
        """
        running = {ref: p.backfill.unread for ref, p in self.core.queries.items() if p.backfill is not None}
        self.backfills = {
            ref: {s: self.backfills.get(ref, {}).get(s) or BackfillRange(self.positions.get(s)) for s in sources}
            for ref, sources in running.items()
        }

    def set_backfill_position(self, query: QueryRef, source: str, position: Position) -> None:
        """Stores the position after the last record that the backfill of a query has read of a source."""
        ranges = self.backfills.get(query, {})
        if source in ranges:
            ranges[source] = replace(ranges[source], position=position)

    def note_payload(
        self, event: Ingested, push: PushId | None, end: Position | None, series: SeriesUpdate | None
    ) -> None:
        """Updates positions, pushes and series for a batch of a source that is not replayable.

        The arguments are the same as in `DurableCore.ingest_payload`.
        """
        if end is not None:
            self.positions[event.source] = end
        if push is not None:
            self.pushes.add(push, event.arrival_ms, event.batch.num_rows)
        if series is not None:
            self.series.setdefault(event.source, SeriesMemory(series.since_ns)).apply(series)

    def series_of(self, source: str) -> SeriesMemory:
        """Returns the memory of a source's cumulative series. A source without series gets a memory that begins with
        this process.
        """
        memory = self.series.get(source)
        return memory if memory is not None else SeriesMemory(self._now_ms * 1_000_000)

    def add_run(self, number: int) -> None:
        """Adds the number of a process that runs on this state from now on."""
        self.runs = [*self.runs, number][-MAX_RUNS:]

    def _count_limited(self, event: MemoryLimited) -> None:
        """Counts a memory limit of a query. Logs only the first of each action, because it may happen in every
        window.
        """
        pipeline = self.core.queries.get(event.query)
        if pipeline is None or event.action is MemoryAction.RESUME:
            return
        kind, logged = f"{pipeline.spec.stream}/{LossReason.QUERY_MEMORY}", (event.query.name, event.action)
        self.losses[kind] = self.losses.get(kind, 0) + 1
        if logged not in self._logged:
            self._logged.add(logged)
            log.error(
                "query %s: %s: its windows take more memory than limits.max_query_bytes, or than other queries leave; "
                "windows that lack records state it. Use a shorter window, fewer groups or an approximate "
                "function, or raise limits.max_query_bytes and limits.max_pending_bytes",
                event.query.name,
                _LIMITED[event.action],
            )

    def _count_failures(self, effect: FunctionFailed) -> None:
        """Counts failed calls. Logs each reason of a function once, because the function may fail in every batch."""
        name, failed = effect.function, self.function_failures
        failed[name] = failed.get(name, 0) + effect.calls
        if (name, effect.reason) not in self._logged:
            self._logged.add((name, effect.reason))
            log.error("function %s failed in query %s, its values are null: %s", name, effect.query.name, effect.detail)

    def to_checkpoint(self) -> bytes:
        """Serialises the whole state."""
        numbers = {
            "positions": self.positions,
            "backfills": [
                [ref.name, ref.version, source, r.until, r.position]
                for ref, ranges in self.backfills.items()
                for source, r in ranges.items()
            ],
            "drops": self.drops,
            "function_failures": self.function_failures,
            "losses": self.losses,
            "runs": self.runs,
            "is_damaged": self.is_damaged,
        }
        series = {_SERIES + source: memory.to_bytes() for source, memory in self.series.items()}
        parts = {"core": self.core.to_state(), "pushes": self.pushes.to_bytes(), **series}
        return State(numbers, parts).pack(CHECKPOINT)

    def restore(self, checkpoint: State) -> None:
        """Restores the state from an unpacked result of `to_checkpoint`. The core must be empty."""
        numbers: dict[str, Any] = checkpoint.numbers
        self.positions, self.drops = numbers["positions"], numbers["drops"]
        self.function_failures, self.losses = numbers["function_failures"], numbers["losses"]
        self.runs, self.is_damaged = numbers["runs"], numbers["is_damaged"]
        for *ref, source, until, position in numbers["backfills"]:
            self.backfills.setdefault(QueryRef(*ref), {})[source] = BackfillRange(until, position)
        self.pushes = CountedPushes.from_bytes(checkpoint.arrays["pushes"])
        self.series = {
            name.removeprefix(_SERIES): SeriesMemory.from_bytes(data)
            for name, data in checkpoint.arrays.items()
            if name.startswith(_SERIES)
        }
        self.core.restore(checkpoint.arrays["core"])

    def begun_anew(self, core: EdgeCore) -> EdgeState:
        """Returns the state of a new incarnation, without records, whose sources continue at the same positions.

        Counted pushes stay known. If a batch is repeated now, it may be lost, and this loss is stated. Otherwise it
        could count in both incarnations.
        """
        result = EdgeState(core, self._now_ms)
        result.positions, result.pushes, result.series = self.positions, self.pushes, self.series
        return result

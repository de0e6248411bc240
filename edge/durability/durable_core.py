"""An `EdgeCore` whose state survives a crash at any moment (`DurableCore`).

Every event is journaled before the core handles it. Only a pull is journaled afterwards, together with the frame that
it built. A frame may be sent, and a push may be acknowledged, only after `sync`. `edge.durability.recovery` restores
the state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from edge.core.core import EdgeCore
from edge.core.events import (
    BackfillIngested,
    Effect,
    Event,
    FrameBuilt,
    Ingested,
    MemoryLimited,
    PullEvent,
    SamplesEnded,
)
from edge.core.memory import SliceMemoryLimits, next_limit
from edge.durability import journal
from edge.durability.edge_state import EdgeState
from edge.durability.event_records import (
    backfill_record,
    encode_event,
    payload_record,
    pull_record,
    range_record,
    run_record,
)
from edge.durability.journal import Segment
from edge.durability.recovery import Recovery, Reread
from edge.durability.state_dir import checkpoint_path, journal_path, load_identity, remove_before, write_identity
from edge.records import Position, PushId
from edge.series import SeriesUpdate
from edgewater.base.errors import StorageError
from edgewater.runtime.state_release import RELEASE


class DurableCore:
    """The core, its journal and its checkpoints. It is synchronous. One caller at a time may use it, except for `sync`.

    Args:
        directory: the state directory, which is created if it is missing.
        make_core: builds an empty core.
        reread: reads a range of a replayable source again.
        reread_backfill: the same for ranges of backfills, which are elsewhere in the same files; None for `reread`.
        incarnation: identity of a new state. An existing state keeps its own identity.
        now_ms: wall time at which recovery begins. It is an upper bound for the arrival of damaged records.
        memory: bounds of the memory of open slices; None for no bounds.

    Attributes:
        state: the core, the positions of its sources, and counters.
        damaged_records: number of journal records and checkpoints that recovery skipped.
        diverged: numbers of the frames that recovery would build with other bodies. The recorded frames are sent.
        durable_records: the number of durable records, by stream; at first the records that recovery has counted.
    """

    def __init__(
        self,
        directory: Path,
        make_core: Callable[[], EdgeCore],
        reread: Reread,
        incarnation: str,
        *,
        reread_backfill: Reread | None = None,
        now_ms: int = 0,
        memory: SliceMemoryLimits | None = None,
    ) -> None:
        self.directory = directory
        self._make_core = make_core
        identity = load_identity(directory, lambda: {"incarnation": incarnation})
        self.incarnation = str(identity["incarnation"])
        self.state = EdgeState(make_core(), now_ms)
        self._memory = memory
        recovery = Recovery(
            directory, self.state, reread, reread_backfill or reread, now_ms=now_ms, written_by=str(identity["release"])
        )
        self._number = recovery.run()
        self._segment = Segment(journal_path(directory, self._number))
        self.damaged_records, self.diverged = recovery.damaged_records, recovery.diverged
        if identity["release"] != RELEASE:
            write_identity(directory, identity)
        self.durable_records = self.state.records
        if recovery.has_lost:
            self.state.is_damaged = True
            # A second replay of the journal could differ, for example if the input exists again by then.
            self.checkpoint()
        self._limit_memory()  # the bounds may be lower than before

    @property
    def core(self) -> EdgeCore:
        return self.state.core

    def begin_run(self, number: int) -> None:
        """Journals that a process runs on this state from now on.

        Call it once. Call `sync` before the center is told the number.

        Args:
            number: a random number from 1 to 2^62 - 1.
        """
        self._segment.append(run_record(number))
        self.state.add_run(number)

    def begin_anew(self, incarnation: str, source: int) -> None:
        """Replaces the state by the state of a new incarnation without records. The sources continue at the same
        positions.

        The object must not be used afterwards. A crash in between leaves the old state, or a state that the center
        refuses like the old state.

        Args:
            source: as in `EdgeCore`, for the new incarnation.

        Raises:
            StorageError: the disk cannot be written.
        """
        number, core = self._number + 1, self._make_core()
        core.source = source
        journal.write_durably(checkpoint_path(self.directory, number), self.state.begun_anew(core).to_checkpoint())
        # The incarnation is written last. With the old state, its records would seem to be in no frame yet.
        identity = load_identity(self.directory, dict) | {"incarnation": incarnation}
        write_identity(self.directory, identity)
        remove_before(self.directory, number)

    def handle(self, event: Event) -> list[Effect]:
        """Journals an event and applies it. For batches, use `ingest_range`, `ingest_payload` or `ingest_backfill`."""
        if not isinstance(event, PullEvent):
            self._segment.append(encode_event(event))
            return self.state.apply(event)
        effects = self.state.apply(event)
        built = [e for e in effects if isinstance(e, FrameBuilt)]
        if built or SamplesEnded() in effects:
            self._segment.append(pull_record(event, built))
        return effects

    def ingest_range(self, event: Ingested, start: Position | None, end: Position) -> list[Effect]:
        """Ingests a batch of a replayable source. The journal stores only its positions."""
        self._segment.append(range_record(event, start, end))
        self.state.positions[event.source] = end
        return self._apply_batch(event)

    def ingest_backfill(
        self, event: BackfillIngested, start: Position | None, end: Position, *, keep: bool = False
    ) -> list[Effect]:
        """Ingests a batch of a query's backfill.

        Args:
            keep: as in `Chunk.keep`. If false, the journal stores only the positions.
        """
        self._segment.append(backfill_record(event, start, end, keep))
        self.state.set_backfill_position(event.query, event.source, end)
        return self._apply_batch(event)

    def ingest_payload(
        self,
        event: Ingested,
        push: PushId | None = None,
        end: Position | None = None,
        series: SeriesUpdate | None = None,
    ) -> list[Effect]:
        """Ingests a batch of a source that is not replayable. The journal stores its records.

        Args:
            push: identity of a pushed batch, which is remembered with the batch; None if it need not be remembered.
            end: the source's position after the batch; None if the source has no positions.
            series: the last points of the cumulative series of the records; None if there are none.
        """
        self._segment.append(payload_record(event, push, end, series))
        self.state.note_payload(event, push, end, series)
        return self._apply_batch(event)

    def _apply_batch(self, event: Ingested | BackfillIngested) -> list[Effect]:
        effects = self.state.apply(event)
        self._limit_memory()
        return effects

    def _limit_memory(self) -> None:
        """Journals and applies the actions that the memory bounds of open slices require."""
        core, limits = self.core, self._memory
        if limits is None:
            return
        suspends = any(pipeline.store.full.suspended for pipeline in core.queries.values())
        if not suspends and sum(pipeline.nbytes for pipeline in core.queries.values()) <= limits.query_bytes:
            return
        while (limit := next_limit(core.held_memory(), limits)) is not None:
            self.handle(MemoryLimited(*limit))

    def sync(self) -> None:
        """Makes all earlier events durable. Raises StorageError. It may be called again after a failure."""
        records = self.state.records
        self._segment.sync()
        self.durable_records = records

    @property
    def unsynced_bytes(self) -> int:
        return self._segment.unsynced_bytes

    @property
    def journal_bytes(self) -> int:
        return self._segment.nbytes

    def checkpoint(self) -> None:
        """Writes a checkpoint, begins a new journal, and removes older checkpoints and journals.

        Raises:
            StorageError: writing failed. The old checkpoint and journal stay in use.
        """
        self.sync()
        number = self._number + 1
        path = checkpoint_path(self.directory, number)
        try:
            journal.write_durably(path, self.state.to_checkpoint())
            segment = Segment(journal_path(self.directory, number))
        except StorageError:
            # The file may exist in spite of the error. Recovery would restore it and miss later records of the current
            # journal.
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                journal.sync_directory(self.directory)
            raise
        self._segment.close()
        self._segment, self._number = segment, number
        remove_before(self.directory, number - 1)  # one older generation stays, in case the new checkpoint gets damaged

    def close(self) -> None:
        self._segment.close()

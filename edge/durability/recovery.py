"""Recovery: restores the newest checkpoint and replays the journal after it in order.

Frames are taken from the journal as they were built. The values in a frame are removed from the state by the keys of
their groups. Recovery neither selects groups nor compresses bodies again. So a recovered edge sends the same frames
with any version of a library and on any processor.

The state itself is computed again from the records, and compared with the recorded frames. If a frame would have
another body now, a source's file was changed, or a user-defined function is not deterministic. Recovery then fails. On
another platform (`platform_id`), the cause may also be the last bit of a logarithm. The edge then logs and counts the
frames, and continues.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from edge.core.events import BackfillIngested, Event, FrameDiverged, InputLost, PullReplayed
from edge.durability import journal
from edge.durability.edge_state import CHECKPOINT, EdgeState
from edge.durability.event_records import (
    BACKFILL,
    PAYLOAD,
    PULL,
    RANGE,
    RUN,
    decode_event,
    platform_id,
    read_ingested,
    read_payload,
    read_pull,
    read_rejected,
    read_run,
)
from edge.durability.journal import Record, Segment
from edge.durability.state_dir import COUNTED_AGAIN, checkpoint_path, journal_path, numbered_files
from edge.records import InputGone, Position, batch_from_bytes
from edgewater.base.errors import CorruptSynopsis, IncompatibleState, StorageError, SynopsisError
from edgewater.base.streams import TIME_COLUMN
from edgewater.runtime.state_release import RELEASE
from edgewater.synopses.encoding.state import State
from edgewater.wire import LossReason, QueryRef

log = logging.getLogger(__name__)

Reread = Callable[[str, Position | None, Position], pa.RecordBatch]
"""Returns the batch between two positions of a source. The arguments are source, start and end."""


class Recovery:
    """Brings an empty state to the point at which the last process ended.

    Args:
        state: a state with an empty core, which `run` changes.
        reread: reads a range of a replayable source again.
        reread_backfill: the same for ranges of backfills.
        now_ms: wall time. It is an upper bound for the arrival of damaged records.
        written_by: the release that has written the state.

    Attributes:
        damaged_records: number of journal records and checkpoints that were skipped.
        diverged: numbers of the frames that would have other bodies here. The recorded frames are sent.
        has_lost: whether records are lost, so that a second replay of the journal could differ.
    """

    def __init__(
        self,
        directory: Path,
        state: EdgeState,
        reread: Reread,
        reread_backfill: Reread,
        *,
        now_ms: int,
        written_by: str,
    ) -> None:
        self._directory, self._state, self._now_ms, self._written_by = directory, state, now_ms, written_by
        self._reread, self._reread_backfill = reread, reread_backfill
        self.damaged_records = 0
        self.diverged: list[int] = []
        self.has_lost = False
        self._lost_records: dict[str, tuple[int, str]] = {}

    def run(self) -> int:
        """Recovers the state. Returns the number of the newest journal, to which the core appends.

        Raises:
            StorageError: the state cannot be recovered. The message names a remedy.
            IncompatibleState: another release has written the state.
        """
        files = numbered_files(self._directory)
        start = self._restore_checkpoint([n for p, n in files if p.suffix == ".ckpt"])
        last = max([n for _, n in files], default=0)
        for number in range(start, last + 1):
            self._replay(self._read(journal_path(self._directory, number)))
        self._report()
        return last

    def _report(self) -> None:
        for source, (count, why) in self._lost_records.items():
            log.error(
                "source %s: %d records that the journal refers to cannot be read again (%s). The edge "
                "continues without the records that are not sent yet; windows that may lack records are not complete",
                source,
                count,
                why,
            )
        if self.diverged:
            log.error(
                "the journal in %s was written by another release, library or processor, and %d frames, the first of "
                "them %d, would have other bodies here. They are sent as recorded. Values that have not been sent are "
                "computed here; if a source's file was also changed, its records may be wrong",
                self._directory,
                len(self.diverged),
                self.diverged[0],
            )

    def _read(self, path: Path) -> list[Record]:
        if not path.exists():
            return []
        scan = journal.scan(path.read_bytes())
        if scan.torn_bytes:
            log.warning("journal %s: a torn tail of %d bytes is truncated", path, scan.torn_bytes)
            segment = Segment(path)
            segment.truncate(scan.good_bytes)
            segment.close()
        if scan.damaged:
            self.damaged_records += len(scan.damaged)
            log.error("journal %s: damaged records at %s are skipped", path, scan.damaged)
            self.has_lost = True
            for stream in self._state.core.streams:
                self._state.apply(InputLost(stream, "journal", LossReason.JOURNAL_DAMAGED, self._now_ms))
        return scan.records

    def _restore_checkpoint(self, numbers: list[int]) -> int:
        """Restores the newest valid checkpoint and returns its number; 0 if there has never been a checkpoint.

        Raises:
            StorageError: all checkpoints are damaged, and the first journal is gone. A new start would count the
                sources' records a second time, so the operator has to decide.
        """
        for number in reversed(numbers):
            data = checkpoint_path(self._directory, number).read_bytes()
            try:
                checkpoint = State.unpack(data, CHECKPOINT)
            except CorruptSynopsis as exc:
                log.error("checkpoint %d is damaged and skipped: %s", number, exc)
                self.damaged_records += 1
                continue
            try:
                self._state.restore(checkpoint)
            except (SynopsisError, KeyError, TypeError, ValueError) as exc:
                raise IncompatibleState(
                    f"{self._directory}: checkpoint {number} of Edgewater {self._written_by} is whole, and Edgewater "
                    f"{RELEASE} cannot restore it ({type(exc).__name__}: {exc}). Go back to the release that wrote it, "
                    f"or remove the directory to start over: {COUNTED_AGAIN}"
                ) from exc
            return number
        if numbers and not journal_path(self._directory, 0).exists():
            raise StorageError(
                f"{self._directory}: all checkpoints {numbers}, of Edgewater {self._written_by}, are damaged. Restore "
                f"the directory from a copy, or remove it to start over: {COUNTED_AGAIN}"
            )
        return 0

    def _replay(self, records: list[Record]) -> None:
        for record in records:
            if record.kind == RUN:
                self._state.add_run(read_run(record))
            elif record.kind == PULL:
                self._replay_pull(*read_pull(record))
            elif (event := self._decode(record)) is not None:
                self._state.apply(event)

    def _replay_pull(self, event: PullReplayed, written_on: int) -> None:
        next_seq = self._state.core.next_seq
        if event.built and event.built[0].frame.seq != next_seq:
            raise StorageError(
                f"{self._directory}: the journal has frame {event.built[0].frame.seq} where {next_seq} is "
                "expected: a damaged record was skipped. Restore the directory from a copy, or remove it to start "
                f"over: {COUNTED_AGAIN}"
            )
        for effect in self._state.apply(event):
            if isinstance(effect, FrameDiverged) and not self.has_lost:
                if written_on == platform_id():
                    raise StorageError(
                        f"{self._directory}: replaying the journal gave another frame than the recorded one "
                        f"({effect.seq}); a source's file or a user-defined function was changed"
                    )
                self.diverged.append(effect.seq)

    def _decode(self, record: Record) -> Event | None:
        """Returns the event of a record; None if the record has no effect."""
        if record.kind == RANGE:
            return self._reread_range(json.loads(record.payload))
        if record.kind == BACKFILL:
            head, _, batch = record.payload.partition(b"\n")
            return self._reread_backfill_range(json.loads(head), batch)
        if record.kind == PAYLOAD:
            event, push, end, series = read_payload(record.payload)
            self._state.note_payload(event, push, end, series)
            return event
        try:
            return decode_event(record)
        except KeyError:
            log.error("journal record of kind %d is unknown to this release", record.kind)
            self.damaged_records += 1
            return None

    def _reread_range(self, head: dict[str, Any]) -> Event:
        """Returns the event of a range of positions. If its records cannot be read again, the event states the loss."""
        stream, source, arrival_ms = head["stream"], head["source"], head["arrival_ms"]
        self._state.positions[source] = head["end"]
        rows, (first_ms, last_ms) = head["rows"], head["times"]
        batch = self._reread_or_none(self._reread, head)
        if batch is None and rows != 0:
            to_ms = None if last_ms is None else last_ms + 1
            reason = LossReason.FILE_GONE
            return InputLost(stream, source, reason, arrival_ms, first_ms, to_ms, rows, was_ingested=True)
        batch = self._no_records(stream) if batch is None else batch
        return read_ingested(head, batch)

    def _reread_backfill_range(self, head: dict[str, Any], data: bytes) -> BackfillIngested | None:
        """Returns the event of a range of a backfill; None if the query is gone.

        If the records cannot be read again, the event has no records, and the backfill states later that they are
        missing.

        Args:
            data: the records, if the journal has them; otherwise b"".
        """
        query, source = QueryRef(*head["query"]), head["source"]
        self._state.set_backfill_position(query, source, head["end"])
        pipeline = self._state.core.queries.get(query)
        if pipeline is None:
            return None
        batch = batch_from_bytes(data) if data else self._reread_or_none(self._reread_backfill, head)
        batch = self._no_records(pipeline.spec.stream) if batch is None else batch
        return BackfillIngested(query, source, batch, head["arrival_ms"], read_rejected(head))

    def _reread_or_none(self, reread: Reread, head: dict[str, Any]) -> pa.RecordBatch | None:
        """Returns the records of a range; None if they cannot be read again. Remembers lost records for the report."""
        source, rows = head["source"], head["rows"]
        try:
            batch = reread(source, head["start"], head["end"])
            if rows is not None and batch.num_rows != rows:  # as after a change of the stream's columns or times
                raise InputGone(f"{batch.num_rows} records are accepted now where {rows} were")
            return batch
        except InputGone as exc:
            if rows != 0:
                self.has_lost = True
                count, why = self._lost_records.get(source, (0, str(exc)))
                self._lost_records[source] = count + rows, why
            return None

    def _no_records(self, stream: str) -> pa.RecordBatch:
        columns = {**self._state.core.streams[stream].spec.columns, TIME_COLUMN: pa.int64()}
        return pa.RecordBatch.from_pylist([], schema=pa.schema(list(columns.items())))

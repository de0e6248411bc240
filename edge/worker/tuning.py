"""The times and sizes by which the worker decides. `docs/decisions/0012-scheduling.md` has the measurements."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """Times and sizes of the worker.

    Attributes:
        block_ms: a batch that takes longer than this is queued.
        busy_ms: if a source has not been idle for longer than this, the edge does not keep up with it.
        together_ms: queries process their queues together if they are expected to take less than this. The event loop
            waits for them.
        piece_ms: the estimated time of a piece of a batch. Smaller pieces would cost more, because the work that
            queries share is computed anew for each piece.
        max_piece_ms: the largest estimated time of a last piece. A query with a longer queue runs alone.
        fold_s: measurements are added to the cost estimates after this time, or when the queries are scheduled.
        frame_turn_ms: replaces `together_ms` for queries without an ended window, for `frame_turns` turns after windows
            have ended.
        frame_turns: the turns of the event loop that a frame needs until it is durable.
        wake_ms: while no window ends, the link is told of changes after this time. Looking for entries to send takes as
            long as thousands of records.
        read_ahead_ms: sources continue to read while less work than this is queued. Otherwise they would read more and
            smaller batches, each with a fixed cost per query.
        read_every_ms: while batches are queued, a source that has read less work than this waits for at most this time.
            All queries then process batches one after the other, as large as without queues, and share their
            computations.
        longest_wait_s: the longest time for which records wait to be processed together.
        wait_share: the largest part of the shortest window for which records wait to be processed together.
        most_waiting: if a batch has more records than this, its source waits half as long, because the fixed cost of
            the batch is small.
        first_rows: records of the first piece of a query without measurements.
        first_batch_rows: before the first measurement, a batch with at most this many records is not queued. Small
            first pieces would cost more than they measure.
        max_laps: the number of measurements after which they are added to the estimates.
    """

    block_ms: float = 50.0
    busy_ms: float = 120.0
    together_ms: float = 500.0
    piece_ms: float = 50.0
    max_piece_ms: float = 75.0
    fold_s: float = 1.0
    frame_turn_ms: float = 2.0
    frame_turns: int = 6
    wake_ms: float = 250.0
    read_ahead_ms: float = 1000.0
    read_every_ms: float = 500.0
    longest_wait_s: float = 0.25
    wait_share: float = 0.1
    most_waiting: int = 4_096
    first_rows: int = 64
    first_batch_rows: int = 8_192
    max_laps: int = 10_000


TUNING = Tuning()

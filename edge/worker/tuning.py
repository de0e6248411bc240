"""The times and sizes by which the worker decides. They were measured: `docs/decisions/0012-scheduling.md`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """Times and sizes of the worker.

    Attributes:
        block_ms: a batch that takes longer is queued.
        busy_ms: a source that has not been idle for longer has more input than the edge keeps up with.
        together_ms: queries process their queues together if they are expected to take no longer: the event loop waits
            for them.
        piece_ms, max_piece_ms: the estimated time of a piece of a batch, and of the last piece at most. A record cannot
            be divided, and what queries share of a whole batch is computed anew for each piece.
        fold_s: measurements are added to the cost estimates after this time, or when the queries are scheduled.
        frame_turn_ms: the same as `together_ms` for the queries that are not due, for the first `frame_turns` after
            windows have ended: a frame takes so many turns of the event loop until it is durable.
        wake_ms: while no window ends, the link is told of changes after this time. It examines every query for what is
            to be sent, which takes as long as thousands of records.
        read_ahead_ms: sources read on while less work is queued. With more, what they read would come in more and
            smaller batches, each of which costs every query a fixed time.
        read_every_ms: while batches are queued, a source that has read less work than this waits, at most so long: all
            queries then process one batch after the other, as large as without queues, and share what they compute.
        longest_wait_s, wait_share: records wait at most so long to be processed together, and at most this share of the
            shortest window.
        most_waiting: if a batch has more records, its fixed cost is small: the source then waits half as long.
        first_rows: records of the first piece of a query without measurements.
        first_batch_rows: until something has been measured, a batch of so many records is not queued: pieces that grow
            from the smallest cost more than they measure.
        max_laps: measurements that are kept until they are added to the estimates.
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

"""The parts in which a query processes its queue."""

from __future__ import annotations

import pyarrow as pa

from edge.core.batch_queue import JOINED_ROWS, BatchQueue, QueuedBatch, joined


def parts(sizes: list[int], through: int) -> list[int]:
    queue, first = BatchQueue(), 0
    for rows in sizes:
        queue.append(QueuedBatch(pa.record_batch({"x": pa.nulls(rows, pa.int64())}), first, 0, 0))
        first += rows
    taken = list(queue.take(through, lambda *_: True))
    assert taken[0][0].first == 0 and taken[-1][-1].end == queue.done == through
    assert queue.records == sum(sizes) - through
    return [joined(part).num_rows for part in taken]


def test_small_batches_are_joined_up_to_a_bound() -> None:
    assert parts([JOINED_ROWS // 4] * 6, 6 * JOINED_ROWS // 4) == [JOINED_ROWS, JOINED_ROWS // 2]


def test_a_large_batch_is_neither_copied_nor_cut() -> None:
    assert parts([2 * JOINED_ROWS, 100, 200], 2 * JOINED_ROWS + 300) == [2 * JOINED_ROWS, 300]


def test_only_the_end_of_a_piece_cuts_a_batch() -> None:
    assert parts([2 * JOINED_ROWS, 100], 2 * JOINED_ROWS - 7) == [2 * JOINED_ROWS - 7]

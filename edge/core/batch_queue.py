"""The batches that a query has not processed yet. Each query has a queue, and all queues share the batches.

On an edge that is short of CPU, a batch is appended to the queues of its stream's queries (`Ingested.queued`). Each
query processes the batch when the scheduler chooses it (`Ran`). Until then the query reads the watermark that the
stream had before the first batch of the query's queue. So the queue changes neither which slices the query closes nor
which records are late. And what the query reports never covers records that it has not processed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

JOINED_ROWS = 32_768
"""Maximum rows of batches that a query processes as one batch. Copying more rows costs more than fewer batches save
(`docs/decisions/0012-scheduling.md`)."""


@dataclass(frozen=True, slots=True)
class QueuedBatch:
    """A batch of a stream, with the stream's state at its ingestion.

    Attributes:
        first: number in the stream of the batch's first record.
        watermark_ms: the stream's watermark before the batch.
        arrival_ms: wall time.
        start_bytes: size of the earlier batches that were queued in the stream.
        end_bytes: `start_bytes` and the size of this batch as it was queued.
    """

    batch: pa.RecordBatch
    first: int
    watermark_ms: int
    arrival_ms: int
    start_bytes: int = 0
    end_bytes: int = 0

    @property
    def end(self) -> int:
        """Number of the record after the batch's last record."""
        return self.first + int(self.batch.num_rows)


@dataclass(slots=True)
class BatchQueue:
    """The queue of one query: batches of its stream up to the newest batch.

    Attributes:
        done: the query has processed the records before this number of the stream.
    """

    batches: deque[QueuedBatch] = field(default_factory=deque)
    done: int = 0

    def __bool__(self) -> bool:
        return bool(self.batches)

    @property
    def first(self) -> QueuedBatch:
        return self.batches[0]

    @property
    def next(self) -> int:
        """Number of the first record that the query has not processed; the queue must not be empty."""
        return max(self.batches[0].first, self.done)

    @property
    def nbytes(self) -> int:
        """Size of the queue's batches, which other queues share."""
        return self.batches[-1].end_bytes - self.batches[0].start_bytes if self.batches else 0

    @property
    def records(self) -> int:
        return sum(each.end - max(each.first, self.done) for each in self.batches)

    def append(self, batch: QueuedBatch) -> None:
        self.batches.append(batch)

    def take(self, through: int, joins: Callable[[int, int], bool] | None = None) -> Iterator[list[QueuedBatch]]:
        """Removes the records before number `through` and yields lists of parts. The query processes each list as one
        batch.

        Args:
            joins: whether batches may be processed as one that were ingested at these two watermarks. Joining saves the
                fixed time per batch. None: batches are never joined.
        """
        parts: list[QueuedBatch] = []
        while self.batches and self.done < through and self.batches[0].first < through:
            head = self.batches[0]
            begin = max(head.first, self.done)
            end = min(head.end, through)
            part = replace(head, batch=head.batch.slice(begin - head.first, end - begin), first=begin)
            self.done = end
            if end == head.end:
                self.batches.popleft()
            last = parts[-1] if parts else None
            if last is None or (
                joins is not None
                and last.end == begin
                and end - parts[0].first <= JOINED_ROWS
                and last.batch.schema == part.batch.schema
                and joins(parts[0].watermark_ms, part.watermark_ms)
            ):
                parts.append(part)
            else:
                yield parts
                parts = [part]
        if parts:
            yield parts


def joined(parts: Sequence[QueuedBatch]) -> pa.RecordBatch:
    """Returns adjacent parts as one batch; copies the rows if there are several parts."""
    return parts[0].batch if len(parts) == 1 else pa.concat_batches([part.batch for part in parts])


def queues_to_state(queues: Mapping[str, BatchQueue]) -> tuple[list[Any], dict[str, bytes]]:
    """Serialises the queues of one stream's queries, by name. Each batch is serialised once."""
    batches = {each.first: each for queue in queues.values() for each in queue.batches}
    heads = [[b.first, b.watermark_ms, b.arrival_ms] for _, b in sorted(batches.items())]
    numbers = {name: [[each.first for each in queue.batches], queue.done] for name, queue in queues.items()}
    return [heads, numbers], {str(first): batch_to_bytes(b.batch, "lz4") for first, b in sorted(batches.items())}


def queues_from_state(state: Sequence[Any], arrays: Mapping[str, bytes]) -> dict[str, BatchQueue]:
    heads, numbers = state
    batches: dict[int, QueuedBatch] = {}
    size = 0
    for first, watermark_ms, arrival_ms in heads:
        batch = batch_from_bytes(arrays[str(first)])
        start, size = size, size + int(batch.nbytes)
        batches[first] = QueuedBatch(batch, first, watermark_ms, arrival_ms, start, size)
    return {name: BatchQueue(deque(batches[n] for n in firsts), done) for name, (firsts, done) in numbers.items()}


def shared_bytes(queues: Iterable[BatchQueue]) -> int:
    """Returns the size of the batches in the queues of one stream; a batch counts once."""
    return max((queue.nbytes for queue in queues), default=0)


def batch_to_bytes(batch: pa.RecordBatch, compression: str) -> bytes:
    """Serialises a batch with its schema as an Arrow IPC stream; `compression` is a codec of Arrow IPC."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def batch_from_bytes(data: bytes) -> pa.RecordBatch:
    """Reads what `batch_to_bytes` has written."""
    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        return reader.read_next_batch()

"""`EdgeSample`: an edge's sample of one window, which is topped up at the window's end.

The center plans a rate for the number of records that it expects. If fewer records come, the sample is too small for
the accuracy. So records that are passed over are kept if their mark is below `REACH` times the rate. At the window's
end, the kept records with the smallest marks are processed, until as many records are processed as were planned. The
mark that is reached becomes the rate of the whole window: late records are sampled at this rate. So one rate holds for
all records of a window. Marks and numbers of records decide, and never values.

Kept records are part of the core's state, so they are in checkpoints, and a replay of the journal keeps the same ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from edge.records import batch_from_bytes, batch_to_bytes
from edgewater.synopses import BoolArray, FloatArray, IntArray
from edgewater.synopses.encoding.state import State

REACH = 4.0  # limit: memory, and work at the end of a window
"""The largest factor by which the rate of a window may rise. A sample that was planned for a number of records is
large enough if at least a quarter of them come (`docs/decisions/0008-intervals-from-samples.md`)."""
KEPT_BYTES = 4 << 20  # limit: memory of a window at an edge
"""The largest size of the kept records of a window. If they take more, the half with the larger marks is dropped."""
_MARK, _ARRIVAL = "\0mark", "\0arrival"
_LEAST = 2.0**-32  # derived: from the bits of a mark


@dataclass(slots=True)
class EdgeSample:
    """The sample of one window at one edge.

    Attributes:
        rate: the rate of the window. Records with marks below it are processed.
        planned: the number of records to process by the window's end.
        limit: the mark below which records are kept.
        processed: the number of records that were processed.
        is_open: whether the window has not ended.
    """

    rate: float
    planned: int
    limit: float
    processed: int = 0
    is_open: bool = True
    _kept: list[pa.RecordBatch] = field(default_factory=list)
    _kept_bytes: int = 0

    @classmethod
    def begin(cls, rate: float, expected_records: int) -> Self:
        """Returns the sample of a new window.

        Args:
            rate, expected_records: as the center plans them.
        """
        return cls(rate, math.ceil(rate * expected_records), min(REACH * rate, 1.0))

    @property
    def nbytes(self) -> int:
        return self._kept_bytes

    def add(self, records: pa.RecordBatch, marks: FloatArray, population: BoolArray, arrival_ms: int) -> None:
        """Counts the records of a batch that are processed, and keeps records that are passed over.

        Args:
            marks: float64, one per record.
            population: mask of the records from which the sample is drawn.
            arrival_ms: when the batch arrived.
        """
        self.processed += int(np.count_nonzero(population & (marks < self.rate)))
        passed = population & (marks >= self.rate) & (marks < self.limit)
        count = int(np.count_nonzero(passed))
        if not count:
            return
        arrivals = pa.array(np.full(count, arrival_ms, np.int64))
        batch = records.filter(pa.array(passed)).append_column(_MARK, pa.array(marks[passed]))
        batch = batch.append_column(_ARRIVAL, arrivals)
        self._kept.append(batch)
        self._kept_bytes += batch.nbytes
        while self._kept_bytes > KEPT_BYTES and (every := self._joined()).num_rows:
            mark = every.column(_MARK)
            self.limit = float(np.partition(mark.to_numpy(), len(mark) // 2)[len(mark) // 2])
            self._keep(every.filter(pc.less(mark, self.limit)))

    def _joined(self) -> pa.RecordBatch:
        if len(self._kept) > 1:
            self._keep(pa.Table.from_batches(self._kept).combine_chunks().to_batches()[0])
        return self._kept[0]

    def _keep(self, records: pa.RecordBatch) -> None:
        self._kept, self._kept_bytes = [records], records.nbytes

    def end(self) -> tuple[pa.RecordBatch, IntArray] | None:
        """Ends the window. Returns the records to process and when each arrived, int64; None: there are none."""
        self.is_open, wanted = False, self.planned - self.processed
        if wanted <= 0 or not self._kept or not (every := self._joined()).num_rows:
            self._kept, self._kept_bytes = [], 0
            return None
        marks = every.column(_MARK).to_numpy()
        self.rate = self.limit
        if wanted < len(marks):
            self.rate = float(np.partition(marks, wanted - 1)[wanted - 1]) + _LEAST
        chosen = every.filter(pa.array(marks < self.rate))
        self._kept, self._kept_bytes = [], 0
        return chosen.drop_columns([_MARK, _ARRIVAL]), chosen.column(_ARRIVAL).to_numpy()

    def to_state(self) -> State:
        numbers = [self.rate, self.planned, self.limit, self.processed, self.is_open]
        return State(numbers, {"kept": batch_to_bytes(self._joined())} if self._kept else {})

    @classmethod
    def from_state(cls, state: State) -> Self:
        result = cls(*state.numbers)
        if "kept" in state.arrays:
            result._keep(batch_from_bytes(state.arrays["kept"]))
        return result

"""Shows which records of a sample a query counts, and in which groups, for `edgewater edge check --query`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from edgewater.base.streams import TIME_COLUMN
from edgewater.base.timestamps import rfc3339
from edgewater.model.key_texts import key_text
from edgewater.model.query import QuerySpec
from edgewater.synopses import IntArray
from edgewater.synopses.key_table import KeyTable

SHOWN_RECORDS = 3  # limit: lines of output
SHOWN_GROUPS = 10  # limit: lines of output
MAX_TEXT = 80  # limit: length of a line of output


class QueryPreview:
    """The records of a stream that a query counts, by group, over all windows together.

    Args:
        columns: the columns of the stream.
        join: adds the columns of lookups to a batch.

    Raises:
        InvalidQuery: the query does not fit the stream.
    """

    def __init__(
        self,
        spec: QuerySpec,
        columns: dict[str, pa.DataType],
        join: Callable[[pa.RecordBatch], pa.RecordBatch] = lambda batch: batch,
    ) -> None:
        self._bound, self._join = spec.bind(columns), join
        self.read = self.counted = 0
        self.records: list[dict[str, Any]] = []
        self._table = KeyTable(self._bound.group_types)
        self._counts: IntArray = np.zeros(0, np.int64)

    def add(self, batch: pa.RecordBatch) -> None:
        """Adds decoded records. Raises StorageError if the file of a lookup is not loaded."""
        self.read += batch.num_rows
        batch = self._bound.joined(self._join(batch))
        if self._bound.where is not None:
            batch = batch.filter(self._bound.where.array(batch))
        if not batch.num_rows:
            return
        self.counted += batch.num_rows
        self._add_examples(batch.slice(0, max(SHOWN_RECORDS - len(self.records), 0)))
        keys = self._bound.encoded_keys(batch)
        codes = self._table.look_up(keys)
        self._counts = np.concatenate([self._counts, np.zeros(len(self._table) - len(self._counts), np.int64)])
        self._counts[codes] += keys.counts

    def _add_examples(self, batch: pa.RecordBatch) -> None:
        names, keys = self._bound.spec.group_by, self._bound.key_arrays(batch)
        groups = zip(*(key.to_pylist() for key in keys), strict=True) if keys else ((),) * batch.num_rows
        for row, group in zip(batch.select(self._shown_columns()).to_pylist(), groups, strict=True):
            time = rfc3339(row.pop(TIME_COLUMN))
            self.records.append({"event_time": time, "columns": row, "group": dict(zip(names, group, strict=True))})

    def _shown_columns(self) -> list[str]:
        return list(dict.fromkeys([TIME_COLUMN, *self._bound.spec.columns]))

    def groups(self) -> list[dict[str, Any]]:
        """Returns the groups with the most records."""
        largest = np.argsort(-self._counts, kind="stable")[:SHOWN_GROUPS]
        columns = [column.to_pylist() for column in self._table.rows(largest)] if self._bound.spec.group_by else []
        names = self._bound.spec.group_by
        return [
            {"group": {name: column[at] for name, column in zip(names, columns, strict=True)}, "records": int(count)}
            for at, count in enumerate(self._counts[largest].tolist())
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "query": self._bound.spec.name,
            "stream": self._bound.spec.stream,
            "records": self.read,
            "counted": self.counted,
            "examples": self.records,
            "groups": len(self._counts),
            "largest_groups": self.groups(),
        }

    def lines(self) -> Iterator[str]:
        """Yields the lines of the preview as text."""
        yield f"query {self._bound.spec.name}: counts {self.counted} of {self.read} records that were read"
        for record in self.records:
            yield f"  {record['event_time']} {_shown(record['columns'])} -> {_shown(record['group']) or 'no group_by'}"
        if self._bound.spec.group_by and self.counted:
            yield f"  {len(self._counts)} group(s); records of the largest, all windows together:"
            yield from (f"    {each['records']:>9} {_shown(each['group'])}" for each in self.groups())
        yield from (f"  advice: {advice}" for advice in self.advice)

    @property
    def advice(self) -> tuple[str, ...]:
        if self.counted or not self.read or not self._bound.spec.where:
            return ()
        return (f"where: no record fulfils {self._bound.spec.where}",)


def _shown(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={_cut(value)}" for name, value in values.items())


def _cut(value: Any) -> str:
    text = key_text(value).replace("\n", " ")
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"

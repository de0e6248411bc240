"""`Kernel` has operations on the states of slices. A state is a single synopsis or a grouped aggregate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

from center.batch.slicing.rows import TimedRows
from edgewater.model.errors import InvalidQuery, InvalidRecord
from edgewater.synopses import GroupedAggregate, Properties, SingleSample, SliceManager


@runtime_checkable
class Decrementable(Protocol):
    """A synopsis from which added values can be removed."""

    def decrement(self, values: Any) -> None: ...


class Kernel:
    """Operations on states that `make` creates.

    Args:
        make: creates an empty synopsis.

    Attributes:
        kind: kind of the synopses.
        in_order: whether records must be added in event-time order. Records then wait for the watermark, and late
            records are refused. The state of a window is a manager of slices.
        invertible: whether values can be removed.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        self._probe = make()
        properties: Properties = self._probe.properties
        self.in_order = properties.ordered and not properties.commutative
        self.invertible = properties.invertible and isinstance(self._probe, Decrementable)
        if not properties.mergeable and not self.in_order:
            accepted = "a synopsis that merges, or an order-based one"
            raise InvalidQuery("synopsis", self._probe.kind, accepted, "a window is a merge of slices")
        self.kind: str = self._probe.kind
        self._seen: Any = None

    def check(self, values: Any) -> None:
        """Checks whether the synopsis accepts values of this type. No state is changed.

        Raises:
            InvalidRecord: the synopsis does not accept the values.
        """
        if self.in_order:
            self.make().update(values)  # a signal refuses single values as well
        elif str(_form(values)) != str(self._seen) and len(values):
            first = values[:1] if isinstance(values, np.ndarray) else values.slice(0, 1)
            probe = self.merged([self._probe])
            self.add(probe, TimedRows(first, np.zeros(1, np.int64), np.zeros(1, np.int64)))
            self._probe, self._seen = probe, _form(values)

    def add(self, state: Any, rows: TimedRows) -> None:
        if isinstance(state, SingleSample):
            # Slices of one stream share a source, so a record has the same number in each slice.
            state.update(rows.values, times=rows.times, ids=rows.numbers)
        else:
            state.update(rows.values, times=rows.times)

    def built(self, rows: TimedRows) -> Any:
        state = self.make()
        self.add(state, rows)
        return state

    def remove(self, state: Any, rows: TimedRows) -> None:
        state.decrement(rows.values)

    def merged(self, states: Sequence[Any]) -> Any:
        """Returns the union of states as a new state."""
        return states[0].merge_many(list(states[1:]))

    def managed(self, parts: Sequence[tuple[int, Any]]) -> SliceManager:
        """Returns a manager of copies of order-based slices.

        Args:
            parts: key and state of each slice.
        """
        return SliceManager([(key, type(state).from_bytes(state.to_bytes())) for key, state in parts])

    def from_bytes(self, data: bytes) -> Any:
        return type(self._probe).from_bytes(data)


class GroupedKernel(Kernel):
    """Operations on `GroupedAggregate` states.

    Values are record batches. They have a column per key, and a column with the name of each measure that has an
    argument.
    """

    def check(self, values: Any) -> None:
        if not isinstance(values, pa.RecordBatch):
            raise InvalidRecord("values", type(values).__name__, "a record batch, a table or a mapping of columns")
        for name in self._probe.key_names:
            if name not in values.schema.names:
                raise InvalidRecord("values", values.schema.names, f"a column {name!r} for the key")
        super().check(values)

    def add(self, state: GroupedAggregate, rows: TimedRows) -> None:
        batch = rows.values
        columns = {name: batch.column(name) if name in batch.schema.names else None for name in state.measures}
        keys = [batch.column(name) for name in state.key_names]
        state.update(keys, columns, batch.num_rows, times=rows.times, ids=rows.numbers)

    def merged(self, states: Sequence[GroupedAggregate]) -> GroupedAggregate:
        result: GroupedAggregate = self.make()
        result.merge_all(states)
        return result


def _form(values: Any) -> Any:
    if isinstance(values, np.ndarray):
        return values.dtype
    return values.schema if isinstance(values, pa.RecordBatch) else values.type


def kernel_of(make: Callable[[], Any]) -> Kernel:
    return GroupedKernel(make) if isinstance(make(), GroupedAggregate) else Kernel(make)

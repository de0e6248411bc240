"""The values of a query's measures over a batch: each expression is worked out once, and of sampled records what costs
much is worked out of these alone.

A value that a user's function gives may cost a thousand times what reading the record did. So of a query whose
accuracy is about such a value, the population that a sample is drawn from is told without it: the records that count
in the query and have no null in a column that the value needs. What the function then says of a sampled record is the
sample's: null is worth 0 in a sum, which makes the sum of the sample what it is of all, and is left out of a mean.
Of a sum that holds also while all records are processed: a window in which the rate changes is of one population.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from edgewater.arithmetic import to_float
from edgewater.query import BoundMeasure, BoundQuery
from edgewater.synopses import BoolArray, FloatArray
from edgewater.syntax import null_rejecting_columns, parse_sql


@dataclass(slots=True)
class Arguments:
    """The arguments of all measures over some records, each worked out when it is first asked for."""

    bound: BoundQuery
    records: pa.RecordBatch
    _known: dict[tuple[str, pa.DataType], pa.Array] = field(default_factory=dict)

    def of(self, measure: BoundMeasure) -> pa.Array | None:
        """A measure's; None: it has none."""
        text = measure.measure.argument
        if text is None or measure.argument is None:
            return None
        key = text, measure.argument.type  # a function of rows reads "x" as rows of one number
        if key not in self._known:
            self._known[key] = measure.argument.array(self.records)
        return self._known[key]

    def by_measure(self) -> dict[str, pa.Array | None]:
        return {m.measure.name: self.of(m) for m in self.bound.measures}

    def among(self, kept: BoolArray) -> Arguments:
        """Those of some of the records; what has been worked out is not worked out again."""
        mask = pa.array(kept)
        return Arguments(self.bound, self.records.filter(mask), {t: a.filter(mask) for t, a in self._known.items()})


@dataclass(frozen=True, slots=True)
class Observed:
    """What an accuracy's monitor is told of records.

    Attributes:
        values: of all of them, NaN where there is none or it is not known; None: it is about all records.
        population: those that a sample is of; None: those that have a value.
        processed: the arguments of those that are processed.
    """

    values: FloatArray | None
    population: BoolArray | None
    processed: Arguments


class Promise:
    """The measure that a query's accuracy is about."""

    def __init__(self, bound: BoundQuery) -> None:
        accuracy = bound.spec.accuracy
        assert accuracy is not None
        (self.measure,) = (m for m in bound.measures if m.measure.name == accuracy.measure)
        self.kind = accuracy.kind
        # A count is of the records that have a value: it needs all of them.
        self.only_sampled = self.measure.measure.is_expensive and self.kind in ("sum", "mean")
        text = self.measure.measure.argument
        self._needed = null_rejecting_columns(parse_sql(text, "")) if self.only_sampled and text is not None else []

    def observed(self, arguments: Arguments, kept: BoolArray | None) -> Observed:
        """Of records of which `kept` are processed; None: all."""
        if self.only_sampled and (kept is not None or self.kind == "sum"):
            return self._of_sample(arguments, kept)
        column = arguments.of(self.measure)
        processed = arguments if kept is None else arguments.among(kept)
        if column is None:
            return Observed(None, None, processed)
        if self.kind == "count":
            valid = column.is_valid().to_numpy(zero_copy_only=False)
            return Observed(np.where(valid, 1.0, np.nan), None, processed)
        return Observed(_floats(column), None, processed)

    def _of_sample(self, arguments: Arguments, kept: BoolArray | None) -> Observed:
        processed = arguments if kept is None else arguments.among(kept)
        column = processed.of(self.measure)
        assert column is not None
        worth = _floats(column)
        if self.kind == "sum":
            worth = np.where(np.isfinite(worth), worth, 0.0)
        count = arguments.records.num_rows
        values = np.full(count, np.nan)
        values[slice(None) if kept is None else kept] = worth
        population = np.ones(count, bool)
        for name in self._needed:
            needed = arguments.records.column(name)
            if needed.null_count:
                population &= needed.is_valid().to_numpy(zero_copy_only=False)
        return Observed(values, population, processed)


def _floats(column: pa.Array) -> FloatArray:
    """float64, NaN for null."""
    values: FloatArray = to_float(column).to_numpy(zero_copy_only=False)
    return values

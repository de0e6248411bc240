"""The values of a query's measures over a batch. Each expression is evaluated once, and expensive ones only for sampled
records.

A user-defined function may cost a thousand times as much as reading the record. So if a query's accuracy is about such
a function, the population of the sample is defined without the function. It is the records that count in the query and
have no null in a column that the function needs.

The function may return null for a sampled record. A sum counts the record as 0, which makes the sample unbiased, and a
mean ignores the record. A sum also counts it as 0 while all records are processed. So the population does not change
when the rate changes within a window.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from edgewater.model.arithmetic import to_float
from edgewater.model.query import BoundMeasure, BoundQuery
from edgewater.model.syntax import null_rejecting_columns, parse_sql
from edgewater.synopses import BoolArray, FloatArray


@dataclass(slots=True)
class MeasureArguments:
    """The arguments of all measures over some records, each evaluated on first use."""

    bound: BoundQuery
    records: pa.RecordBatch
    _evaluated: dict[tuple[str, pa.DataType], pa.Array] = field(default_factory=dict)

    def argument(self, measure: BoundMeasure) -> pa.Array | None:
        """Returns the argument of a measure; None if it has none."""
        text = measure.measure.argument
        if text is None or measure.argument is None:
            return None
        # a function of rows reads "x" as rows of one number, so the type is part of the key
        key = text, measure.argument.type
        if key not in self._evaluated:
            self._evaluated[key] = measure.argument.array(self.records)
        return self._evaluated[key]

    def by_measure(self) -> dict[str, pa.Array | None]:
        return {m.measure.name: self.argument(m) for m in self.bound.measures}

    def filter(self, kept: BoolArray) -> MeasureArguments:
        """Returns the arguments over a subset of the records; evaluated arguments are filtered."""
        mask = pa.array(kept)
        evaluated = {key: array.filter(mask) for key, array in self._evaluated.items()}
        return MeasureArguments(self.bound, self.records.filter(mask), evaluated)


@dataclass(frozen=True, slots=True)
class ObservedRecords:
    """The input of the arrival monitor for a batch.

    Attributes:
        values: float64 per record, NaN where there is none or it is unknown; None: every record counts.
        population: mask of the records from which the sample is drawn; None: the records that have a value.
        processed: the arguments of the processed records.
        bounds: least and greatest possible value per record, float64; None: the value itself, or unknown.
    """

    values: FloatArray | None
    population: BoolArray | None
    processed: MeasureArguments
    bounds: tuple[FloatArray, FloatArray] | None = None


class AccuracyMeasure:
    """The measure of a query's accuracy."""

    def __init__(self, bound: BoundQuery) -> None:
        accuracy = bound.spec.accuracy
        assert accuracy is not None
        (self.measure,) = (m for m in bound.measures if m.measure.name == accuracy.measure)
        self.kind, self._range = accuracy.kind, accuracy.range
        # A count depends on which records have a value, so it needs the values of all records.
        self.only_sampled = self.measure.measure.is_expensive and self.kind in ("sum", "mean")
        text = self.measure.measure.argument
        self._needed = null_rejecting_columns(parse_sql(text, "")) if self.only_sampled and text is not None else []

    def observed(self, arguments: MeasureArguments, kept: BoolArray | None) -> ObservedRecords:
        """Returns the monitor's input for a batch.

        Args:
            kept: mask of the records that the query processes; None: all records.
        """
        if self.only_sampled and (kept is not None or self.kind == "sum"):
            return self._sampled_only(arguments, kept)
        # The records of a synopsis are counted, also those without a value.
        column = None if self.kind == "records" else arguments.argument(self.measure)
        processed = arguments if kept is None else arguments.filter(kept)
        if column is None:
            return ObservedRecords(None, None, processed)
        if self.kind == "count":
            valid = column.is_valid().to_numpy(zero_copy_only=False)
            return ObservedRecords(np.where(valid, 1.0, np.nan), None, processed)
        return ObservedRecords(_floats(column), None, processed)

    def _sampled_only(self, arguments: MeasureArguments, kept: BoolArray | None) -> ObservedRecords:
        processed = arguments if kept is None else arguments.filter(kept)
        column = processed.argument(self.measure)
        assert column is not None
        sampled = _floats(column)
        if self.kind == "sum":
            sampled = np.where(np.isfinite(sampled), sampled, 0.0)
        count = arguments.records.num_rows
        values = np.full(count, np.nan)
        values[slice(None) if kept is None else kept] = sampled
        population = np.ones(count, bool)
        for name in self._needed:
            needed = arguments.records.column(name)
            if needed.null_count:
                population &= needed.is_valid().to_numpy(zero_copy_only=False)
        return ObservedRecords(values, population, processed, self._bounds(values))

    def _bounds(self, values: FloatArray) -> tuple[FloatArray, FloatArray] | None:
        """Returns the bounds of values, NaN where a value is unknown; None: the declared range does not hold."""
        if self._range is None:
            return None
        (least, greatest), unknown = self._range, np.isnan(values)
        if (values < least).any() or (values > greatest).any():
            return None
        return np.where(unknown, least, values), np.where(unknown, greatest, values)


def _floats(column: pa.Array) -> FloatArray:
    """Converts to float64, with NaN for null."""
    values: FloatArray = to_float(column).to_numpy(zero_copy_only=False)
    return values

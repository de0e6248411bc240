"""Samples of rows of numbers, for functions that have no synopsis of their own (`sample_functions`).

A row is sampled if its tag, a hash of the record's identity, is at most its group's bound. The bound of a merge is the
minimum over its partials. If a group exceeds `limit` rows, the bound is lowered to just below the tag of the first
surplus row. The sample therefore depends on the records and the rates, not on order or merges. Every row was sampled
with the same probability, the bound's fraction of all tags (Cohen and Kaplan's bottom-k, PODC 2007).
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from edgewater.base.errors import InvalidRecord, InvalidRequest
from edgewater.synopses.base import (
    MAX_ROW_COLUMNS,
    BoolArray,
    Count,
    Estimates,
    FloatArray,
    IntArray,
    Properties,
    Question,
    Questions,
)
from edgewater.synopses.checks import check_whole
from edgewater.synopses.encoding.layout import Layout, field
from edgewater.synopses.hashing import DEFAULT_SEED, WordArray
from edgewater.synopses.registry import register_kind
from edgewater.synopses.sampling.estimator import SampleEstimator
from edgewater.synopses.sampling.sample_rows import MAX_TAG, Key, SampleRows, record_tags
from edgewater.synopses.sampling.sample_stack import RateSampleStack, sample_layout

DEFAULT_LIMIT = 1 << 14


def _cut_of(rate: float) -> np.uint64:
    """Returns the number of tags above the bound of a sample of this rate."""
    if not 0 < rate <= 1:
        raise InvalidRequest("rate", rate, "a probability above 0, at most 1")
    return MAX_TAG - np.uint64(max(int(rate * 2.0**64), 1) - 1) if rate < 1 else np.uint64(0)


def is_sampled(source: int, numbers: IntArray, rate: float, seed: int = DEFAULT_SEED) -> BoolArray:
    """Returns which records of a source, by number, a `RowSampleStack` of this rate samples; a bool per record."""
    tags = record_tags(source, np.ascontiguousarray(numbers, np.int64), seed)
    return np.asarray(tags <= MAX_TAG - _cut_of(rate))


class RowSampleStack(RateSampleStack):
    """At most `limit` rows of `columns` float64 numbers per group, each sampled with the group's rate.

    Rows with a number that is not finite are skipped.

    Attributes:
        input_rate: the rate at which the caller sampled the records that it passes to `update`, by `is_sampled`; 1: all
            records.
    """

    kind: ClassVar[str] = "row_sample"
    properties: ClassVar[Properties] = Properties(idempotent=True)
    questions: ClassVar[Questions] = (Count,)
    arrays: ClassVar[dict[str, tuple[str, float]]] = {"cut": ("<u8", 0)}
    layouts: ClassVar[tuple[Layout, ...]] = sample_layout(
        RateSampleStack.key_types, field("values", "<f8", "rows", "columns"), (field("cut", "<u8"),)
    )
    threshold: ClassVar[str] = "cut"
    required: ClassVar[tuple[str, ...]] = ("columns", "limit")

    def __init__(
        self,
        groups: int = 0,
        *,
        columns: int = 1,
        limit: int = DEFAULT_LIMIT,
        source: int = 0,
        seed: int = DEFAULT_SEED,
        item_type: str | None = None,
    ) -> None:
        del item_type  # the items are rows of float64
        self.columns = check_whole("columns", columns, 1, MAX_ROW_COLUMNS)
        self.limit = check_whole("limit", limit, 2, 1 << 30)
        self.input_rate = 1.0
        super().__init__(groups, source=source, seed=seed, item_type="float64")

    def _no_rows(self) -> SampleRows:
        return SampleRows(np.zeros(0, np.int64), (np.zeros(0, np.uint64),), np.zeros((0, self.columns)))

    def _check_item_type(self, values: Any) -> None:
        shape = getattr(values, "shape", None)
        if shape is None or (shape[1:] or (1,)) != (self.columns,) or values.dtype.kind not in "iuf":
            found = f"{getattr(values, 'dtype', type(values).__name__)}{shape}"
            raise InvalidRecord("values", found, f"a NumPy array of {self.columns} numbers per record")

    def _canonical(self, values: Any) -> FloatArray:
        # + 0.0 turns -0.0 into 0.0, because rows of one identity are compared
        return np.asarray(values, np.float64).reshape(len(values), self.columns) + 0.0

    def _differ(self, one: Any, two: Any) -> BoolArray:
        return np.asarray(((one != two) & ((one == one) | (two == two))).any(axis=1))

    def reduce_rate(self, rate: float) -> None:
        """Lowers the sampling rate of further records, and thins the sample to it. A higher rate changes nothing."""
        _cut_of(rate)
        if rate < self.input_rate:
            self.input_rate = rate
            self._set_rows(self._rows.at(self._candidates(self._rows)))

    def rates(self) -> FloatArray:
        """Returns the sampling rate per group."""
        self.consolidate()
        return np.asarray(np.maximum(1.0 - self._thresholds().astype(np.float64) * 2.0**-64, 2.0**-64))

    def _thresholds(self) -> WordArray:
        return np.asarray(np.maximum(self._view("cut"), _cut_of(self.input_rate)), np.uint64)

    def _candidates(self, rows: SampleRows) -> BoolArray:
        bounds = MAX_TAG - self._thresholds()
        inside = rows.keys[0] <= (bounds if len(self) == 1 else bounds[rows.groups])
        return np.asarray(inside & np.isfinite(rows.values).all(axis=1))

    def _retained(self, rows: SampleRows) -> BoolArray:
        retained = self._candidates(rows)
        crowded = np.flatnonzero(np.bincount(rows.groups[retained], minlength=len(self)) > self.limit)
        if len(crowded):
            # Rows ascend by group and tag, so the surplus begins `limit` rows after a group's first row.
            first = np.searchsorted(rows.groups, crowded)
            self._view("cut")[crowded] = MAX_TAG - rows.keys[0][first + self.limit] + np.uint64(1)
            retained = self._candidates(rows)
        return retained

    def take(self, groups: IntArray) -> Self:
        result = super().take(groups)
        result.input_rate = self.input_rate
        return result

    def _load_rows(self, meta: IntArray, own: list[Key], counts: IntArray, keys: tuple[Key, ...], values: Any) -> None:
        if values.shape[1] != self.columns:
            raise ValueError(f"rows of {values.shape[1]} columns, expected {self.columns}")
        if not np.isfinite(values).all():
            raise ValueError("a number that is not finite")
        super()._load_rows(meta, own, counts, keys, values)

    def query(self, question: Question | None = None) -> Estimates:
        """Returns the number of records of the population per group."""
        self.check(question)
        rows = self.consolidate()
        return SampleEstimator(rows.groups, rows.values, self.rates(), self.kind).query(question or Count())

    def sampled(self) -> tuple[IntArray, pa.Array]:
        rows = self.consolidate()
        return rows.groups, pa.FixedSizeListArray.from_arrays(pa.array(rows.values.reshape(-1)), self.columns)

    def rows_by_group(self) -> list[FloatArray]:
        """Returns the rows of each group, float64 (n, columns), in the order of their tags.

        This order is random, and the same in every call.
        """
        rows = self.consolidate()
        return np.split(rows.values, rows.starts(len(self))[1:-1]) if len(self) else []


register_kind(RowSampleStack)

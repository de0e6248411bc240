"""A sample of rows of numbers, for functions of several columns without a synopsis of their own (`sample_functions`).

A row is in if its tag, a hash of the record's identity, is at most a group's bound. The bound is the least that any
part was drawn at; and where more than `limit` rows would be held, it is lowered to just below the tag of the first
row that is too many. So what is held depends on the records and the rates, not on order or merges, and every row was
drawn with the same probability, the bound's part of all tags (Cohen and Kaplan's bottom-k, PODC 2007).
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from edgewater.errors import InvalidRecord, InvalidRequest
from edgewater.synopses.base import BoolArray, Count, Estimates, FloatArray, IntArray, Properties, Question, Questions
from edgewater.synopses.hashing import DEFAULT_SEED, WordArray
from edgewater.synopses.items import check_whole
from edgewater.synopses.registry import register_kind
from edgewater.synopses.sampling.draw import Draw
from edgewater.synopses.sampling.sample_rows import Key, Rows, SampleStack, tags_of

MAX_COLUMNS = 16
DEFAULT_LIMIT = 1 << 14
_ALL = np.uint64((1 << 64) - 1)


def cut_of(rate: float) -> np.uint64:
    """How many tags lie above the bound of a sample of that rate."""
    if not 0 < rate <= 1:
        raise InvalidRequest("rate", rate, "a probability above 0, at most 1")
    return _ALL - np.uint64(max(int(rate * 2.0**64), 1) - 1) if rate < 1 else np.uint64(0)


def drawn(source: int, numbers: IntArray, rate: float, seed: int = DEFAULT_SEED) -> BoolArray:
    """Which records of a source, by number, are in a sample of that rate: what `RowSampleStack` would keep."""
    tags = tags_of(np.array([source], np.uint64), np.ascontiguousarray(numbers, np.int64), seed)
    return np.asarray(tags <= _ALL - cut_of(rate))


class RowSampleStack(SampleStack):
    """Rows of `columns` float64 numbers per group, each drawn with the group's rate, at most `limit` of them.

    A row with a number that is not finite is none.

    Attributes:
        offered: the rate at which the records that it is given were drawn by `drawn`, 1 for all.
    """

    kind: ClassVar[str] = "row_sample"
    properties: ClassVar[Properties] = Properties(idempotent=True)
    questions: ClassVar[Questions] = (Count,)
    arrays: ClassVar[dict[str, tuple[str, float]]] = {"cut": ("<u8", 0)}
    key_types: ClassVar[tuple[str, ...]] = ("<u8",)

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
        del item_type  # all are rows of float64
        self.columns = check_whole("columns", columns, 1, MAX_COLUMNS)
        self.limit = check_whole("limit", limit, 2, 1 << 30)
        self.offered = 1.0
        super().__init__(groups, source=source, seed=seed, item_type="float64")

    @property
    def parameters(self) -> dict[str, Any]:
        return {"columns": self.columns, "limit": self.limit}

    def _empty(self) -> Self:
        return type(self)(columns=self.columns, limit=self.limit, source=self.source, seed=self.seed)

    @classmethod
    def _of_parameters(cls, parameters: dict[str, Any], **common: Any) -> Self:
        return cls(columns=parameters["columns"], limit=parameters["limit"], **common)

    def _most_levels(self) -> int:
        return 0

    # Rows of numbers in place of items

    def _no_rows(self) -> Rows:
        return Rows(np.zeros(0, np.int64), (np.zeros(0, np.uint64),), np.zeros((0, self.columns)))

    def _learn(self, values: Any) -> None:
        shape = getattr(values, "shape", None)
        if shape is None or (shape[1:] or (1,)) != (self.columns,) or values.dtype.kind not in "iuf":
            given = f"{getattr(values, 'dtype', type(values).__name__)}{shape}"
            raise InvalidRecord("values", given, f"a NumPy array of {self.columns} numbers per record")

    def _canonical(self, values: Any) -> FloatArray:
        # 0.0 is added for one zero of two: rows of one identity are compared.
        return np.asarray(values, np.float64).reshape(len(values), self.columns) + 0.0

    def _differ(self, one: Any, two: Any) -> BoolArray:
        return np.asarray(((one != two) & ((one == one) | (two == two))).any(axis=1))

    # Which stay

    def offer(self, rate: float) -> None:
        """From now on records come that were drawn at `rate`; those that are held are thinned to it."""
        cut_of(rate)
        if rate < self.offered:
            self.offered = rate
            self._hold(self._held.at(self._promising(self._held)))

    def rates(self) -> FloatArray:
        """The probability with which each row was drawn, per group."""
        self._settle()
        return np.asarray(1.0 - self._cuts().astype(np.float64) * 2.0**-64)

    def _cuts(self) -> WordArray:
        return np.asarray(np.maximum(self._view("cut"), cut_of(self.offered)), np.uint64)

    def _keys(self, numbers: IntArray, times: IntArray | None) -> tuple[Key, ...]:
        return (tags_of(np.array([self.source], np.uint64), numbers, self.seed),)

    def _promising(self, rows: Rows) -> BoolArray:
        bounds = _ALL - self._cuts()
        inside = rows.keys[0] <= (bounds if len(self) == 1 else bounds[rows.groups])
        return np.asarray(inside & np.isfinite(rows.values).all(axis=1))

    def _kept(self, rows: Rows) -> BoolArray:
        kept = self._promising(rows)
        crowded = np.flatnonzero(np.bincount(rows.groups[kept], minlength=len(self)) > self.limit)
        if len(crowded):
            # Rows ascend by group and tag, so what is too many begins `limit` rows behind a group's first.
            first = np.searchsorted(rows.groups, crowded)
            self._view("cut")[crowded] = _ALL - rows.keys[0][first + self.limit] + np.uint64(1)
            kept = self._promising(rows)
        return kept

    unite = None  # type: ignore[assignment]  # bounds are the samples' own
    fold = None  # type: ignore[assignment]  # a lower rate is what shrinks it

    def merge_ones(self, others: Any) -> None:
        for other in others:
            self.merge(other, np.zeros(1, np.int64))

    def merge(self, other: Self, codes: IntArray) -> None:
        other._settle()
        cuts = other._cuts().copy()  # `other` may be this stack itself
        super().merge(other, codes)
        mine = self._view("cut")
        np.maximum.at(mine, codes, cuts)  # several of its groups may become one
        self._hold(self._held.at(self._kept(self._held)))

    def take(self, groups: IntArray) -> Self:
        result = super().take(groups)
        result.offered = self.offered
        return result

    def to_message(self) -> Any:
        self._settle()
        self._view("cut")[:] = self._cuts()
        return super().to_message()

    def _load_rows(self, meta: IntArray, own: list[Key], counts: IntArray, keys: tuple[Key, ...], values: Any) -> None:
        if getattr(values, "ndim", 0) != 2 or values.shape[1] != self.columns:
            raise ValueError(f"rows of shape {getattr(values, 'shape', None)} where there are {self.columns} columns")
        if not np.isfinite(values).all():
            raise ValueError("a number that is not finite")
        super()._load_rows(meta, own, counts, keys, values)

    # What they say

    def query(self, question: Question | None = None) -> Estimates:
        """How many records there were to draw from, per group."""
        self.check(question)
        rows = self._settle()
        return Draw(rows.groups, rows.values, self.rates(), self.kind).query(question or Count())

    def sampled(self) -> tuple[IntArray, pa.Array]:
        rows = self._settle()
        return rows.groups, pa.FixedSizeListArray.from_arrays(pa.array(rows.values.reshape(-1)), self.columns)

    def rows_by_group(self) -> list[FloatArray]:
        """The rows of each group, float64 (n, columns), in an order that is random and the same everywhere."""
        rows = self._settle()
        return np.split(rows.values, rows.starts(len(self))[1:-1]) if len(self) else []


register_kind(RowSampleStack)

"""`Column`: a measure's values of all groups, rendered as JSON cells or as table columns. Pure.

A cell consists of parts. Each part is columnar and renders its member of the cell for every row, or its columns of a
table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from edgewater.answers.own_error import OwnError
from edgewater.model.float_bounds import SIDES
from edgewater.model.key_texts import not_finite
from edgewater.model.number_columns import DECIMAL, outwards
from edgewater.synopses import BoolArray, Estimates, FloatArray, IntArray

Cell = dict[str, Any]
_LEAST, _GREATEST = -(1 << 63), (1 << 63) - 1


def stated_confidence(estimates: Estimates) -> float | None:
    """The confidence of the intervals; None if no bound is known, because a confidence without a bound states
    nothing.
    """
    is_bounded = np.isfinite(estimates.lower).any() or np.isfinite(estimates.upper).any()
    return estimates.confidence if is_bounded else None


class CellPart(Protocol):
    """One member of a measure's cell."""

    @property
    def confidence(self) -> float | None:
        """The lowest confidence of its intervals; None: no interval has a bound."""

    def cells(self, rows: int) -> list[Cell]:
        """Per row, the members that the part adds to the cell."""

    def columns(self, measure: str, rows: int) -> dict[str, pa.Array]:
        """The part's columns of a table, each of `rows` rows."""

    def first_interval(self) -> Estimates | None:
        """The first interval of the cell of each row; None: the cells have intervals only in lists, or none."""


@dataclass(frozen=True, slots=True)
class IntervalPart:
    """An estimate with its bounds: the cell itself (`name` empty), or one of its members.

    Attributes:
        whole: integral numbers are written as integers.
    """

    name: str
    estimates: Estimates
    whole: bool = False

    @property
    def confidence(self) -> float | None:
        return stated_confidence(self.estimates)

    def first_interval(self) -> Estimates | None:
        return self.estimates

    def cells(self, rows: int) -> list[Cell]:
        each = intervals(self.estimates, self.whole)
        return [{self.name: cell} for cell in each] if self.name else each

    def columns(self, measure: str, rows: int) -> dict[str, pa.Array]:
        return interval_columns(f"{measure}.{self.name}" if self.name else measure, self.estimates)


@dataclass(frozen=True, slots=True)
class NumberPart:
    """A property of the synopsis without an interval, such as the size of a sample."""

    name: str
    values: FloatArray
    whole: bool = False

    @property
    def confidence(self) -> float | None:
        return None

    def first_interval(self) -> Estimates | None:
        return None

    def cells(self, rows: int) -> list[Cell]:
        return [{self.name: value} for value in numbers(self.values, self.whole)]

    def columns(self, measure: str, rows: int) -> dict[str, pa.Array]:
        return {f"{measure}.{self.name}": nullable(self.values)}


@dataclass(frozen=True, slots=True)
class KeyedPart:
    """One question evaluated at several points, keyed by the point as text: quantiles, ranks, ranges.

    Attributes:
        prefix: column names are measure name + prefix + key.
    """

    name: str
    prefix: str
    answers: Mapping[str, Estimates]
    whole: bool = False

    @property
    def confidence(self) -> float | None:
        return min((c for e in self.answers.values() if (c := stated_confidence(e)) is not None), default=None)

    def first_interval(self) -> Estimates | None:
        return next(iter(self.answers.values()), None)

    def cells(self, rows: int) -> list[Cell]:
        each = {key: intervals(e, self.whole) for key, e in self.answers.items()}
        return [{self.name: {key: cells[row] for key, cells in each.items()}} for row in range(rows)]

    def columns(self, measure: str, rows: int) -> dict[str, pa.Array]:
        result: dict[str, pa.Array] = {}
        for key, estimates in self.answers.items():
            result.update(interval_columns(f"{measure}{self.prefix}{key}", estimates))
        return result


@dataclass(frozen=True, slots=True)
class ItemsPart:
    """Answers about requested items: a list of ``{"item": …, "estimate": …, …}``."""

    name: str
    answers: Sequence[tuple[Any, Estimates]]
    whole: bool = True

    @property
    def confidence(self) -> float | None:
        return min((c for _, e in self.answers if (c := stated_confidence(e)) is not None), default=None)

    def first_interval(self) -> Estimates | None:
        return None

    def cells(self, rows: int) -> list[Cell]:
        each = [(plain_key(item), intervals(e, self.whole)) for item, e in self.answers]
        return [{self.name: [{"item": item, **cells[row]} for item, cells in each]} for row in range(rows)]

    def columns(self, measure: str, rows: int) -> dict[str, pa.Array]:
        result: dict[str, pa.Array] = {}
        for item, estimates in self.answers:
            shown = str(item).lower() if isinstance(item, bool) else str(item)
            result.update(interval_columns(f"{measure}.{self.name}:{shown}", estimates))
        return result


@dataclass(frozen=True, slots=True)
class ListPart:
    """A list per row, of any length: ranked items, buckets, boundaries, sampled values.

    Attributes:
        groups: int64 row number per entry, ascending.
        keys: members of an entry besides its interval; empty: an entry is the interval.
        estimates: per entry; None: an entry is the value of the only key.
    """

    name: str
    groups: IntArray
    keys: Mapping[str, pa.Array]
    estimates: Estimates | None
    whole: bool = False

    @property
    def confidence(self) -> float | None:
        return None if self.estimates is None else stated_confidence(self.estimates)

    def _entries(self) -> list[Any]:
        columns = {name: [plain_key(v) for v in column.to_pylist()] for name, column in self.keys.items()}
        if self.estimates is None:
            (values,) = columns.values()
            return values
        each = intervals(self.estimates, self.whole)
        if not columns:
            return list(each)
        keys = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return [{**key, **cell} for key, cell in zip(keys, each, strict=True)]

    def _offsets(self, rows: int) -> IntArray:
        return np.searchsorted(self.groups, np.arange(rows + 1))

    def first_interval(self) -> Estimates | None:
        return None

    def cells(self, rows: int) -> list[Cell]:
        entries, offsets = self._entries(), self._offsets(rows).tolist()
        return [{self.name: entries[start:end]} for start, end in pairwise(offsets)]

    def columns(self, measure: str, rows: int) -> dict[str, pa.Array]:
        """One list column, of structs or of plain values."""
        offsets = pa.array(self._offsets(rows), pa.int32())
        if self.estimates is None:
            (values,) = self.keys.values()
            return {f"{measure}.{self.name}": pa.ListArray.from_arrays(offsets, values)}
        columns = dict(self.keys)
        for name, bound in (("estimate", "value"), ("lower", "lower"), ("upper", "upper")):
            columns[name] = nullable(getattr(self.estimates, bound))
        entries = pa.StructArray.from_arrays(list(columns.values()), list(columns))
        return {f"{measure}.{self.name}": pa.ListArray.from_arrays(offsets, entries)}


@dataclass(frozen=True, slots=True)
class FunctionErrors:
    """The errors of a function of a sample, with an entry per group.

    Attributes:
        errors: the relative error; infinite: unknown.
        sizes, rates: number of sampled rows, and the rate at which they were sampled.
        problems: why the function failed; empty if it did not fail.
    """

    errors: FloatArray
    sizes: IntArray
    rates: FloatArray
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """The values of one measure, or of a computed value, in all rows of an answer.

    Attributes:
        own: the synopsis' own error, before the values were widened by what the answer lacks.
        excess: the widest interval beyond the error budget: its width to one side, and the budget there. None: all
            intervals are within the budget.
        has_lost_bound: a value has lost a bound, because edges withhold records.
        accuracy_error: of the synopsis that the query's accuracy is about, the largest error; infinite: a value has
            lost a bound.
        function: of a function of a sample.
    """

    measure: str
    parts: tuple[CellPart, ...]
    own: OwnError
    excess: tuple[float, float] | None = None
    has_lost_bound: bool = False
    accuracy_error: float = 0.0
    function: FunctionErrors | None = None

    @property
    def confidence(self) -> float | None:
        """The lowest confidence of any of its intervals; None: it has none with a bound."""
        return min((c for part in self.parts if (c := part.confidence) is not None), default=None)

    def cells(self, rows: int) -> list[Cell]:
        """The measure's cell per row: the members of all its parts."""
        each = [part.cells(rows) for part in self.parts]
        return [{k: v for part in parts for k, v in part.items()} for parts in zip(*each, strict=True)]


def equal_cells(part: CellPart, other: CellPart, mine: IntArray, theirs: IntArray) -> BoolArray:
    """Which rows of two parts with the same question have equal cells.

    Args:
        mine, theirs: the rows of `part` and of `other` to compare, int64, of one length.
    """
    if isinstance(part, IntervalPart) and isinstance(other, IntervalPart) and part.whole == other.whole:
        return _equal_estimates(part.estimates, other.estimates, mine, theirs)
    if isinstance(part, KeyedPart) and isinstance(other, KeyedPart) and list(part.answers) == list(other.answers):
        pairs = zip(part.answers.values(), other.answers.values(), strict=True)
        result = np.ones(len(mine), bool)
        for a, b in pairs:
            result &= _equal_estimates(a, b, mine, theirs)
        return result
    cells, others = part.cells(int(mine.max(initial=-1)) + 1), other.cells(int(theirs.max(initial=-1)) + 1)
    rows = zip(mine.tolist(), theirs.tolist(), strict=True)
    return np.array([cells[i] == others[j] for i, j in rows], bool)


def _equal_estimates(a: Estimates, b: Estimates, mine: IntArray, theirs: IntArray) -> BoolArray:
    equal: BoolArray = a.odd[mine] == b.odd[theirs]
    for left, right in ((a.value, b.value), (a.lower, b.lower), (a.upper, b.upper)):
        left, right = left[mine], right[theirs]
        equal &= (left == right) | (np.isnan(left) & np.isnan(right))
    mine_exact, theirs_exact = a.integers, b.integers
    if mine_exact is None or theirs_exact is None or mine_exact.type != theirs_exact.type:
        return equal & (mine_exact is theirs_exact)
    exact = pc.equal(mine_exact.take(pa.array(mine)), theirs_exact.take(pa.array(theirs)))
    equal &= np.asarray(pc.fill_null(exact, True), bool)  # the `value` of a null is NaN
    return equal


_FORMULA = "^'*[=+@\\-\t\r\n]"
"""Texts that a spreadsheet reads as formulas. Apostrophes before the formula match too, so that a reader can undo what
`csv_table` adds."""


def csv_table(table: pa.Table) -> pa.Table:
    """Returns the table in the form for CSV: lists as JSON strings, and no text that a spreadsheet executes.

    If a text or a column name begins like a formula, an apostrophe is put before it. Numbers do not change.
    """
    for at, field in enumerate(table.schema):
        column = table.column(at)
        if pa.types.is_list(field.type):
            column = list_texts(column)
        elif pa.types.is_string(field.type):
            column = _without_formulas(column)
        table = table.set_column(at, field.name, column)
    return table.rename_columns(_without_formulas(pa.array(table.column_names, pa.string())).to_pylist())


def list_texts(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Returns the lists of a column as JSON texts."""
    return pa.array([None if v is None else _text(v) for v in column.to_pylist()], pa.string())


def _without_formulas(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    escaped = pc.binary_join_element_wise("'", texts, "")
    return pc.if_else(pc.match_substring_regex(texts, _FORMULA), escaped, texts)


def _text(value: list[Any]) -> str:
    shown = [{k: plain_key(v) for k, v in e.items()} if isinstance(e, dict) else plain_key(e) for e in value]
    return json.dumps(shown, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def interval_columns(name: str, estimates: Estimates) -> dict[str, pa.Array]:
    """Returns an estimate and its bounds as columns.

    Unknown bounds are null, and so is the value of a group without one.

    Integers are int64, or decimal128(38, 0) if one of them exceeds int64. Other values are float64, which may be NaN or
    infinite.
    """
    names = (name, f"{name}_lower", f"{name}_upper")
    if estimates.integers is not None:
        exact, lower, upper = _integers(estimates)
        columns = [[_rounded(b, by) for b in of] for of, by in ((exact, int), (lower, math.floor), (upper, math.ceil))]
        fits = all(i is None or _LEAST <= i <= _GREATEST for column in columns for i in column)
        kind = pa.int64() if fits else DECIMAL
        return {
            n: pa.array([i if i is None or fits else Decimal(i) for i in column], kind)
            for n, column in zip(names, columns, strict=True)
        }
    absent = np.isnan(estimates.value) if estimates.present is None else ~estimates.present
    value = pa.array(np.asarray(estimates.value, np.float64), pa.float64(), mask=absent)
    return dict(zip(names, (value, nullable(estimates.lower), nullable(estimates.upper)), strict=True))


def intervals(estimates: Estimates, whole: bool) -> list[Cell]:
    """One interval per row, as JSON; `not_finite` names a value for which JSON has no number: NaN and infinities."""
    if estimates.integers is not None:
        columns: Sequence[Sequence[float | None]] = _integers(estimates)
    else:
        columns = [numbers(c, whole) for c in (estimates.value, estimates.lower, estimates.upper)]
    cells: list[Cell] = [{"estimate": e, "lower": low, "upper": high} for e, low, high in zip(*columns, strict=True)]
    for row in np.flatnonzero(estimates.odd).tolist():
        cells[row]["not_finite"] = not_finite(float(estimates.value[row]))
    return cells


def _integers(estimates: Estimates) -> list[list[float | None]]:
    """Returns value, lower and upper bounds per row. The value is an integer, and so is a bound that is equal to it."""
    assert estimates.integers is not None
    exact = [None if v is None else int(v) for v in estimates.integers.to_pylist()]
    bounds = (
        numbers(np.where(b == estimates.value, np.nan, outwards(b, side)), True)
        for b, side in zip((estimates.lower, estimates.upper), SIDES, strict=True)
    )
    moved = [(b != estimates.value).tolist() for b in (estimates.lower, estimates.upper)]
    columns = [
        [bound if m else e for e, bound, m in zip(exact, each, those, strict=True)]
        for each, those in zip(bounds, moved, strict=True)
    ]
    return [list(exact), *columns]


def _rounded(number: float | None, rounded: Callable[[float], int]) -> int | None:
    return None if number is None else rounded(number)


def numbers(values: FloatArray, whole: bool) -> list[float | int | None]:
    """JSON numbers; with `whole`, integral values are written as integers."""
    return [
        None if not math.isfinite(v) else int(v) if whole and v.is_integer() else v for v in map(float, values.tolist())
    ]


def plain(value: Any) -> Any:
    """A value as JSON: NaN and infinity become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plain_key(value: Any) -> Any:
    """A value of a group's key, or an item, as JSON: NaN and infinity become their names, since null is another key."""
    return not_finite(value) if isinstance(value, float) and not math.isfinite(value) else value


def nullable(values: FloatArray) -> pa.Array:
    return pa.array(np.asarray(values, np.float64), pa.float64(), mask=~np.isfinite(values))

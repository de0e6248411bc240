"""`Column`: a measure's values of all groups, rendered as JSON cells or as table columns. Pure.

A cell consists of parts. Each part is columnar and renders its member of the cell for every row, or its columns of a
table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from edgewater.answers.own_error import OwnError
from edgewater.model.float_bounds import SIDES
from edgewater.model.key_texts import not_finite
from edgewater.model.number_columns import DECIMAL, outwards
from edgewater.synopses import Estimates, FloatArray, IntArray

Cell = dict[str, Any]
Texts: TypeAlias = pa.StringArray
_ESCAPED = r'["\\\x00-\x1f]'
"""Texts with characters that JSON escapes."""
_ROWS = 10_000
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

    def texts(self, rows: int) -> Texts:
        """Per row, the members that the part adds to the cell: JSON without braces."""

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

    def texts(self, rows: int) -> Texts:
        each = interval_texts(self.estimates, self.whole)
        return _member(self.name, "{", each, "}") if self.name else each

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

    def texts(self, rows: int) -> Texts:
        return _member(self.name, number_texts(self.values, self.whole))

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

    def texts(self, rows: int) -> Texts:
        each = [_member(key, "{", interval_texts(e, self.whole), "}") for key, e in self.answers.items()]
        return _member(self.name, "{", _listed(each, rows), "}")

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

    def texts(self, rows: int) -> Texts:
        each = [
            joined('{"item":', json_text(plain_key(item)), ",", interval_texts(e, self.whole), "}")
            for item, e in self.answers
        ]
        return _member(self.name, "[", _listed(each, rows), "]")

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

    def _entries(self) -> Texts:
        columns = {name: key_texts(column) for name, column in self.keys.items()}
        if self.estimates is None:
            (values,) = columns.values()
            return values
        keys = [text for name, column in columns.items() for text in (f"{json_text(name)}:", column, ",")]
        return joined("{", *keys, interval_texts(self.estimates, self.whole), "}")

    def _offsets(self, rows: int) -> IntArray:
        return np.searchsorted(self.groups, np.arange(rows + 1))

    def first_interval(self) -> Estimates | None:
        return None

    def texts(self, rows: int) -> Texts:
        lists = pa.ListArray.from_arrays(pa.array(self._offsets(rows), pa.int32()), self._entries())
        return _member(self.name, "[", pc.binary_join(lists, ","), "]")

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

    def texts(self, rows: int) -> Texts:
        """The measure's cell per row as JSON: the members of all its parts."""
        return joined("{", _listed([part.texts(rows) for part in self.parts], rows), "}")

    def cells(self, rows: int) -> list[Cell]:
        """The measure's cell per row."""
        return [json.loads(text) for text in self.texts(rows).to_pylist()]


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
    return json_text([{k: plain_key(v) for k, v in e.items()} if isinstance(e, dict) else plain_key(e) for e in value])


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
    """Returns one interval per row."""
    return [json.loads(f"{{{text}}}") for text in interval_texts(estimates, whole).to_pylist()]


def interval_texts(estimates: Estimates, whole: bool) -> Texts:
    """Returns the members of one interval per row: JSON without braces.

    ``not_finite`` names a value for which JSON has no number: NaN and infinities.
    """
    if estimates.integers is not None:
        value, lower, upper = _integer_texts(estimates)
    else:
        value, lower, upper = (number_texts(b, whole) for b in (estimates.value, estimates.lower, estimates.upper))
    texts = joined('"estimate":', value, ',"lower":', lower, ',"upper":', upper)
    if not (odd := estimates.odd).any():
        return texts
    values = np.where(odd, estimates.value, 0.0).tolist()
    stated = [f',"not_finite":"{not_finite(v)}"' if o else "" for o, v in zip(odd.tolist(), values, strict=True)]
    return joined(texts, pa.array(stated, pa.string()))


def _integer_texts(estimates: Estimates) -> list[Texts]:
    """Returns value, lower and upper bounds per row. The value is an integer, and so is a bound that is equal to it."""
    assert estimates.integers is not None
    exact = pc.cast(estimates.integers, pa.string())
    columns = [exact]
    for bound, side in zip((estimates.lower, estimates.upper), SIDES, strict=True):
        moved = bound != estimates.value
        columns.append(
            pc.if_else(pa.array(moved), number_texts(outwards(bound, side), True), exact) if moved.any() else exact
        )
    return columns


def _integers(estimates: Estimates) -> list[list[float | None]]:
    return [[None if t is None else json.loads(t) for t in c.to_pylist()] for c in _integer_texts(estimates)]


def _rounded(number: float | None, rounded: Callable[[float], int]) -> int | None:
    return None if number is None else rounded(number)


def number_texts(values: FloatArray, whole: bool) -> Texts:
    """Returns JSON numbers; null: not finite. With `whole`, integral values are written as integers."""
    floats = np.asarray(values, np.float64)
    texts = pc.cast(pa.array(floats, pa.float64(), mask=~np.isfinite(floats)), pa.string())
    if not whole:
        return texts
    integral = np.isfinite(floats) & (floats == np.floor(floats))
    is_large = integral & (np.abs(floats) >= 2.0**63)
    small = pa.array(np.where(integral & ~is_large, floats, 0.0).astype(np.int64))
    texts = pc.if_else(pa.array(integral & ~is_large), pc.cast(small, pa.string()), texts)
    if is_large.any():
        large = pa.array([str(int(v)) if i else None for i, v in zip(is_large, floats, strict=True)], pa.string())
        texts = pc.coalesce(large, texts)
    return texts


def key_texts(column: pa.Array | pa.ChunkedArray) -> Texts:
    """Returns values of keys, or items, as JSON (`plain_key`)."""
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return pc.cast(column, pa.string())
    if pa.types.is_string(kind) and not pc.any(pc.match_substring_regex(column, _ESCAPED)).as_py():
        return pc.binary_join_element_wise('"', column, '"', "")
    return pa.array([None if v is None else json_text(plain_key(v)) for v in column.to_pylist()], pa.string())


def json_text(value: object) -> str:
    """Returns JSON without white space. Raises ValueError for NaN and infinity."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def to_json(value: object) -> bytes:
    """Returns `json_text` as UTF-8."""
    return json_text(value).encode()


def joined_rows(texts: Texts) -> Iterator[bytes]:
    """Yields the texts of many rows with commas between, in parts that fit into one text of Arrow."""
    for at in range(0, len(texts), _ROWS):
        part = texts.slice(at, _ROWS)
        (text,) = pc.binary_join(pa.ListArray.from_arrays(pa.array([0, len(part)], pa.int32()), part), ",")
        yield text.as_buffer().to_pybytes()


def joined(*texts: Texts | str) -> Texts:
    """Returns the texts of each row, one after another. A null is ``null``."""
    return pc.binary_join_element_wise(*texts, "", null_handling="replace", null_replacement="null")


def _member(name: str, *value: Texts | str) -> Texts:
    return joined(f"{json_text(name)}:", *value)


def _listed(each: Sequence[Texts], rows: int) -> Texts:
    """Returns the texts of each row, with commas between."""
    if not each:
        return pa.array([""] * rows, pa.string())
    return pc.binary_join_element_wise(*each, ",") if len(each) > 1 else each[0]


def plain(value: Any) -> Any:
    """A value as JSON: NaN and infinity become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plain_key(value: Any) -> Any:
    """A value of a group's key, or an item, as JSON: NaN and infinity become their names, since null is another key."""
    return not_finite(value) if isinstance(value, float) and not math.isfinite(value) else value


def nullable(values: FloatArray) -> pa.Array:
    return pa.array(np.asarray(values, np.float64), pa.float64(), mask=~np.isfinite(values))

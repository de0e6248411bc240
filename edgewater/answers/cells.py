"""`CellColumn`: a measure's values of all groups, rendered as JSON cells or as table columns. Pure.

A cell consists of parts (`Part`). Each part is columnar and has one of five shapes. A format is one function over the
shapes: `part_texts` writes JSON, `part_columns` tables, and the Prometheus face its series.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, assert_never

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from edgewater.answers.own_error import OwnError
from edgewater.answers.work import spend
from edgewater.base.float_bounds import GREATEST_INT, LEAST_INT, SIDES, Side
from edgewater.base.number_columns import DECIMAL, float_column, outwards
from edgewater.model.computed import BINOMIAL
from edgewater.model.json_types import Document, IntervalCell
from edgewater.model.key_texts import not_finite
from edgewater.model.replies import PartShape
from edgewater.model.table_texts import Texts, joined, json_text, key_texts, plain_key
from edgewater.synopses import BoolArray, Estimates, FloatArray, IntArray
from edgewater.synopses.shapes import Label

_ROWS = 10_000  # limit: memory of texts


def stated_confidence(estimates: Estimates) -> float | None:
    """The confidence of the intervals; None if no bound is known, because a confidence without a bound states
    nothing.
    """
    is_bounded = np.isfinite(estimates.lower).any() or np.isfinite(estimates.upper).any()
    return estimates.confidence if is_bounded else None


@dataclass(frozen=True, slots=True)
class IntervalPart:
    """An estimate with its bounds: the cell itself (`name` empty), or one of its members.

    Attributes:
        whole: integral numbers are written as integers.
    """

    shape: ClassVar[Literal["interval"]] = "interval"
    name: str
    estimates: Estimates
    whole: bool = False


@dataclass(frozen=True, slots=True)
class NumberPart:
    """A property of the synopsis without an interval, such as the size of a sample.

    Attributes:
        values: numbers, or texts. A null text is no member of its cell, and texts are in JSON only.
        is_absent: only tables have it, because their columns do not depend on values.
    """

    shape: ClassVar[Literal["number"]] = "number"
    name: str
    values: FloatArray | Texts
    whole: bool = False
    is_absent: bool = False


@dataclass(frozen=True, slots=True)
class KeyedPart:
    """One question evaluated at several points, keyed by the point as text: quantiles, ranks, ranges.

    Attributes:
        prefix: column names are measure name + prefix + key.
        label: of Prometheus series; its value is the key.
    """

    shape: ClassVar[Literal["keyed"]] = "keyed"
    name: str
    prefix: str
    answers: Mapping[str, Estimates]
    whole: bool = False
    label: Label = "item"


@dataclass(frozen=True, slots=True)
class ItemsPart:
    """Answers about given items: a list of ``{"item": …, "estimate": …, …}``.

    Attributes:
        prefix: column names are measure name + prefix + item.
        key: the member of an entry that has the item.
    """

    shape: ClassVar[Literal["items"]] = "items"
    name: str
    prefix: str
    answers: Sequence[tuple[Any, Estimates]]
    whole: bool = True
    key: str = "item"


@dataclass(frozen=True, slots=True)
class ListPart:
    """A list per row, of any length: ranked items, buckets, boundaries, sampled values.

    Attributes:
        groups: int64 row number per entry, ascending.
        keys: members of an entry besides its interval; empty: an entry is the interval.
        estimates: per entry; None: an entry is the value of the only key.
    """

    shape: ClassVar[Literal["list"]] = "list"
    name: str
    groups: IntArray
    keys: Mapping[str, pa.Array]
    estimates: Estimates | None
    whole: bool = False

    def offsets(self, rows: int) -> pa.Array:
        """Returns the entries of each row, as the offsets of a list array."""
        return pa.array(np.searchsorted(self.groups, np.arange(rows + 1)), pa.int32())


Part: TypeAlias = IntervalPart | NumberPart | KeyedPart | ItemsPart | ListPart
"""One member of a measure's cell, or several, in all rows. Each format writes all of these shapes, and no others."""


class RowInterval(NamedTuple):
    """An interval that each row has.

    Attributes:
        column: the name of its column in a table.
        name: its name within the cell, such as ``quantiles 0.5``; empty: it is the cell.
        whole: integral numbers are written as integers.
    """

    column: str
    name: str
    estimates: Estimates
    whole: bool


def row_intervals(part: Part, measure: str) -> list[RowInterval]:
    """Returns the intervals of which each row has one."""
    match part:
        case IntervalPart(name, estimates, whole):
            return [RowInterval(f"{measure}.{name}" if name else measure, name, estimates, whole)]
        case KeyedPart(name, prefix, answers, whole):
            return [RowInterval(f"{measure}{prefix}{k}", f"{name} {k}", e, whole) for k, e in answers.items()]
        case ItemsPart(name, prefix, items, whole):
            shown = [(str(item).lower() if isinstance(item, bool) else str(item), e) for item, e in items]
            return [RowInterval(f"{measure}{prefix}{item}", f"{name} {item}", e, whole) for item, e in shown]
        case NumberPart() | ListPart():
            return []
        case _:
            assert_never(part)


def part_texts(part: Part, rows: int) -> Texts:
    """Returns the members that a part adds to the cell of each row: JSON without braces."""
    match part:
        case IntervalPart(name, estimates, whole):
            each = interval_texts(estimates, whole)
            return _member(name, "{", each, "}") if name else each
        case NumberPart(name, values, whole):
            if isinstance(values, pa.Array):
                return pc.binary_join_element_wise(f"{json_text(name)}:", key_texts(values), "")
            return _member(name, number_texts(values, whole))
        case KeyedPart(name, _, answers, whole):
            members = [_member(key, "{", interval_texts(e, whole), "}") for key, e in answers.items()]
            return _member(name, "{", _listed(members, rows), "}")
        case ItemsPart(name, _, items, whole, key):
            entries = [
                joined(f"{{{json_text(key)}:{json_text(plain_key(item))},", interval_texts(e, whole), "}")
                for item, e in items
            ]
            return _member(name, "[", _listed(entries, rows), "]")
        case ListPart(name):
            lists = pa.ListArray.from_arrays(part.offsets(rows), _entry_texts(part))
            return _member(name, "[", pc.binary_join(lists, ","), "]")
        case _:
            assert_never(part)


def part_columns(part: Part, measure: str, rows: int) -> dict[str, pa.Array]:
    """Returns the columns of a part in a table, each of `rows` rows."""
    match part:
        case IntervalPart() | KeyedPart() | ItemsPart():
            each = (interval_columns(i.column, i.estimates) for i in row_intervals(part, measure))
            return {name: column for columns in each for name, column in columns.items()}
        case NumberPart(name, values):
            return {} if isinstance(values, pa.Array) else {f"{measure}.{name}": nullable(values)}
        case ListPart(name, _, keys, estimates):
            if estimates is None:
                (entries,) = keys.values()
            else:
                bounds = (("estimate", "value"), ("lower", "lower"), ("upper", "upper"))
                members = {**keys, **{n: nullable(getattr(estimates, bound)) for n, bound in bounds}}
                entries = pa.StructArray.from_arrays(list(members.values()), list(members))
            return {f"{measure}.{name}": pa.ListArray.from_arrays(part.offsets(rows), entries)}
        case _:
            assert_never(part)


def part_shape(part: Part, measure: str) -> PartShape:
    """Returns the form of a part, for readers: its member, its shape, and its columns without those of bounds."""
    columns = [each.column for each in row_intervals(part, measure)]
    if isinstance(part, ListPart) or (isinstance(part, NumberPart) and not isinstance(part.values, pa.Array)):
        columns = [f"{measure}.{part.name}"]
    return {"name": part.name, "shape": part.shape, "columns": columns}


def _entry_texts(part: ListPart) -> Texts:
    columns = {name: key_texts(column) for name, column in part.keys.items()}
    if part.estimates is None:
        (values,) = columns.values()
        return joined(values)  # a null text would make the whole list null
    keys = [text for name, column in columns.items() for text in (f"{json_text(name)}:", column, ",")]
    return joined("{", *keys, interval_texts(part.estimates, part.whole), "}")


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
class CellColumn:
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
    parts: Sequence[Part]
    own: OwnError
    excess: tuple[float, float] | None = None
    has_lost_bound: bool = False
    accuracy_error: float = 0.0
    function: FunctionErrors | None = None

    @property
    def shown(self) -> list[Part]:
        """The parts that JSON and series have."""
        return [part for part in self.parts if not (isinstance(part, NumberPart) and part.is_absent)]

    @property
    def intervals(self) -> list[RowInterval]:
        """The intervals of which each row has one."""
        return [each for part in self.parts for each in row_intervals(part, self.measure)]

    @property
    def has_unknown_bound(self) -> bool:
        """Whether a value that is known has no bound to one side."""
        each = [interval.estimates for part in self.parts for interval in row_intervals(part, "")]
        each += [part.estimates for part in self.parts if isinstance(part, ListPart) and part.estimates is not None]
        return any((np.isfinite(e.value) & ~(np.isfinite(e.lower) & np.isfinite(e.upper))).any() for e in each)

    @property
    def confidence(self) -> float | None:
        """The lowest confidence of any of its intervals; None: it has none with a bound."""
        listed = (p.estimates for p in self.parts if isinstance(p, ListPart) and p.estimates is not None)
        about_records = (i.estimates for i in self.intervals if i.estimates.basis != BINOMIAL)
        each = map(stated_confidence, (*about_records, *listed))
        return min((c for c in each if c is not None), default=None)

    def texts(self, rows: int) -> Texts:
        """The measure's cell per row as JSON: the members of all its parts."""
        return joined("{", _listed([part_texts(part, rows) for part in self.shown], rows), "}")

    def cells(self, rows: int) -> list[Document]:
        """The measure's cell per row."""
        return [json.loads(text) for text in self.texts(rows).to_pylist()]


def equal_cells(
    mine: CellColumn, theirs: CellColumn, at: IntArray, there: IntArray, rows: tuple[int, int]
) -> BoolArray:
    """Returns which cells of a measure are equal in two revisions of a window.

    Args:
        at, there: the rows of `mine` and of `theirs` to compare, int64, of one length.
        rows: number of rows of `mine` and of `theirs`.
    """
    ours, others = mine.intervals, theirs.intervals
    is_simple = not any(isinstance(part, NumberPart | ListPart) for part in (*mine.shown, *theirs.shown))
    if is_simple and [(i.name, i.whole) for i in ours] == [(i.name, i.whole) for i in others]:
        pairs = zip(ours, others, strict=True)
        each = [_equal_estimates(a.estimates, b.estimates, at, there) for a, b in pairs]
        return np.asarray(np.all(each, axis=0), bool)
    texts = (mine.texts(rows[0]).take(pa.array(at)), theirs.texts(rows[1]).take(pa.array(there)))
    return np.asarray(pc.equal(*texts), bool)


def _equal_estimates(a: Estimates, b: Estimates, at: IntArray, there: IntArray) -> BoolArray:
    equal: BoolArray = a.odd[at] == b.odd[there]
    for left, right in ((a.value, b.value), (a.lower, b.lower), (a.upper, b.upper)):
        left, right = left[at], right[there]
        equal &= (left == right) | (np.isnan(left) & np.isnan(right))
    if a.integers is None or b.integers is None or a.integers.type != b.integers.type:
        return equal & (a.integers is b.integers)
    exact = pc.equal(a.integers.take(pa.array(at)), b.integers.take(pa.array(there)))
    equal &= np.asarray(pc.fill_null(exact, True), bool)  # the `value` of a null is NaN
    return equal


def interval_columns(name: str, estimates: Estimates, *, wide: bool = False) -> dict[str, pa.Array]:
    """Returns an estimate and its bounds as columns.

    Unknown bounds are null, and so is the value of a group without one. Integers are int64, and an integer beyond int64
    is null (`beyond_int64`). Other values are float64, which may be NaN or infinite. So the type of a column does not
    depend on its values.

    Args:
        wide: with an integer beyond int64, the columns are float64 instead, and bounds are rounded outwards.
    """
    names = (name, f"{name}_lower", f"{name}_upper")
    if estimates.integers is not None:
        exact, beyond = estimates.integers, beyond_int64(estimates)
        if beyond.any() and wide:
            floats = [float_column(exact, 0)]
            for bounds, side in zip((estimates.lower, estimates.upper), SIDES, strict=True):
                floats.append(np.where(bounds == estimates.value, float_column(exact, side), outwards(bounds, side)))
            return {n: nullable(each) for n, each in zip(names, floats, strict=True)}
        if beyond.any():
            exact = pc.if_else(pa.array(beyond), None, exact)
        exact = exact.cast(pa.int64())
        both = zip((estimates.lower, estimates.upper), SIDES, (np.floor, np.ceil), strict=True)
        columns = [_int64_bounds(*each, estimates.value, exact) for each in both]
        return dict(zip(names, (exact, *columns), strict=True))
    absent = np.isnan(estimates.value) if estimates.present is None else ~estimates.present
    value = pa.array(np.asarray(estimates.value, np.float64), pa.float64(), mask=absent)
    return dict(zip(names, (value, nullable(estimates.lower), nullable(estimates.upper)), strict=True))


def _int64_bounds(
    bounds: FloatArray, side: Side, rounded: Callable[[FloatArray], FloatArray], values: FloatArray, exact: pa.Array
) -> pa.Array:
    """Returns bounds as int64. A bound that is equal to its value is the exact value."""
    whole = rounded(outwards(bounds, side))
    fits = (whole >= -(2.0**63)) & (whole < 2.0**63)  # not NaN
    integers = pa.array(np.where(fits, whole, 0.0).astype(np.int64), mask=~fits)
    return pc.if_else(pa.array(bounds != values), integers, exact)


def beyond_int64(estimates: Estimates) -> BoolArray:
    """Returns which values are integers beyond int64."""
    integers = estimates.integers
    if integers is None or not pa.types.is_decimal(integers.type):
        return np.zeros(len(estimates), bool)
    least, greatest = (pa.scalar(Decimal(n), DECIMAL) for n in (LEAST_INT, GREATEST_INT))
    beyond = pc.or_(pc.less(integers, least), pc.greater(integers, greatest))
    return np.asarray(pc.fill_null(beyond, False), bool)


def intervals(estimates: Estimates, whole: bool) -> list[IntervalCell]:
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


def joined_rows(texts: Texts) -> Iterator[bytes]:
    """Yields the texts of many rows with commas between, in parts that fit into one text of Arrow."""
    for at in range(0, len(texts), _ROWS):
        spend()
        part = texts.slice(at, _ROWS)
        (text,) = pc.binary_join(pa.ListArray.from_arrays(pa.array([0, len(part)], pa.int32()), part), ",")
        yield text.as_buffer().to_pybytes()


def _member(name: str, *value: Texts | str) -> Texts:
    return joined(f"{json_text(name)}:", *value)


def _listed(each: Sequence[Texts], rows: int) -> Texts:
    """Returns the texts of each row, with commas between; without nulls."""
    if not each:
        return pa.array([""] * rows, pa.string())
    return pc.binary_join_element_wise(*each, ",", null_handling="skip") if len(each) > 1 else each[0]


def plain(value: Any) -> Any:
    """A value as JSON: NaN and infinity become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def nullable(values: FloatArray) -> pa.Array:
    return pa.array(np.asarray(values, np.float64), pa.float64(), mask=~np.isfinite(values))

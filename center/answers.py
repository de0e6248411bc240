"""What an answer looks like to a reader: JSON rows, an Arrow table, or CSV. Pure.

Intervals are the synopsis' own, widened by what edges stated that they withhold. Where nobody knows
how far the truth may lie away — a mean of which records are withheld — the bounds are null and not a
guess.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from center.results import AnswerRecord
from edgewater.errors import InvalidRequest
from edgewater.query import Measure, QuerySpec
from edgewater.synopses.base import Estimates, FloatArray, IntArray, Quantile, Stack
from edgewater.synopses.grouped import GroupedAggregate

DEFAULT_QUANTILES = (0.5, 0.9, 0.95, 0.99)
MAX_QUANTILES = 100


@dataclass(frozen=True, slots=True)
class Questions:
    """What a reader asks of an answer besides what it says by itself.

    Attributes:
        quantiles: ranks in [0, 1], asked of measures that are about quantiles.
        groups: column and accepted values as texts (see `is_meant`); only groups that have one of them
            in each column named. What is left out is never rendered.
    """

    quantiles: tuple[float, ...] = DEFAULT_QUANTILES
    groups: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __post_init__(self) -> None:
        accepted = f"1 to {MAX_QUANTILES} numbers from 0 to 1"
        if not 1 <= len(self.quantiles) <= MAX_QUANTILES or not all(0.0 <= q <= 1.0 for q in self.quantiles):
            raise InvalidRequest("quantile", self.quantiles, accepted)


PLAIN = Questions()


@dataclass(frozen=True, slots=True)
class Values:
    """A measure's values of all groups, in the order of the rows.

    Attributes:
        by_quantile: rank as text -> values; None for measures that are one number.
    """

    name: str
    one: Estimates | None
    by_quantile: Mapping[str, Estimates] | None
    whole: bool

    @property
    def confidence(self) -> float:
        each = [self.one] if self.one is not None else list((self.by_quantile or {}).values())
        return min((e.confidence for e in each), default=1.0)


@dataclass(frozen=True, slots=True)
class Rows:
    """An answer's rows as columns, sorted by group."""

    groups: dict[str, pa.Array]
    values: tuple[Values, ...]
    length: int


def render(record: AnswerRecord, spec: QuerySpec, questions: Questions = PLAIN) -> dict[str, Any]:
    """The answer as the JSON of `docs/reference/answer.md`; NaN and infinity become null.

    Raises:
        InvalidRequest: a question that a measure's synopsis cannot answer.
        SynopsisError: the stored bytes cannot be read.
    """
    rows = _rows(record, spec, questions)
    quality = dict(record.quality)
    contract = quality.pop("contract")
    names = list(rows.groups)
    keys = [column.to_pylist() for column in rows.groups.values()]
    groups = (
        [{n: _plain(v) for n, v in zip(names, key, strict=True)} for key in zip(*keys, strict=True)] if keys else []
    )
    columns = [(values.name, _cells(values)) for values in rows.values]
    data = [
        {"group": groups[i] if keys else {}, **{name: cells[i] for name, cells in columns}} for i in range(rows.length)
    ]
    return {
        "query": record.query.name,
        "window": {"start": rfc3339(record.window_start_ms), "end": rfc3339(record.window_end_ms)},
        "phase": record.phase.value,
        "revision": record.revision,
        "data": data,
        "confidence": min((values.confidence for values in rows.values), default=1.0),
        "quality": quality,
        "contract": contract,
    }


def to_table(record: AnswerRecord, spec: QuerySpec, questions: Questions = PLAIN) -> pa.Table:
    """The answer as a table: group columns, then per measure m the float64 columns ``m``, ``m_lower``
    and ``m_upper``, or ``m_0.5``, ``m_0.5_lower``, … for quantiles. Unknown values are null.

    An answer without data has no rows, and null-typed group columns: no edge has told their types.
    """
    rows = _rows(record, spec, questions)
    columns: dict[str, pa.Array] = dict(rows.groups)
    for values in rows.values:
        named = {values.name: values.one} if values.one is not None else {}
        named.update({f"{values.name}_{q}": e for q, e in (values.by_quantile or {}).items()})
        for name, estimates in named.items():
            columns[name] = _nullable(estimates.value)
            columns[f"{name}_lower"] = _nullable(estimates.lower)
            columns[f"{name}_upper"] = _nullable(estimates.upper)
    return pa.table(columns)


def to_csv(record: AnswerRecord, spec: QuerySpec, questions: Questions = PLAIN) -> bytes:
    """`to_table` as CSV with a header line, UTF-8."""
    sink = pa.BufferOutputStream()
    pyarrow.csv.write_csv(to_table(record, spec, questions), sink)
    text: bytes = sink.getvalue().to_pybytes()
    return text


def rfc3339(time_ms: int) -> str:
    """UTC, with milliseconds only where there are any."""
    unit: Literal["ms", "s"] = "ms" if time_ms % 1000 else "s"
    return str(np.datetime_as_string(np.array(time_ms, "datetime64[ms]"), unit=unit, timezone="UTC"))


def _rows(record: AnswerRecord, spec: QuerySpec, questions: Questions) -> Rows:
    if record.synopsis is None:
        groups = {name: pa.nulls(0) for name in spec.group_by}
        return Rows(groups, tuple(_no_values(m, questions) for m in spec.measures), 0)
    aggregate = GroupedAggregate.from_bytes(record.synopsis)
    order = _asked_for(aggregate, _sorted_groups(aggregate), questions)
    groups = dict(zip(aggregate.key_names, aggregate.rows(order), strict=True))
    withheld = record.quality["error"]["withheld"]
    values = tuple(_values(m, aggregate.measures[m.name], order, withheld, questions) for m in spec.measures)
    return Rows(groups, values, len(order))


def _sorted_groups(aggregate: GroupedAggregate) -> IntArray:
    """Codes by key columns, so that equal data look equal whatever order they were merged in."""
    if not aggregate.key_names:
        return np.arange(len(aggregate))
    keys = pa.table(dict(zip(aggregate.key_names, aggregate.rows(), strict=True)))
    by = [(name, "ascending") for name in aggregate.key_names]
    order: IntArray = pc.sort_indices(keys, sort_keys=by).to_numpy().astype(np.int64)
    return order


def _asked_for(aggregate: GroupedAggregate, order: IntArray, questions: Questions) -> IntArray:
    columns = dict(zip(aggregate.key_names, aggregate.rows(order), strict=True)) if questions.groups else {}
    keep = np.ones(len(order), bool)
    for name, texts in questions.groups:
        codes = columns[name].dictionary_encode(null_encoding="encode")
        meant = np.array([any(is_meant(v, text) for text in texts) for v in codes.dictionary.to_pylist()], bool)
        keep &= meant[np.asarray(codes.indices)] if len(meant) else keep
    return order[keep]


def is_meant(value: object, text: str) -> bool:
    """Whether a group's value is what a text in a URL means by it."""
    if isinstance(value, str):
        return value == text
    if value is None:
        return text == "null"
    if isinstance(value, bool):
        return text == ("true" if value else "false")
    try:
        return float(text) == value if isinstance(value, float) else int(text) == value
    except ValueError:
        return False


def _values(
    measure: Measure, stack: Stack, order: IntArray, withheld: Mapping[str, Any], questions: Questions
) -> Values:
    def shown(estimates: Estimates) -> Estimates:
        widened = _widen(estimates, measure, withheld)
        return Estimates(
            widened.value[order], widened.lower[order], widened.upper[order], widened.confidence, widened.basis
        )

    if Quantile in stack.questions:
        by_quantile = {f"{q:g}": shown(stack.query(Quantile(q))) for q in questions.quantiles}
        return Values(measure.name, None, by_quantile, False)
    return Values(measure.name, shown(stack.query()), None, stack.kind in ("count", "integer_sum"))


def _no_values(measure: Measure, questions: Questions) -> Values:
    nothing = np.zeros(0, np.float64)
    none = Estimates(nothing, nothing, nothing)
    if Quantile in measure.function.make(measure.parameters, None).questions:
        return Values(measure.name, None, {f"{q:g}": none for q in questions.quantiles}, False)
    return Values(measure.name, none, None, False)


def _widen(estimates: Estimates, measure: Measure, withheld: Mapping[str, Any]) -> Estimates:
    """Makes room for what edges withhold; see `Totals.union` for why their bounds add up."""
    if not withheld:
        return estimates
    bound = withheld.get(measure.name)
    if measure.function.error is not None:
        if bound is None:
            return estimates
        above = math.inf if bound["above"] is None else bound["above"]
        below = math.inf if bound["below"] is None else bound["below"]
        lower, upper = estimates.lower - below, estimates.upper + above
    else:
        # Records are missing from it, and no bound says how far they would move it.
        lower = upper = np.full(len(estimates), np.nan)
    return Estimates(estimates.value, lower, upper, estimates.confidence, estimates.basis)


def _cells(values: Values) -> list[dict[str, Any]]:
    if values.one is not None:
        return _intervals(values.one, values.whole)
    by_quantile = {q: _intervals(e, values.whole) for q, e in (values.by_quantile or {}).items()}
    length = max((len(cells) for cells in by_quantile.values()), default=0)
    return [{"quantiles": {q: cells[i] for q, cells in by_quantile.items()}} for i in range(length)]


def _intervals(estimates: Estimates, whole: bool) -> list[dict[str, Any]]:
    columns = [_numbers(c, whole) for c in (estimates.value, estimates.lower, estimates.upper)]
    return [{"estimate": e, "lower": low, "upper": high} for e, low, high in zip(*columns, strict=True)]


def _numbers(values: FloatArray, whole: bool) -> list[float | int | None]:
    """JSON numbers; counts and integer sums without a decimal point where they have no fraction."""
    return [
        None if not math.isfinite(v) else int(v) if whole and v.is_integer() else v for v in map(float, values.tolist())
    ]


def _plain(key: Any) -> Any:
    return None if isinstance(key, float) and not math.isfinite(key) else key


def _nullable(values: FloatArray) -> pa.Array:
    return pa.array(values, pa.float64(), mask=~np.isfinite(values))

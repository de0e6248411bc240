"""The series of a query: its answers as samples at the ends of its windows.

    <query>:<measure>, <query>:<measure>_lower, <query>:<measure>_upper      labels: groups, and quantile, item, …
    <query>:all:<measure>, …_lower, …_upper                                  of a query with groups: the answer's totals
    <query>:completeness, :staleness_seconds, :contract_met, :phase          one per query; 0 early, 1 complete, 2 final
    <query>:exactly_once                                                     1: each record of all edges counts once

A value or a bound that is unknown is no sample. Like Prometheus with staleness markers, a series ends where a newer
window lacks it: a group without records in the newest window is not shown with the value of an older one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never, cast, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from center.results import AnswerRecord, ResultStore
from center.serving.byte_cache import ByteCache
from center.serving.measures import NO_QUESTIONS, MeasureQuestions
from center.serving.render import EvaluatedAnswer, answer_rows, merged_data, statement_of
from center.serving.totals import answer_totals
from edgewater.answers.cells import IntervalPart, ItemsPart, KeyedPart, ListPart, NumberPart, Part, interval_columns
from edgewater.answers.work import spend
from edgewater.base.errors import Overspent
from edgewater.base.float_bounds import Side, side_of, to_float
from edgewater.model.json_types import IntervalCell
from edgewater.model.key_texts import key_text, label_names
from edgewater.model.own_columns import OWN_COLUMNS
from edgewater.model.registered_query import RegisteredQuery
from edgewater.model.replies import Members
from edgewater.model.table_texts import plain_key
from edgewater.model.windows import TimeWindow
from edgewater.synopses import Estimates
from edgewater.synopses.shapes import Label

Labels = tuple[tuple[str, str], ...]
"""Sorted by name, with `__name__`."""
Samples = dict[Labels, npt.NDArray[np.float64]]
"""By series, float64, a value per step; `ABSENT` for a step without a sample."""

CACHE_BYTES = 32 << 20  # limit: memory of samples
"""A limit of the memory for samples of all requests."""
SAMPLE_BYTES = 400
"""Approximate size of a sample with its labels."""
MAX_POINTS = 11_000
"""The limit of Prometheus for the steps of a request."""
MAX_SERIES = 1_000
"""Series of one query in a request: a limit of the memory of a request."""
MIN_LOOKBACK_MS = 300_000
"""The lookback of Prometheus."""
PAGE = 25  # limit: memory of a request
"""Answers that are read at a time: a limit of the memory of a request."""
RESERVED = frozenset({"__name__", *get_args(Label)})
SERIES = {name: column for name, column in OWN_COLUMNS.items() if column.is_series}
DESCRIBING = (*SERIES, "staleness_seconds", "contract_met", "phase", "exactly_once")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Axis:
    """The times of a request: `start_ms`, then every `step_ms` up to `end_ms`."""

    start_ms: int
    end_ms: int
    step_ms: int

    @property
    def times(self) -> npt.NDArray[np.int64]:
        return np.arange(self.start_ms, self.end_ms + 1, self.step_ms, dtype=np.int64)

    def shifted(self, by_ms: int) -> Axis:
        return Axis(self.start_ms - by_ms, self.end_ms - by_ms, self.step_ms)


def samples_cache() -> ByteCache:
    """Returns a cache of samples of answers, for the repeated requests of dashboards."""
    return ByteCache(CACHE_BYTES, lambda made: SAMPLE_BYTES * len(made))


@dataclass(slots=True)
class SeriesReader:
    """Reads series for one request.

    Attributes:
        cache: shared by requests.
        queries: those that the caller may read, by name and version. The series of a version continue in the next
            version.
        warnings: which answers could not be evaluated, and why.
    """

    results: ResultStore
    queries: tuple[RegisteredQuery, ...]
    cache: ByteCache
    warnings: list[str] = field(default_factory=list)

    def samples(self, wanted: Matchers, axis: Axis) -> Samples:
        """Returns the selected series on an axis; `ABSENT` for a step without a sample.

        Raises:
            Overspent: more series than a request may have.
        """
        found: Samples = {}
        times = axis.times
        for number, query in enumerate(self.queries):
            selection = wanted.of(query)
            if selection is None or not self._may_show(query, axis):
                continue
            ends_ms = _next_version_ms(query, self.queries[number + 1 : number + 2])
            windows: list[tuple[int, int, dict[Labels, float]]] = []
            for record, until_ms in self._newest_by_time(query, axis):
                first = int(np.searchsorted(times, record.window_end_ms, "left"))
                until_ms = min(until_ms, ends_ms)
                end = int(np.searchsorted(times, min(until_ms, record.window_end_ms + lookback_ms(query) + 1), "left"))
                if first >= end:
                    continue
                windows.append((first, end, self.series(query, record, selection)))
                spend(cells=len(windows[-1][2]))
            each = list(dict.fromkeys(labels for _, _, series in windows for labels in series))
            selected = {labels for labels, is_one in zip(each, wanted.selects(each), strict=True) if is_one}
            if len(selected) > MAX_SERIES:
                raise Overspent(f"query {query.ref.name}: more than {MAX_SERIES} series; select groups by their labels")
            for first, end, series in windows:
                spend()
                for labels, value in series.items():
                    if labels in selected:
                        if labels not in found:
                            spend(cells=len(times))
                            found[labels] = np.full(len(times), ABSENT)
                        found[labels][first:end] = value
        return found

    @staticmethod
    def _may_show(query: RegisteredQuery, axis: Axis) -> bool:
        """Returns whether an answer of this version of a query may be shown on an axis."""
        shown_ms = query.spec.window.longest_ms + lookback_ms(query)
        return query.windows.from_ms <= axis.end_ms and query.windows.until_ms + shown_ms >= axis.start_ms

    def newest(self, query: RegisteredQuery, start_ms: int | None, end_ms: int | None) -> dict[Labels, float]:
        """Returns the series of the query's newest window between two times; None: of the last window."""
        latest = self.results.latest(query.ref, until_ms=query.windows.until_ms)
        if latest is not None and end_ms is not None and latest.window_end_ms > end_ms:
            latest = None
            for record, _ in self._newest_by_time(query, Axis(end_ms, end_ms, 1)):
                latest = record
        if latest is None or (start_ms is not None and latest.window_end_ms < start_ms - lookback_ms(query)):
            return {}
        return self.series(query, latest, ALL)

    def _newest_by_time(self, query: RegisteredQuery, axis: Axis) -> Iterator[tuple[AnswerRecord, int]]:
        """Yields the newest answers to the windows that steps of the axis may show, each with the end of the next
        window that has an answer or is empty.
        """
        latest = self.results.latest(query.ref, until_ms=query.windows.until_ms)
        if latest is not None and latest.window_end_ms <= axis.start_ms:
            yield from self._with_ends(query, [latest], FOREVER_MS)
            return
        records: list[AnswerRecord] = []
        for page in self._pages(query, axis) if latest is not None else ():
            # Windows of a query have one length or do not overlap, so their ends ascend with their starts.
            if records and page:
                yield from self._with_ends(query, records, page[0].window_end_ms)
            records = page or records
        if records:
            yield from self._with_ends(query, records, FOREVER_MS)

    def _with_ends(
        self, query: RegisteredQuery, records: Sequence[AnswerRecord], until_ms: int
    ) -> Iterator[tuple[AnswerRecord, int]]:
        """Yields answers to adjacent windows, each with the time until which its values are the newest ones.

        Args:
            until_ms: the end of the window that follows the last answer's.
        """
        ends = [*(record.window_end_ms for record in records[1:]), until_ms]
        window, following = query.spec.window, dict[int, tuple[int, int]]()
        if isinstance(window, TimeWindow):
            for record, end in zip(records, ends, strict=True):
                start = window.following(record.window_start_ms)
                if window.end(start) < end:
                    following[record.window_start_ms] = start, window.end(start)
        empty = self.results.empty_windows(query.ref, list(following.values()))
        for record, end in zip(records, ends, strict=True):
            after = following.get(record.window_start_ms)
            yield record, end if after is None or after not in empty else after[1]

    def _pages(self, query: RegisteredQuery, axis: Axis) -> Iterator[list[AnswerRecord]]:
        longest_ms = query.spec.window.longest_ms
        first, last = axis.start_ms - lookback_ms(query), axis.end_ms
        cursor = None
        while True:
            begin_ms = max(first - longest_ms, query.windows.from_ms)
            chunk, cursor = self.results.windows(query.ref, begin_ms, min(last, query.windows.until_ms), PAGE, cursor)
            yield [record for record in chunk if first <= record.window_end_ms <= last]
            if cursor is None:
                return

    def series(self, query: RegisteredQuery, record: AnswerRecord, selection: SeriesSelection) -> dict[Labels, float]:
        """Returns the samples of an answer. If its data cannot be evaluated, they are omitted with a warning."""
        key = record.answer_id, selection
        try:
            return self.cache.get(key, lambda: self._made(query, record, selection))
        except Exception as exc:
            where = f"query {query.key}, window at {record.window_start_ms}, revision {record.revision}"
            log.exception("%s: its data cannot be evaluated", where)
            self.warnings.append(f"{where}: its data cannot be evaluated ({type(exc).__name__}); see the center's log")
            return {}

    def _made(self, query: RegisteredQuery, record: AnswerRecord, selection: SeriesSelection) -> dict[Labels, float]:
        merged = merged_data(record)
        rows = answer_rows(record, query.spec, selection.questions, merged=merged)
        name, found = query.ref.name, dict[Labels, float]()
        if selection.describes:
            stated = statement_of(record, query.spec, rows, selection.questions, merged)
            totals = answer_totals(record, query.spec, NO_QUESTIONS, merged)
            members = cast(Members, EvaluatedAnswer(record, rows, stated, totals, merged).members())
            own = (column.read(members) for column in SERIES.values() if column.read is not None)
            described = (
                *(None if number is None else float(number) for number in own),
                record.staleness_ms / 1000,
                float(stated.contract.met),
                float(record.phase.rank),
                float(not record.facts.deliveries),
            )
            one = set(query.spec.shown) if query.spec.group_by else set()  # quantiles have no series of all groups
            for measure, cell in ((name, cell) for name, cell in totals.total.items() if name in one):
                _add_interval(found, f"{name}:{all_groups(query)}:{measure}", {}, cell)
            for suffix, number in zip(describing(query), described, strict=True):
                _add(found, f"{name}:{suffix}", {}, number)
        if not selection.measures:
            return found
        names = label_names(list(rows.groups), RESERVED)
        keys = zip(*(column.to_pylist() for column in rows.groups.values()), strict=True) if names else ()
        groups = [dict(zip(names, map(key_text, key), strict=True)) for key in keys] if names else [{}] * rows.length
        for values in rows.values:
            for at, part in enumerate(values.shown):
                _add_part(found, f"{name}:{values.measure}", groups, part, at == 0)
        return found


@dataclass(frozen=True, slots=True)
class SeriesSelection:
    """The part of a query's answers that is evaluated.

    Attributes:
        measures: whether to evaluate measures; `questions` states which.
        describes: whether to evaluate completeness, staleness, contract, phase and delivery.
    """

    questions: MeasureQuestions = NO_QUESTIONS
    measures: bool = True
    describes: bool = True


ALL = SeriesSelection()


@dataclass(frozen=True, slots=True)
class Matchers:
    """The matchers of a selector. A series must fulfil all of them."""

    each: tuple[tuple[str, str, str], ...]
    """Name, operator (``= != =~ !~``) and value."""

    def selects(self, series: Sequence[Labels]) -> list[bool]:
        """Returns whether each series fulfils the matchers. Each pattern is compiled once, which may take 10 ms."""
        held = [dict(labels) for labels in series]
        selected = [True] * len(held)
        for name, operator, wanted in self.each:
            values = [labels.get(name, "") for labels in held]
            fulfilled = hold(operator, values, wanted)
            selected = [both and one for both, one in zip(selected, fulfilled, strict=True)]
        return selected

    def of(self, query: RegisteredQuery) -> SeriesSelection | None:
        """Returns the part of a query that has to be evaluated; None: no part."""
        equal = {name: value for name, operator, value in self.each if operator == "="}
        return _selection(query, equal.pop("__name__", None), equal)


def hold(operator: str, values: Sequence[str], wanted: str) -> list[bool]:
    """Returns whether each value fulfils a matcher. An RE2 pattern matches whole values, in linear time.

    Raises:
        pa.ArrowInvalid: RE2 refuses the pattern.
    """
    if operator in ("=", "!="):
        return [(value == wanted) == (operator == "=") for value in values]
    distinct = list(dict.fromkeys(values))
    found = pc.match_substring_regex(pa.array(distinct, pa.string()), f"^(?:{wanted})$").to_pylist()
    matches = dict(zip(distinct, found, strict=True))
    return [matches[value] == (operator == "=~") for value in values]


def _selection(query: RegisteredQuery, name: str | None, labels: Mapping[str, str]) -> SeriesSelection | None:
    """Returns the part of a query with the series of this name (None: any) and these labels; None: no part has them."""
    groups = tuple(
        (column, (labels[column],))
        for column, label in zip(query.spec.group_by, label_names(query.spec.group_by, RESERVED), strict=True)
        if label == column and column in labels and labels[column] == key_text(labels[column])
    )
    if name is None:
        return SeriesSelection(MeasureQuestions(groups=groups), describes=not groups)
    prefix, _, rest = name.partition(":")
    if prefix != query.ref.name:
        return None
    if rest in describing(query) or rest.startswith(f"{all_groups(query)}:"):
        return SeriesSelection(measures=False)
    measures = tuple(m for m in query.spec.shown if rest in (m, f"{m}_lower", f"{m}_upper") or rest.startswith(f"{m}:"))
    return SeriesSelection(MeasureQuestions(groups=groups, measures=measures), describes=False) if measures else None


def describing(query: RegisteredQuery) -> tuple[str, ...]:
    """Returns the names of the series that describe answers. If a measure has the same name, a prefix is added."""
    return tuple(f"answer_{suffix}" if suffix in query.spec.shown else suffix for suffix in DESCRIBING)


def all_groups(query: RegisteredQuery) -> str:
    """Returns the prefix of the series of totals. It differs from the names of measures."""
    return "answer_all" if "all" in query.spec.shown else "all"


FOREVER_MS = 1 << 62  # format: above all times
ABSENT = float(np.frombuffer(np.uint64(0x7FF0000000000002).tobytes(), np.float64)[0])
"""Prometheus' staleness marker: a NaN that is no value."""


def is_absent(values: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Returns which values are the staleness marker."""
    marked: npt.NDArray[np.bool_] = np.ascontiguousarray(values).view(np.uint64) == np.uint64(0x7FF0000000000002)
    return marked


def _next_version_ms(query: RegisteredQuery, following: Sequence[RegisteredQuery]) -> int:
    """Returns the end of the next version's first window, which replaces this version's last window."""
    for after in following:
        if after.ref.name == query.ref.name and isinstance(after.spec.window, TimeWindow):
            return after.spec.window.end(after.windows.from_ms)
    return FOREVER_MS


def lookback_ms(query: RegisteredQuery) -> int:
    """Returns how long a window's answer is shown after its end, if no newer answer follows."""
    spec = query.spec.window
    return max(MIN_LOOKBACK_MS, spec.longest_ms)


def _add(found: dict[Labels, float], name: str, labels: Mapping[str, str], value: float | None, side: Side = 0) -> None:
    if value is not None:
        found[tuple(sorted({"__name__": name, **labels}.items()))] = to_float(value, side)


def _add_interval(found: dict[Labels, float], name: str, labels: Mapping[str, str], cell: IntervalCell) -> None:
    odd = cell.get("not_finite")
    _add(found, name, labels, cell["estimate"] if odd is None else float(odd))
    _add(found, f"{name}_lower", labels, cell["lower"], -1)
    _add(found, f"{name}_upper", labels, cell["upper"], 1)


def _add_intervals(
    found: dict[Labels, float], name: str, labels: Sequence[Mapping[str, str]], estimates: Estimates
) -> None:
    for column, numbers in interval_columns(name, estimates, wide=True).items():
        spend()
        for each, number in zip(labels, numbers.to_pylist(), strict=True):
            _add(found, column, each, number, side_of(column[len(name) :]))


def _add_part(
    found: dict[Labels, float], name: str, groups: Sequence[Mapping[str, str]], part: Part, is_first: bool
) -> None:
    """Adds the intervals and numbers of a part. Lists without one item per entry, such as buckets, are no series.

    Args:
        is_first: whether the part's answers are the measure's own, so that its series have the name of the measure.
    """
    own = name if is_first else f"{name}:{part.name}"
    match part:
        case IntervalPart(member, estimates):
            _add_intervals(found, f"{name}:{member}" if member else name, groups, estimates)
        case NumberPart(member, values):
            for group, number in zip(groups, values.tolist(), strict=True):
                if isinstance(number, float) and math.isfinite(number):
                    _add(found, f"{name}:{member}", group, number)
        case KeyedPart(_, _, answers, _, label):
            for key, estimates in answers.items():
                _add_intervals(found, own, [{**group, label: key} for group in groups], estimates)
        case ItemsPart(_, _, items):
            for item, estimates in items:
                _add_intervals(found, own, [{**group, "item": _item(item)} for group in groups], estimates)
        case ListPart(_, rows, keys, listed):
            if listed is not None and len(keys) == 1:
                each = zip(rows.tolist(), next(iter(keys.values())).to_pylist(), strict=True)
                _add_intervals(found, own, [{**groups[row], "item": _item(item)} for row, item in each], listed)
        case _:
            assert_never(part)


def _item(item: Any) -> str:
    return key_text(plain_key(item))

"""Converts OTLP metrics to rows, and cumulative points to increments.

Each point of a gauge or a sum gives one row. A point of a histogram gives a row with its count, sum, minimum and
maximum, and a row for each bucket that is not empty. A point of a summary gives a row with its count and sum, and a row
for each quantile.

Totals of monotonic sums, histograms and summaries become increments (`edge.series`), because increments can be added
over windows and edges. Each bucket is a separate series, even while it is empty. Otherwise the first value of a bucket
would not count, as the first total of a series may have been counted before.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from google.protobuf.message import DecodeError

from edge.codecs.schema import RecordSchema
from edge.records import Decoded, RejectionReason, guesses
from edge.series import KEY_BYTES, Points, SeriesMemory, SeriesUpdate
from edge.sources.otlp.columns import IntArray, Prepared, Rows, Values, nanoseconds, prepare
from edge.sources.otlp.messages import Budget, OtlpRecords, Unreadable, message_class, text
from edgewater.base.streams import type_name
from edgewater.wire import DropReason

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

KINDS = ("gauge", "sum", "histogram", "exponential_histogram", "summary")
_CLASSES = ("Gauge", "Sum", "Histogram", "ExponentialHistogram", "Summary")
_GAUGE, _SUM, _HISTOGRAM, _EXPONENTIAL, _SUMMARY = range(5)
PARTS = ("value", "total", "bucket", "quantile")
_VALUE, _TOTAL, _BUCKET, _QUANTILE = range(4)
_DELTA, _CUMULATIVE = 1, 2  # format: of OTLP
_NO_VALUE = 1  # format: of OTLP
"""The flag of a point without a recorded value."""
MIN_SCALE, MAX_SCALE = -10, 20
"""The accepted scales of exponential histograms. Bucket `i` begins at 2^(i · 2^-scale)."""
NUMBERS = ("value", "count", "sum", "min", "max", "lower", "upper", "quantile")


@dataclass(frozen=True, slots=True)
class _Metric:
    """One metric of a request, without its points."""

    name: str | Unreadable
    unit: str | Unreadable
    description: str | Unreadable
    kind: int
    temporality: int
    is_monotonic: bool
    group: int

    @property
    def needs_temporality(self) -> bool:
        """Whether the metric's points are increments or totals."""
        return self.kind in (_HISTOGRAM, _EXPONENTIAL) or self.is_monotonic

    @property
    def is_total(self) -> bool:
        """Whether the metric's points are totals. Only the increments of totals are counted."""
        cumulative = self.temporality == _CUMULATIVE
        return self.kind == _SUMMARY or (cumulative and (self.kind == _HISTOGRAM or self.is_monotonic))


class _Builder:
    """Collects the rows of a request. Lists have one entry per row, but `points` and `metric_of` have one entry per
    point.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.metrics: list[_Metric] = []
        self.points: list[Any] = []
        self.metric_of: list[int] = []
        self.point_of: list[int] = []
        self.part: list[int] = []
        self.bits: list[float | int | None] = []  # the value; for histograms and summaries the count
        self.extra: dict[str, list[float | None]] = {name: [] for name in NUMBERS[2:]}
        self.malformed: list[int] = []  # indices of rejected points
        self.fault = ""  # the reason for the first rejected point
        self.unreadable = 0  # number of metrics whose points cannot be read

    def add_metric(self, metric: Any, group: int) -> None:
        kind = metric.WhichOneof("data")
        if kind is None:
            return
        number = KINDS.index(kind)
        serialized = getattr(metric, kind)
        try:
            self.budget.take(len(message_class("levels.Request").FromString(serialized).groups))
            data = message_class(f"metrics.v1.{_CLASSES[number]}").FromString(serialized)
        except DecodeError:
            self.unreadable += 1
            return
        texts = text(metric.name), text(metric.unit), text(metric.description)
        temporality, monotonic = getattr(data, "aggregation_temporality", 0), getattr(data, "is_monotonic", False)
        described = _Metric(*texts, number, temporality, monotonic, group)
        self.metrics.append(described)
        add = (self._numbers, self._numbers, self._histogram, self._exponential, self._summary)[number]
        for point in data.data_points:
            if not point.flags & _NO_VALUE:
                self.points.append(point)
                self.metric_of.append(len(self.metrics) - 1)
                add(point)
                if described.needs_temporality and described.temporality not in (_DELTA, _CUMULATIVE):
                    self._reject(f"aggregation temporality {described.temporality}; expected delta or cumulative")

    def _reject(self, why: str) -> None:
        """Rejects the newest point."""
        self.malformed.append(len(self.points) - 1)
        self.fault = self.fault or f"{self.metrics[-1].name!s}: {why}"

    def _row(self, part: int, value: float | int | None, **extra: float | None) -> None:
        self.point_of.append(len(self.points) - 1)
        self.part.append(part)
        self.bits.append(value)
        for name, column in self.extra.items():
            column.append(extra.get(name))

    def _numbers(self, point: Any) -> None:
        kind = point.WhichOneof("value")
        self._row(_VALUE, None if kind is None else getattr(point, kind))

    def _total(self, point: Any) -> None:
        known = {name: getattr(point, name) for name in ("sum", "min", "max") if point.HasField(name)}
        self._row(_TOTAL, point.count, **known)

    def _buckets(self, counts: Sequence[int], lower: Iterable[float | None], upper: Iterable[float | None]) -> None:
        self.budget.take(len(counts), unit=1)
        for count, begin, end in zip(counts, lower, upper, strict=True):
            self._row(_BUCKET, count, lower=begin, upper=end)

    def _histogram(self, point: Any) -> None:
        self._total(point)
        bounds, counts = list(point.explicit_bounds), point.bucket_counts
        if counts and len(counts) != len(bounds) + 1:
            self._reject(f"{len(counts)} bucket counts and {len(bounds)} bounds")
        elif not all(lower < upper for lower, upper in pairwise((-math.inf, *bounds))):
            self._reject("bounds that do not increase")
        elif counts:
            self._buckets(counts, [None, *bounds], [*bounds, None])

    def _exponential(self, point: Any) -> None:
        self._total(point)
        if self.metrics[-1].temporality == _CUMULATIVE:
            # If the scale changes, two points have different buckets, so their difference is unknown.
            self._reject("a cumulative exponential histogram; expected delta temporality")
            return
        if not MIN_SCALE <= point.scale <= MAX_SCALE:
            self._reject(f"scale {point.scale}; expected {MIN_SCALE} to {MAX_SCALE}")
            return
        self.budget.take(len(point.positive.bucket_counts) + len(point.negative.bucket_counts), unit=1)
        for sign, side in ((1.0, point.positive), (-1.0, point.negative)):
            with np.errstate(over="ignore"):
                indexes = side.offset + np.arange(len(side.bucket_counts) + 1, dtype=np.float64)
                bounds = sign * np.exp2(indexes * 2.0**-point.scale)
            for count, one, other in zip(side.bucket_counts, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
                if count:
                    self._row(_BUCKET, count, lower=min(one, other), upper=max(one, other))
        if point.zero_count:
            self._row(_BUCKET, point.zero_count, lower=-point.zero_threshold, upper=point.zero_threshold)

    def _summary(self, point: Any) -> None:
        self._row(_TOTAL, point.count, sum=point.sum)
        self.budget.take(len(point.quantile_values), unit=1)
        for each in point.quantile_values:
            self._row(_QUANTILE, each.value, quantile=each.quantile)


class MetricRows(Rows):
    """The rows of the metrics of a request.

    Args:
        names: the metrics to read. A name may end in ``*``. None for all metrics.
    """

    signal = "metrics"
    fields = dict.fromkeys("name unit description type temporality part".split(), "string")
    fields |= {"monotonic": "bool", "value": "number", "count": "number"}
    fields |= dict.fromkeys("sum min max lower upper quantile".split(), "float64")

    def __init__(self, records: OtlpRecords, names: Sequence[str] | None, budget: Budget) -> None:
        builder = _Builder(budget)
        chosen: dict[bytes, bool] = {}
        for metric, group in zip(records.messages, records.group_of.tolist(), strict=True):
            name = metric.name
            if name not in chosen:
                known = name.decode("utf-8", "replace")
                chosen[name] = names is None or any(fnmatchcase(known, pattern) for pattern in names)
            if chosen[name]:
                builder.add_metric(metric, group)
        self._build(builder)
        unreadable = records.unreadable + builder.unreadable
        super().__init__(
            OtlpRecords(builder.budget, builder.points, records.resources, records.scopes, unreadable=unreadable)
        )

    def _build(self, builder: _Builder) -> None:
        self.metrics = builder.metrics
        self.malformed, self.fault = np.array(builder.malformed, np.int64), builder.fault
        self.metric_of_point = np.array(builder.metric_of, np.int64)
        self.point_of = np.array(builder.point_of, np.int64)
        self.part = np.array(builder.part, np.int64)
        given = builder.bits
        self.has_number = np.array([each is not None for each in given], np.bool_)
        # Counts may be larger than int64. Such a count is a float, which an int64 column rejects.
        self.is_int = np.array([isinstance(each, int) and each < 1 << 63 for each in given], np.bool_)
        ints = np.array([e if is_int else 0 for e, is_int in zip(given, self.is_int, strict=True)], np.int64)
        floats = np.array([0.0 if e is None else float(e) for e in given], np.float64)
        self.bits = np.where(self.is_int, ints, floats.view(np.int64))
        self.extra = {name: np.array(column, np.float64) for name, column in builder.extra.items()}
        self.metric_of = self.metric_of_point[self.point_of]
        self.is_total = np.array([metric.is_total for metric in self.metrics], np.bool_)[self.metric_of]
        self.is_total &= self.part != _QUANTILE

    def _times(self) -> IntArray:
        return nanoseconds(self.records.messages, "time_unix_nano")[self.point_of]

    @property
    def start_ns(self) -> IntArray:
        return nanoseconds(self.records.messages, "start_time_unix_nano")[self.point_of]

    def group_of(self) -> IntArray:
        return np.array([metric.group for metric in self.metrics], np.int64)[self.metric_of]

    def _own_attribute(self, key: str) -> Values:
        return super()._own_attribute(key).at(self.point_of)

    def _field(self, path: str) -> Values:
        read: Mapping[str, Callable[[_Metric], Any]] = {
            "type": lambda metric: KINDS[metric.kind],
            "temporality": lambda metric: {_DELTA: "delta", _CUMULATIVE: "cumulative"}.get(metric.temporality),
            "monotonic": lambda metric: metric.is_monotonic if metric.kind == _SUM else None,
        }
        if path == "part":
            return Values(PARTS, self.part)
        if path in read:
            return Values(list(map(read[path], self.metrics)), self.metric_of)
        return Values([getattr(metric, path) or None for metric in self.metrics], self.metric_of)

    def keys(self, rows: IntArray) -> list[bytes]:
        """Returns the identity of each row's series: a digest of its metric, its attributes and its bucket."""
        of_metric = [self._metric_digest(metric) for metric in self.metrics]
        points, of_point = self.records.messages, dict[int, bytes]()
        lower, upper, result = self.extra["lower"], self.extra["upper"], list[bytes]()
        for row, point, part in zip(rows.tolist(), self.point_of[rows].tolist(), self.part[rows].tolist(), strict=True):
            if point not in of_point:
                digest = of_metric[self.metric_of_point[point]].copy()
                digest.update(b"".join(sorted(points[point].attributes)))
                of_point[point] = digest.digest()
            key = of_point[point]
            if part != _VALUE:
                bounds = lower[row].tobytes() + upper[row].tobytes() if part == _BUCKET else b""
                key = hashlib.blake2b(key + bytes([part]) + bounds, digest_size=KEY_BYTES).digest()
            result.append(key)
        return result

    def _metric_digest(self, metric: _Metric) -> Any:
        resource, scope = self.records.resources[metric.group], self.records.scopes[metric.group]
        scoped = text(scope.name), text(scope.version), sorted(scope.attributes)
        identity = sorted(resource.attributes), *scoped, metric.name, metric.unit, metric.kind
        return hashlib.blake2b(repr(identity).encode(), digest_size=KEY_BYTES)


class MetricStream:
    """Converts rows to the records of one stream.

    Args:
        paths: by column, the path of a field or an attribute.
        max_series: the largest number of remembered cumulative series.
    """

    def __init__(self, schema: RecordSchema, paths: Mapping[str, str], max_series: int) -> None:
        self._schema, self._max_series = schema, max_series
        self._numbers = {name: path for name, path in paths.items() if path in NUMBERS}
        self._others = {name: path for name, path in paths.items() if path not in NUMBERS}
        others = {name: kind for name, kind in schema.columns.items() if name not in self._numbers}
        self._rest = RecordSchema(others, schema.time, {})

    def decode(
        self, rows: MetricRows, arrival_ms: int
    ) -> tuple[Decoded, Callable[[SeriesMemory], tuple[Decoded, SeriesUpdate]] | None]:
        """Returns the records of the rows.

        If rows are totals, returns no records, and a function that computes the records from the remembered series.
        """
        prepared = prepare(rows, self._others, self._rest)
        malformed = np.isin(rows.point_of, rows.malformed)
        prepared.reject(RejectionReason.MALFORMED, malformed, rows.time_ns, rows.fault.partition(":")[0], rows.fault)
        missing = ~rows.has_number
        prepared.reject(RejectionReason.MALFORMED, missing, rows.time_ns, "value", "a point without a value")
        floats = np.where(rows.is_int, 0.0, rows.bits.view(np.float64))
        negative = np.where(rows.is_int, rows.bits < 0, ~(floats >= 0) | np.isinf(floats)) & rows.is_total
        message = "the value of a monotonic cumulative sum; expected a finite number of at least 0"
        prepared.reject(RejectionReason.WRONG_TYPE, negative, rows.time_ns, "value", message)
        if not rows.is_total.any():
            keep = (rows.part != _BUCKET) | (rows.bits != 0)
            return self._finish(rows, prepared, arrival_ms, keep, rows.bits, rows.is_int, rows.extra["sum"]), None
        at, points = self._totals(rows, prepared, arrival_ms)
        rejected = Decoded(self._schema.empty(), prepared.rejections.as_tuple())
        return rejected, lambda memory: self._convert(rows, prepared, arrival_ms, at, points, memory)

    def _totals(self, rows: MetricRows, prepared: Prepared, arrival_ms: int) -> tuple[IntArray, Points]:
        """Returns the indices of the totals that are not rejected, and their points."""
        time, time_ms = self._schema.time, rows.time_ns // 1_000_000
        # A point in the far future will be rejected. It is left out here, so that later points of its series are not
        # late.
        plausible = (time_ms >= time.min_ms) & (time_ms <= time.latest_ms(arrival_ms))
        at = np.flatnonzero(rows.is_total & prepared.keep & plausible)
        sums = np.nan_to_num(rows.extra["sum"][at], posinf=np.inf, neginf=-np.inf)
        return at, Points(rows.keys(at), rows.start_ns[at], rows.time_ns[at], rows.bits[at], rows.is_int[at], sums)

    def _convert(
        self, rows: MetricRows, prepared: Prepared, arrival_ms: int, at: IntArray, points: Points, memory: SeriesMemory
    ) -> tuple[Decoded, SeriesUpdate]:
        increments = memory.increments(points, arrival_ms * 1_000_000, self._max_series)
        bits, is_int, total = rows.bits.copy(), rows.is_int.copy(), rows.extra["sum"].copy()
        bits[at], is_int[at] = increments.added.bits, increments.added.is_int
        total[at] = np.where(np.isnan(total[at]), np.nan, increments.added.extra)
        for which, why in (
            (
                increments.out_of_order,
                "another process sends the series, too; expected an attribute such as service.instance.id",
            ),
            (increments.too_many, f"a new series beyond max_series ({self._max_series}); expected fewer attributes"),
        ):
            if which.any():
                bad = np.zeros(len(rows), np.bool_)
                bad[at[which]] = True
                name = rows.metrics[rows.metric_of[int(np.argmax(bad))]].name
                prepared.reject(RejectionReason.MALFORMED, bad, rows.time_ns, str(name), f"{name!s}: {why}")
        keep = np.ones(len(rows), np.bool_)
        keep[at] = increments.counts | increments.out_of_order | increments.too_many
        keep &= (rows.part != _BUCKET) | (bits != 0)
        decoded = self._finish(rows, prepared, arrival_ms, keep, bits, is_int, total)
        moved = _have_moved(rows.part[at] == _BUCKET, rows.point_of[at], points, memory.last_ns(points.keys))
        increments.guesses[DropReason.OVERLAPPING_TOTAL][moved & (increments.added.bits != 0)] = True
        times_ms = points.time_ns // 1_000_000
        guessed = (each for reason, mask in increments.guesses.items() for each in guesses(reason, times_ms[mask]))
        return replace(decoded, guessed=tuple(guessed)), increments.update

    def _finish(
        self,
        rows: MetricRows,
        prepared: Prepared,
        arrival_ms: int,
        counts: BoolArray,
        bits: IntArray,
        is_int: BoolArray,
        total: FloatArray,
    ) -> Decoded:
        """Adds the numeric columns, and removes the rows that do not count."""
        has_value = (rows.part == _VALUE) | (rows.part == _QUANTILE)
        is_absolute = ~rows.is_total
        for name, path in self._numbers.items():
            kind = self._schema.columns[name]
            if path in ("value", "count"):
                has = has_value if path == "value" else ~has_value
                prepared.columns[name], bad = _numeric(bits, is_int, has, kind)
                bad &= counts
                if bad.any():
                    example = bits.view(np.float64)[int(np.argmax(bad))]
                    message = f"{name}: {path} is {example}; expected {type_name(kind)}"
                    prepared.reject(RejectionReason.WRONG_TYPE, bad, rows.time_ns, f"{name} = {example}", message)
                continue
            column = total if path == "sum" else rows.extra[path]
            null = np.isnan(rows.extra[path])
            if path in ("min", "max"):  # extremes of a total are over all time, not over the increment
                null = null | ~is_absolute
            prepared.columns[name] = pa.array(column, pa.float64(), mask=null)
        prepared.columns = {name: prepared.columns[name] for name in self._schema.textual}
        if not counts.all():
            prepared.columns = {name: column.filter(pa.array(counts)) for name, column in prepared.columns.items()}
            prepared.keep = prepared.keep[counts]
        return prepared.decoded(self._schema, arrival_ms)


def _numeric(bits: IntArray, is_int: BoolArray, has: BoolArray, kind: pa.DataType) -> tuple[pa.Array, BoolArray]:
    """Returns numbers as a type, null where `has` is false, and a mask of the numbers that cannot be converted."""
    floats = np.where(is_int, 0.0, bits.view(np.float64))
    if kind == pa.float64():
        floats = np.where(is_int, bits.astype(np.float64), floats)
        return pa.array(floats, kind, mask=~has), np.zeros(len(has), np.bool_)
    whole = is_int | ((np.floor(floats) == floats) & (np.abs(floats) < 2.0**63))
    ints = np.where(is_int, bits, np.where(whole, floats, 0.0).astype(np.int64))
    return pa.array(ints, kind, mask=~(has & whole)), has & ~whole


def _have_moved(is_bucket: BoolArray, point_of: IntArray, points: Points, last_ns: IntArray) -> BoolArray:
    """Returns a mask of the buckets that are new in a histogram that is not: the sender has changed the bounds.

    The total of such a bucket has records that earlier buckets have counted.

    Args:
        point_of: the number of the histogram's point.
        last_ns: the times of the last points of the series; -1 for an unknown series.
    """
    histogram_ns = np.full(int(point_of.max(initial=-1)) + 1, -1, np.int64)
    histogram_ns[point_of[~is_bucket]] = last_ns[~is_bucket]
    return is_bucket & (last_ns < 0) & (histogram_ns[point_of] >= np.maximum(points.start_ns, 0))

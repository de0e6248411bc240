"""Receives samples of Prometheus remote write 1.0 (extra ``remote-write``). Each sample is one record.

Prometheus repeats a refused request unchanged. The digest of its body identifies the request, so it counts once. The
samples of a counter become increments (`edge.series`). The journal has the increments together with the last value of
each series, so each increment counts once, even if the agent is killed.

One path may feed several streams, and each stream takes some of the metrics. Each request repeats the label sets of its
series. The edge decodes a label set once, and later looks it up by its bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf.message import DecodeError
from pydantic import Field, field_validator, model_validator
from starlette.responses import PlainTextResponse, Response

from edge.codecs.event_time import extract_event_times
from edge.config import MAX_PATTERN, Model
from edge.receivers import Body, BodyTooLarge, Conversion, Counted, Decompress, Part, PushedSource, Refused, Request
from edge.records import Decoded, RejectionReason, Rejections, Source, guesses
from edge.series import KEY_BYTES, Points, SeriesMemory, SeriesUpdate
from edge.source_kinds import SourceContext, require_module
from edgewater.base.errors import InvalidConfig, InvalidRecord
from edgewater.base.streams import TIME_COLUMN
from edgewater.model import arithmetic
from edgewater.runtime.configuration import refusal
from edgewater.synopses import BoolArray, FloatArray, IntArray
from edgewater.wire import remote_write_pb2 as pb

MEDIA = "application/x-protobuf"
STALE = 0x7FF0000000000002  # format: of Prometheus
"""The bits of the float64 that Prometheus sends when a series has ended."""
NAME_LABEL = "__name__"
COUNTERS = [".*_(total|count|sum|bucket)"]
MAX_LABEL_BYTES = 64 << 10
"""The largest size of all labels of a series. Samples of other series are rejected."""
MAX_SERIES_BYTES = 256 << 10
"""The largest size of a series in a request. It bounds the memory for parsing a series."""
MIN_SAMPLE_BYTES = 16
"""A body may have one sample, native histogram or series for each `MIN_SAMPLE_BYTES` bytes of the limit of a body."""
MAX_CACHE_BYTES = 32 << 20
"""The largest size of all cached label sets in encoded form."""
CHECK_EVERY = 4096  # limit: samples between two checks of the CPU time
_FAR_MS = 10**14  # limit: times that int64 ns cannot have
_NOT_TAKEN, _GAUGE, _COUNTER, _INVALID = range(4)
_ROW = "\0row"
_STATUS = {408: 503, 422: 400, 429: 503}
"""The reply's status by the status of a refusal. Prometheus drops samples after a reply 4xx, so a request to repeat
gets 503.
"""


class RemoteWriteInput(Model):
    """The options below ``remote_write:``.

    Attributes:
        path: the path of the endpoint. Several streams may have the same path.
        metrics: regular expressions (RE2) of whole names of metrics. None: all metrics.
        columns: by column, ``label.NAME`` or ``value``. Columns without an entry: ``value`` is the sample's value,
            ``metric`` is the metric's name, any other is the label with its name.
        counters: regular expressions of the metrics whose values are totals. The edge counts their increments.
        max_series: the largest number of series of counters whose last values the edge remembers.
    """

    path: str = Field(default="/api/v1/write", pattern=r"^(/[A-Za-z0-9._~-]+)+$")
    metrics: list[str] | None = None
    columns: dict[str, str] = {}
    counters: list[str] = COUNTERS
    max_series: int = Field(default=100_000, ge=1, le=10_000_000)

    @field_validator("metrics", "counters")
    @classmethod
    def _patterns(cls, patterns: list[str] | None) -> list[str] | None:
        try:
            _whole(patterns or ()).matches(pa.array([""]))
        except pa.ArrowInvalid as exc:
            raise refusal("regular expressions of RE2, such as http_requests_total or node_.*", str(exc)) from exc
        if len("|".join(patterns or ())) > MAX_PATTERN:
            raise refusal(f"at most {MAX_PATTERN} characters in all", "the list is longer")
        return patterns

    @model_validator(mode="after")
    def _fields(self) -> RemoteWriteInput:
        for column, name in self.columns.items():
            if name != "value" and not (name.startswith("label.") and len(name) > len("label.")):
                raise refusal("value, or a label such as label.handler", f"columns.{column} is {name!r}")
        return self

    def fields(self, columns: Mapping[str, pa.DataType], time: str) -> dict[str, str]:
        """Returns the label of each column; "" for the column of the value.

        Raises:
            InvalidConfig: the options do not fit the columns. Its field is relative to the source's options.
        """
        if time in columns:
            accepted = "an event time that is none of the columns: it is the time of the sample"
            raise InvalidConfig("time.column", time, accepted)
        for name in self.columns:
            if name not in columns:
                raise InvalidConfig("columns", name, f"columns among {', '.join(columns)}")
        usual = {"value": "value", "metric": f"label.{NAME_LABEL}"}
        fields = {name: self.columns.get(name) or usual.get(name) or f"label.{name}" for name in columns}
        values = [name for name, of in fields.items() if of == "value"]
        if len(values) != 1 or columns[values[0]] != pa.float64():
            raise InvalidConfig("columns", ", ".join(values), "one column of type float64 that is the value", "")
        return {name: of.removeprefix("label.") if of != "value" else "" for name, of in fields.items()}


@dataclass(frozen=True, slots=True)
class _Patterns:
    pattern: str

    def matches(self, names: pa.Array) -> BoolArray:
        mask: BoolArray = pc.match_substring_regex(names, self.pattern).to_numpy(zero_copy_only=False)
        return mask


def _whole(patterns: Sequence[str]) -> _Patterns:
    return _Patterns("^(?:" + "|".join(f"(?:{each})" for each in patterns) + ")$" if patterns else "^$")


@dataclass(frozen=True, slots=True)
class _Samples:
    """The samples of a request. All arrays have one entry per sample, except `histograms`.

    Attributes:
        sets: number of the sample's label set in `_LabelSets`, int64.
        histograms: number of the label set of each native histogram, int64.
        unreadable: number of series that cannot be read.
    """

    sets: IntArray
    values: FloatArray
    times_ms: IntArray
    histograms: IntArray
    unreadable: int


@dataclass(slots=True)
class _LabelSets:
    """Decoded label sets by number, and their meaning for each source.

    A number stays valid while the object grows. A change replaces the arrays, so that requests in progress can read on.

    Attributes:
        digests: the identity of each label set's series.
        roles: per source, `_NOT_TAKEN`, `_GAUGE`, `_COUNTER` or `_INVALID` for each label set.
        columns: per source, the values of its columns for each label set.
    """

    roles: list[IntArray]
    columns: list[dict[str, pa.Array]]
    numbers: dict[bytes, int] = field(default_factory=dict)
    digests: list[bytes] = field(default_factory=list)
    nbytes: int = 0


class _Mapping:
    """Maps label sets to the columns of one source."""

    def __init__(self, config: RemoteWriteInput, source: PushedSource) -> None:
        self.source, self.max_series = source, config.max_series
        schema = source.schema
        self.labels = config.fields(schema.columns, schema.time.column)
        self.value = next(name for name, label in self.labels.items() if not label)
        self._metrics = None if config.metrics is None else _whole(config.metrics)
        self._counters = _whole(config.counters)
        self._rows = replace(schema, columns={**schema.columns, _ROW: pa.int64()})

    def roles(self, names: pa.Array) -> IntArray:
        """Returns the role of each metric, by its name. A null name stands for an invalid label set."""
        roles = np.where(self._counters.matches(names.fill_null("")), _COUNTER, _GAUGE)
        if self._metrics is not None:
            roles[~self._metrics.matches(names.fill_null(""))] = _NOT_TAKEN
        roles[names.is_null().to_numpy(zero_copy_only=False)] = _INVALID
        return roles

    def values(self, column: str, sets: Sequence[Mapping[str, str]]) -> pa.Array:
        """Returns the value of a column for each label set; null if the label's text does not fit the column's type."""
        texts = pa.array([labels.get(self.labels[column]) for labels in sets], pa.string())
        return arithmetic.cast(texts, self.source.schema.columns[column])

    def decode(self, samples: _Samples, sets: _LabelSets, number: int, arrival_ms: int) -> Part | None:
        """Returns the records of the source in a request; None if the source takes no sample of it.

        Args:
            number: the number of the source in `sets`.
        """
        roles, rejections = sets.roles[number], Rejections()
        role = roles[samples.sets]
        stale = samples.values.view(np.int64) == STALE
        rows = np.flatnonzero(((role == _GAUGE) | (role == _COUNTER)) & ~stale)
        if number == 0:  # once, because an invalid label set belongs to no source
            _reject(rejections, RejectionReason.MALFORMED, int((role == _INVALID).sum()), _LABELS_ACCEPTED)
            _reject(rejections, RejectionReason.MALFORMED, samples.unreadable, _SERIES_ACCEPTED)
        taken = roles[samples.histograms]
        histograms = int(((taken == _GAUGE) | (taken == _COUNTER)).sum())
        _reject(rejections, RejectionReason.UNSUPPORTED, histograms, "a native histogram; expected classic histograms")
        skipped = {"stale": int((stale & (role != _NOT_TAKEN) & (role != _INVALID)).sum())}
        if not len(rows) and not rejections.count and not skipped["stale"]:
            return None
        at = pa.array(samples.sets[rows])
        table = pa.table(
            {name: column.take(at) for name, column in sets.columns[number].items()}
            | {self.value: pa.array(samples.values[rows]), _ROW: pa.array(rows)}
            | {self._rows.time.column: pa.array(samples.times_ms[rows], pa.timestamp("ms"))}
        )
        decoded = replace(extract_event_times(table, self._rows, arrival_ms, rejections), skipped=skipped)
        kept = decoded.batch.column(_ROW).to_numpy()
        decoded = replace(decoded, batch=decoded.batch.drop_columns([_ROW]))
        is_counter = role[kept] == _COUNTER
        ends = np.flatnonzero(stale & (role == _COUNTER))
        if not is_counter.any() and not len(ends):
            return Part(self.source, decoded)
        digests = [sets.digests[n] for n in samples.sets[kept[is_counter]].tolist()]
        times_ns = samples.times_ms[ends] * 1_000_000
        ended = dict[bytes, list[int]]()
        for n, time_ns in zip(samples.sets[ends].tolist(), times_ns.tolist(), strict=True):
            ended.setdefault(sets.digests[n], []).append(time_ns)
        return Part(self.source, decoded, self._conversion(decoded, is_counter, digests, ended, arrival_ms))

    def _conversion(
        self,
        decoded: Decoded,
        is_counter: BoolArray,
        digests: Sequence[bytes],
        ended: Mapping[bytes, Sequence[int]],
        arrival_ms: int,
    ) -> Conversion:
        """Returns the function that replaces the totals of counters by increments.

        Args:
            digests: the identities of the counters' series, in the order of the counters' rows.
            ended: by series, the times in ns at which Prometheus reports its end.
        """
        totals = decoded.batch.column(self.value).to_numpy()[is_counter]
        times_ms = decoded.batch.column(TIME_COLUMN).to_numpy()[is_counter]
        valid = np.isfinite(totals) & (totals >= 0)
        valid_ms = times_ms[valid]
        count = int(valid.sum())
        points = Points(
            [digest for digest, is_valid in zip(digests, valid.tolist(), strict=True) if is_valid],
            np.zeros(count, np.int64),
            valid_ms * 1_000_000,
            totals[valid].view(np.int64),
            np.zeros(count, np.bool_),
            np.zeros(count),
        )

        def convert(memory: SeriesMemory) -> tuple[Decoded, SeriesUpdate]:
            found = memory.increments(points, arrival_ms * 1_000_000, self.max_series, ended)
            rejections = Rejections(decoded.rejected)
            for reason, bad, what in (
                (RejectionReason.WRONG_TYPE, _at(valid, None), "a counter that is negative or no number"),
                (
                    RejectionReason.MALFORMED,
                    _at(valid, found.out_of_order),
                    "a second total of the same time; expected a label that tells two senders apart",
                ),
                (
                    RejectionReason.TOO_MANY_SERIES,
                    _at(valid, found.too_many),
                    f"a further series; expected at most {self.max_series} (max_series)",
                ),
            ):
                _reject(rejections, reason, int(bad.sum()), what)
                rejections.add_times(reason, times_ms[bad])
            keep, values = ~is_counter, np.zeros(len(is_counter))
            keep[is_counter] = _at(valid, found.counts)
            values[np.flatnonzero(is_counter)[valid]] = found.added.floats
            has_none = ~(found.counts | found.out_of_order | found.too_many)
            skipped = {**decoded.skipped, "no-increment": int(has_none.sum())}
            batch = decoded.batch
            column = batch.schema.get_field_index(self.value)
            merged = pc.if_else(pa.array(is_counter), pa.array(values), batch.column(column))
            batch = batch.set_column(column, batch.schema.field(column), merged).filter(pa.array(keep))
            guessed = (each for reason, mask in found.guesses.items() for each in guesses(reason, valid_ms[mask]))
            return Decoded(batch, rejections.as_tuple(), skipped, tuple(guessed)), found.update

        return convert


_SERIES_ACCEPTED = f"a series that cannot be read; expected a prometheus.TimeSeries, at most {MAX_SERIES_BYTES} bytes"
_LABELS_ACCEPTED = f"a series; expected distinct labels in UTF-8 with {NAME_LABEL}, at most {MAX_LABEL_BYTES} bytes"


def _at(valid: BoolArray, mask: BoolArray | None) -> BoolArray:
    """Returns a mask over all counters from a mask over the valid ones. Without a mask, returns the mask of the invalid
    ones.
    """
    if mask is None:
        return ~valid
    result = np.zeros(len(valid), np.bool_)
    result[valid] = mask
    return result


def _reject(rejections: Rejections, reason: RejectionReason, count: int, message: str) -> None:
    rejections.add(reason, "", message, count)


class RemoteWriteReceiver:
    """A `Receiver` of remote write requests to one path."""

    grpc_method: str | None = None

    def __init__(self, path: str, mappings: Sequence[_Mapping]) -> None:
        self.path = path
        self.encodings: Mapping[str, Decompress] = {"snappy": decompress}
        self._mappings = mappings
        self._lock = threading.Lock()
        self._sets = self._no_sets()

    def sources(self, request: Request) -> Sequence[PushedSource]:
        if request.media != MEDIA:
            raise Refused(415, "unsupported-media-type", f"Content-Type {request.media[:100]!r}; expected {MEDIA}")
        version = request.headers.get("x-prometheus-remote-write-version", "0.1.0")
        if version.startswith("2.") or "io.prometheus.write.v2" in request.headers.get("content-type", ""):
            detail = "remote write 2.0 is not accepted; expected 1.0: protobuf_message: prometheus.WriteRequest"
            raise Refused(415, "unsupported-media-type", detail)
        if not version.startswith(("0.", "1.")):
            detail = f"X-Prometheus-Remote-Write-Version {version[:20]!r} is not accepted; expected 0.1.0"
            raise Refused(415, "unsupported-media-type", detail)
        return [mapping.source for mapping in self._mappings]

    def decode(self, request: Request, body: Body) -> Sequence[Part]:
        try:
            raw = pb.WriteRequest.FromString(body.plain).timeseries
        except DecodeError as exc:
            raise InvalidRecord("body", body.plain[:20], "a prometheus.WriteRequest", str(exc)) from exc
        samples, sets = self._samples(raw, body)
        parts = [
            mapping.decode(samples, sets, number, body.arrival_ms) for number, mapping in enumerate(self._mappings)
        ]
        return [part for part in parts if part is not None]

    def _samples(self, raw: Sequence[bytes], body: Body) -> tuple[_Samples, _LabelSets]:
        """Decodes series. Raises InvalidRecord and BodyTooCostly."""
        check, left = body.check, body.limit_bytes // MIN_SAMPLE_BYTES - len(raw)
        keys, counts, histograms, readable = list[bytes](), list[int](), list[int](), list[bytes]()
        values, times, new = list[float](), list[int](), dict[bytes, Sequence[bytes]]()
        parse, join, known = pb.TimeSeries.FromString, b"\0".join, self._sets.numbers
        for begin in range(0, len(raw), CHECK_EVERY):
            check()
            for each in raw[begin : begin + CHECK_EVERY]:
                if left < 0:
                    raise InvalidRecord("body", None, "smaller requests", "it has too many samples")
                try:
                    series = parse(each) if len(each) <= MAX_SERIES_BYTES else None
                except DecodeError:
                    series = None
                if series is None:
                    continue
                readable.append(each)
                labels, samples = series.labels, series.samples
                left -= len(samples) + len(series.histograms)
                key = join(labels)
                keys.append(key)
                if key not in known:
                    new[key] = labels
                counts.append(len(samples))
                histograms.append(len(series.histograms))
                for sample in samples:
                    values.append(sample.value)
                    times.append(sample.timestamp)
        numbers, sets = self._known(keys, new, readable, check)
        times_ms = np.clip(np.array(times, np.int64), -_FAR_MS, _FAR_MS)
        columns = np.repeat(numbers, counts), np.array(values, np.float64), times_ms
        return _Samples(*columns, np.repeat(numbers, histograms), len(raw) - len(readable)), sets

    def _known(
        self,
        keys: Sequence[bytes],
        new: Mapping[bytes, Sequence[bytes]],
        raw: Sequence[bytes],
        check: Callable[[], None],
    ) -> tuple[IntArray, _LabelSets]:
        """Returns the number of each label set, and the label sets.

        Args:
            keys: the label sets.
            new: the label sets that were not known when the request was read.
            raw: the series of the label sets.
        """
        with self._lock:
            missing = {key for key in keys if key not in self._sets.numbers}
            if missing:
                has_room = self._sets.nbytes + sum(map(len, missing)) <= MAX_CACHE_BYTES
                if has_room and missing <= new.keys():
                    new = {key: labels for key, labels in new.items() if key in missing}
                else:  # the cache is full, or another request has emptied it in the meantime
                    self._sets = self._no_sets()
                    new = {key: pb.TimeSeries.FromString(each).labels for key, each in zip(keys, raw, strict=True)}
                self._sets = self._with(self._sets, new, check)
            return np.fromiter(map(self._sets.numbers.__getitem__, keys), np.int64, len(keys)), self._sets

    def _no_sets(self) -> _LabelSets:
        roles = [np.zeros(0, np.int64) for _ in self._mappings]
        labelled = [(mapping, [n for n, label in mapping.labels.items() if label]) for mapping in self._mappings]
        return _LabelSets(roles, [{n: mapping.values(n, ()) for n in names} for mapping, names in labelled])

    def _with(self, sets: _LabelSets, new: Mapping[bytes, Sequence[bytes]], check: Callable[[], None]) -> _LabelSets:
        """Returns label sets with new ones added. Requests in progress may still use `sets`."""
        decoded = list[dict[str, str]]()
        for number, labels in enumerate(new.values()):
            if number % CHECK_EVERY == 0:
                check()
            decoded.append(_decoded(labels))
        names = pa.array([labels.get(NAME_LABEL) for labels in decoded], pa.string())
        roles = [np.concatenate([old, m.roles(names)]) for old, m in zip(sets.roles, self._mappings, strict=True)]
        columns = [
            {name: pa.concat_arrays([column, m.values(name, decoded)]) for name, column in old.items()}
            for old, m in zip(sets.columns, self._mappings, strict=True)
        ]
        first = len(sets.numbers)
        sets.numbers.update(zip(new, range(first, first + len(new)), strict=True))
        sets.digests.extend(blake2b(key, digest_size=KEY_BYTES).digest() for key in new)
        return _LabelSets(roles, columns, sets.numbers, sets.digests, sets.nbytes + sum(map(len, new)))

    def reply(self, request: Request, counted: Sequence[Counted]) -> Response:
        rejected = [each for part in counted for each in part.rejected]
        if rejected:
            accepted, count = sum(part.records for part in counted), sum(each.count for each in rejected)
            what = "; ".join(f"{each.reason}: {each.count}, the first is {each.message}" for each in rejected)
            detail = f"{count} samples are rejected and will not be counted; {accepted} records count. {what}"
            raise Refused(400, "invalid-record", detail)
        return Response(status_code=204)

    def refusal(self, request: Request, refused: Refused) -> Response:
        """Returns the detail as a line of text, because Prometheus logs it."""
        return PlainTextResponse(refused.detail + "\n", _STATUS.get(refused.status, refused.status))


def _decoded(labels: Sequence[bytes]) -> dict[str, str]:
    """Returns the labels of a series without empty values; {} if the labels are invalid."""
    if len(labels) + sum(map(len, labels)) > MAX_LABEL_BYTES:
        return {}
    try:
        pairs = [(label.name, label.value) for label in map(pb.Label.FromString, labels)]
    except DecodeError:
        return {}
    found = dict(pairs)
    return {name: value for name, value in pairs if value} if len(found) == len(pairs) else {}


def decompress(body: bytes, limit: int) -> bytes:
    """Decompresses the block format of snappy, which begins with the length of the plain data.

    Raises:
        BodyTooLarge: the length exceeds `limit`.
        InvalidRecord: the data cannot be decompressed.
    """
    from cramjam import DecompressionError, snappy

    try:
        if snappy.decompress_raw_len(body) > limit:
            raise BodyTooLarge
        return bytes(snappy.decompress_raw(body))
    except DecompressionError as exc:
        raise InvalidRecord("body", body[:20], "a block of snappy, as Content-Encoding says", str(exc)) from exc


class RemoteWrite:
    """The kind of sources ``remote_write``."""

    name = "remote_write"
    config = RemoteWriteInput

    def sources(self, options: RemoteWriteInput, context: SourceContext) -> Sequence[Source]:
        require_module("cramjam", "cramjam", "remote-write")
        options.fields(context.schema.columns, context.schema.time.column)
        return [_source(options, context)]

    def receivers(self, entries: Sequence[tuple[RemoteWriteInput, SourceContext]]) -> Sequence[RemoteWriteReceiver]:
        by_path: dict[str, list[_Mapping]] = {}
        for options, context in entries:
            by_path.setdefault(options.path, []).append(_Mapping(options, _source(options, context)))
        return [RemoteWriteReceiver(path, mappings) for path, mappings in by_path.items()]


def _source(options: RemoteWriteInput, context: SourceContext) -> PushedSource:
    name = f"{context.stream}:remote_write:{options.path}"
    return PushedSource(name, context.stream, context.schema, context.idle)


KIND = RemoteWrite()

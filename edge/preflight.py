"""The logic of ``edgewater edge check``: validates a configuration against existing data.

It reads the beginning of each source's files, and some records of each broker, with the agent's own decoders. It
reports which records were accepted, and which were rejected and why. It also reports likely mistakes in the
configuration, such as a column that is always empty or a disorder bound that is too small. It changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from edge.codecs.schema import DAY_MS
from edge.config import EdgeConfig, FileConfig, PackageSourceConfig, SourceConfig, StreamConfig
from edge.durability import IDENTITY, load_identity
from edge.query_preview import QueryPreview
from edge.records import Decoded, Rejection, Rejections
from edge.source_kinds import SourceContext
from edge.sources.factory import build_source, check_package, file_opener, package_sources
from edge.sources.files import matching_files
from edge.sources.lookups import StreamLookups, load_table, open_lookups
from edgewater.base.errors import InvalidConfig, InvalidInput, InvalidQuery, StorageError, did_you_mean
from edgewater.base.quantities import format_duration
from edgewater.base.streams import TIME_COLUMN, Delivery
from edgewater.model.query import QuerySpec

MAX_FILES = 3  # limit: the time of a check
MAX_RECORDS_PER_FILE = 50_000  # limit: the time of a check
MAX_RECORDS_PER_BROKER = 1_000  # limit: the time of a check
Add = Callable[[pa.RecordBatch], None]
"""Takes a batch of decoded records."""
OK_ADVISED = "ok, but see the advice above"


@dataclass(slots=True)
class SourceReport:
    """The findings in the beginning of one source.

    Attributes:
        files: number of matching files. At most `MAX_FILES` of them are read.
        facts: findings of the source's kind, one line each.
        records: number of valid records read.
        nbytes: bytes of input read, decompressed.
        first_ms, last_ms: least and greatest event time; None if there was no valid record.
        newest_ms: the newest event time of the sample; None at its beginning. Disorder is measured within a sample.
        disorder_ms: the largest lag of a record behind the newest earlier record.
        only_midnights: whether each event time is a midnight.
        empty_columns: the columns that are null in all records.
        rejections: rejected records.
        problems: faults that stop the source or lose records.
        advice: likely mistakes that do not stop the source.
        delivery: how often a record of the source counts after crashes and lost connections; None if the source cannot
            be built.
    """

    source: str
    files: int = 0
    facts: tuple[str, ...] = ()
    records: int = 0
    nbytes: int = 0
    first_ms: int | None = None
    last_ms: int | None = None
    newest_ms: int | None = None
    disorder_ms: int = 0
    only_midnights: bool = True
    empty_columns: set[str] = field(default_factory=set)
    rejections: Rejections = field(default_factory=Rejections)
    problems: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    delivery: Delivery | None = None

    @property
    def rejected(self) -> tuple[Rejection, ...]:
        return self.rejections.as_tuple()

    def add(self, decoded: Decoded) -> None:
        """Adds the records of a block."""
        batch = decoded.batch
        self.rejections.extend(decoded.rejected)
        if not batch.num_rows:
            return
        if self.records == 0:
            self.empty_columns = set(batch.schema.names)
        self.records += batch.num_rows
        self.empty_columns -= {n for n in batch.schema.names if batch.column(n).null_count < batch.num_rows}
        times = batch.column(TIME_COLUMN).to_numpy()
        least, greatest = int(times.min()), int(times.max())
        self.first_ms = least if self.first_ms is None else min(self.first_ms, least)
        self.only_midnights &= not (times % DAY_MS).any()
        self.last_ms = greatest if self.last_ms is None else max(self.last_ms, greatest)
        newest = np.maximum.accumulate(np.maximum(times, least if self.newest_ms is None else self.newest_ms))
        self.disorder_ms = max(self.disorder_ms, int((newest - times).max()))
        self.newest_ms = int(newest[-1])

    def finish(self, stream: StreamConfig, nothing: str) -> SourceReport:
        """Adds what follows from all records. `nothing` is the reason why there may be none."""
        if self.records == 0 and not self.problems:
            if self.rejections.count:
                self.problems = ("every record that was read is rejected",)
            else:
                self.advice = (*self.advice, f"no record was read: {nothing}")
        self.advice = (*self.advice, *_advice(stream, self))
        return self

    def to_json(self) -> dict[str, object]:
        return {
            "source": self.source,
            "files": self.files,
            "facts": list(self.facts),
            "records": self.records,
            "bytes": self.nbytes,
            "first_event_time": _iso(self.first_ms),
            "last_event_time": _iso(self.last_ms),
            "disorder_ms": self.disorder_ms,
            "rejected": [rejection.to_json() for rejection in self.rejected],
            "problems": list(self.problems),
            "advice": list(self.advice),
            "delivery": self.delivery,
        }


@dataclass(frozen=True, slots=True)
class StreamReport:
    stream: str
    sources: tuple[SourceReport, ...]
    advice: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PreflightReport:
    """The outcome of a check.

    Attributes:
        problems: faults that concern the whole edge.
        preview: the groups that a query would count in the records that were read; None without a query.
    """

    edge: str
    streams: tuple[StreamReport, ...]
    problems: tuple[str, ...] = ()
    preview: QueryPreview | None = None

    @property
    def ok(self) -> bool:
        """Whether there is no problem. Invalid records alone are no problem, because they are rejected and counted."""
        return not self.problems and not any(s.problems for stream in self.streams for s in stream.sources)

    def to_json(self) -> dict[str, object]:
        streams = {s.stream: [source.to_json() for source in s.sources] for s in self.streams}
        advice = {s.stream: list(s.advice) for s in self.streams if s.advice}
        preview = {} if self.preview is None else {"query": self.preview.to_json()}
        return {
            "edge": self.edge,
            "ok": self.ok,
            "problems": list(self.problems),
            "streams": streams,
            "advice": advice,
            **preview,
        }

    def to_text(self) -> str:
        """Returns the report as text, one finding per line."""
        lines = [f"edge {self.edge}", *(f"  problem: {problem}" for problem in self.problems)]
        for stream in self.streams:
            lines.append(f"stream {stream.stream}")
            for source in stream.sources:
                lines += _source_lines(source)
            lines += (f"  advice: {advice}" for advice in stream.advice)
        lines += () if self.preview is None else self.preview.lines()
        advised = any(stream.advice or any(s.advice for s in stream.sources) for stream in self.streams)
        advised |= self.preview is not None and bool(self.preview.advice)
        lines.append("not ok: see the problems above" if not self.ok else OK_ADVISED if advised else "ok")
        return "\n".join(lines)


def _source_lines(source: SourceReport) -> Iterator[str]:
    yield f"  {source.source}"
    yield from (f"    {fact}" for fact in source.facts)
    if source.files or source.nbytes:
        span = f", event time {_iso(source.first_ms)} to {_iso(source.last_ms)}" if source.records else ""
        files = f"{source.files} file(s); " if source.files else ""
        yield f"    {files}read {source.records} valid records in {source.nbytes} bytes{span}"
        if source.disorder_ms:
            yield f"    records arrive up to {format_duration(source.disorder_ms)} behind the newest"
    if source.delivery is not None:
        yield f"    {source.delivery}: {source.delivery.summary}"
    for rejection in source.rejected:
        yield f"    rejected, {rejection.reason}: {rejection.count} record(s); {rejection.message}"
        yield f"      example: {rejection.example}"
    yield from (f"    problem: {problem}" for problem in source.problems)
    yield from (f"    advice: {advice}" for advice in source.advice)


def check(
    config: EdgeConfig, now_ms: Callable[[], int], *, connects: bool = True, query: QuerySpec | None = None
) -> PreflightReport:
    """Checks a configuration against the files and the brokers that it names. Reads some records, and writes nothing.

    Args:
        connects: whether kinds of sources may connect to their systems. The check never connects to the center.
        query: a query to try on the records that are read.

    Raises:
        InvalidQuery: the query does not fit its stream, or the edge does not have the stream.
    """
    streams, problems = [], list(_edge_problems(config))
    preview = None if query is None else _preview(config, query, now_ms)
    for name, stream in config.streams.items():
        problems += _lookup_problems(name, stream)
        keys = _LookupKeys(open_lookups(name, stream, now_ms))
        adds = [
            keys.add,
            *([preview.add] if preview is not None and query is not None and query.stream == name else []),
        ]
        add = _each(adds)
        context = SourceContext(name, stream.record_schema, now_ms)
        reports: list[SourceReport] = []
        for number, source in enumerate(stream.sources):
            if source.package is None:
                reports.append(_check_source(stream, source, now_ms(), add))
            else:
                path = f"streams.{name}.sources.{number}.{source.package.kind}"
                taken = {report.source for report in reports}
                reports.append(_check_package_source(path, stream, source.package, context, taken, connects, add))
        time = stream.record_schema.time
        facts = (
            (f"a time without a zone is in {time.zone} (time.zone)",) if time.is_text and "%z" not in time.unit else ()
        )
        for report, source in zip(reports, stream.sources, strict=True):
            report.delivery, report.facts = _delivery(source, context), (*report.facts, *facts)
        streams.append(StreamReport(name, tuple(reports), tuple(keys.advice())))
    return PreflightReport(config.edge, tuple(streams), tuple(problems), preview)


def _each(adds: Sequence[Add]) -> Add:
    def add(batch: pa.RecordBatch) -> None:
        for take in adds:
            take(batch)

    return add


class _LookupKeys:
    """Counts which records have a row in the stream's lookups."""

    def __init__(self, lookups: StreamLookups) -> None:
        self._lookups = lookups
        self._keys = [0] * len(lookups.lookups)

    def add(self, batch: pa.RecordBatch) -> None:
        if not self._keys:
            return
        joined = self._lookups.join(batch, needs_all=False)
        for number, lookup in enumerate(self._lookups.lookups):
            self._keys[number] += batch.num_rows - joined.column(lookup.config.stream_key).null_count

    def advice(self) -> Iterator[str]:
        for keys, lookup in zip(self._keys, self._lookups.lookups, strict=True):
            if keys and lookup.loaded_ms is not None and lookup.unmatched == keys:
                key = lookup.config.stream_key
                yield f"lookup {lookup.config.file} has no row for any of {keys} records with a {key}; check its key"


def _preview(config: EdgeConfig, query: QuerySpec, now_ms: Callable[[], int]) -> QueryPreview:
    stream = config.streams.get(query.stream)
    if stream is None:
        near = did_you_mean(query.stream, config.streams).lstrip(", ")
        raise InvalidQuery("from", query.stream, f"one of the streams {', '.join(config.streams)}", near)
    joined = open_lookups(query.stream, stream, now_ms)
    # A lookup that cannot be loaded is reported as a separate problem. Its columns are null here.
    return QueryPreview(query, stream.stream_columns, partial(joined.join, needs_all=False))


def _lookup_problems(name: str, stream: StreamConfig) -> Iterator[str]:
    for number, lookup in enumerate(stream.lookups):
        try:
            load_table(lookup, stream.stream_columns[lookup.stream_key])
        except InvalidConfig as exc:
            yield f"streams.{name}.lookups.{number}.{exc}"


def _check_package_source(
    path: str,
    stream: StreamConfig,
    package: PackageSourceConfig,
    context: SourceContext,
    taken: set[str],
    connects: bool,
    add: Add,
) -> SourceReport:
    name = package.kind
    try:
        name = next((source.name for source in package_sources(package, context, taken)), name)
        found = check_package(package, context, MAX_RECORDS_PER_BROKER) if connects else None
    except InvalidConfig as exc:
        field = exc.field if exc.field.startswith("streams.") else f"{path}.{exc.field}".rstrip(".")
        return SourceReport(name, problems=(str(InvalidConfig(field, exc.value, exc.accepted, exc.reason)),))
    except (InvalidInput, OSError) as exc:
        return SourceReport(name, problems=(f"{path}: {exc}",))
    # A fault of a package concerns only its own report; the text is left out, as it may quote records or credentials.
    except Exception as exc:
        return SourceReport(name, problems=(f"{path}: the check failed: {type(exc).__name__}",))
    if found is None:
        return SourceReport(name)
    report = SourceReport(name, facts=found.facts, problems=found.problems, advice=found.advice, nbytes=found.nbytes)
    for sample in found.samples:
        report.newest_ms = None
        report.add(sample)
        add(sample.batch)
    return report.finish(stream, f"{name} has none now; check its names")


def _delivery(source: SourceConfig, context: SourceContext) -> Delivery | None:
    if source.package is None:
        return build_source(source, context).delivery
    with contextlib.suppress(Exception):  # the report has the reason
        for each in package_sources(source.package, context):
            return each.delivery
    return None


def _edge_problems(config: EdgeConfig) -> Iterator[str]:
    state = Path(config.state_dir)
    existing = next(path for path in (state, *state.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        yield f"state_dir: {config.state_dir}: {existing} is not a writable directory"
    if (free := shutil.disk_usage(existing).free) < config.limits.max_pending_bytes:
        need = f"expected at least limits.max_pending_bytes, {config.limits.max_pending_bytes}"
        yield f"state_dir: {config.state_dir}: {free} bytes are free; {need}"
    if (state / IDENTITY).exists():
        try:
            load_identity(state, dict)
        except StorageError as exc:
            yield f"state_dir: {exc}"
    tls = config.center.tls
    for key in ("ca", "cert", "key") if tls is not None else ():
        path = getattr(tls, key)
        if path is not None and not os.access(path, os.R_OK):
            yield f"center.tls.{key}: {path} is not a readable file"


def _check_source(stream: StreamConfig, source: SourceConfig, now_ms: int, add: Add) -> SourceReport:
    if source.file is not None:
        return _check_files(stream, source.file, now_ms, add)
    return SourceReport("stdin" if source.stdin is not None else "http")


def _check_files(stream: StreamConfig, file: FileConfig, now_ms: int, add: Add) -> SourceReport:
    name = f"file {file.path} ({file.format})"
    paths = matching_files(file.path)
    if not paths and not file.follow:
        return SourceReport(name, problems=("no file matches the path; expected one, or follow: true",))
    report = SourceReport(name, len(paths))
    for path in paths[:MAX_FILES]:
        try:
            _read_beginning(path, file, stream, report, now_ms, add)
        except (InvalidInput, OSError) as exc:
            report.problems = (*report.problems, str(exc))
    return report.finish(stream, "the files are empty" if paths else "no file matches the path yet; check it")


def _read_beginning(
    path: str, file: FileConfig, stream: StreamConfig, report: SourceReport, now_ms: int, add: Add
) -> None:
    reader = file_opener(file, stream.record_schema)(path, None)
    report.newest_ms = None  # files are read in the order of their names
    read = 0
    try:
        while read < MAX_RECORDS_PER_FILE and (piece := reader.next(True, now_ms)) is not None:
            report.add(piece.decoded)
            add(piece.decoded.batch)
            report.nbytes += piece.nbytes
            read += piece.decoded.batch.num_rows + 1
    finally:
        reader.close()


def _advice(stream: StreamConfig, findings: SourceReport) -> Iterator[str]:
    if findings.records and findings.only_midnights and stream.time.time_of_day is None:
        yield (
            f"time.column {stream.time.column}: every event time is a midnight, such as {_iso(findings.first_ms)}: a"
            " date without a time of day. A window shorter than a day would have all records of a day or none: name the"
            " column with the time of day in time.time_of_day, or let windows be whole days"
        )
    if findings.disorder_ms > stream.disorder_ms:
        seen, allowed = format_duration(findings.disorder_ms), format_duration(stream.disorder_ms)
        yield f"disorder is {allowed} but records arrive up to {seen} behind the newest; late records may be left out"
    for column in sorted(findings.empty_columns):
        yield f"column {column} is null in every record that was read; check its name"
    replay = stream.replay
    if replay is not None and replay.start is not None and findings.first_ms is not None:
        if findings.first_ms < replay.start:
            yield f"records begin at {_iso(findings.first_ms)}, before replay.start; these are released at once"
        elif findings.last_ms is not None and findings.first_ms > replay.start and replay.speed != "max":
            wait_ms = round((findings.first_ms - replay.start) / float(replay.speed))
            if wait_ms > 60_000:
                yield f"the first record is released {format_duration(wait_ms)} after the replay's start"


def _iso(millis: int | None) -> str | None:
    return None if millis is None else f"{np.datetime64(millis, 'ms')}Z"

"""The configuration of an edge: one YAML file.

Paths are relative to the working directory. The token and the edge's id are given literally or as
``{env: NAME}`` or ``{file: PATH}``; with an id from the environment many machines share one file.
Nothing else in the file is substituted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import pyarrow as pa
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from edge.codecs import (
    CODECS,
    COMBINED_FIELDS,
    COMBINED_TIME,
    DAY_MS,
    EXTENSIONS,
    TIME_UNITS,
    YEAR_2000_MS,
    CsvDialect,
    EventTime,
    Format,
    LinePattern,
    RecordSchema,
    TextFormat,
    TextFormatName,
    is_time_pattern,
)
from edge.source_kinds import BUILT_IN, KINDS
from edgewater.model.errors import InvalidConfig
from edgewater.model.measure import NAME, NAME_ACCEPTED
from edgewater.model.streams import COLUMN_TYPES, MAX_CONSTANT, TIME_COLUMN, Constant, is_constant
from edgewater.runtime.configuration import (
    INSTANT_ACCEPTED,
    Address,
    Duration,
    Instant,
    RemoteAddress,
    Section,
    Size,
    is_loopback,
    read_secret,
    read_yaml,
    refusal,
    text_or_referenced,
    validate,
)

IDLE_MS = 10_000
MIN_BANDWIDTH = 1 << 10
"""Bytes per second: heartbeats alone take up to a hundred and fifty while an edge has news."""
MAX_PUSH_BYTES = 12 << 20
"""An Arrow body may grow 16-fold, and a record of the journal ends at 256 MiB."""


class Model(Section):
    model_config = ConfigDict(strict=True)


class TlsConfig(Model):
    """PEM files of a connection. They are read at each connection."""

    ca: str | None = None
    """CA of the other side. None: the CAs of the system."""
    cert: str | None = None
    """This edge's certificate, for mutual TLS."""
    key: str | None = None
    """The key of `cert`."""

    @model_validator(mode="after")
    def _pair(self) -> TlsConfig:
        if (self.cert is None) != (self.key is None):
            raise refusal("cert and key together, or neither")
        return self


class UplinkConfig(Model):
    """The connection to the center."""

    address: RemoteAddress = "127.0.0.1:7400"
    """Address of the center's gateway."""
    token: SecretStr | None = None
    """The token of this edge at the center."""
    tls: TlsConfig | None = None
    """TLS. None: no TLS."""
    bandwidth: Size | None = Field(default=None, ge=MIN_BANDWIDTH)
    """Most bytes per second that this edge sends. None: unlimited."""
    daily: Size | None = Field(default=None, gt=0)
    """Most bytes per UTC day that this edge sends. Frames wait for the next day, heartbeats do not. None: unlimited."""

    @field_validator("token", mode="before")
    @classmethod
    def _secret(cls, value: object, info: ValidationInfo) -> object:
        return read_secret(value, (info.context or {}).get("environ", os.environ))


def secret(value: object, info: ValidationInfo) -> SecretStr | None:
    """Reads a secret: itself, ``{env: NAME}`` or ``{file: PATH}``. For validators of kinds of sources."""
    return read_secret(value, (info.context or {}).get("environ", os.environ))


class HttpTlsConfig(Model):
    """PEM files of the HTTP server."""

    cert: str
    """The server's certificate."""
    key: str
    """The key of `cert`."""
    client_ca: str | None = None
    """The authority whose certificates clients must present. None: clients need no certificate."""


class HttpConfig(Model):
    """The server of pushed records and of the operator's endpoints."""

    listen: Address = "127.0.0.1:7410"
    """Address of the server. An address other than loopback needs `tokens` or `tls.client_ca` if a stream is pushed."""
    hosts: list[str] = []
    """Names besides loopback by which requests without credentials may address the server, such as a proxy's name."""
    tokens: list[SecretStr] = []
    """Bearer tokens of the clients that push. Several are valid at once, so that one can replace another."""
    tls: HttpTlsConfig | None = None
    """TLS of the server. None: no TLS."""
    metrics: Address | None = None
    """Address of /livez, /readyz and /metrics without TLS and token. None: they are at `listen`."""
    grpc: Address | None = None
    """Address of the gRPC services of sources such as otlp, with the same tokens and TLS. None: they are not served."""

    @field_validator("tokens", mode="before")
    @classmethod
    def _secrets(cls, values: object, info: ValidationInfo) -> object:
        if not isinstance(values, list):
            raise refusal("a list of tokens, each the secret itself, {env: NAME} or {file: PATH}")
        return [read_secret(value, (info.context or {}).get("environ", os.environ)) for value in values]

    @property
    def authenticates(self) -> bool:
        return bool(self.tokens) or (self.tls is not None and self.tls.client_ca is not None)


class LimitsConfig(Model):
    """Limits of memory, time and CPU."""

    max_pending_bytes: Size = Field(default=64 << 20, ge=1 << 20)
    """Memory of groups and unacknowledged frames. Above it, the edge reads no more records until frames have left."""
    max_query_bytes: Size | None = Field(default=None, ge=1 << 10)
    """Memory of one query's open windows, and of closed windows that accept late records. Above it, these windows take
    no more records. At most three quarters of `max_pending_bytes`. None: half of `max_pending_bytes`."""
    max_push_bytes: Size = Field(default=8 << 20, ge=1, le=MAX_PUSH_BYTES)
    """Size of one pushed body, both as sent and decompressed."""
    push_timeout_ms: Duration = Field(default=60_000, alias="push_timeout", ge=100)
    """Time in which a pushed body must arrive."""
    push_cpu_ms: Duration = Field(default=5_000, alias="push_cpu", ge=10)
    """CPU time that decoding one pushed body may take."""
    checkpoint_ms: Duration = Field(default=5000, alias="checkpoint", ge=100)
    """Interval between checkpoints."""
    scheduling: Literal["klink", "fair", "fcfs", "off"] = "off"
    """Which query runs next while the edge is short of CPU: `klink` takes the least slack, `fair` each query in turn,
    `fcfs` the oldest batch. `off` has no queues: all queries process each batch at once."""

    @field_validator("scheduling", mode="before")
    @classmethod
    def _off(cls, value: object) -> object:
        return "off" if value is False else value  # what YAML makes of `off` without quotes

    @model_validator(mode="after")
    def _leaves_room(self) -> LimitsConfig:
        most = self.max_pending_bytes - self.max_pending_bytes // 4
        if self.max_query_bytes is not None and self.max_query_bytes > most:
            raise InvalidConfig(
                "limits.max_query_bytes",
                self.max_query_bytes,
                f"at most three quarters of limits.max_pending_bytes, {most}",
                "it would leave no room for frames",
            )
        return self


class TimeConfig(Model):
    """Where the event time of a record is read."""

    column: str = Field(min_length=1)
    """The column of the event time."""
    time_of_day: str | None = Field(default=None, min_length=1)
    """A second column, with the time of day, if `column` has dates."""
    unit: str = "ms"
    """`ms`, `s`, `us`, `iso8601`, or a pattern of `strptime`. If a source of the stream has the format `combined`, the
    default is the time of access logs."""
    min_time: Instant = YEAR_2000_MS
    """Records before this time are rejected."""
    max_skew: Duration = DAY_MS
    """Records that are further ahead of the stream's clock are rejected. A replay has no such limit."""

    @field_validator("unit")
    @classmethod
    def _unit(cls, unit: str) -> str:
        if unit not in TIME_UNITS and not ("%" in unit and is_time_pattern(unit)):
            raise refusal(
                f"one of {', '.join(TIME_UNITS)}, or a pattern of strptime such as {COMBINED_TIME!r}",
                f"{unit!r} does not read year, month, day, hour, minute and second",
            )
        return unit


class ReplayConfig(Model):
    """Replay of recorded data under a replay clock."""

    speed: float | Literal["max"]
    """Event time per wall time. `max`: as fast as records can be read, without a clock."""
    start: Instant | None = None
    """Event time at which the replay begins. Required unless `speed` is `max`."""
    at: Instant | None = None
    """Wall time at which the replay begins. None: at the agent's first start."""

    @field_validator("speed", mode="before")
    @classmethod
    def _speed(cls, value: object) -> object:
        number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
        if not number and value != "max":
            raise refusal("a positive number, such as 86400 for a day a second, or max")
        return float(value) if isinstance(value, int) else value

    @model_validator(mode="after")
    def _has_start(self) -> ReplayConfig:
        if self.speed != "max" and self.start is None:
            raise refusal(f"start: {INSTANT_ACCEPTED}, the event time at which the replay begins", "start is missing")
        return self


class CsvConfig(Model):
    """The CSV dialect."""

    delimiter: str = Field(default=",", pattern=r"^[\t !#-~]$")
    """One character between fields."""
    nulls: list[str] = []
    """Texts that are null in every column. Without any, these are null: an empty field, and NA, NULL and NaN in columns
    that are not strings."""
    header: list[str] | None = None
    """Names of the columns, for input without a header line."""

    @property
    def dialect(self) -> CsvDialect:
        return CsvDialect(self.delimiter, tuple(self.nulls))


MAX_PATTERN = 4096
"""Characters of a regular expression."""


class RegexConfig(Model):
    """The pattern of the format `regex`."""

    pattern: str = Field(min_length=1, max_length=MAX_PATTERN)
    """A regular expression of RE2 that matches a whole line, with a named group per column."""
    nulls: list[str] = []
    """Texts that are null, besides an empty text."""

    @field_validator("pattern")
    @classmethod
    def _pattern(cls, pattern: str) -> str:
        if (fault := LinePattern(pattern).fault) is not None:
            accepted = "a regular expression of RE2 with a named group per column, such as (?P<status>[0-9]+)"
            raise refusal(f"{accepted}; RE2 has no backreferences and no lookarounds", fault)
        return pattern


class TextConfig(Model):
    """A text format and its options, of a source whose records are lines."""

    format: TextFormatName
    """The format of the records."""
    csv: CsvConfig = CsvConfig()
    """Options of the format `csv`."""
    regex: RegexConfig | None = None
    """The pattern of the format `regex`."""

    @model_validator(mode="before")
    @classmethod
    def _format_by_options(cls, options: Any) -> Any:
        if isinstance(options, dict) and "format" not in options and "regex" in options:
            return {**options, "format": "regex"}
        return options

    @model_validator(mode="after")
    def _pattern_fits(self) -> Self:
        if (self.format == "regex") != (self.regex is not None):
            accepted = "regex: {pattern: …} with format: regex, and with no other format"
            raise refusal(accepted, f"format is {self.format}")
        return self

    def column_fault(self, columns: Sequence[str]) -> tuple[str, str] | None:
        """Returns what is accepted and what is wrong, if the fields of the format do not fit the columns."""
        groups = self.pattern.groups if self.regex is not None else COMBINED_FIELDS
        if self.format == "combined" or self.regex is not None:
            for name in columns:
                if name not in groups:
                    accepted = f"columns among the fields of the format {self.format}: {', '.join(groups)}"
                    return accepted, f"column {name} is none of them"
        for name in groups if self.regex is not None else ():
            if name not in columns:
                accepted = f"groups of regex.pattern that are columns or the time: {', '.join(columns)}"
                return accepted, f"the group {name} is none of them; (?:…) is a group without a column"
        return None

    @property
    def pattern(self) -> LinePattern:
        assert self.regex is not None
        return LinePattern(self.regex.pattern, tuple(self.regex.nulls))

    def text_format(self, schema: RecordSchema) -> TextFormat:
        """Returns the format for records of a stream; not for Parquet."""
        header = tuple(self.csv.header) if self.csv.header is not None and self.format == "csv" else None
        pattern = self.pattern if self.regex is not None else None
        return TextFormat(self.format, schema, self.csv.dialect, header, pattern)


class FileConfig(TextConfig):
    """Files of a pattern."""

    path: str = Field(min_length=1)
    """A path, or a pattern such as `/var/log/*.csv`."""
    format: Format  # type: ignore[assignment]
    """The format of the records. It may be missing if the extension of `path` or a `regex` tells it."""
    follow: bool = False
    """Whether appended lines, new files and rotated files are read, too."""
    rotate_wait: Duration = 60_000
    """How long a followed file that has left the pattern is kept open after its last record. It is shorter if no
    process has the file open for writing."""
    compression: Literal["auto", "none", "gzip", "zstd", "bz2"] = "auto"
    """The compression of the files. `auto`: by their extension."""

    @model_validator(mode="before")
    @classmethod
    def _format_by_name(cls, options: Any) -> Any:
        if not isinstance(options, dict) or "format" in options or not isinstance(options.get("path"), str):
            return options
        path = Path(options["path"])
        suffix = Path(path.stem).suffix if path.suffix in CODECS else path.suffix
        return {**options, "format": EXTENSIONS[suffix]} if suffix in EXTENSIONS else options


class StdinConfig(TextConfig):
    """Standard input of the agent. Its records count at most once."""

    format: TextFormatName = "ndjson"


class HttpPushConfig(TextConfig):
    """Records are pushed to ``POST /v1/streams/{stream}``."""

    dedupe: Literal["body", "key"] = "body"
    """How a batch that is pushed again is recognised. `body`: by its Idempotency-Key, or else by its body and client.
    `key`: only by its Idempotency-Key."""
    format: TextFormatName | None = None  # type: ignore[assignment]
    """The format of bodies of the type text/plain. None: such bodies are refused."""


class PackageSourceConfig(Model):
    """A source of a kind that a package provides.

    Attributes:
        options: an instance of the kind's `config`, once the whole configuration is validated.
    """

    kind: str
    options: Any


class SourceConfig(Model):
    """One source: exactly one of the three built-in kinds, or a kind that a package provides."""

    file: FileConfig | None = None
    """Files of a pattern."""
    stdin: StdinConfig | None = None
    """Standard input of the agent, in one stream only."""
    http: HttpPushConfig | None = None
    """Records that clients push."""
    package: PackageSourceConfig | None = Field(default=None, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _one_kind(cls, source: Any) -> Any:
        if isinstance(source, dict) and len(source) == 1:
            ((kind, options),) = source.items()
            options = {} if options is None else options
            return {kind: options} if kind in BUILT_IN else {"package": {"kind": str(kind), "options": options}}
        accepted = (
            "one of file: {path: …}, stdin: {format: …}, http: {}, or a kind of a package, with its options below it"
        )
        raise refusal(accepted, "the entry has several keys" if isinstance(source, dict) and len(source) > 1 else "")

    @property
    def is_pushed(self) -> bool:
        """Whether its records arrive in requests to this edge."""
        return self.http is not None or self.has_receivers

    @property
    def has_receivers(self) -> bool:
        """Whether the kind of a package receives its records in requests."""
        return self.package is not None and KINDS.receivers(self.package.kind) is not None


class LookupConfig(Model):
    """Columns that are added to records from a file, by the value of a key column."""

    file: str = Field(min_length=1)
    """Path of the file, with one row per key."""
    format: Literal["csv", "ndjson", "parquet"]
    """Format of the file; by default that of its extension."""
    key: str | dict[str, str]
    """Key column of the stream and of the file; `{stream column: file column}` if their names differ."""
    columns: dict[str, str] = Field(min_length=1)
    """Columns of the file that are added, with their types. They become columns of the stream."""
    refresh: Duration = Field(default=60_000, ge=1_000)
    """Interval at which the file is loaded again if it has changed."""

    @model_validator(mode="before")
    @classmethod
    def _format_by_name(cls, options: Any) -> Any:
        if not isinstance(options, dict) or "format" in options or not isinstance(options.get("file"), str):
            return options
        suffix = Path(options["file"]).suffix
        return {**options, "format": EXTENSIONS[suffix]} if suffix in EXTENSIONS else options

    @field_validator("key")
    @classmethod
    def _one_key(cls, key: str | dict[str, str]) -> str | dict[str, str]:
        if isinstance(key, dict) and len(key) != 1:
            raise refusal("one column, or {column of the stream: column of the file}")
        return key

    @model_validator(mode="after")
    def _types(self) -> LookupConfig:
        for name, kind in self.columns.items():
            if kind not in COLUMN_TYPES:
                raise refusal(f"a type among {', '.join(COLUMN_TYPES)}", f"column {name} has the unknown type {kind}")
        if self.file_key in self.columns:
            raise refusal("columns without the key", f"{self.file_key} is the key")
        return self

    @property
    def stream_key(self) -> str:
        return self.key if isinstance(self.key, str) else next(iter(self.key))

    @property
    def file_key(self) -> str:
        return self.key if isinstance(self.key, str) else next(iter(self.key.values()))


class StreamConfig(Model):
    """A stream that this edge serves."""

    columns: dict[str, str]
    """Name and type of each column: string, int64, float64 or bool."""
    time: TimeConfig
    """Where the event time is. It may be missing if a source has the format `combined`."""
    lookups: list[LookupConfig] = Field(default=[], max_length=8)
    """Files whose columns are added to the records. A key may be a column of an earlier one."""
    constants: dict[str, Constant] = {}
    """Columns that have one value in all records of the stream at this edge, such as its site."""
    disorder_ms: Duration = Field(default=0, alias="disorder")
    """How far behind the newest record a record may come and be punctual."""
    idle: Duration | None = None
    """Time without records after which a source's watermark follows the clock. None: 10s, and never in a replay."""
    replay: ReplayConfig | None = None
    """The clock of recorded data. None: event time is wall time."""
    sources: list[SourceConfig] = Field(min_length=1)
    """Where the records come from."""

    @field_validator("columns")
    @classmethod
    def _types(cls, columns: dict[str, str]) -> dict[str, str]:
        if not columns:
            raise refusal("at least one column, such as {carrier: string}")
        for name, kind in columns.items():
            if kind not in COLUMN_TYPES:
                raise refusal(f"a type among {', '.join(COLUMN_TYPES)}", f"column {name} has the unknown type {kind}")
        if TIME_COLUMN in columns:
            raise refusal(f"another name than {TIME_COLUMN}", "that is the name of the event time in every stream")
        return columns

    @model_validator(mode="before")
    @classmethod
    def _time_of_access_logs(cls, stream: Any) -> Any:
        sources = stream.get("sources") if isinstance(stream, dict) else None
        kinds = (
            [options for s in sources if isinstance(s, dict) for options in s.values()]
            if isinstance(sources, list)
            else []
        )
        if not any(isinstance(options, dict) and options.get("format") == "combined" for options in kinds):
            return stream
        time = stream.get("time", {})
        return (
            {**stream, "time": {"column": "time", "unit": COMBINED_TIME, **time}} if isinstance(time, dict) else stream
        )

    @model_validator(mode="after")
    def _formats_fit(self) -> StreamConfig:
        columns = list(self.record_schema.textual)
        for source in self.sources:
            text = source.file or source.stdin or source.http
            if text is not None and (fault := text.column_fault(columns)) is not None:
                raise refusal(*fault)
        return self

    @model_validator(mode="after")
    def _time_fits(self) -> StreamConfig:
        if self.time.time_of_day is not None and self.time.unit != "iso8601":
            raise refusal(
                "time.unit: iso8601, with dates such as 2013-01-01 and times of day such as 05:15:00",
                f"time.time_of_day is {self.time.time_of_day} and time.unit is {self.time.unit}",
            )
        if self.time.time_of_day == self.time.column:
            raise refusal("two different columns", f"time.column and time.time_of_day are both {self.time.column}")
        fitting = ("int64", "float64") if self.time.unit in ("ms", "s", "us") else ("string",)
        for name in (self.time.column, self.time.time_of_day):
            declared = self.columns.get(name) if name is not None else None
            if declared is not None and declared not in fitting:
                raise refusal(
                    f"the type {' or '.join(fitting)} for column {name}",
                    f"it is declared {declared} and time.unit is {self.time.unit}",
                )
        kinds = [kind for source in self.sources for kind in source.model_fields_set]
        paths = [source.file.path for source in self.sources if source.file]
        if kinds.count("http") > 1 or len(set(paths)) < len(paths):
            raise refusal("each path once, and http once", "a source is named twice and would be counted twice")
        return self

    @model_validator(mode="after")
    def _lookups_fit(self) -> StreamConfig:
        known = dict(self.columns)
        for number, lookup in enumerate(self.lookups):
            kind = known.get(lookup.stream_key)
            if kind is None or kind == "float64":
                columns = ", ".join(name for name, kind in known.items() if kind != "float64")
                fault = f"lookups.{number}.key is {lookup.stream_key}, a " + (
                    "float64" if kind else "column of nothing"
                )
                raise refusal(f"one of the columns {columns}", fault)
            for name in lookup.columns:
                if name in known or name == TIME_COLUMN:
                    raise refusal("columns that the stream lacks", f"lookups.{number}.columns.{name} is there already")
            known.update(lookup.columns)
        return self

    @model_validator(mode="after")
    def _constants_fit(self) -> StreamConfig:
        for name, value in self.constants.items():
            declared = self.columns.get(name)
            if declared is None:
                raise refusal(f"one of the columns {', '.join(self.columns)}", f"constants.{name} is no column")
            if not is_constant(value, declared):
                accepted = (
                    f"a {declared} of at most {MAX_CONSTANT} characters" if declared == "string" else f"a {declared}"
                )
                accepted = "a column of type string, int64 or bool" if declared == "float64" else accepted
                raise refusal(accepted, f"constants.{name} is {value!r:.300}, and the column is {declared}")
        return self

    @property
    def arrow_columns(self) -> dict[str, pa.DataType]:
        """The columns that sources read."""
        return {name: COLUMN_TYPES[kind] for name, kind in self.columns.items()}

    @property
    def stream_columns(self) -> dict[str, pa.DataType]:
        """The columns of the stream's records: those that sources read, and those of lookups."""
        added = {name: COLUMN_TYPES[kind] for lookup in self.lookups for name, kind in lookup.columns.items()}
        return self.arrow_columns | added

    @property
    def record_schema(self) -> RecordSchema:
        """The schema that the decoders of this stream's sources produce."""
        skew = self.time.max_skew if self.replay is None else None
        time = EventTime(self.time.column, self.time.unit, self.time.min_time, skew, self.time.time_of_day)
        return RecordSchema(self.arrow_columns, time, self.constants)

    @property
    def idle_ms(self) -> int | None:
        """As `edge.core.streams.StreamSpec.idle_ms`. The default is 10 s for a live stream, none for a replay."""
        if self.idle is not None:
            return self.idle
        return IDLE_MS if self.replay is None else None


class EdgeConfig(Model):
    """The whole configuration of an edge agent."""

    edge: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    """This edge's id, at most 63 letters, digits, `.`, `_` and `-`. It may also be `{env: NAME}` or `{file: PATH}`."""
    labels: dict[str, str] = {}
    """Texts that the center shows beside the edge."""
    center: UplinkConfig = UplinkConfig()
    """The connection to the center."""
    state_dir: str = Field(min_length=1)
    """Directory of the journal. Everything that must survive is in it."""
    http: HttpConfig = HttpConfig()
    """The HTTP server of the agent."""
    streams: dict[str, StreamConfig] = Field(min_length=1)
    """The streams that this edge serves, by name."""
    limits: LimitsConfig = LimitsConfig()
    """Limits of memory, time and CPU."""

    @field_validator("edge", mode="before")
    @classmethod
    def _id(cls, value: object, info: ValidationInfo) -> object:
        return text_or_referenced(value, (info.context or {}).get("environ", os.environ), "an id such as jfk")

    @field_validator("streams")
    @classmethod
    def _names(cls, streams: dict[str, StreamConfig]) -> dict[str, StreamConfig]:
        for name in streams:
            if not NAME.fullmatch(name):
                raise refusal(NAME_ACCEPTED, f"the stream's name {name!r} could not be used in a query")
        stdin = [name for name, stream in streams.items() for source in stream.sources if source.stdin]
        if len(stdin) > 1:
            raise refusal("stdin in one stream only", f"it is a source of {', '.join(stdin)}")
        return streams

    @model_validator(mode="after")
    def _package_sources(self, info: ValidationInfo) -> EdgeConfig:
        for name, stream in self.streams.items():
            for number, source in enumerate(stream.sources):
                if source.package is not None:
                    path = f"streams.{name}.sources.{number}.{source.package.kind}"
                    options = _package_options(source.package, path, stream, info.context)
                    object.__setattr__(source.package, "options", options)
        return self

    @model_validator(mode="after")
    def _pushes_are_authenticated(self) -> EdgeConfig:
        pushed = any(source.is_pushed for stream in self.streams.values() for source in stream.sources)
        if self.http.grpc is not None and not any(s.has_receivers for st in self.streams.values() for s in st.sources):
            raise InvalidConfig("http.grpc", self.http.grpc, "a source that is received over gRPC, such as otlp")
        for key, address in (("http.listen", self.http.listen), ("http.grpc", self.http.grpc)):
            if pushed and address is not None and not self.http.authenticates and not is_loopback(address):
                raise InvalidConfig(
                    key,
                    address,
                    "a loopback address, or http.tokens or http.tls.client_ca",
                    "other machines could push records without credentials",
                )
        return self


_NEVER_SECRET = (
    "topic", "topics", "brokers", "broker", "format", "client_id", "session", "start", "signal", "columns", "metrics",
    "max_series",
)  # fmt: skip


def _without_secrets(path: str, options: object, error: InvalidConfig) -> InvalidConfig:
    """Returns an error of a package's options under its path, without values that may be secrets.

    Users misspell the keys of passwords, too, so only values of known keys are shown. The reason is shown unless it
    quotes another text of the options.
    """
    is_plain = isinstance(error.value, int | float | str) and "@" not in str(error.value)
    known = error.field.split(".")[0] in _NEVER_SECRET
    is_shown = error.value is None or (is_plain and known)
    quotes = any(re.search(rf"(?<!\w){re.escape(text)}(?!\w)", error.reason) for text in _texts(options))
    field = f"{path}.{error.field}".rstrip(".")
    return InvalidConfig(
        field, error.value if is_shown else "(not shown)", error.accepted, "" if quotes else error.reason
    )


def _texts(value: object) -> Iterator[str]:
    """Yields the texts in a value of options that may be secrets."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            if name not in _NEVER_SECRET:
                yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, str) and value:
        yield value


def _package_options(
    source: PackageSourceConfig, path: str, stream: StreamConfig, context: Mapping[str, Any] | None
) -> BaseModel:
    """Returns the validated options of a source. Raises InvalidConfig, also for a kind that is not installed."""
    kind = KINDS.get(source.kind)
    if kind is None:
        accepted = f"one of the kinds {', '.join((*BUILT_IN, *KINDS.names))}"
        raise InvalidConfig(path, source.kind, accepted, KINDS.hint())
    if stream.replay is not None:
        raise InvalidConfig(path, source.kind, "no replay in the stream: the source has no recorded data")
    try:
        options = validate(kind.config, source.options, context)
    except InvalidConfig as exc:
        raise _without_secrets(path, source.options, exc) from None
    if isinstance(options, TextConfig):
        fault = options.column_fault(list(stream.record_schema.textual))
        if fault is not None:
            raise InvalidConfig(path, source.kind, *fault)
    return options


def parse_config(document: object, environ: Mapping[str, str] = os.environ) -> EdgeConfig:
    """Validates a configuration.

    Args:
        environ: where ``{env: NAME}`` is looked up.

    Raises:
        InvalidConfig: names the key's path, its value and what is accepted.
    """
    return validate(EdgeConfig, document, {"environ": environ})


def load_config(path: str | Path, environ: Mapping[str, str] = os.environ) -> EdgeConfig:
    """Reads a configuration file.

    Raises:
        InvalidConfig: the file cannot be read, is not YAML, or has a value that is not accepted.
    """
    return parse_config(read_yaml(path, ""), environ)

"""The configuration of an edge: one YAML file.

Paths are relative to the working directory. The token and the edge's id are given literally or as
``{env: NAME}`` or ``{file: PATH}``; with an id from the environment many machines share one file.
Nothing else in the file is substituted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
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
from edgewater.configuration import (
    INSTANT_ACCEPTED,
    Address,
    Duration,
    Instant,
    RemoteAddress,
    Section,
    Size,
    is_loopback,
    read_yaml,
    refusal,
    validate,
)
from edgewater.errors import InvalidConfig
from edgewater.measure import NAME, NAME_ACCEPTED
from edgewater.streams import COLUMN_TYPES, MAX_CONSTANT, TIME_COLUMN, Constant, is_constant

IDLE_MS = 10_000
MIN_BANDWIDTH = 1 << 10
"""Bytes per second: heartbeats alone take up to a hundred and fifty while an edge has news."""
MAX_PUSH_BYTES = 12 << 20
"""An Arrow body may grow 16-fold, and a record of the journal ends at 256 MiB."""


class Model(Section):
    model_config = ConfigDict(strict=True)


class TlsConfig(Model):
    """PEM files: the other side's CA (None: the system's CAs), and for mutual TLS this edge's certificate and key."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    @model_validator(mode="after")
    def _pair(self) -> TlsConfig:
        if (self.cert is None) != (self.key is None):
            raise refusal("cert and key together, or neither")
        return self


class UplinkConfig(Model):
    """The connection to the center.

    Attributes:
        bandwidth: limit of bytes per second sent by this edge; None: unlimited.
        daily: limit of bytes per UTC day sent by this edge; None: unlimited.
    """

    address: RemoteAddress = "127.0.0.1:7400"
    token: SecretStr | None = None
    tls: TlsConfig | None = None
    bandwidth: Size | None = Field(default=None, ge=MIN_BANDWIDTH)
    daily: Size | None = Field(default=None, gt=0)

    @field_validator("token", mode="before")
    @classmethod
    def _secret(cls, value: object, info: ValidationInfo) -> object:
        return _read_secret(value, (info.context or {}).get("environ", os.environ))


def secret(value: object, info: ValidationInfo) -> SecretStr | None:
    """Reads a secret: itself, ``{env: NAME}`` or ``{file: PATH}``. For validators of kinds of sources."""
    return _read_secret(value, (info.context or {}).get("environ", os.environ))


def _read_secret(value: object, environ: Mapping[str, str]) -> SecretStr | None:
    if value is None or isinstance(value, SecretStr):
        return value
    return SecretStr(_literal_or_referenced(value, environ, "the secret itself"))


def _literal_or_referenced(value: object, environ: Mapping[str, str], itself: str) -> str:
    """Returns the text itself, or reads it from ``{env: NAME}`` or ``{file: PATH}``."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, Mapping) and len(value) == 1:
        ((kind, name),) = value.items()
        if kind == "env" and isinstance(name, str):
            if not environ.get(name):
                raise refusal(f"the environment variable {name} to be set", "it is not set, or empty")
            return environ[name]
        if kind == "file" and isinstance(name, str):
            try:
                return Path(name).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as exc:
                raise refusal("a readable text file", str(exc)) from exc
    raise refusal(f"{itself}, {{env: NAME}} or {{file: PATH}}")


class HttpTlsConfig(Model):
    """PEM files: the server's certificate and key; with `client_ca`, clients must present a certificate of its."""

    cert: str
    key: str
    client_ca: str | None = None


class HttpConfig(Model):
    """The server of pushed records and of the operator's endpoints.

    Attributes:
        tokens: bearer tokens of the clients that push; several are valid at once, so that one can replace another.
        metrics: address of /livez, /readyz and /metrics, without TLS and token; None: they are served at `listen`.
        hosts: names besides those of loopback by which requests without credentials may address it: of a proxy, say.
    """

    listen: Address = "127.0.0.1:7410"
    hosts: list[str] = []
    tokens: list[SecretStr] = []
    tls: HttpTlsConfig | None = None
    metrics: Address | None = None

    @field_validator("tokens", mode="before")
    @classmethod
    def _secrets(cls, values: object, info: ValidationInfo) -> object:
        if not isinstance(values, list):
            raise refusal("a list of tokens, each the secret itself, {env: NAME} or {file: PATH}")
        return [_read_secret(value, (info.context or {}).get("environ", os.environ)) for value in values]

    @property
    def authenticates(self) -> bool:
        return bool(self.tokens) or (self.tls is not None and self.tls.client_ca is not None)


class LimitsConfig(Model):
    """Resource limits.

    Attributes:
        max_pending_bytes: memory of groups and unacknowledged frames above which sources are backpressured.
        max_query_bytes: memory of one query's open windows and of what it keeps of closed ones for late records, beyond
            which they take no more records; None: half of `max_pending_bytes`.
        max_push_bytes: size of one pushed body, both as sent and decompressed.
        push_timeout_ms: time in which a pushed body must arrive.
        push_cpu_ms: CPU time that decoding one pushed body may take.
        checkpoint_ms: interval between checkpoints.
        scheduling: which query runs next while the edge is short of CPU: the least slack (klink), each in turn (fair),
            the oldest batch (fcfs); off: no queues, every batch is processed by all queries at once.
    """

    max_pending_bytes: Size = Field(default=64 << 20, ge=1 << 20)
    max_query_bytes: Size | None = Field(default=None, ge=1 << 10)
    max_push_bytes: Size = Field(default=8 << 20, ge=1, le=MAX_PUSH_BYTES)
    push_timeout_ms: Duration = Field(default=60_000, alias="push_timeout", ge=100)
    push_cpu_ms: Duration = Field(default=5_000, alias="push_cpu", ge=10)
    checkpoint_ms: Duration = Field(default=5000, alias="checkpoint", ge=100)
    scheduling: Literal["klink", "fair", "fcfs", "off"] = "off"

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
    """Where the event time of a record is read.

    Attributes:
        time_of_day: a second column, with the time of day, if `column` holds dates.
        unit: ms, s, us, iso8601, or a pattern of `strptime`. The default is the time of access logs if a source of the
            stream has the format `combined`, otherwise ms.
    """

    column: str = Field(min_length=1)
    time_of_day: str | None = Field(default=None, min_length=1)
    unit: str = "ms"
    min_time: Instant = YEAR_2000_MS
    max_skew: Duration = DAY_MS

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
    """Replay of recorded data under a replay clock.

    Attributes:
        speed: event time per wall time; max: as fast as records can be read, without a clock.
        start: event time at which the replay begins.
        at: wall time at which the replay begins; None: at the agent's first start.
    """

    speed: float | Literal["max"]
    start: Instant | None = None
    at: Instant | None = None

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
    """The CSV dialect, see `CsvDialect`. `header` names the columns of files without a header line."""

    delimiter: str = Field(default=",", pattern=r"^[\t !#-~]$")
    nulls: list[str] = []
    header: list[str] | None = None

    @property
    def dialect(self) -> CsvDialect:
        return CsvDialect(self.delimiter, tuple(self.nulls))


MAX_PATTERN = 4096
"""Characters of a regular expression."""


class RegexConfig(Model):
    """The pattern of the format `regex`, see `LinePattern`."""

    pattern: str = Field(min_length=1, max_length=MAX_PATTERN)
    nulls: list[str] = []

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
    csv: CsvConfig = CsvConfig()
    regex: RegexConfig | None = None

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
    """Files of a pattern.

    Attributes:
        rotate_wait: how long a followed file that has left the pattern is kept open after its last record, unless it is
            known that no process has it open for writing.
    """

    path: str = Field(min_length=1)
    format: Format  # type: ignore[assignment]
    follow: bool = False
    rotate_wait: Duration = 60_000
    compression: Literal["auto", "none", "gzip", "zstd", "bz2"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _format_by_name(cls, options: Any) -> Any:
        if not isinstance(options, dict) or "format" in options or not isinstance(options.get("path"), str):
            return options
        path = Path(options["path"])
        suffix = Path(path.stem).suffix if path.suffix in CODECS else path.suffix
        return {**options, "format": EXTENSIONS[suffix]} if suffix in EXTENSIONS else options


class StdinConfig(TextConfig):
    format: TextFormatName = "ndjson"


class HttpPushConfig(TextConfig):
    """Records are pushed to ``POST /v1/streams/{stream}``.

    Attributes:
        dedupe: how a batch that is pushed again is recognised: by its Idempotency-Key and, if it has none, by its body
            and client; or only by its key.
        format: of bodies of the type text/plain; None: they are refused.
    """

    dedupe: Literal["body", "key"] = "body"
    format: TextFormatName | None = None  # type: ignore[assignment]


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
    stdin: StdinConfig | None = None
    http: HttpPushConfig | None = None
    package: PackageSourceConfig | None = Field(default=None, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _one_kind(cls, source: Any) -> Any:
        if isinstance(source, dict) and len(source) == 1:
            ((kind, options),) = source.items()
            options = {} if options is None else options
            return {kind: options} if kind in BUILT_IN else {"package": {"kind": str(kind), "options": options}}
        raise refusal("one of file: {path: …}, stdin: {format: …}, http: {}")


class LookupConfig(Model):
    """Columns that are added to records from a file, by the value of a key column.

    Attributes:
        file: path of the file, with one row per key.
        format: default: by the extension.
        key: the key column of the stream and of the file; ``{stream column: file column}`` if their names differ.
        columns: the added columns of the file with their types. They become columns of the stream.
        refresh: interval at which the file is loaded again if it has changed.
    """

    file: str = Field(min_length=1)
    format: Literal["csv", "ndjson", "parquet"]
    key: str | dict[str, str]
    columns: dict[str, str] = Field(min_length=1)
    refresh: Duration = Field(default=60_000, ge=1_000)

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
    """A stream that this edge serves.

    Attributes:
        lookups: files whose columns are added to the records; a key may be a column of an earlier one.
        constants: columns that have one value in all records of the stream at this edge, such as its site.
    """

    columns: dict[str, str]
    time: TimeConfig
    lookups: list[LookupConfig] = Field(default=[], max_length=8)
    constants: dict[str, Constant] = {}
    disorder_ms: Duration = Field(default=0, alias="disorder")
    idle: Duration | None = None
    replay: ReplayConfig | None = None
    sources: list[SourceConfig] = Field(min_length=1)

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
    labels: dict[str, str] = {}
    center: UplinkConfig = UplinkConfig()
    state_dir: str = Field(min_length=1)
    http: HttpConfig = HttpConfig()
    streams: dict[str, StreamConfig] = Field(min_length=1)
    limits: LimitsConfig = LimitsConfig()

    @field_validator("edge", mode="before")
    @classmethod
    def _id(cls, value: object, info: ValidationInfo) -> object:
        return _literal_or_referenced(value, (info.context or {}).get("environ", os.environ), "an id such as jfk")

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
        pushed = any(source.http for stream in self.streams.values() for source in stream.sources)
        if pushed and not self.http.authenticates and not is_loopback(self.http.listen):
            raise InvalidConfig(
                "http.listen",
                self.http.listen,
                "a loopback address, or http.tokens or http.tls.client_ca",
                "other machines could push records without credentials",
            )
        return self


def _shown(error: InvalidConfig) -> object:
    """Returns the value of an error as far as it is surely no secret: users misspell the keys of passwords, too."""
    is_plain = isinstance(error.value, int | float | str) and "@" not in str(error.value)
    is_missing = error.value is None
    known = error.field.split(".")[0] in (
        "topic",
        "topics",
        "brokers",
        "broker",
        "format",
        "client_id",
        "session",
        "start",
    )
    return error.value if is_missing or (is_plain and known) else "(not shown)"


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
        raise InvalidConfig(f"{path}.{exc.field}".rstrip("."), _shown(exc), exc.accepted, "") from None
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

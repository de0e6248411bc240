"""The section `streams`: columns, event time, lookups and sources of a stream."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow as pa
from pydantic import AfterValidator, Field, field_validator, model_validator

from edge.codecs import (
    ACCESS_LOGS,
    ACCESS_TIME,
    EXTENSIONS,
    MAX_SKEW_MS,
    MS_PER_UNIT,
    TIME_UNITS,
    YEAR_2000_MS,
    EventTime,
    RecordSchema,
    is_time_pattern,
)
from edge.config.section import Model
from edge.config.sources import SourceConfig
from edgewater.model.streams import COLUMN_TYPES, MAX_CONSTANT, TIME_COLUMN, Constant, is_constant
from edgewater.model.time_functions import is_zone
from edgewater.runtime.configuration import INSTANT_ACCEPTED, Duration, Instant, refusal

IDLE_MS = 10_000


def _known_zone(name: str) -> str:
    if not is_zone(name):
        raise refusal("the IANA name of a time zone, such as Europe/Berlin", f"got {name!r}")
    return name


Zone = Annotated[str, AfterValidator(_known_zone)]
"""A time zone of the IANA database."""


class TimeConfig(Model):
    """The column and the unit of a record's event time."""

    column: str = Field(min_length=1)
    """The column of the event time."""
    time_of_day: str | None = Field(default=None, min_length=1)
    """A second column, with the time of day, if `column` has dates."""
    unit: str = "ms"
    """`ms`, `s`, `us`, `ns`, `iso8601`, or a pattern of `strptime`. If a source of the stream is an access log, the
    default is the time of access logs."""
    zone: Zone = "UTC"
    """The IANA name of the time zone of times that state none. A time that its clocks skip is rejected. A time that
    they show twice counts at the one nearer to the record's arrival, and states the guess `doubled-hour`."""
    min_time: Instant = YEAR_2000_MS
    """Records with an earlier event time are rejected."""
    max_skew: Duration = MAX_SKEW_MS
    """Records whose event time is further ahead of the stream's clock are rejected, because they would make the records
    of all others late. A replay has no such limit."""

    @field_validator("unit")
    @classmethod
    def _unit(cls, unit: str) -> str:
        if unit not in TIME_UNITS and not ("%" in unit and is_time_pattern(unit)):
            raise refusal(
                f"one of {', '.join(TIME_UNITS)}, or a pattern of strptime such as {ACCESS_TIME!r}",
                f"{unit!r} does not read year, month, day, hour, minute and second",
            )
        return unit


class ReplayConfig(Model):
    """Replay of recorded data under a replay clock."""

    speed: float | Literal["max"]
    """How much event time passes per unit of wall time. `max`: as fast as records can be read, without a clock."""
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


class LookupConfig(Model):
    """Columns that are added to records from a file, by the value of a key column."""

    file: str = Field(min_length=1)
    """Path of the file, with one row per key."""
    format: Literal["csv", "ndjson", "parquet"]
    """Format of the file; by default the format that its extension names."""
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
    """The column and unit of the event time. The section may be missing if a source is an access log."""
    lookups: list[LookupConfig] = Field(default=[], max_length=8)
    """Files whose columns are added to the records. A key may be a column that an earlier lookup has added."""
    constants: dict[str, Constant] = {}
    """Columns that have one value in all records of the stream at this edge, such as its site."""
    lenient: list[str] = []
    """Columns whose values may be written as another type: `"66.2"` and `200.0` as numbers, `yes` and `off` as
    booleans, a number or `true` as a text. Other values are rejected as ever."""
    disorder_ms: Duration = Field(default=0, alias="disorder")
    """How far the event time of a record may be behind the newest record without being late."""
    idle: Duration | None = None
    """Time without records after which a source's watermark follows the clock. None: 10s for a live stream, and never
    in a replay.
    """
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
        if not any(isinstance(options, dict) and options.get("format") in ACCESS_LOGS for options in kinds):
            return stream
        time = stream.get("time", {})
        return {**stream, "time": {"column": "time", "unit": ACCESS_TIME, **time}} if isinstance(time, dict) else stream

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
        if self.time.zone != "UTC" and "%z" in self.time.unit:
            raise refusal("time.zone or the zone in time.unit", f"both are set, and time.unit is {self.time.unit}")
        fitting = ("int64", "float64") if self.time.unit in MS_PER_UNIT else ("string",)
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
            raise refusal(
                "each path once, and http once", "a source is named twice, so its records would be counted twice"
            )
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
                    raise refusal(
                        "columns that the stream lacks",
                        f"lookups.{number}.columns.{name} is a column already",
                    )
            known.update(lookup.columns)
        return self

    @model_validator(mode="after")
    def _lenient_fit(self) -> StreamConfig:
        if unknown := [name for name in self.lenient if name not in self.columns]:
            raise refusal(
                f"some of the columns {', '.join(self.columns)}", f"lenient has {unknown[0]}, which is no column"
            )
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
        """The columns of the stream's records: the columns that sources read, and the columns that lookups add."""
        added = {name: COLUMN_TYPES[kind] for lookup in self.lookups for name, kind in lookup.columns.items()}
        return self.arrow_columns | added

    @property
    def record_schema(self) -> RecordSchema:
        """The schema that the decoders of this stream's sources produce."""
        skew = self.time.max_skew if self.replay is None else None
        of = self.time
        time = EventTime(of.column, of.unit, of.min_time, skew, of.time_of_day, of.zone)
        return RecordSchema(self.arrow_columns, time, self.constants, frozenset(self.lenient))

    @property
    def idle_ms(self) -> int | None:
        """See `edge.core.streams.StreamSpec.idle_ms`. The default is 10 s for a live stream and None for a replay."""
        if self.idle is not None:
            return self.idle
        return IDLE_MS if self.replay is None else None
